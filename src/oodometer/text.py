"""Names with parameters as users type them: `name:param=value,param=value`."""

from __future__ import annotations

import ast
import re
from typing import Any

from oodometer.errors import OodometerError


def split_parameters(text: str, what: str, *, example: str = "") -> tuple[str, dict[str, Any]]:
    """The name and its parameters; values are Python literals, or else strings.

    >>> split_parameters("odin:epsilon=0.002", "column")
    ('odin', {'epsilon': 0.002})
    """
    name, _, rest = text.partition(":")
    params: dict[str, Any] = {}
    # A comma separates parameters only where a name follows: values may be tuples.
    for pair in re.split(r",(?=\s*\w+\s*=)", rest) if rest else []:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            hint = f"; write e.g. {example}" if example else ""
            raise OodometerError(f"{what} {text!r}: {pair!r} is not PARAM=VALUE{hint}")
        params[key.strip()] = _literal(value.strip())
    return name.strip(), params


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)

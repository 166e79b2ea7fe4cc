"""What all commands share: arguments, the two output streams, JSON."""

from __future__ import annotations

import json
import math
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any, TypeAlias, TypeVar, get_args, get_type_hints

import tyro
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from oodometer.errors import OodometerError

T = TypeVar("T")
Many: TypeAlias = Annotated[list[tuple[str, ...]], tyro.conf.UseAppendAction]
"""An option with several values that may also be repeated: `--test a b --test c`."""


_NO_DEFAULT = ("", "None", "False", "''")
_HINT = tyro.conf.arg(help_behavior_hint=lambda text: "" if text in _NO_DEFAULT else f"(default: {text})")
_PLACEHOLDERS: dict[Any, str] = {str: "NAME", int: "INT", float: "FLOAT", Path: "FILE"}


def parse(options: type[T], arguments: Sequence[str], *, command: str, about: str) -> T:
    """The command's options; a mistake is explained on stderr and ends with exit code 2."""
    settings = tyro._experimental_options
    # The parser colours its messages whenever stdout is a terminal; they may go to a stderr that is none.
    settings["ansi_codes"] = _colourful() and sys.stdout.isatty() and sys.stderr.isatty()
    settings["utf8_boxes"] = "utf" in (sys.stdout.encoding or "").lower()
    _tell_defaults(options)
    return tyro.cli(
        options,
        prog=f"oodometer {command}",
        # The parser joins lines that start with a letter.
        description=indent(about.strip(), "  "),
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def _tell_defaults(options: type[Any]) -> None:
    """Let help speak of what can be typed, where the parser would write (default: None) and {None}|FLOAT."""
    known = get_type_hints(options, include_extras=True)
    options.__annotations__ = {name: Annotated[kind, _HINT, *_placeholder(kind)] for name, kind in known.items()}


def _placeholder(kind: Any) -> list[Any]:
    """What stands for the value of an option that has no word of its own for it."""
    plain = [one for one in get_args(kind) or (kind,) if one is not type(None)]
    return [tyro.conf.arg(metavar=_PLACEHOLDERS[plain[0]])] if len(plain) == 1 and plain[0] in _PLACEHOLDERS else []


def flat(groups: Sequence[Sequence[str]]) -> list[str]:
    """The values of a `Many` option in the order they were typed."""
    return [value for group in groups for value in group]


def named_path(text: str) -> tuple[str, str]:
    """NAME=PATH, or a path named after its file."""
    name, equals, path = text.partition("=")
    if not equals or Path(text).exists():
        return Path(text).resolve().stem, text
    if not name or not path:
        raise OodometerError(f"{text!r}: write PATH or NAME=PATH")
    return name, path


def named_paths(texts: Sequence[str], what: str) -> dict[str, str]:
    """Paths by name; no name may stand for two."""
    found: dict[str, str] = {}
    for name, path in map(named_path, texts):
        if name in found:
            raise OodometerError(f"two {what} are named {name!r}: give each a name of its own, as NAME=PATH")
        found[name] = path
    return found


def show(*renderables: Any) -> None:
    """Results for a reader, on standard output; off a terminal without colours and trailing blanks.

    Words break where the terminal is narrow, numbers do not: a table that cannot be as narrow is written wider, for a
    reader can scroll what a cut would lose.
    """
    console = _console(stderr=False)
    for table in (one for one in renderables if isinstance(one, Table)):
        for column in table.columns:
            column.overflow = "fold"
        least = Measurement.get(console, console.options.update(max_width=WIDEST), table).minimum
        # The measure leaves out the blanks behind the last column, which the layout gives room.
        console.width = max(console.width, least + table.padding[1])
    with console.capture() as captured:
        for renderable in renderables:
            console.print(renderable)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def log() -> Console:
    """Standard error: progress, notes, failures."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    colours: Any = "auto" if _colourful() else None
    return Console(stderr=stderr, color_system=colours, highlight=False, emoji=False)


def plain_table() -> Table:
    """A table without lines, readable at 80 columns and when piped."""
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))


WIDEST = 10_000


def _colourful() -> bool:
    return not os.environ.get("NO_COLOR")


def write_json(value: Any) -> None:
    """Strict JSON on standard output: not-a-number becomes null."""
    sys.stdout.write(json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A file to write instead of the target; it takes its place when complete, and is gone when not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{uuid.uuid4().hex[:8]}.partial{target.suffix}")
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)

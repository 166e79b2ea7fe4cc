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
from typing import Annotated, Any, TypeAlias, TypeVar

import tyro
from rich.console import Console
from rich.table import Table

T = TypeVar("T")
Many: TypeAlias = Annotated[list[tuple[str, ...]], tyro.conf.UseAppendAction]
"""An option with several values that may also be repeated: `--test a b --test c`."""


def parse(options: type[T], arguments: Sequence[str], *, command: str, about: str) -> T:
    """The command's options; a mistake is explained on stderr and ends with exit code 2."""
    settings = tyro._experimental_options
    # The parser colours its messages whenever stdout is a terminal; they may go to a stderr that is none.
    settings["ansi_codes"] = _colourful() and sys.stdout.isatty() and sys.stderr.isatty()
    settings["utf8_boxes"] = "utf" in (sys.stdout.encoding or "").lower()
    return tyro.cli(
        options,
        prog=f"oodometer {command}",
        # The parser joins lines that start with a letter.
        description=indent(about.strip(), "  "),
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def flat(groups: Sequence[Sequence[str]]) -> list[str]:
    """The values of a `Many` option in the order they were typed."""
    return [value for group in groups for value in group]


def show(*renderables: Any) -> None:
    """Results for a reader, on standard output; off a terminal without colours and trailing blanks."""
    console = _console(stderr=False)
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

"""`oodometer compare`: what changed between two runs, and whether it matters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.table import Table
from rich.text import Text

from oodometer.cli import OK, _terminal

if TYPE_CHECKING:
    from oodometer.compare import RunComparison

ABOUT = """
Compares two runs: which settings, versions and data differ, which detectors
got better or worse beyond chance, and whether the conclusion (the group of
detectors that cannot be told apart from the best) is still the same.

Differences are tested over folds, pair by pair where both runs have the same
ones, and adjusted by Holm for the number of detectors.

example:
  oodometer compare runs/before runs/after
  oodometer compare runs/a runs/b --metric fpr95_ood --json
"""
_MOST_FACTS = 20


@dataclass
class Options:
    """Which runs, by what."""

    run_a: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_A")]
    """Folder of the first run."""
    run_b: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_B")]
    """Folder of the second run."""
    metric: str | None = None
    """The metric to compare by (default: auroc)."""
    alpha: float = 0.05
    """Level of the tests."""
    json: bool = False
    """Print JSON instead of text."""


def main(arguments: list[str]) -> int:
    """Print the comparison."""
    options = _terminal.parse(Options, arguments, command="compare", about=ABOUT)
    from oodometer.compare import compare
    from oodometer.results import Results

    found = compare(
        Results.open(options.run_a), Results.open(options.run_b), metric=options.metric, alpha=options.alpha
    )
    if options.json:
        _terminal.write_json(found.to_dict())
    else:
        _terminal.show(Text(found.headline, "bold"), Text(), *_changes(found), _table(found), Text(), _how(found))
    return OK


def _changes(found: RunComparison) -> Iterator[Any]:
    for side, only in (("A", found.only_a), ("B", found.only_b)):
        for axis, names in only.items():
            yield Text(f"only in {side}, {axis}: {', '.join(names)}")
    lines = [f"{one.name}: {_short(one.a)} → {_short(one.b)}" for one in (*found.parameters, *found.facts)]
    for line in lines[:_MOST_FACTS]:
        yield Text(line)
    if len(lines) > _MOST_FACTS:
        yield Text(f"… and {len(lines) - _MOST_FACTS} more differences (--json has all)", "dim")
    if lines or found.only_a or found.only_b:
        yield Text()


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _table(found: RunComparison) -> Table:
    table = _terminal.plain_table()
    for title in ("detector", "A", "B", "B − A", "p", "says"):
        table.add_column(title, justify="left" if title in ("detector", "says") else "right")
    for one in found.differences:
        p = "–" if one.pvalue != one.pvalue else f"{one.pvalue:.4f}"
        gap = "0" if one.identical else f"{one.difference:+.4f}"
        numbers = (f"{one.a:.4f}", f"{one.b:.4f}", gap, p)
        table.add_row(Text(one.method), *numbers, one.says(found.alpha))
    return table


def _how(found: RunComparison) -> Text:
    folds = "the same folds, pair by pair" if found.same_folds else "different folds, as two samples"
    return Text(f"{found.metric}; {folds}; corrected resampled t-test, adjusted by Holm, level {found.alpha:g}.", "dim")

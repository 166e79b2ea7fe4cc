"""`oodometer report`: a run as a page to decide from, or as a table for a paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from oodometer.cli import OK, _terminal
from oodometer.errors import OodometerError
from oodometer.results import Results, write_atomically

ABOUT = """
Writes the report of a run: one HTML file that opens anywhere, offline. The
verdict comes first, in plain words; then results, a threshold explorer, the
stability over folds, statistics, every detector and where everything comes
from.

The ending of --out chooses what is written: .html the page, .tex or .md a
table for a paper, .bib what to cite, .csv all values.

example:
  oodometer report runs/a
  oodometer report runs/a -o report.html --metric fpr95_ood
  oodometer report runs/a -o table.tex --metric auroc autc --style groups
  oodometer report runs/a -o references.bib
"""


@dataclass
class Options:
    """Which run, and what to write."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = None
    """What to write (default: report.html in the folder of the run)."""
    metric: Annotated[_terminal.Many, tyro.conf.arg(metavar="NAME …")] = field(default_factory=list)
    """The metric that decides (tables take several; default: auroc)."""
    alpha: float = 0.05
    """Level of the tests."""
    style: Literal["groups", "pairs"] = "groups"
    """Tables: detectors × OOD sets with group averages, or (ID, OOD) × detectors."""
    exposure: str | None = None
    """Tables: with or without outlier exposure (default: both)."""
    digits: int = 2
    """Tables: decimals of the percentages."""
    no_interval: bool = False
    """Tables: leave out ± half the 95 % interval."""


def main(arguments: list[str]) -> int:
    """Write one file."""
    options = _terminal.parse(Options, arguments, command="report", about=ABOUT)
    out = options.out or options.run / "report.html"
    writers: dict[str, Callable[[Results, Options], str]] = {
        ".html": _page,
        ".tex": lambda results, chosen: results.to_latex(**_of_table(chosen)),
        ".md": lambda results, chosen: results.to_markdown(**_of_table(chosen)),
        ".bib": lambda results, _: results.citations(),
        ".csv": lambda results, _: (results.folder / "results.csv").read_text(encoding="utf-8"),
    }
    if out.suffix not in writers:
        raise OodometerError(f"--out: a file that ends in {', '.join(writers)} was needed, {str(out)!r} was found")
    results = Results.open(options.run)
    with _terminal.log().status("reading scores and writing the report …"):
        text = writers[out.suffix](results, options)
    write_atomically(out, text.encode())
    size = len(text.encode())
    told = f"{size / 1e6:.2f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
    # Not through the console, which would break a long path at the edge of the terminal.
    print(f"written: {out} ({told})")
    return OK


def _page(results: Results, options: Options) -> str:
    from oodometer.report import html

    metrics = _terminal.flat(options.metric)
    if len(metrics) > 1:
        raise OodometerError(f"--metric: one metric decides the page, {len(metrics)} were found: {', '.join(metrics)}")
    return html.render(results, metric=metrics[0] if metrics else None, alpha=options.alpha)


def _of_table(options: Options) -> dict[str, Any]:
    return {
        "metrics": _terminal.flat(options.metric) or None,
        "style": options.style,
        "exposure": options.exposure,
        "alpha": options.alpha,
        "digits": options.digits,
        "interval": not options.no_interval,
    }

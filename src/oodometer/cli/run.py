"""`oodometer run`: a whole study, resumed where it stopped."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from oodometer.cli import FAILED, INTERRUPTED, OK, _terminal

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

ABOUT = """
Runs a study: every detector on every fold and data set, as its study file
says (`oodometer init` writes one). Each piece of work is written when it is
done, so a run that was stopped goes on where it was: type the same command
again. What cannot be computed is recorded with its error, and the rest goes
on.

example:
  oodometer init study.toml
  oodometer run study.toml --dry-run
  oodometer run study.toml --out runs/a --n-jobs 4
  oodometer run study.toml --out runs/b --set split.folds=3 seed=1
"""


@dataclass
class Options:
    """What to run, where, and with how many processes."""

    study: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="STUDY.toml")]
    """The study file."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="FOLDER")] = None
    """Folder of the results (default: runs/NAME of the study)."""
    set: Annotated[_terminal.Many, tyro.conf.arg(metavar="KEY=VALUE …")] = field(default_factory=list)
    """Values that replace those of the file, e.g. split.folds=3."""
    n_jobs: int = 1
    """Processes that share the folds (-1: one a core)."""
    threads: int = 1
    """Threads of every process; another number changes the last digits, and so computes anew."""
    device: Annotated[str | None, tyro.conf.arg(metavar="DEVICE")] = None
    """Where to compute, e.g. cuda (needs PyTorch); NumPy by default."""
    dry_run: bool = False
    """Print the cells, and about how long they take, and stop."""
    json: bool = False
    """Print JSON instead of text."""


def main(arguments: list[str]) -> int:
    """Run a study; 1 if some cells failed, 130 if interrupted."""
    options = _terminal.parse(Options, arguments, command="run", about=ABOUT)
    from oodometer.study import Study

    study = Study.from_toml(options.study, _terminal.flat(options.set))
    out = options.out or Path("runs") / study.spec.name
    if options.dry_run:
        _preview(study, out, options)
        return OK
    try:
        return _run(study, out, options)
    except KeyboardInterrupt:
        _say(f"interrupted; what is finished is kept in {out}. The same command goes on from there")
        return INTERRUPTED


def _run(study: Any, out: Path, options: Options) -> int:
    from oodometer.study import run

    with _progress() as progress, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = run(
            study, out, n_jobs=options.n_jobs, threads=options.threads, device=options.device, progress=progress
        )
    for one in caught:
        _say(f"warning: {one.message}")
    reasons = dict.fromkeys(one["error"] for one in results.failed)
    for reason in list(reasons)[:SHOWN]:
        _say(_failure([one for one in results.failed if one["error"] == reason]))
    if len(reasons) > SHOWN:
        _say(f"… and {len(reasons) - SHOWN} more reasons of failures (see run.json)")
    if options.json:
        _terminal.write_json({"folder": str(out), "failed": results.failed, "warnings": results.facts["warnings"]})
    elif results.to_pandas().empty:
        _say(f"{results.folder}: every cell failed; run.json has the errors")
    else:
        _summary(results)
    return FAILED if results.failed else OK


SHOWN = 10
"""Reasons of failures that are printed; run.json has every failed cell."""


def _failure(cells: list[dict[str, Any]]) -> str:
    """Cells that failed for one reason: the first, how many more, and the reason."""
    one, more = cells[0], len(cells) - 1
    where = f"fold {one['fold']}" + (f" of repeat {one['repeat']}" if one["repeat"] else "")
    params = one["params"] if one["params"] != "{}" else ""
    names = " ".join(part for part in (one["detector"], one["variant"], params) if part)
    on = f", OOD set {one['ood']}" if one["ood"] else ""
    others = f", and {more:,} more {'cell' if more == 1 else 'cells'}" if more else ""
    return f"failed: {names}, {where}{on}, {one['exposure']} exposure{others}: {one['error']}"


def _say(message: str) -> None:
    _terminal.log().print(Text(message), soft_wrap=True)


# ---------------------------------------------------------------------------------------------- output


@contextmanager
def _progress() -> Iterator[Any]:
    """A bar with the time that is left on a terminal, a line every tenth of the work elsewhere."""
    console = _terminal.log()
    start, told = time.perf_counter(), 0
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    left = (TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False))
    with Progress(*columns, *left, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=1.0)

        def progress(what: str, share: float) -> None:
            nonlocal told
            bar.update(task, description=what, completed=share)
            seconds = time.perf_counter() - start
            # Short runs say nothing: a log of ten lines for two seconds helps nobody.
            if not console.is_terminal and int(10 * share) > told and seconds > QUIET:
                told = int(10 * share)
                _say(f"{10 * told} % after {_duration(seconds)}")

        yield progress


def _summary(results: Any) -> None:
    """The mean of the first metric, as methods × OOD sets, and where the rest is."""
    rows = results.to_pandas()
    metric = rows["metric"].iloc[0]
    found = results.summary().query("metric == @metric")
    found = found.assign(
        method=found["detector"].where(found["variant"] == "", found["detector"] + " " + found["variant"])
    )
    exposures = list(dict.fromkeys(found["exposure"]))
    shown: list[Any] = []
    for exposure in exposures:
        title = [Text(f"{exposure} exposure", "bold")] if len(exposures) > 1 else []
        tables = _means(found[found["exposure"] == exposure], metric, _terminal.log().width)
        shown += [*title, *(part for table in tables for part in (table, Text()))]
    n = int(found["n"].max())
    spread = f"Mean ± standard deviation of {n} values (folds × repeats), as fractions.\n" if n > 1 else ""
    counts = f"{results.folder}: {len(rows):,} values of {rows['metric'].nunique()} metrics"
    _terminal.show(*shown, Text(f"{spread}{counts}", "dim"))


def _means(found: pd.DataFrame, metric: str, room: int) -> Iterator[Table]:
    """Methods × OOD sets, in as many tables as the terminal's width asks for."""
    methods, names = (list(dict.fromkeys(found[column])) for column in ("method", "ood"))
    values = found.set_index(["ood", "method"])[["mean", "std"]].T.to_dict("list")
    cells = {name: [_cell(*values.get((name, method), (math.nan, math.nan))) for method in methods] for name in names}
    free = room - max(map(len, (metric, *methods))) - GAP
    widths = [max(map(len, (name, *cells[name]))) + GAP for name in names]
    while names:
        fitting = max(sum(reach <= free for reach in accumulate(widths)), 1)
        table = _terminal.plain_table()
        table.add_column(metric)
        for name in names[:fitting]:
            table.add_column(name, justify="right")
        for place, method in enumerate(methods):
            table.add_row(method, *(cells[name][place] for name in names[:fitting]))
        yield table
        names, widths = names[fitting:], widths[fitting:]


GAP = 2
"""Blanks between two columns."""
QUIET = 20
"""Seconds before a run that writes to no terminal tells how far it is."""


def _cell(mean: float, std: float) -> str:
    if math.isnan(mean):
        return "–"
    return f"{mean:.4f}" if math.isnan(std) else f"{mean:.4f} ± {std:.4f}"


def _preview(study: Any, out: Path, options: Options) -> None:
    import joblib

    from oodometer.results import Store
    from oodometer.study import preview

    plan = study.plan(device=options.device, threads=options.threads)
    lines = preview(plan, Store(out / "cells"))
    if options.json:
        _terminal.write_json([vars(line) for line in lines])
        return
    table = _terminal.plain_table()
    for title in ("method", "parameters", "cells", "finished", "expected"):
        table.add_column(title, justify="left" if title in ("method", "parameters") else "right")
    unforeseen = plan.spec.trainer.name not in ("frozen", "probe")
    for place, line in enumerate(lines):
        expected = "–" if unforeseen and place == 0 else _duration(line.seconds)
        table.add_row(line.method, line.params, str(line.cells), str(line.finished), expected)
    cells, done = sum(line.cells for line in lines), sum(line.finished for line in lines)
    seconds = sum(line.seconds for line in lines) / joblib.effective_n_jobs(options.n_jobs)
    about = (
        f"{len(plan.rows)} folds × {len(plan.data.ood)} OOD sets, {' and '.join(plan.spec.exposure)} exposure: "
        f"{cells - done:,} of {cells:,} cells to compute, about {_duration(seconds)} (rough"
        f"{'; training of networks not included' if unforeseen else ''})"
    )
    _terminal.show(table, Text(), Text(about))


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

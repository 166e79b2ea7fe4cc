"""`oodometer demo`: a complete small study on real digits, from the data to the report."""

from __future__ import annotations

import shlex
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from oodometer.cli import FAILED, OK, _terminal
from oodometer.errors import OodometerError

if TYPE_CHECKING:
    import pandas as pd

    from oodometer.results import Results

ABOUT = """
A complete study in seconds, on data that need no download: a small network
learns some of scikit-learn's digits, and detectors are judged on the digits
it never saw and on patches of a photograph, by 5-fold hierarchical dual
cross-validation, with and without outlier exposure. It writes the banks, the
study file, every score and the report, so that each step can be repeated and
changed.

example:
  oodometer demo
  oodometer demo --out /tmp/demo --n-jobs 2
"""


@dataclass
class Options:
    """Where to write, and with how many processes."""

    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FOLDER")] = Path("oodometer-demo")
    """Folder of the demo's files."""
    n_jobs: int = 1
    """Processes that share the folds (-1: one a core)."""


def main(arguments: list[str]) -> int:
    """Run the demo; 1 if some cells failed."""
    options = _terminal.parse(Options, arguments, command="demo", about=ABOUT)
    from oodometer import demo

    if options.out.exists() and not options.out.is_dir():
        raise OodometerError(f"--out {options.out} is a file: give a folder")
    start = time.perf_counter()
    with _progress() as progress, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = demo.run(options.out, n_jobs=options.n_jobs, progress=progress)
    for one in caught:
        _terminal.log().print(Text(f"warning: {one.message}"), soft_wrap=True)
    for failure in results.failed:
        _terminal.log().print(Text(f"failed: {failure['detector']}: {failure['error']}"), soft_wrap=True)
    _terminal.show(_about(results, demo.known_digits(results)), Text(), _table(results), Text())
    _terminal.show(_reading(results), Text())
    # Not through the console, which would break long commands at the edge of the terminal.
    print(_files(options.out, time.perf_counter() - start))
    return FAILED if results.failed else OK


@contextmanager
def _progress() -> Iterator[Any]:
    """A bar on a terminal, one line elsewhere."""
    console = _terminal.log()
    if not console.is_terminal:
        console.print("running the demo study: some ten seconds")
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=1.0)

        def progress(what: str, share: float) -> None:
            bar.update(task, description=what if share < 1 else "writing the report", completed=share)

        yield progress


# ---------------------------------------------------------------------------------------------- output


def _about(results: Results, known: list[int]) -> Text:
    classifiers = results.classifiers
    accuracy = classifiers.groupby("exposure")["accuracy"].mean()
    others = [digit for digit in range(10) if digit not in known]
    return Text(
        "Which detectors notice what a digit classifier has never seen?\n\n"
        f"  known         digits {_listed(known)}; a network with one hidden layer, trained\n"
        f"                on each fold, gets {_percent(accuracy['without'])} of the test rows right\n"
        f"  other digits  {_listed(others)}, drawn from the round, straight and mixed digits\n"
        "  photograph    patches of a photograph, shrunk to the size of a digit\n"
        f"  with          exposure to OOD classes that are not tested; {_percent(accuracy['with'])} right"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _listed(digits: list[int]) -> str:
    return " ".join(map(str, digits))


def _table(results: Results) -> Any:
    """AUROC in percent, the best method on average first."""
    found = results.summary().query("metric == 'auroc'")
    tuned = set(results.tuning["detector"])
    table = _terminal.plain_table()
    table.add_column("AUROC in %\nmean ± sd of 5 folds")
    pairs = [(ood, exposure) for ood in dict.fromkeys(found["ood"]) for exposure in ("without", "with")]
    for ood, exposure in pairs:
        table.add_column(f"{ood}\n{exposure}", justify="right")
    for name in _averages(found).index:
        of_method = found[found["detector"] == name].set_index(["ood", "exposure"])
        cells = [_cell(of_method, pair) for pair in pairs]
        table.add_row(f"{name} (tuned)" if name in tuned else name, *cells)
    return table


def _averages(found: pd.DataFrame) -> pd.Series[float]:
    return found.groupby("detector")["mean"].mean().sort_values(ascending=False)


def _cell(rows: pd.DataFrame, pair: tuple[str, str]) -> str:
    if pair not in rows.index:
        return "failed"
    return f"{100 * rows['mean'][pair]:.1f} ± {100 * rows['std'][pair]:4.1f}"


def _reading(results: Results) -> Text:
    """What the numbers say, in words."""
    found = results.summary().query("metric == 'auroc'")
    averages = _averages(found)
    means = found.groupby(["exposure", "detector"])["mean"].mean()
    before, after = means["without"].to_dict(), means["with"].to_dict()
    helped = max(before.keys() & after.keys(), key=lambda name: (after[name] - before[name], name))
    worst = found.sort_values("mean").to_dict("records")[0]
    lines = [
        f"Best on average: {averages.index[0]}, {_percent(averages.iloc[0])}.",
        f"Exposure helps {helped} most: from {_percent(before[helped])} to {_percent(after[helped])} on average.",
    ]
    if worst["mean"] < 0.5:
        lines.append(
            f"Below 50 % a score takes OOD rows for known ones: {worst['detector']} on {worst['ood']} "
            f"({_percent(worst['mean'])})."
        )
    return Text("\n".join(lines))


def _files(folder: Path, seconds: float) -> str:
    place = shlex.quote(str(folder))
    return (
        f"Done in {seconds:.0f} s. Written:\n"
        f"  {place}/report.html          tables and figures, for a browser\n"
        f"  {place}/results/results.csv  every number\n"
        f"  {place}/study.toml           the study, to read and to change\n\n"
        "Next:\n"
        "  oodometer list knn\n"
        f"  oodometer run {place}/study.toml --dry-run\n"
        f"  oodometer run {place}/study.toml --set split.repeats=3"
    )

"""`oodometer fidelity`: does a cheap protocol conclude what the benchmark truth concludes?"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.progress import track
from rich.text import Text

from oodometer.cli import OK, _terminal
from oodometer.errors import OodometerError

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from oodometer.stats import BenchmarkTruth, Change, Fidelity, Rates

ABOUT = """
Compares cross-validation runs with the benchmark truth, the mean of many
repetitions (DCV-ROOD). Hit rate: in how many runs, on average, a difference
between two methods that the truth knows is found. Error rate: the same for
differences it does not know. Then, method by method, whether a run differs
from the truth, and what both cost.

TRUTH and CV are folders of `oodometer run` (or results.csv files, or folders
that hold them at any depth), e.g. of one study with
split.kind=repeated-holdout, and with split.repeats=10. A run is one repeat of
one file. The p-values are Wilcoxon signed-rank, as the published ones are;
the paper's text names Mann–Whitney, which --test offers.

example:
  oodometer run study.toml --out runs/truth --set split.kind=repeated-holdout
  oodometer run study.toml --out runs/cv --set split.repeats=10
  oodometer fidelity runs/truth runs/cv
  oodometer fidelity runs/truth runs/cv --metric auroc --alpha 0.1 --pairs
  oodometer fidelity --pvalues table05.csv --counts table06.csv --runs 10
"""


@dataclass
class Options:
    """Results to compare, or two published tables."""

    truth: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[TRUTH]")] = None
    """Results of the repetitions of the benchmark truth."""
    cv: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CV]")] = None
    """Results of the cross-validation runs."""
    metric: Annotated[_terminal.Many, tyro.conf.arg(metavar="NAME …")] = field(default_factory=list)
    """Which metrics (default: all that both have)."""
    alpha: float = 0.05
    """Level at which truth and runs are read (p ≤ alpha)."""
    test: Literal["wilcoxon", "mannwhitney", "t", "route"] = "wilcoxon"
    """The test between two methods over blocks; "route": t where both are normal, else Wilcoxon."""
    adjust: Literal["none", "holm", "bonferroni"] = "none"
    """How the p-values are adjusted for the number of pairs (the paper: none)."""
    tol: float = 0.001
    """The truth has converged once its running means stay this close over 10 repetitions."""
    pvalues: Path | None = None
    """A published table of the truth's p-values (CSV, methods × methods), instead of TRUTH."""
    counts: Path | None = None
    """A published table of how many runs find each pair significant, instead of CV."""
    runs: int = 10
    """How many runs the published counts are of."""
    pairs: bool = False
    """Print every pair of methods: its p-value in the truth, and in how many runs it differs."""
    json: bool = False
    """Print JSON instead of text."""


@dataclass(frozen=True)
class Comparison:
    """One metric's truth, with its convergence, and what the runs make of it."""

    metric: str
    truth: BenchmarkTruth
    fidelity: Fidelity
    run_names: tuple[str, ...]


@dataclass(frozen=True)
class Cost:
    """CPU-seconds of the truth and of one run, where every run.json knows them in full."""

    truth: float
    run: float

    def __str__(self) -> str:
        ratio = self.truth / self.run
        return f"cost: truth {_seconds(self.truth)}, a run {_seconds(self.run)}, 1/{ratio:.1f} of it."


def main(arguments: list[str]) -> int:
    """Compare results, or two published tables."""
    options = _terminal.parse(Options, arguments, command="fidelity", about=ABOUT)
    if options.pvalues or options.counts:
        _of_tables(options)
        return OK
    if options.truth is None or options.cv is None:
        raise OodometerError(
            "fidelity: TRUTH and CV (results.csv files or folders of them) are needed, or --pvalues and --counts"
        )
    truth, runs = read_results(options.truth), read_results(options.cv)
    metrics = _metrics(truth, runs, _terminal.flat(options.metric))
    console = _terminal.log()
    bar = track(metrics, "comparing", console=console, transient=True, disable=not console.is_terminal)
    found = [compare(truth, runs, metric, options) for metric in bar]
    cost = cost_of(options.truth, options.cv, len(found[0].run_names))
    if options.json:
        _terminal.write_json([facts(one, cost) for one in found])
    else:
        _print(found, cost, options)
    return OK


def read_results(path: Path) -> pd.DataFrame:
    """All results.csv files below a folder as one table; `source` tells them apart."""
    import pandas as pd

    files, parts = _files(path), []
    for file in files:
        try:
            part = pd.read_csv(file, keep_default_na=False, na_values={"value": ["", "nan", "NaN"]})
        except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
            raise OodometerError(f"{file}: no table of results ({error})") from None
        _check_values(part, file)
        parts.append(part.assign(source=str(file.relative_to(path).parent) if len(files) > 1 else ""))
    return pd.concat(parts, ignore_index=True)


def _files(path: Path) -> list[Path]:
    files = sorted(path.rglob("results.csv")) if path.is_dir() else [path]
    if not files:
        raise OodometerError(f"{path}: no results.csv in this folder; `oodometer run` writes one")
    return files


def cost_of(truth: Path, cv: Path, n_runs: int) -> Cost | None:
    """What the truth and one run cost; None where it is not known in full."""
    spent = [_cpu_seconds(path) for path in (truth, cv)]
    return Cost(spent[0], spent[1] / n_runs) if spent[0] and spent[1] else None


def _cpu_seconds(path: Path) -> float | None:
    """The CPU-seconds of all studies in a folder, if none of their cells was computed by a run that was killed."""
    total = 0.0
    for file in _files(path):
        try:
            timings = json.loads((file.parent / "run.json").read_text(encoding="utf-8"))["timings"]
            if timings["computed"] < timings["kept"]:
                return None
            total += float(timings["cpu"])
        except (OSError, ValueError, KeyError, TypeError):
            return None  # results of elsewhere
    return total


def _check_values(part: pd.DataFrame, file: Path) -> None:
    absent = [column for column in ("detector", "metric", "value") if column not in part]
    if absent:
        raise OodometerError(f"{file}: results need the columns detector, metric, value; absent: {', '.join(absent)}")
    if not all(isinstance(value, int | float) for value in part["value"].tolist()):
        raise OodometerError(f"{file}, column value: a number is needed in every row")


def _metrics(truth: pd.DataFrame, runs: pd.DataFrame, wanted: list[str]) -> list[str]:
    there = set(runs["metric"])
    both = [str(metric) for metric in truth["metric"].unique() if metric in there]
    unknown = [metric for metric in wanted if metric not in both]
    if unknown or not both:
        raise OodometerError(
            f"metric: {', '.join(unknown) or 'one'} in both tables is needed; both have: {', '.join(both) or 'none'}"
        )
    return wanted or both


def compare(truth: pd.DataFrame, runs: pd.DataFrame, metric: str, options: Options) -> Comparison:
    """The fidelity of the runs in one metric."""
    from oodometer.stats import benchmark_truth, fidelity
    from oodometer.stats.tidy import block_means, draws, repetitions, run_means

    known, cheap = draws(truth, metric), run_means(draws(runs, metric))
    found = fidelity(
        block_means(known), list(cheap.values()), alpha=options.alpha, test=options.test, adjust=options.adjust
    )
    return Comparison(metric, benchmark_truth(repetitions(known), tol=options.tol), found, tuple(cheap))


def facts(one: Comparison, cost: Cost | None) -> dict[str, Any]:
    """A comparison as plain data."""
    rates = one.fidelity.rates
    return {
        "metric": one.metric,
        "hit_rate": rates.hit,
        "error_rate": rates.error,
        "undefined": rates.undefined,
        "runs": rates.n_runs,
        "pairs_different": rates.n_different,
        "pairs_alike": rates.n_alike,
        "alpha": rates.alpha,
        "test": one.fidelity.test,
        "adjust": one.fidelity.adjust,
        "blocks": one.fidelity.n_blocks,
        "truth_repetitions": one.truth.n,
        "truth_converged_at": one.truth.converged_at,
        "truth_standard_error": float(one.truth.standard_error.max()),
        "truth_cpu_seconds": cost and cost.truth,
        "run_cpu_seconds": cost and cost.run,
        "pairs": list(one.fidelity.pairs()),
        "changes": [
            {"run": one.run_names[change.run], "method": change.method, "pvalue": change.pvalue}
            for change in one.fidelity.changes()
        ],
    }


def _print(found: list[Comparison], cost: Cost | None, options: Options) -> None:
    first = found[0].fidelity
    table = _terminal.plain_table()
    for title in ("metric", "hit rate", "error rate", "differ", "alike", "repetitions", "error ≤"):
        table.add_column(title, justify="left" if title == "metric" else "right")
    for one in found:
        rates, truth = one.fidelity.rates, one.truth
        cells = (_rate(rates.hit), _rate(rates.error), str(rates.n_different), str(rates.n_alike))
        table.add_row(one.metric, *cells, str(truth.n), f"{truth.standard_error.max():.2g}")
    about = (
        f"{first.rates.n_runs} runs, {len(first.names)} methods, {first.n_blocks} blocks. {first.test}, "
        f"p ≤ {options.alpha:g}, adjustment: {first.adjust}. Rates run from 0 to {first.rates.n_runs}; differ, alike: "
        "pairs of methods in the truth, the mean of so many repetitions; error: its Monte-Carlo standard error, at its "
        "largest."
    )
    pairs = [shown for one in found for shown in (Text(), _pairs(one))] if options.pairs else []
    notes = [Text(), *([Text(str(cost))] if cost else []), *(line for one in found for line in _notes(one, options))]
    _terminal.show(table, Text(), Text(about, "dim"), *pairs, *notes)


def _pairs(one: Comparison) -> Table:
    """Every pair, the clearest in the truth first."""
    table = _terminal.plain_table()
    for title in (f"{one.metric}: a", "b", "p in the truth", "differs in runs", ""):
        table.add_column(title, justify="right" if title.startswith(("p ", "differs")) else "left")
    n_runs, level = one.fidelity.rates.n_runs, one.fidelity.rates.alpha
    for pair in sorted(one.fidelity.pairs(), key=lambda pair: pair["truth_pvalue"]):
        differs = pair["truth_pvalue"] <= level
        missed = n_runs - pair["runs"] if differs else pair["runs"]
        word = f"{missed} {'missed' if differs else 'in error'}" if missed else ""
        table.add_row(str(pair["a"]), str(pair["b"]), f"{pair['truth_pvalue']:.4f}", str(pair["runs"]), word)
    return table


def _rate(rate: float) -> str:
    return "–" if math.isnan(rate) else f"{rate:.4f}"


def _seconds(cpu: float) -> str:
    return f"{cpu:.3g} CPU-s" if cpu < 1000 else f"{cpu:.0f} CPU-s"


def _notes(one: Comparison, options: Options) -> list[Text]:
    notes = []
    if one.fidelity.rates.undefined:
        notes.append(f"{one.metric}: {one.fidelity.rates.undefined}.")
    if one.truth.converged_at is None:
        notes.append(f"{one.metric}: the truth has not converged to ±{options.tol:g}{_last_moves(one.truth)}.")
    found = groupby(one.fidelity.changes(), key=lambda change: change.run)
    by_run = (f"{one.run_names[run] or 'the run'} ({_methods(list(changes))})" for run, changes in found)
    notes.append(f"{one.metric}: methods that differ from their truth, by run: {', '.join(by_run) or 'none'}.")
    return [Text(note) for note in notes]


def _methods(changes: list[Change]) -> str:
    return "; ".join(f"{change.method}, p = {change.pvalue:.4f}" for change in changes)


def _last_moves(truth: BenchmarkTruth) -> str:
    """How far the running means still moved over the stop rule's window."""
    if truth.n <= truth.window:
        return f"; the rule needs more than {truth.window} repetitions"
    moved = abs(truth.running_mean[-1 - truth.window : -1] - truth.running_mean[-1]).max()
    return f"; over the last {truth.window} repetitions its means still moved by {moved:.2g}"


# ------------------------------------------------------------------------------------------- published tables


def _of_tables(options: Options) -> None:
    from oodometer.stats import fidelity_rates

    if options.pvalues is None or options.counts is None or options.truth is not None:
        raise OodometerError(
            "fidelity: published tables come in pairs, --pvalues and --counts, and without TRUTH and CV"
        )
    pvalues, counts = _matrix(options.pvalues), _matrix(options.counts)
    if set(pvalues.columns) != set(counts.columns):
        raise OodometerError(
            f"{options.counts} needs the methods of {options.pvalues}: {', '.join(map(str, pvalues.columns))}"
        )
    counts = counts.loc[pvalues.index, pvalues.columns]
    rates = fidelity_rates(pvalues, counts, n_runs=options.runs, alpha=options.alpha)
    if options.json:
        _terminal.write_json(_plain(rates))
    else:
        _terminal.show(Text(str(rates)))


def _plain(rates: Rates) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(rates), "undefined": rates.undefined}


def _matrix(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        table = pd.read_csv(path, index_col=0)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise OodometerError(f"{path}: no table of numbers ({error})") from None
    numeric = all(kind.kind in "if" for kind in table.dtypes)
    if not numeric or list(table.index) != list(table.columns):
        raise OodometerError(f"{path}: a table of numbers with the same methods as rows and columns is needed")
    return table

"""`oodometer fidelity`: does a cheap protocol conclude what the benchmark truth concludes?"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.progress import track
from rich.text import Text

from oodometer.cli import OK, _terminal
from oodometer.errors import OodometerError

if TYPE_CHECKING:
    import pandas as pd

    from oodometer.stats import BenchmarkTruth, Fidelity, Rates

ABOUT = """
Compares cross-validation runs with the benchmark truth, the mean of many repetitions
(DCV-ROOD). Hit rate: in how many runs, on average, a difference between two methods
that the truth knows is found. Error rate: the same for differences it does not know.
Then, method by method, whether a run differs from the truth.

TRUTH and CV are results.csv files, or folders that hold them at any depth. A run is
one repeat of one file. The p-values are Wilcoxon signed-rank, as the published ones
are; the paper's text names Mann–Whitney, which --test offers.

example:
  oodometer fidelity runs/truth runs/cv
  oodometer fidelity runs/truth runs/cv --metric auroc --alpha 0.1 --json
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
    json: bool = False
    """Print JSON instead of text."""


@dataclass(frozen=True)
class Comparison:
    """One metric's truth, with its convergence, and what the runs make of it."""

    metric: str
    truth: BenchmarkTruth
    fidelity: Fidelity
    run_names: tuple[str, ...]


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
    bar = track(metrics, "comparing", console=_terminal.log(), transient=True, disable=options.json)
    found = [compare(truth, runs, metric, options) for metric in bar]
    if options.json:
        _terminal.write_json([facts(one) for one in found])
    else:
        _print(found, options)
    return OK


def read_results(path: Path) -> pd.DataFrame:
    """All results.csv files below a folder as one table; `source` tells them apart."""
    import pandas as pd

    files = sorted(path.rglob("results.csv")) if path.is_dir() else [path]
    if not files:
        raise OodometerError(f"{path}: no results.csv in this folder; `oodometer run` writes one")
    parts = []
    for file in files:
        try:
            part = pd.read_csv(file, keep_default_na=False, na_values={"value": ["", "nan", "NaN"]})
        except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
            raise OodometerError(f"{file}: no table of results ({error})") from None
        _check_values(part, file)
        parts.append(part.assign(source=str(file.relative_to(path).parent) if len(files) > 1 else ""))
    return pd.concat(parts, ignore_index=True)


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


def facts(one: Comparison) -> dict[str, Any]:
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
        "pairs": list(one.fidelity.pairs()),
        "changes": [
            {"run": one.run_names[change.run], "method": change.method, "pvalue": change.pvalue}
            for change in one.fidelity.changes()
        ],
    }


def _print(found: list[Comparison], options: Options) -> None:
    first = found[0].fidelity
    table = _terminal.plain_table()
    for title in ("metric", "hit rate", "error rate", "pairs that differ", "alike", "truth: repetitions", "error ≤"):
        table.add_column(title, justify="left" if title == "metric" else "right")
    for one in found:
        rates, truth = one.fidelity.rates, one.truth
        cells = (f"{rates.hit:.4f}", f"{rates.error:.4f}", str(rates.n_different), str(rates.n_alike))
        table.add_row(one.metric, *cells, str(truth.n), f"{truth.standard_error.max():.2g}")
    about = (
        f"{first.rates.n_runs} runs, {len(first.names)} methods, {first.n_blocks} blocks. {first.test}, "
        f"p ≤ {options.alpha:g}, adjustment: {first.adjust}. Rates run from 0 to {first.rates.n_runs}; "
        "error: Monte-Carlo standard error of the truth, at its largest."
    )
    _terminal.show(table, Text(), Text(about, "dim"), *(line for one in found for line in _notes(one, options)))


def _notes(one: Comparison, options: Options) -> list[Text]:
    notes = []
    if one.fidelity.rates.undefined:
        notes.append(f"{one.metric}: {one.fidelity.rates.undefined}.")
    if one.truth.converged_at is None:
        notes.append(f"{one.metric}: the truth has not converged to ±{options.tol:g}; add repetitions.")
    changes = one.fidelity.changes()
    names = ", ".join(f"{one.run_names[c.run] or 'the run'} ({c.method}, p = {c.pvalue:.4f})" for c in changes)
    notes.append(f"{one.metric}: methods that differ from their truth, by run: {names or 'none'}.")
    return [Text(note) for note in notes]


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

"""Whether cross-validation concludes what the benchmark truth concludes: hit and error rate, and method by method."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oodometer.errors import OodometerError
from oodometer.stats.blocks import BlockTable, Floats, Table, block_table, check_level, read_numbers
from oodometer.stats.paired import LABELS, named_test
from oodometer.stats.posthoc import Adjust, adjusted, test_pairs

if TYPE_CHECKING:
    import pandas as pd

Pair = tuple[Hashable, Hashable]


@dataclass(frozen=True)
class Rates:
    """In how many runs, on average, a pair of methods is significant: hits and errors against the truth."""

    hit: float
    """Mean count over the pairs that differ in the truth; NaN if none does. Best: n_runs."""
    error: float
    """Mean count over the pairs that do not differ in the truth; NaN if all do. Best: 0."""
    n_runs: int
    n_different: int
    n_alike: int
    alpha: float
    """The level at which the truth was read."""

    @property
    def undefined(self) -> str:
        """Why a rate is NaN; empty if none is."""
        reasons = [
            "no hit rate: no pair differs in the truth" if not self.n_different else "",
            "no error rate: every pair differs in the truth" if not self.n_alike else "",
        ]
        return "; ".join(filter(None, reasons))

    def __str__(self) -> str:
        why = f"; {self.undefined}" if self.undefined else ""
        return (
            f"hit rate {self.hit:.4f} of {self.n_runs} over {self.n_different} pairs, "
            f"error rate {self.error:.4f} over {self.n_alike} pairs (truth: p ≤ {self.alpha:g}){why}"
        )


class Change(NamedTuple):
    """A method whose results in one run differ from its truth."""

    run: int
    method: Hashable
    pvalue: float


@dataclass(frozen=True)
class Fidelity:
    """What the truth and every run conclude about each pair, and about each method against itself."""

    rates: Rates
    names: tuple[Hashable, ...]
    n_blocks: int
    test: str
    adjust: str
    alpha: float
    """The level at which the runs are read."""
    truth_pvalues: Floats
    run_pvalues: Floats
    """[run, method, method]"""
    method_pvalues: Floats
    """[run, method]: the method's values in that run against its truth, block by block; not adjusted."""

    @property
    def counts(self) -> NDArray[np.intp]:
        """In how many runs each pair is significant."""
        return np.asarray(_significant(self.run_pvalues, self.alpha).sum(axis=0), dtype=np.intp)

    def changes(self, alpha: float | None = None) -> list[Change]:
        """The methods that differ from their truth at level alpha, run by run (DCV-ROOD, Table 9)."""
        level = self.alpha if alpha is None else alpha
        found = np.argwhere(self.method_pvalues <= level).tolist()
        return [Change(run, self.names[j], float(self.method_pvalues[run, j])) for run, j in found]

    def pairs(self) -> Iterator[dict[str, Any]]:
        """Each pair once: its p-value in the truth, and in how many runs it is significant."""
        counts = self.counts
        for i, j in combinations(range(len(self.names)), 2):
            yield {
                "a": self.names[i],
                "b": self.names[j],
                "truth_pvalue": float(self.truth_pvalues[i, j]),
                "runs": int(counts[i, j]),
            }

    def to_pandas(self) -> pd.DataFrame:
        """The matrix of counts with the names of the methods, as Table 6 of DCV-ROOD."""
        import pandas as pd

        return pd.DataFrame(self.counts, index=list(self.names), columns=list(self.names))

    def __str__(self) -> str:
        return (
            f"{self.rates}; runs: p ≤ {self.alpha:g}; {self.test}, adjustment: {self.adjust}; {self.n_blocks} blocks, "
            f"{len(self.names)} methods; {len(self.changes())} of {self.method_pvalues.size} methods × runs "
            "differ from their truth"
        )


def fidelity(
    truth: Table,
    runs: Sequence[Table],
    *,
    alpha: float = 0.05,
    truth_alpha: float | None = None,
    test: str = "wilcoxon",
    adjust: Adjust = "none",
    names: Sequence[Hashable] | None = None,
) -> Fidelity:
    """Compare cross-validation runs with the truth, all as blocks × methods (DCV-ROOD §5.2 and §5.3).

    `test`: "wilcoxon" or "dcv-rood" (paired, what the published p-values are), "mannwhitney" (what the paper's text
    names), "t", or "route" (t-test where both samples are normal). Frames are matched by their labels.
    """
    reference = block_table(truth, names=names)
    tables = [_like(reference, block_table(run, names=names), place) for place, run in enumerate(runs)]
    if not tables:
        raise OodometerError("fidelity: at least one cross-validation run was needed, none was found.")
    truth_pvalues = adjusted(test_pairs(reference.values, test)[1], adjust)
    run_pvalues = np.stack([adjusted(test_pairs(table, test)[1], adjust) for table in tables])
    counts = _significant(run_pvalues, check_level(alpha)).sum(axis=0)
    level = alpha if truth_alpha is None else truth_alpha
    rates = fidelity_rates(truth_pvalues, counts, n_runs=len(tables), alpha=level, names=reference.names)
    return Fidelity(
        rates=rates,
        names=reference.names,
        n_blocks=reference.shape[0],
        test=LABELS[test],
        adjust=adjust,
        alpha=alpha,
        truth_pvalues=truth_pvalues,
        run_pvalues=run_pvalues,
        method_pvalues=_against_truth(reference.values, tables, test),
    )


def fidelity_rates(
    pvalues: Any,
    counts: Any,
    *,
    n_runs: int,
    alpha: float = 0.05,
    names: Sequence[Hashable] | None = None,
    known: Mapping[Pair, bool] | None = None,
) -> Rates:
    """Hit and error rate from the truth's p-values and the number of runs in which each pair is significant.

    Signs of the counts are ignored: printed tables use them as a mark. `known` says of single pairs whether they
    differ in the truth, where a p-value is missing (NaN) or is not the one that was used.
    """
    p, found = _square(pvalues, "pvalues"), np.abs(_square(counts, "counts"))
    labels = _labels(pvalues, names, len(p))
    different = _differs(p, check_level(alpha), labels, known or {})
    upper = np.triu_indices(len(p), 1)
    _check_counts(found, upper, n_runs, len(p))
    in_truth, times = different[upper], found[upper]
    return Rates(
        hit=_mean(times[in_truth]),
        error=_mean(times[~in_truth]),
        n_runs=n_runs,
        n_different=int(in_truth.sum()),
        n_alike=int((~in_truth).sum()),
        alpha=alpha,
    )


def _mean(counts: Floats) -> float:
    return float(counts.mean()) if len(counts) else math.nan


def _significant(pvalues: Floats, alpha: float) -> NDArray[np.bool_]:
    """p ≤ α, as the tables of DCV-ROOD are headed."""
    return np.asarray((pvalues <= alpha) & ~np.eye(pvalues.shape[-1], dtype=bool))


def _against_truth(truth: Floats, runs: Sequence[Floats], test: str) -> Floats:
    compare = named_test(test)
    return np.array([[compare(truth[:, j], run[:, j]).pvalue for j in range(truth.shape[1])] for run in runs])


# ---------------------------------------------------------------------------------------------- checks


def _like(truth: BlockTable, run: BlockTable, place: int) -> Floats:
    """The values of a run in the truth's order of blocks and methods."""
    for kind, wanted, own in (("methods", truth.names, run.names), ("blocks", truth.blocks, run.blocks)):
        if set(wanted) != set(own):
            absent = [label for label in wanted if label not in set(own)]
            extra = [label for label in own if label not in set(wanted)]
            raise OodometerError(
                f"fidelity: run {place} needs the {kind} of the truth; it lacks {absent} and adds {extra}. "
                "Leave them out of both, or complete them."
            )
    rows = [run.blocks.index(label) for label in truth.blocks]
    columns = [run.names.index(label) for label in truth.names]
    return run.values[np.ix_(rows, columns)]


def _square(matrix: ArrayLike, name: str) -> Floats:
    values = read_numbers(matrix, name)
    if values.ndim != 2 or values.shape[0] != values.shape[1] or len(values) < 2:
        raise OodometerError(f"{name}: a square matrix (methods × methods) was needed, {values.shape} was found.")
    if not np.array_equal(np.abs(values), np.abs(values.T), equal_nan=True):
        raise OodometerError(f"{name}: a symmetric matrix was needed: both orders of a pair need the same number.")
    return values


def _labels(pvalues: Any, names: Sequence[Hashable] | None, k: int) -> tuple[Hashable, ...]:
    own = pvalues.columns if hasattr(pvalues, "columns") else range(k)
    labels = tuple(own if names is None else names)
    if len(labels) != k:
        raise OodometerError(f"names: {k} were needed, {len(labels)} were found.")
    return labels


def _differs(p: Floats, alpha: float, labels: tuple[Hashable, ...], known: Mapping[Pair, bool]) -> NDArray[np.bool_]:
    """Which pairs differ in the truth: by their p-value, or as `known` says."""
    different, open_ = _significant(p, alpha), np.isnan(p)
    np.fill_diagonal(open_, False)
    for pair, answer in known.items():
        if not set(pair) <= set(labels) or len(set(pair)) != 2:
            raise OodometerError(f"known: two of {list(labels)} were needed, {pair!r} was found.")
        i, j = (labels.index(name) for name in pair)
        different[i, j] = different[j, i] = answer
        open_[i, j] = open_[j, i] = False
    if open_.any():
        i, j = np.argwhere(open_)[0].tolist()
        raise OodometerError(
            f"pvalues: one for every pair was needed, that of {labels[i]!r} and {labels[j]!r} is missing "
            f"({int(open_.sum()) // 2} pairs). Say in known={{(a, b): True or False}} whether they differ."
        )
    return different


def _check_counts(counts: Floats, upper: tuple[NDArray[np.intp], ...], n_runs: int, k: int) -> None:
    times = counts[upper]
    if len(counts) != k:
        raise OodometerError(f"counts: the methods of the p-values ({k}) were needed, {len(counts)} were found.")
    if n_runs < 1 or (times != np.rint(times)).any() or (times > n_runs).any():
        raise OodometerError(
            f"counts: whole numbers of runs up to n_runs = {n_runs} were needed, up to {times.max():g} was found."
        )

"""What a study says in plain words: who is best, by how much, how sure, and on what."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from oodometer import stats
from oodometer.errors import OodometerError, OodometerWarning
from oodometer.report.layout import Layout, arrow, label_of
from oodometer.results import higher_is_better

if TYPE_CHECKING:
    import pandas as pd

    from oodometer.stats import Cliques, Friedman, Pairwise, RankBootstrap

REDRAWS = 2000


@dataclass(frozen=True)
class Reading:
    """One metric's comparison of all methods: on blocks (OOD sets × exposures), or on the folds of a single one."""

    metric: str
    n_blocks: int
    n_draws: int
    order: tuple[str, ...]
    """Methods, best first: by average rank, or by mean where there is one block."""
    means: dict[str, float]
    top: tuple[str, ...]
    """Methods that cannot be told apart from the best."""
    basis: str
    """What `top` rests on: "ranks", "folds", "none", or "alone" where a single method leaves nothing to compare."""
    pvalues: dict[str, float] = field(default_factory=dict)
    """Adjusted p-value of each method against the best one."""
    left_out: tuple[str, ...] = ()
    """Methods without a value somewhere."""
    dropped: tuple[Any, ...] = ()
    """Blocks without a value of any method."""
    exposed: bool = False
    """Whether a block is an OOD set with one exposure, and not an OOD set alone."""
    alone: tuple[tuple[str, float, float], ...] = ()
    """Of a single method: each block with its mean and half its 95 % interval over folds."""
    notes: tuple[str, ...] = ()
    friedman: Friedman | None = None
    pairwise: Pairwise | None = None
    cliques: Cliques | None = None
    redrawn: RankBootstrap | None = None

    @property
    def blocks(self) -> str:
        """How many blocks, in words."""
        if self.exposed:
            return f"{plural(self.n_blocks, 'block')} of OOD set × exposure"
        return plural(self.n_blocks, "OOD set")

    @property
    def drawn(self) -> bool:
        """Whether any difference was found."""
        return self.cliques is None or self.cliques.drawn

    @property
    def runner_up(self) -> str | None:
        """The best method that is worse than the best beyond chance."""
        outside = [name for name in self.order if name not in self.top]
        return outside[0] if outside else None


def read(layout: Layout, metric: str, *, alpha: float = 0.05, where: pd.Series[Any] | None = None) -> Reading:
    """Compare the methods in one metric, on all blocks or on those `where` selects (a mask over the tidy table)."""
    rows = layout if where is None else _part(layout, where)
    table = rows.means(metric)
    whole = table.dropna(axis=0, how="all")
    complete = whole.dropna(axis=1, how="any")
    if complete.empty:
        raise OodometerError(
            f"{label_of(metric)}: no detector has a value on every OOD set, so that none can be compared; "
            "mend the failed cells listed in run.json and run the study again, or decide by another metric"
        )
    compare = _on_ranks if min(complete.shape) > 1 else _on_folds
    return replace(
        compare(rows, metric, complete, alpha),
        left_out=tuple(name for name in layout.methods if name not in complete.columns),
        dropped=tuple(label for label in table.index if label not in whole.index),
        exposed=len(layout.exposures) > 1,
    )


def _part(layout: Layout, where: pd.Series[Any]) -> Layout:
    return replace(layout, frame=layout.frame[where])


def _on_ranks(layout: Layout, metric: str, table: pd.DataFrame, alpha: float) -> Reading:
    better = higher_is_better(metric)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OodometerWarning)
        pairs = stats.conover(table, higher_is_better=better)
        found = stats.cliques(pairs, alpha)
        redrawn = stats.bootstrap_ranks(table, higher_is_better=better, seed=0, n=REDRAWS)
    order = _ordered(table, pairs.average_ranks, better)
    best = order[0]
    return Reading(
        metric=metric,
        n_blocks=len(table),
        n_draws=len(layout.draws),
        order=order,
        means={name: float(table[name].mean()) for name in order},
        top=tuple(name for name in order if name in found.top),
        basis="ranks",
        pvalues={name: pairs[best, name] for name in order if name != best},
        notes=tuple(dict.fromkeys(str(one.message) for one in caught)),
        friedman=pairs.omnibus,
        pairwise=pairs,
        cliques=found,
        redrawn=redrawn,
    )


def _ordered(table: pd.DataFrame, ranks: Any, better: bool) -> tuple[str, ...]:
    """By average rank; equal ranks by mean, then in the order of the study."""
    means = table.mean().to_numpy(np.float64)
    place = np.lexsort((-means if better else means, ranks))
    return tuple(table.columns[i] for i in place)


def _on_folds(layout: Layout, metric: str, table: pd.DataFrame, alpha: float) -> Reading:
    """One block (or one method): no ranks over data sets; its folds compare methods on this data set alone."""
    means = table.mean()
    order = tuple(means.sort_values(ascending=not higher_is_better(metric), kind="stable").index)
    pvalues = _fold_pvalues(layout, metric, order) if len(order) > 1 and len(layout.draws) > 1 else {}
    return Reading(
        metric=metric,
        n_blocks=len(table),
        n_draws=len(layout.draws),
        order=order,
        means={name: float(means[name]) for name in order},
        top=(*order[:1], *(name for name, p in pvalues.items() if p >= alpha)),
        basis="alone" if len(order) == 1 else "folds" if pvalues else "none",
        pvalues=pvalues,
        alone=_single(layout, metric, order[0]) if len(order) == 1 else (),
    )


def _single(layout: Layout, metric: str, name: str) -> tuple[tuple[str, float, float], ...]:
    """Each block of one method with its mean and half its interval, the easiest block first."""
    every = layout.cells(metric)
    cells = every[every.index.get_level_values("method") == name].dropna(subset=["mean"])
    cells = cells.sort_values("mean", ascending=not higher_is_better(metric), kind="stable")
    labels = [f"{ood}, {exposure} exposure" if len(layout.exposures) > 1 else ood for ood, exposure, _ in cells.index]
    return tuple(zip(labels, cells["mean"].tolist(), cells["half"].tolist(), strict=True))


def _fold_pvalues(layout: Layout, metric: str, order: Sequence[str]) -> dict[str, float]:
    """Each method against the best one, adjusted by Holm."""
    rows = layout.frame[(layout.frame["metric"] == metric) & layout.frame["method"].isin(order)]
    folds = rows.pivot_table(index=["repeat", "fold"], columns="method", values="value", sort=False)
    best = folds[order[0]].to_numpy(np.float64)
    raw = [corrected_t(best - folds[name].to_numpy(np.float64), layout.test_to_train) for name in order[1:]]
    return dict(zip(order[1:], stats.holm(raw).tolist(), strict=True))


def corrected_t(differences: np.ndarray[Any, Any], test_to_train: float) -> float:
    """Two-sided p of a mean difference over folds, whose training rows overlap: t with s²(1/n + n_test/n_train).

    Nadeau and Bengio, Machine Learning 2003, equation 9.
    """
    from scipy.special import stdtr

    n = len(differences)
    mean = float(differences.mean())
    spread = float(differences.std(ddof=1)) if np.ptp(differences) else 0.0
    if not spread:
        return float(mean == 0)
    t = mean / (spread * math.sqrt(1 / n + test_to_train))
    return float(2 * stdtr(n - 1, -abs(t)))


# ------------------------------------------------------------------------------------------------ words


def headline(reading: Reading) -> str:
    """The verdict in one sentence."""
    label, best, others = label_of(reading.metric), reading.order[0], len(reading.top) - 1
    if reading.basis == "alone":
        return f"{best} has a mean {label} of {percent(reading.means[best])}; no other detector is here to compare."
    if reading.basis == "none":
        return f"{best} has the best {label}; one fold of one OOD set cannot say how sure that is."
    if not reading.drawn:
        return "No detector is shown to be better than another."
    if not others:
        return f"{best} is the best detector of this study."
    if others < 4:
        return f"{listed(reading.top)} are the best detectors; this study cannot tell them apart."
    return f"{best} leads, but {others} other detectors cannot be told apart from it."


def by_how_much(reading: Reading) -> str:
    """Means of the best and of the first detector that is worse beyond chance."""
    best, last = reading.order[0], reading.order[-1]
    text = f"{best}: mean {label_of(reading.metric)} {percent(reading.means[best])}."
    if len(reading.alone) > 1:
        ends = [f"{name} {percent(mean)}" for name, mean, _ in (reading.alone[0], reading.alone[-1])]
        return f"{text} The easiest of {reading.blocks}: {ends[0]}; the hardest: {ends[1]}."
    second = reading.runner_up
    if second is None:
        return text if best == last else f"{text} The last one, {last}: {percent(reading.means[last])}."
    gap = reading.means[second] - reading.means[best]
    worse = (gap < 0) == higher_is_better(reading.metric)
    ranks = "" if worse else ", although it ranks behind on most OOD sets"
    return (
        f"{text} The first one that is worse beyond chance, {second}: "
        f"{percent(reading.means[second])} ({signed(100 * gap)} points{ranks})."
    )


def how_sure(reading: Reading, alpha: float) -> str:
    """The tests behind the verdict."""
    if reading.basis == "alone":
        return _alone_how_sure(reading)
    if reading.basis == "none":
        return "Not at all: it takes at least two folds, or two OOD sets, to see how far results vary."
    if reading.basis == "folds":
        return (
            f"One OOD set: the {reading.n_draws} folds compare the detectors on this set alone, by the corrected "
            f"resampled t-test with Holm's adjustment at α = {alpha:g}. Other OOD sets may rank them otherwise."
        )
    assert reading.friedman is not None and reading.redrawn is not None
    best = reading.order[0]
    share = dict(zip(reading.redrawn.names, reading.redrawn.best.tolist(), strict=True))[best]
    between = "differ" if reading.drawn else "are not shown to differ"
    return (
        f"The detectors {between} ({reading.friedman.omnibus_test}, {p_text(reading.friedman.omnibus_pvalue)}, "
        f"{reading.blocks}); pairs by Conover's test with Holm's adjustment at α = {alpha:g}. "
        f"When the OOD sets are drawn anew, {best} has the best average rank in {100 * share:.0f}\u00a0% of the draws."
    )


def _alone_how_sure(reading: Reading) -> str:
    """The intervals of a single method's values."""
    reach = [100 * half for _, _, half in reading.alone if not math.isnan(half)]
    if not reach:
        return "Not known: a single fold shows no spread. Split into more folds, or add repeats."
    several = f"s, by OOD set: ± {min(reach):.2f} to ± {max(reach):.2f}" if len(reach) > 1 else f": ± {reach[0]:.2f}"
    return f"95\u00a0% interval{several} points, over {plural(reading.n_draws, 'fold')} that share training rows."


def on_what(reading: Reading, layout: Layout) -> str:
    """The data behind the verdict."""
    repeats = len({repeat for repeat, _ in layout.draws})
    folds = len({fold for _, fold in layout.draws})
    often = f" × {repeats} repeats" if repeats > 1 else ""
    exposures = "" if layout.exposures == ("without",) else f", outlier exposure: {listed(layout.exposures)}"
    return (
        f"{label_of(reading.metric)} {arrow(reading.metric)} of {plural(len(reading.order), 'detector')} on "
        f"{plural(len(layout.sets), 'OOD set')} × {plural(folds, 'fold')}{often}; in distribution: "
        f"{listed(layout.ids)}{exposures}."
    )


def percent(value: float) -> str:
    """A fraction as tables print it."""
    return f"{100 * value:.2f}\u00a0%"


def signed(value: float) -> str:
    """+1.20 or −1.20."""
    return f"{value:+.2f}".replace("-", "−")


def p_text(p: float) -> str:
    """A p-value as a reader wants it."""
    return "p < 0.0001" if p < 0.0001 else f"p = {p:.4f}"


def plural(n: int, noun: str) -> str:
    """3 folds, 1 fold."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    *head, last = names
    return f"{', '.join(head)} and {last}" if head else last

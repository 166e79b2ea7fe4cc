"""Figures of scores, thresholds and comparisons: arrays or tables in, matplotlib Axes out."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oodometer.errors import OodometerError
from oodometer.metrics import aufnr, aufpr, aupr, auroc, fixed_scale, threshold_equal_error
from oodometer.metrics._counts import as_scores
from oodometer.metrics.risk import augrc, aurc
from oodometer.metrics.risk import risk_coverage as risk_curve

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from oodometer.metrics import Scale
    from oodometer.stats import Cliques, Pairwise

Floats = NDArray[np.float64]
Curve = Callable[[Floats, Floats], tuple[Floats, Floats]]

ID_COLOUR = "#4d4d4d"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's colours, told apart by colour-blind readers; the yellow is left out, it is faint on white."""
_STROKES = ("-", "--", ":", "-.")
_FPR_COLOUR, _FNR_COLOUR = "#009e73", "#e69f00"


# ------------------------------------------------------------------------------------------------ one style


def _axes(ax: Axes | None, size: tuple[float, float] = (6.4, 4.0)) -> Axes:
    if ax is None:
        import matplotlib.pyplot as plt

        _, ax = plt.subplots(figsize=size, layout="constrained")
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(length=3)
    ax.grid(color="0.9", linewidth=0.6)
    ax.set_axisbelow(True)
    return ax


def _strokes(names: Iterable[Hashable]) -> dict[Any, dict[str, Any]]:
    """A colour for each name, and another dash once the colours are used up."""
    names = list(names)
    pairs = itertools.cycle(itertools.product(_STROKES, PALETTE))
    return {name: {"color": colour, "linestyle": dash} for name, (dash, colour) in zip(names, pairs, strict=False)}


def _counted(name: object, n: int) -> str:
    return f"{name} (n = {n:,})"


def _sets(ood_scores: Mapping[str, ArrayLike] | ArrayLike) -> dict[str, Floats]:
    named = ood_scores if isinstance(ood_scores, Mapping) else {"OOD": ood_scores}
    if not named:
        raise OodometerError('ood_scores: at least one set was needed, as in {"textures": scores}.')
    return {name: as_scores(scores, f"OOD {name!r}", finite=True) for name, scores in named.items()}


# ------------------------------------------------------------------------------------------------ scores, thresholds


def score_histograms(
    id_scores: ArrayLike,
    ood_scores: Mapping[str, ArrayLike] | ArrayLike,
    *,
    thresholds: Mapping[str, float] | None = None,
    at_test: bool = False,
    bins: int = 60,
    ax: Axes | None = None,
) -> Axes:
    """Normalised histograms of the ID scores and of every OOD set, with thresholds as vertical lines.

    `thresholds` are global ones (solid); `at_test` adds each set's own threshold of equal errors (dashed), which
    nobody has in practice (Beyond AUROC, figure 9).
    """
    ax = _axes(ax)
    id_values, sets = as_scores(id_scores, "ID", finite=True), _sets(ood_scores)
    edges = np.histogram_bin_edges(np.concatenate([id_values, *sets.values()]), bins).tolist()
    ax.hist(id_values, edges, density=True, color=ID_COLOUR, alpha=0.35, label=_counted("ID", id_values.size))
    for (name, values), stroke in zip(sets.items(), _strokes(sets).values(), strict=True):
        label = _counted(name, values.size)
        ax.hist(values, edges, density=True, histtype="step", linewidth=1.4, label=label, **stroke)
        if at_test:
            equal = threshold_equal_error(id_values, values)
            ax.axvline(equal, color=stroke["color"], linestyle="--", linewidth=1, label=f"@test {name}: {equal:.4g}")
    for (name, value), dash in zip((thresholds or {}).items(), itertools.cycle(("-", "-.", ":"))):
        ax.axvline(value, color="black", linestyle=dash, linewidth=1.2, label=f"{name}: {value:.4g}")
    ax.set(xlabel="score (higher = more out of distribution)", ylabel="density")
    ax.legend(frameon=False, fontsize="small")
    return ax


def threshold_errors(
    id_scores: ArrayLike,
    ood_scores: ArrayLike,
    *,
    scale: Scale | None = None,
    calibration: ArrayLike | None = None,
    ax: Axes | None = None,
) -> Axes:
    """FPR and FNR against the threshold with their crossing; the shaded areas are AUFPR and AUFNR.

    The scale maps scores to [0, 1]: give it, or the ID `calibration` scores that fix it (Beyond AUROC, figure 6).
    """
    ax = _axes(ax)
    if scale is None and calibration is None:
        raise OodometerError("threshold_errors: scale= or calibration= (ID scores that fix the scale) is needed.")
    fixed = scale if scale is not None else fixed_scale(np.asarray(calibration))
    id_values, ood_values = as_scores(id_scores, "ID", finite=True), as_scores(ood_scores, "OOD", finite=True)
    id_unit, ood_unit = fixed.apply(id_values, "ID"), fixed.apply(ood_values, "OOD")
    areas = [area(id_values, ood_values, low=fixed.low, high=fixed.high) for area in (aufpr, aufnr)]
    t = np.unique(np.concatenate([[0.0, 1.0], id_unit, ood_unit]))
    fpr, fnr = 1 - _share_upto(id_unit, t), _share_upto(ood_unit, t)
    for rate, name, colour, area, n in (
        (fpr, "FPR", _FPR_COLOUR, areas[0], id_unit.size),
        (fnr, "FNR", _FNR_COLOUR, areas[1], ood_unit.size),
    ):
        ax.step(t, rate, where="post", color=colour, label=f"{name}: AU{name} = {area:.3f} (n = {n:,})")
        ax.fill_between(t, rate, step="post", color=colour, alpha=0.15, linewidth=0)
    cross = float(fixed.apply(np.array([threshold_equal_error(id_values, ood_values)]))[0])
    height = float(np.maximum(1 - _share_upto(id_unit, cross), _share_upto(ood_unit, cross)))
    ax.plot([cross], [height], "o", color="black", markersize=5, label=f"FPR ≈ FNR at {cross:.3f}")
    ax.set(xlabel=f"threshold, score scaled from [{fixed.low:.4g}, {fixed.high:.4g}] to [0, 1]", ylabel="error rate")
    ax.set(xlim=(0, 1), ylim=(0, 1.02), title=f"AUTC = {sum(areas) / 2:.3f}")
    ax.legend(frameon=False, fontsize="small")
    return ax


def _share_upto(values: Floats, t: Any) -> Any:
    return np.searchsorted(np.sort(values), t, side="right") / values.size


# ------------------------------------------------------------------------------------------------ ROC, PR, risk


def roc(
    id_scores: ArrayLike,
    ood_scores: Mapping[str, ArrayLike] | ArrayLike,
    *,
    n_bootstrap: int = 0,
    confidence: float = 0.95,
    seed: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """ROC curves, OOD positive; `n_bootstrap` > 0 adds pointwise bands, the rows of each side being drawn anew."""
    ax = _axes(ax, (4.8, 4.6))
    redraw = _Redraw(n_bootstrap, confidence, seed)
    id_values, sets = as_scores(id_scores, "ID"), _sets(ood_scores)
    for (name, values), stroke in zip(sets.items(), _strokes(sets).values(), strict=True):
        redraw.band(ax, id_values, values, _roc_points, stroke["color"])
        label = f"{_counted(name, values.size)}: AUROC {auroc(id_values, values):.3f}"
        ax.plot(*_roc_points(*_flagged(id_values, values)), label=label, **stroke)
    ax.plot([0, 1], [0, 1], color="0.7", linewidth=0.8)
    ax.set(xlabel=f"FPR: ID rows flagged (n = {id_values.size:,})", ylabel="TPR: OOD rows flagged")
    ax.set(xlim=(0, 1), ylim=(0, 1.01), aspect="equal")
    ax.legend(frameon=False, fontsize="small", loc="lower right", title=redraw.caption)
    return ax


def precision_recall(
    id_scores: ArrayLike,
    ood_scores: Mapping[str, ArrayLike] | ArrayLike,
    *,
    n_bootstrap: int = 0,
    confidence: float = 0.95,
    seed: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """Precision–recall curves, OOD positive; precision depends on the class ratio, which the legend tells."""
    ax = _axes(ax, (4.8, 4.6))
    redraw = _Redraw(n_bootstrap, confidence, seed)
    id_values, sets = as_scores(id_scores, "ID"), _sets(ood_scores)
    for (name, values), stroke in zip(sets.items(), _strokes(sets).values(), strict=True):
        redraw.band(ax, id_values, values, _pr_points, stroke["color"])
        label = f"{_counted(name, values.size)}: AUPR {aupr(id_values, values):.3f}"
        ax.plot(*_pr_points(*_flagged(id_values, values)), label=label, **stroke)
        ax.axhline(values.size / (values.size + id_values.size), color=stroke["color"], linewidth=0.6, alpha=0.6)
    ax.set(
        xlabel="recall: OOD rows flagged", ylabel=f"precision: flagged rows that are OOD (ID: n = {id_values.size:,})"
    )
    ax.set(xlim=(0, 1), ylim=(0, 1.01))
    ax.legend(frameon=False, fontsize="small", loc="lower left", title=redraw.caption)
    return ax


def _flagged(
    id_values: Floats, ood_values: Floats, id_weights: Any = 1.0, ood_weights: Any = 1.0
) -> tuple[Floats, Floats]:
    """(FP, TP) as the threshold falls from above the highest score, equal scores being flagged together."""
    values = np.concatenate([id_values, ood_values])
    from_ood = np.arange(values.size) >= id_values.size
    weights = np.concatenate(
        [np.broadcast_to(id_weights, id_values.shape), np.broadcast_to(ood_weights, ood_values.shape)]
    )
    order = np.argsort(-values, kind="stable")
    last = np.flatnonzero(np.append(np.diff(values[order]) != 0, True))
    fp, tp = (np.cumsum((weights * side)[order])[last] for side in (~from_ood, from_ood))
    return np.append(0.0, fp), np.append(0.0, tp)


def _roc_points(fp: Floats, tp: Floats) -> tuple[Floats, Floats]:
    return fp / fp[-1], tp / tp[-1]


def _pr_points(fp: Floats, tp: Floats) -> tuple[Floats, Floats]:
    """(recall, precision) from (0, 1) on."""
    flagged = fp + tp
    precision = np.divide(tp, flagged, out=np.ones_like(tp), where=flagged > 0)
    return tp / tp[-1], precision


@dataclass(frozen=True)
class _Redraw:
    """Pointwise percentile bands over stratified bootstrap draws."""

    n: int
    confidence: float
    seed: int

    @property
    def caption(self) -> str | None:
        return f"bands: {self.confidence:.0%}, {self.n} bootstrap draws" if self.n else None

    def band(self, ax: Axes, id_values: Floats, ood_values: Floats, points: Curve, colour: str) -> None:
        if not self.n:
            return
        rng = np.random.default_rng(self.seed)
        grid = np.linspace(0, 1, 201)
        curves = np.empty((self.n, grid.size))
        for row in curves:
            draws = [rng.multinomial(v.size, np.full(v.size, 1 / v.size)) for v in (id_values, ood_values)]
            x, y = points(*_flagged(id_values, ood_values, *draws))
            row[:] = np.interp(grid, x, y)
        tail = (1 - self.confidence) / 2
        low, high = np.quantile(curves, [tail, 1 - tail], axis=0)
        ax.fill_between(grid, low, high, color=colour, alpha=0.18, linewidth=0)


def risk_coverage(
    rows: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    generalised: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Risk against coverage for each named (scores, failures), as `metrics.risk.failures` gives them.

    Selective risk (failures among accepted rows; area AURC), or `generalised` risk (accepted failures among all rows;
    area AUGRC).
    """
    ax = _axes(ax)
    for (name, (scores, failed)), stroke in zip(rows.items(), _strokes(rows).values(), strict=True):
        curve = risk_curve(scores, failed)
        risk = curve.generalised_risk if generalised else curve.selective_risk
        first = 0.0 if generalised else risk[0]
        area = f"AUGRC {augrc(scores, failed):.4f}" if generalised else f"AURC {aurc(scores, failed):.4f}"
        x, y = np.append(0.0, curve.coverage), np.append(first, risk)
        ax.plot(x, y, label=f"{_counted(name, curve.n)}: {area}", **stroke)
    ax.set(xlabel="coverage: rows accepted", xlim=(0, 1))
    ax.set_ylabel(
        "generalised risk: accepted failures / all rows" if generalised else "selective risk: failures / accepted rows"
    )
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, fontsize="small")
    return ax


# ------------------------------------------------------------------------------------------------ comparisons


def critical_difference(pairwise: Pairwise, cliques: Cliques, *, ax: Axes | None = None) -> Axes:
    """Average ranks on one axis; a bar joins the methods of a clique, with a dot on each member.

    The dots matter where a clique is no run of the ranks (pair-by-pair tests): the bar then passes a method that
    differs from a member.
    """
    names, ranks = list(pairwise.names), pairwise.average_ranks
    order = np.argsort(ranks, kind="stable")
    bars = [clique for clique in cliques if len(clique) > 1]
    rows = (len(names) + 1) // 2
    ax = _axes(ax, (7.2, 1.2 + 0.22 * rows + 0.16 * len(bars)))
    ax.grid(False)
    place = dict(zip(names, ranks.tolist(), strict=True))
    low, high = math.floor(ranks.min()), math.ceil(ranks.max())
    for level, clique in enumerate(bars, start=1):
        at = [place[member] for member in clique]
        ax.plot(at, [-level * 0.7] * len(at), "-o", color=PALETTE[0], linewidth=2.5, markersize=4, label=str(clique))
    top = -0.7 * len(bars) - 0.8
    for row, index in enumerate(order):
        left = row < rows
        y = top - (row if left else len(names) - 1 - row)
        edge = low - 0.02 * (high - low) if left else high + 0.02 * (high - low)
        ax.plot([ranks[index], ranks[index], edge], [0, y, y], color="0.55", linewidth=0.7)
        label = f"{names[index]}  {ranks[index]:.2f}" if left else f"{ranks[index]:.2f}  {names[index]}"
        ax.text(edge, y, f" {label} ", ha="right" if left else "left", va="center", fontsize="small")
    _rank_axis(ax, low, high, top - rows)
    undrawn = "" if cliques.drawn else f"; omnibus p = {cliques.omnibus_pvalue:.2g}: no difference shown"
    test = f"{pairwise.test}, {pairwise.adjust}, α = {cliques.alpha:g}"
    ax.set_xlabel(f"average rank (1 = best) over {pairwise.n_blocks} blocks; {test}{undrawn}")
    return ax


def _rank_axis(ax: Axes, low: float, high: float, bottom: float) -> None:
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.spines["top"].set_visible(True)
    ax.spines["top"].set_bounds(low, high)
    ax.spines["top"].set_position(("data", 0))
    ax.xaxis.set_ticks_position("top")
    ax.set(yticks=[], ylim=(bottom, 0.5), xlim=(low - 0.3 * (high - low), high + 0.3 * (high - low)))
    ax.set_xticks(np.arange(low, high + 1, max(1, round((high - low) / 12))))


def clique_chart(
    regimes: Mapping[str, Iterable[Hashable]],
    *,
    methods: Sequence[Hashable] | None = None,
    persistent: float = 0.5,
    ax: Axes | None = None,
) -> Axes:
    """The top clique of every regime: a column of joined dots; bands shade methods that win in many regimes.

    A method is shaded when it is in the top clique of at least the share `persistent` of the regimes (Systematic
    Analysis, figures 1 and 2). Rows follow `methods`, or how often a method wins.
    """
    winners = {regime: list(members) for regime, members in regimes.items()}
    wins = Counter(itertools.chain.from_iterable(winners.values()))
    rows = list(methods) if methods is not None else sorted(wins, key=lambda name: (-wins[name], str(name)))
    absent = [name for name in wins if name not in rows]
    if absent:
        raise OodometerError(f"methods: every winner needs a row, {absent} have none.")
    ax = _axes(ax, (1.5 + 0.55 * len(winners), 1.2 + 0.22 * len(rows)))
    ax.grid(False)
    for y, name in enumerate(rows):
        often = wins[name] >= persistent * len(winners) and wins[name] > 1
        ax.axhline(y, color="0.92", linewidth=0.6, zorder=0)
        if often:
            ax.axhspan(y - 0.5, y + 0.5, color=PALETTE[5], alpha=0.2, linewidth=0, label=str(name))
    for x, members in enumerate(winners.values()):
        at = sorted(rows.index(name) for name in members)
        ax.plot([x] * len(at), at, "-o", color=PALETTE[0], markersize=5, linewidth=1.5)
    ax.set_xticks(
        range(len(winners)), [f"{regime}\n{len(m)}" for regime, m in winners.items()], rotation=45, ha="right"
    )
    ax.set_yticks(range(len(rows)), [f"{name}  ({wins[name]})" for name in rows])
    ax.set(
        xlim=(-0.6, len(winners) - 0.4), ylim=(len(rows) - 0.5, -0.5), xlabel="regime, with the size of its top clique"
    )
    ax.set_ylabel("method (in how many top cliques)")
    return ax


def heat_map(
    table: pd.DataFrame, *, metric: str, higher_is_better: bool, digits: int = 3, ax: Axes | None = None
) -> Axes:
    """Detectors (rows) × OOD sets (columns) with the value in each cell; the best of a column is bold."""
    ax = _axes(ax, (1.6 + 0.8 * table.shape[1], 1.2 + 0.28 * table.shape[0]))
    ax.grid(False)
    values = table.to_numpy(np.float64)
    image = ax.imshow(values, aspect="auto", cmap="viridis" if higher_is_better else "viridis_r")
    best = np.nanmax(values, axis=0) if higher_is_better else np.nanmin(values, axis=0)
    for (row, column), value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        red, green, blue, _ = image.cmap(image.norm(value))
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        weight = "bold" if value == best[column] else "normal"
        text = f"{value:.{digits}f}"
        ax.text(
            column, row, text, ha="center", va="center", fontsize="small", weight=weight, color="w" if dark else "k"
        )
    ax.set_xticks(range(table.shape[1]), [str(name) for name in table.columns], rotation=45, ha="right")
    ax.set_yticks(range(table.shape[0]), [str(name) for name in table.index])
    ax.figure.colorbar(image, ax=ax, label=f"{metric} ({'higher' if higher_is_better else 'lower'} is better)")
    return ax


def fold_stability(values: pd.DataFrame, *, metric: str, ax: Axes | None = None) -> Axes:
    """One box a detector (columns) over the folds (rows), in the order of the columns, with a dot for each fold."""
    ax = _axes(ax, (6.4, 1.0 + 0.26 * values.shape[1]))
    columns = {str(name): values[name].dropna().to_numpy(np.float64) for name in values.columns}
    grey = {"color": "0.4", "linewidth": 0.9}
    ax.boxplot(
        list(columns.values()),
        orientation="horizontal",
        positions=range(len(columns)),
        showfliers=False,
        boxprops=grey,
        whiskerprops=grey,
        capprops=grey,
        medianprops={"color": PALETTE[1], "linewidth": 1.6},
    )
    for y, folds in enumerate(columns.values()):
        ax.plot(folds, np.full(folds.size, y), "o", color=PALETTE[0], alpha=0.75, markersize=3.5)
    ax.set_yticks(range(len(columns)), [_counted(name, folds.size) for name, folds in columns.items()])
    ax.set(ylim=(len(columns) - 0.5, -0.5), xlabel=f"{metric}, one dot a fold")
    return ax


def tuning_curve(
    points: pd.DataFrame, *, parameter: str, criterion: str = "value", chosen: Any = None, ax: Axes | None = None
) -> Axes:
    """The criterion against the grid of one parameter; further parameters are separate lines, the choice is ringed."""
    ax = _axes(ax)
    others = [name for name in points.columns if name not in (parameter, criterion)]
    grid = list(dict.fromkeys(points[parameter]))
    groups = points.groupby(others, sort=False, dropna=False) if others else [((), points)]
    lines = {", ".join(f"{n}={v}" for n, v in zip(others, key, strict=True)): part for key, part in groups}
    for (label, part), stroke in zip(lines.items(), _strokes(lines).values(), strict=True):
        at = [grid.index(value) for value in part[parameter]]
        ax.plot(at, part[criterion], marker="o", markersize=3.5, label=label, **stroke)
    if chosen is not None:
        best = points.loc[points[parameter] == chosen, criterion].max()
        ax.plot([grid.index(chosen)], [best], "o", markersize=11, fillstyle="none", color="black", label="chosen")
    ax.set_xticks(range(len(grid)), [str(value) for value in grid])
    ax.set(xlabel=f"{parameter} (grid of {len(grid)})", ylabel=f"{criterion} on validation rows")
    if any(lines) or chosen is not None:
        ax.legend(frameon=False, fontsize="small")
    return ax


# ------------------------------------------------------------------------------------------------ maps


def proximity_map(table: pd.DataFrame, *, x: str, y: str, group: str = "group", ax: Axes | None = None) -> Axes:
    """OOD sets (rows) by two of their numbers, for instance distance to ID and AUROC, coloured by near, mid, far."""
    ax = _axes(ax)
    groups = list(dict.fromkeys(table[group]))
    for name, stroke in _strokes(groups).items():
        part = table[table[group] == name]
        ax.plot(part[x], part[y], "o", color=stroke["color"], label=_counted(name, len(part)))
        for label, (at_x, at_y) in zip(part.index, part[[x, y]].to_numpy(np.float64), strict=True):
            ax.annotate(str(label), (at_x, at_y), xytext=(5, 4), textcoords="offset points", fontsize="small")
    ax.set(xlabel=x, ylabel=y)
    ax.legend(frameon=False, fontsize="small", title=f"{group} (OOD sets)")
    return ax


def feature_map(
    id_features: ArrayLike,
    ood_features: ArrayLike | Mapping[str, ArrayLike],
    *,
    id_labels: ArrayLike | None = None,
    method: Literal["pca", "tsne"] = "pca",
    seed: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """Features in two dimensions: ID rows coloured by class, OOD rows in grey.

    "pca": the plane is fitted on the ID rows alone. "tsne": all rows together, distances across the map mean little.
    """
    ax = _axes(ax, (5.6, 5.0))
    named = ood_features if isinstance(ood_features, Mapping) else {"OOD": ood_features}
    inside, outside = np.asarray(id_features, np.float64), {k: np.asarray(v, np.float64) for k, v in named.items()}
    flat, titles = _in_two_dimensions(inside, np.concatenate(list(outside.values())), method, seed)
    at, markers = len(inside), itertools.cycle("x+1234|_")
    for (name, rows), marker in zip(outside.items(), markers, strict=False):
        part = flat[at : at + len(rows)]
        at += len(rows)
        label = _counted(name, len(rows))
        ax.plot(part[:, 0], part[:, 1], marker, color="0.6", markersize=4, alpha=0.7, label=label, zorder=1)
    classes = np.zeros(len(inside), int) if id_labels is None else np.asarray(id_labels)
    for name, stroke in _strokes(np.unique(classes).tolist()).items():
        part = flat[: len(inside)][classes == name]
        label = _counted("ID" if id_labels is None else f"ID {name}", len(part))
        ax.plot(part[:, 0], part[:, 1], "o", color=stroke["color"], markersize=3, alpha=0.8, label=label, zorder=2)
    ax.set(xlabel=titles[0], ylabel=titles[1])
    ax.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def _in_two_dimensions(inside: Floats, outside: Floats, method: str, seed: int) -> tuple[Floats, tuple[str, str]]:
    every = np.concatenate([inside, outside])
    if method == "pca":
        from sklearn.decomposition import PCA

        pca = PCA(2, svd_solver="full").fit(inside)
        first, second = pca.explained_variance_ratio_
        return pca.transform(every), (f"PC 1 ({first:.0%} of ID variance)", f"PC 2 ({second:.0%} of ID variance)")
    if method == "tsne":
        from sklearn.manifold import TSNE

        return TSNE(2, random_state=seed, init="pca").fit_transform(every), ("t-SNE 1", "t-SNE 2")
    raise OodometerError(f'method: "pca" or "tsne" was needed, {method!r} was found.')

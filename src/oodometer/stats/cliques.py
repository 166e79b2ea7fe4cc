"""Groups of methods that the study cannot tell apart: maximal cliques of the indifference graph, and their layers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from oodometer.errors import OodometerError
from oodometer.stats.blocks import Floats, check_level, read_numbers
from oodometer.stats.posthoc import Pairwise
from oodometer.stats.ranks import Friedman

if TYPE_CHECKING:
    import pandas as pd

Graph: TypeAlias = NDArray[np.bool_]
_ROUNDING = 1e-9
"""By so much other programs' p-values may exceed 1, or differ between both orders of a pair."""


@dataclass(frozen=True)
class Clique:
    """Methods of which no pair differs, best first."""

    members: tuple[Hashable, ...]
    best_rank: float
    mean_rank: float

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, name: object) -> bool:
        return name in self.members

    def __str__(self) -> str:
        return "{" + ", ".join(map(str, self.members)) + "}"


@dataclass(frozen=True)
class Cliques:
    """All maximal cliques, best first, and the disjoint ones among them as layers."""

    cliques: tuple[Clique, ...]
    layers: tuple[Clique, ...]
    unlayered: tuple[Hashable, ...]
    """Methods whose every clique shares a member with a chosen layer."""
    alpha: float
    drawn: bool
    """False: the omnibus test does not reject, and all methods are one clique."""
    omnibus_pvalue: float | None

    @property
    def top(self) -> Clique:
        """The clique that holds the best average rank."""
        return self.layers[0]

    def __iter__(self) -> Iterator[Clique]:
        return iter(self.cliques)

    def __len__(self) -> int:
        return len(self.cliques)

    def to_pandas(self) -> pd.DataFrame:
        """One row a method: its layer (missing if unlayered) and the cliques it belongs to, counted from 0."""
        import pandas as pd

        names = dict.fromkeys(name for clique in self.cliques for name in clique)
        layer = {name: place for place, clique in enumerate(self.layers) for name in clique}
        rows = [
            {"method": name, "layer": layer.get(name), "cliques": [i for i, c in enumerate(self.cliques) if name in c]}
            for name in names
        ]
        return pd.DataFrame(rows).astype({"layer": "Int64"})

    def __str__(self) -> str:
        if not self.drawn:
            return f"no difference between the methods (omnibus p = {self.omnibus_pvalue:.4g}): one clique of all"
        layers = "; ".join(f"{place}: {clique}" for place, clique in enumerate(self.layers))
        rest = f"; unlayered: {', '.join(map(str, self.unlayered))}" if self.unlayered else ""
        return f"layers at α = {self.alpha:g}: {layers}{rest}"


def cliques(
    pvalues: Any,
    alpha: float = 0.05,
    ranks: Any = None,
    *,
    names: Sequence[Hashable] | None = None,
    omnibus: Friedman | float | None = None,
) -> Cliques:
    """Maximal sets of methods with pairwise p ≥ alpha (NaN separates), ordered by their average ranks.

    `pvalues`: a Pairwise result, which brings ranks and omnibus test with it, a DataFrame or a symmetric matrix;
    `ranks`: average ranks by name (Friedman's test, a Series, a dictionary), or in the order of a matrix that has no
    names. If the omnibus test is known and does not reject at alpha, all methods are one clique.
    """
    alpha = check_level(alpha)
    matrix = _matrix(pvalues)
    labels, average = _named_ranks(pvalues, ranks, names, len(matrix))
    omnibus = pvalues.omnibus if omnibus is None and isinstance(pvalues, Pairwise) else omnibus
    p = omnibus.omnibus_pvalue if isinstance(omnibus, Friedman) else omnibus
    drawn = p is None or p < alpha
    found = maximal_cliques(matrix >= alpha, average) if drawn else [tuple(range(len(matrix)))]
    ordered = _sorted([_clique(members, labels, average) for members in found])
    layers = _layers(ordered)
    chosen = {name for layer in layers for name in layer}
    left = tuple(labels[i] for i in np.argsort(average, kind="stable") if labels[i] not in chosen)
    return Cliques(ordered, layers, left, alpha, drawn, p)


def _clique(members: Sequence[int], names: tuple[Hashable, ...], ranks: Floats) -> Clique:
    ordered = sorted(members, key=lambda i: (ranks[i], str(names[i])))
    own = [float(ranks[i]) for i in ordered]
    # fsum: equal ranks in another order give an equal mean
    return Clique(tuple(names[i] for i in ordered), own[0], math.fsum(own) / len(own))


def _sorted(found: list[Clique]) -> tuple[Clique, ...]:
    return tuple(sorted(found, key=lambda c: (c.best_rank, c.mean_rank, -len(c), sorted(map(str, c)))))


def _layers(ordered: tuple[Clique, ...]) -> tuple[Clique, ...]:
    """The best clique, then always the next one that shares no method with the chosen ones."""
    layers: list[Clique] = []
    used: set[Hashable] = set()
    for clique in ordered:
        if used.isdisjoint(clique.members):
            layers.append(clique)
            used.update(clique.members)
    return tuple(layers)


# ------------------------------------------------------------------------------------------- maximal cliques


def maximal_cliques(edges: Graph, ranks: Floats) -> list[tuple[int, ...]]:
    """Every maximal clique of a symmetric graph, the diagonal left aside."""
    graph = np.array(edges, dtype=bool)
    np.fill_diagonal(graph, True)
    order = np.argsort(ranks, kind="stable")
    in_order = graph[np.ix_(order, order)]
    found = contiguous_runs(in_order) if neighbourhoods_contiguous(in_order) else bron_kerbosch(in_order)
    return [tuple(int(order[i]) for i in clique) for clique in found]


def neighbourhoods_contiguous(graph: Graph) -> bool:
    """Whether every closed neighbourhood is one run of the order.

    Then, if i and l are joined, so is every pair between them: j (i < j < l) lies in the run of l and so joins l,
    and any h in between lies in the run of j. A clique therefore spans a run that is itself a clique: the maximal
    cliques are the maximal runs. Tests with one standard error (p decreases with the rank difference) always
    satisfy it, adjusted or not; pair-by-pair tests need not.
    """
    steps = np.diff(graph.astype(np.int8), axis=1, prepend=0)
    return bool(((steps == 1).sum(axis=1) == 1).all())


def contiguous_runs(graph: Graph) -> list[tuple[int, ...]]:
    """From each method to the last one it is joined to, unless an earlier run reached as far."""
    n = len(graph)
    reach = n - 1 - np.argmax(graph[:, ::-1], axis=1)
    return [tuple(range(i, int(reach[i]) + 1)) for i in range(n) if i == 0 or reach[i] > reach[i - 1]]


def bron_kerbosch(graph: Graph) -> list[tuple[int, ...]]:
    """Bron and Kerbosch 1973 with the pivot of Tomita et al. 2006; sets of nodes are the bits of an integer."""
    n = len(graph)
    joined = [sum(1 << j for j in range(n) if graph[i, j] and i != j) for i in range(n)]
    found: list[tuple[int, ...]] = []
    stack = [(0, (1 << n) - 1, 0)]
    while stack:
        clique, candidates, excluded = stack.pop()
        if not candidates | excluded:
            found.append(tuple(_bits(clique)))
            continue
        pivot = max(_bits(candidates | excluded), key=lambda u: (joined[u] & candidates).bit_count())
        for node in _bits(candidates & ~joined[pivot]):
            stack.append((clique | 1 << node, candidates & joined[node], excluded & joined[node]))
            candidates &= ~(1 << node)
            excluded |= 1 << node
    return found


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


# ---------------------------------------------------------------------------------------------- input


def _matrix(pvalues: Any) -> Floats:
    """The smaller p-value of both orders of a pair, which may differ in the last bits only."""
    matrix = read_numbers(pvalues.pvalues if isinstance(pvalues, Pairwise) else pvalues, "pvalues")
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise OodometerError(f"pvalues: a square matrix (methods × methods) was needed, {matrix.shape} was found.")
    if hasattr(pvalues, "columns") and list(pvalues.index) != list(pvalues.columns):
        raise OodometerError(
            "pvalues: rows and columns with the same names in the same order were needed, "
            f"{list(pvalues.index)} and {list(pvalues.columns)} were found."
        )
    off = matrix[~np.eye(len(matrix), dtype=bool)]
    symmetric = np.allclose(matrix, matrix.T, rtol=_ROUNDING, atol=0, equal_nan=True)
    if not symmetric or (off < 0).any() or (off > 1 + _ROUNDING).any():
        raise OodometerError("pvalues: a symmetric matrix of numbers from 0 to 1 (NaN: not comparable) was needed.")
    return np.minimum(matrix, matrix.T)


def _named_ranks(
    pvalues: Any, ranks: Any, names: Sequence[Hashable] | None, k: int
) -> tuple[tuple[Hashable, ...], Floats]:
    """The methods in the order of the matrix and their average ranks, matched by name where both sides have names."""
    own = _names(pvalues, names, k)
    given, values = _ranks(pvalues, ranks)
    if len(values) != k or not np.isfinite(values).all():
        raise OodometerError(f"ranks: {k} finite average ranks were needed, {values.tolist()} was found.")
    numbers = tuple(range(k))
    labels = numbers if own is None else own
    if given is None or given == numbers:
        return labels, values
    if labels == numbers and set(given) != set(numbers):  # the matrix has no names: those of the ranks are its own
        return _distinct(given, k), values
    place = dict(zip(given, values.tolist(), strict=True))
    absent = [name for name in labels if name not in place]
    if absent:
        raise OodometerError(f"ranks: a rank for every method was needed, {absent} have none.")
    return labels, np.array([place[name] for name in labels])


def _names(pvalues: Any, names: Sequence[Hashable] | None, k: int) -> tuple[Hashable, ...] | None:
    """The names of the matrix; None: it has none."""
    own = pvalues.names if isinstance(pvalues, Pairwise) else getattr(pvalues, "columns", None)
    labels = own if names is None else names
    return None if labels is None else _distinct(tuple(labels), k)


def _distinct(names: tuple[Hashable, ...], k: int) -> tuple[Hashable, ...]:
    if len(names) != k or len(set(names)) != k:
        raise OodometerError(f"names: {k} different names were needed, {list(names)} was found.")
    return names


def _ranks(pvalues: Any, ranks: Any) -> tuple[tuple[Hashable, ...] | None, Floats]:
    """Average ranks with their names, if they have any."""
    if ranks is None and isinstance(pvalues, Pairwise):
        return pvalues.names, pvalues.average_ranks
    if ranks is None:
        raise OodometerError("ranks: average ranks (1 = best) are needed to order the cliques: friedman(…) has them.")
    if isinstance(ranks, Friedman):
        return ranks.names, ranks.average_ranks
    if isinstance(ranks, Mapping):
        return tuple(ranks), read_numbers(list(ranks.values()), "ranks")
    own = getattr(ranks, "index", None)  # a list has one too, its method
    values = read_numbers(ranks, "ranks")
    if values.ndim != 1:
        raise OodometerError(f"ranks: one average rank for each method was needed, shape {values.shape} was found.")
    return (None if own is None or callable(own) else tuple(own)), values

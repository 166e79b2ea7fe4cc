"""Give every row or class a fold: plain, stratified, grouped, or grouped inside each stratum."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from oodometer.splits.labels import Index, Label, Level

# The class that every class descends from: the one stratum of a set without a hierarchy.
ROOT: tuple[Label, ...] = ("all classes",)

Ancestors: TypeAlias = list[tuple[Index, Sequence[Label]]]  # for each level upwards: node of every class, node names


class Deal(NamedTuple):
    """Into how many folds rows are dealt, and what its random numbers are named after."""

    n_splits: int
    seed: int
    side: str  # 'id' or 'ood'


def random_keys(count: int, seed: int, *name: Label) -> NDArray[np.uint64]:
    """Random numbers that belong to (seed, name): no other stratum can change them.

    Raw PCG64 output instead of `Generator.permutation`, whose stream NumPy may change between versions.
    """
    text = "\x1f".join(str(part) for part in (seed, *name))
    state = int.from_bytes(sha256(text.encode("utf-8", "surrogatepass")).digest(), "big")
    return np.random.PCG64(state).random_raw(count)


def members(codes: Index) -> list[tuple[int, Index]]:
    """Every code that occurs with the positions where it does, both ascending."""
    order = np.argsort(codes, kind="stable")
    found, starts = np.unique(codes[order], return_index=True)
    return list(zip(found.tolist(), np.split(order, starts[1:]), strict=True))


def plain_folds(order: Index, deal: Deal) -> Index:
    """k-fold by simple random sampling; fold sizes differ by one row at most."""
    keys = random_keys(len(order), deal.seed, deal.side, "plain")
    return _dealt(order[np.argsort(keys, kind="stable")], deal.n_splits, 0)


def stratified_folds(level: Level, rank: Index, order: Index, deal: Deal) -> Index:
    """Stratified k-fold; `rank` lines the classes up so that relatives are neighbours.

    The rows of all classes form one queue dealt round the folds. Any stretch of it (a class, but also every
    node above it) gives each fold ⌊n/K⌋ or ⌈n/K⌉ of its rows, and so does the whole.
    """
    ranks = rank[level.codes[order]]
    by_class = np.argsort(ranks, kind="stable")
    label_at = [label for _, label in sorted(zip(rank.tolist(), level.classes, strict=True))]
    sizes = np.bincount(ranks, minlength=len(rank))
    keys = [random_keys(size, deal.seed, deal.side, label_at[at]) for at, size in enumerate(sizes.tolist()) if size]
    shuffled = np.lexsort((np.concatenate(keys), ranks[by_class]))
    start = int(random_keys(1, deal.seed, deal.side, "first fold")[0]) % deal.n_splits
    return _dealt(order[by_class[shuffled]], deal.n_splits, start)


def _dealt(queue: Index, n_splits: int, start: int) -> Index:
    folds = np.empty(len(queue), dtype=np.intp)
    folds[queue] = (np.arange(len(queue)) + start) % n_splits
    return folds


def greedy_folds(sizes: Index, n_splits: int, keys: NDArray[np.uint64]) -> Index:
    """Group k-fold: largest group first to the lightest fold, ties to the lowest; keys order equal groups."""
    folds = np.zeros(len(sizes), dtype=np.intp)
    lightest = [(0, fold) for fold in range(n_splits)]
    heapify(lightest)
    for group in np.lexsort((keys, -sizes)).tolist():
        load, fold = lightest[0]
        folds[group] = fold
        heapreplace(lightest, (load + int(sizes[group]), fold))
    return folds


def group_folds(groups: Level, deal: Deal) -> Index:
    """Group k-fold of rows without a hierarchy."""
    sizes = np.bincount(groups.codes, minlength=len(groups.classes))
    return greedy_folds(sizes, deal.n_splits, random_keys(len(sizes), deal.seed, deal.side, ROOT[0]))[groups.codes]


def stratum_folds(sizes: Index, ancestors: Ancestors, n_splits: int, seed: int) -> Index:
    """A fold for every OOD class: group k-fold inside each stratum, then strata joined level by level.

    Algorithm 3 joins fold f of one stratum to fold f of the next, but which of a stratum's folds is called f
    is free. Joining the fullest to the emptiest is the rotation that strata with fewer classes than folds
    need, and it balances every node of the hierarchy: one with m classes is in min(m, K) folds, and its fold
    sizes differ by its largest class at most (loads of spread A and B, sorted against each other, add up to
    loads of spread max(A, B) at most).
    """
    folds = np.zeros(len(sizes), dtype=np.intp)
    strata, names = ancestors[0]
    # Algorithm 3, lines 2-4
    for stratum, classes in members(strata):
        keys = random_keys(len(classes), seed, "ood", names[stratum])
        folds[classes] = greedy_folds(sizes[classes], n_splits, keys)
    # Algorithm 3, line 5
    for (children, _), (nodes, node_names) in pairwise(ancestors):
        for node, classes in members(nodes):
            parts = [classes[part] for _, part in members(children[classes])]
            keys = random_keys(len(parts), seed, "ood join", node_names[node])
            _join_by_fold(folds, sizes, [parts[at] for at in np.argsort(keys, kind="stable")], n_splits)
    return folds


def _join_by_fold(folds: Index, sizes: Index, parts: Sequence[Index], n_splits: int) -> None:
    loads = np.zeros(n_splits)
    new_fold = np.empty(n_splits, dtype=np.intp)
    for part in parts:
        own = np.bincount(folds[part], weights=sizes[part], minlength=n_splits)
        new_fold[np.argsort(-own, kind="stable")] = np.argsort(loads, kind="stable")
        folds[part] = new_fold[folds[part]]
        loads[new_fold] += own


def stratified_group_folds(level: Level, groups: Level, deal: Deal) -> Index:
    """Stratified k-fold that keeps a group's rows together, as evenly as whole groups allow.

    Largest group first to the fold where it adds least to Σ_classes Σ_folds (share of the class)²; ties go to
    the lighter, then to the lower fold.
    """
    n_classes, n_groups = len(level.classes), len(groups.classes)
    pairs, counts = np.unique(groups.codes * n_classes + level.codes, return_counts=True)
    weight = (1.0 / np.maximum(np.bincount(level.codes, minlength=n_classes), 1) ** 2).tolist()
    bounds = np.searchsorted(pairs // n_classes, np.arange(n_groups + 1)).tolist()
    classes, rows = (pairs % n_classes).tolist(), counts.tolist()
    held = [[0] * n_classes for _ in range(deal.n_splits)]
    load = [0] * deal.n_splits
    folds = np.zeros(n_groups, dtype=np.intp)
    group_sizes = np.bincount(groups.codes, minlength=n_groups)
    keys = random_keys(n_groups, deal.seed, deal.side, "groups")
    for group in np.lexsort((keys, -group_sizes)).tolist():
        own = range(bounds[group], bounds[group + 1])
        pull = [(classes[at], weight[classes[at]] * rows[at]) for at in own]
        cost = [(sum(share * mine[label] for label, share in pull), load[f], f) for f, mine in enumerate(held)]
        fold = min(cost)[2]
        folds[group] = fold
        for at in own:
            held[fold][classes[at]] += rows[at]
            load[fold] += rows[at]
    return folds[groups.codes]


def depth_first(parent_of: Sequence[Index], n_classes: int) -> Index:
    """The place of every deepest class in a walk through the tree: relatives become neighbours."""
    path = [np.arange(n_classes, dtype=np.intp)]
    for parent in reversed(parent_of):
        path.append(parent[path[-1]])
    rank = np.empty(n_classes, dtype=np.intp)
    rank[np.lexsort(path)] = np.arange(n_classes)
    return rank

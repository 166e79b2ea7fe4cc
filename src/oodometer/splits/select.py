"""Choose which classes of one labelled data set play the part of OOD, stratum by stratum."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oodometer.errors import OodometerError, OodometerWarning
from oodometer.splits.assign import ROOT, members, random_keys
from oodometer.splits.labels import (
    HierarchyLike,
    Index,
    Label,
    Level,
    depth_of,
    parents,
    quote,
    read_hierarchy,
)

Rule = Literal["floor", "ceil1"]
# p·N is floored after this much is added: .29 · 100 = 28.999… in floating point and means 29.
_SLACK = 1e-9


class StratumCount(NamedTuple):
    """N_i and k_i of Algorithm 2."""

    n_classes: int
    n_ood: int


@dataclass(frozen=True, eq=False, repr=False)
class ClassSelection:
    """Which classes are ID and which OOD, the rows of each, and how many every stratum gave."""

    level: str
    fraction: float | Fraction
    seed: int
    rule: Rule
    id_classes: tuple[Label, ...]
    ood_classes: tuple[Label, ...]
    id_rows: Index
    ood_rows: Index
    id_hierarchy: Mapping[str, NDArray[Any]]
    ood_hierarchy: Mapping[str, NDArray[Any]]
    counts: Mapping[Label, StratumCount]

    def __repr__(self) -> str:
        return (
            f"ClassSelection(level={self.level!r}, fraction={self.fraction}, seed={self.seed}, "
            f"rule={self.rule!r}: {len(self.id_classes)} ID and {len(self.ood_classes)} OOD classes "
            f"in {len(self.counts)} strata)"
        )

    def __str__(self) -> str:
        lines = [("stratum", "classes", "OOD")]
        lines += [(str(name), str(count.n_classes), str(count.n_ood)) for name, count in self.counts.items()]
        width = max(len(line[0]) for line in lines)
        return "\n".join([repr(self), *(f"{name:<{width}}  {n:>7}  {k:>3}" for name, n, k in lines)])


def select_ood_classes(
    hierarchy: HierarchyLike,
    *,
    level: str,
    fraction: float | Fraction | str,
    seed: int,
    rule: Rule = "floor",
    whole_strata: bool = False,
) -> ClassSelection:
    """Draw ⌊p·N_i⌋ OOD classes of `level` from every class directly above it (Algorithm 2).

    A hierarchy of one column is one stratum: simple random sampling of the classes. `rule="ceil1"` takes at
    least one class where a stratum has two or more. `whole_strata=True` says that leaving a stratum without
    ID classes is intended (fraction 1).
    """
    p = _read_fraction(fraction)
    seed = read_seed(seed)
    if rule not in ("floor", "ceil1"):
        raise OodometerError(f"rule: needs 'floor' or 'ceil1'; found {rule!r}.")
    levels = read_hierarchy(hierarchy, "hierarchy")
    depth = depth_of(level, levels)
    parent_of = parents(levels)
    column = levels[str(level)]
    above, names = _strata(levels, parent_of, depth)
    is_ood = np.zeros(len(column.classes), dtype=bool)
    counts: dict[Label, StratumCount] = {}
    # Algorithm 2, lines 2-7
    for stratum, classes in members(above):
        k = _n_ood(p, len(classes), rule)
        drawn = np.argsort(random_keys(len(classes), seed, names[stratum]), kind="stable")[:k]
        is_ood[classes[drawn]] = True
        counts[names[stratum]] = StratumCount(len(classes), k)
    _check_counts(counts, p, rule, whole_strata)
    # Algorithm 2, lines 8-9
    row_is_ood = is_ood[column.codes]
    id_rows, ood_rows = np.flatnonzero(~row_is_ood), np.flatnonzero(row_is_ood)
    return ClassSelection(
        level=str(level),
        fraction=p,
        seed=seed,
        rule=rule,
        id_classes=tuple(column.classes[code] for code in np.flatnonzero(~is_ood)),
        ood_classes=tuple(column.classes[code] for code in np.flatnonzero(is_ood)),
        id_rows=id_rows,
        ood_rows=ood_rows,
        id_hierarchy={name: column.rows(id_rows).values() for name, column in levels.items()},
        ood_hierarchy={name: column.rows(ood_rows).values() for name, column in levels.items()},
        counts=counts,
    )


def read_seed(seed: int) -> int:
    """Any integer; never a hidden source of randomness."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise OodometerError(f"seed: needs an integer; found {seed!r}. Pass e.g. seed=0: equal seeds, equal folds.")
    return int(seed)


def _strata(levels: Mapping[str, Level], parent_of: list[Index], depth: int) -> tuple[Index, tuple[Label, ...]]:
    if depth == 0:
        return np.zeros(len(next(iter(levels.values())).classes), dtype=np.intp), ROOT
    return parent_of[depth - 1], list(levels.values())[depth - 1].classes


def _read_fraction(fraction: float | Fraction | str) -> float | Fraction:
    message = f"fraction: needs a number from 0 to 1, such as 0.2, '1/5' or Fraction(1, 5); found {fraction!r}."
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float, str, Fraction, np.number)):
        raise OodometerError(message)
    try:
        p = Fraction(fraction) if isinstance(fraction, (int, str, Fraction)) else float(fraction)
    except (ValueError, ZeroDivisionError) as error:
        raise OodometerError(message) from error
    if not 0 <= p <= 1:  # also true of NaN
        raise OodometerError(message)
    return p


def _n_ood(p: float | Fraction, n_classes: int, rule: Rule) -> int:
    exact = p * n_classes
    k = math.floor(exact if isinstance(exact, Fraction) else exact + _SLACK)
    return max(k, 1) if rule == "ceil1" and n_classes >= 2 else k


def _check_counts(counts: Mapping[Label, StratumCount], p: float | Fraction, rule: Rule, whole_strata: bool) -> None:
    emptied = [name for name, count in counts.items() if count.n_ood == count.n_classes]
    if emptied and not whole_strata:
        raise OodometerError(
            f"fraction: every stratum needs an ID class; {p} makes all classes OOD in {quote(emptied)}. "
            "Lower the fraction, or pass whole_strata=True if that is intended."
        )
    spared = [name for name, count in counts.items() if count.n_ood == 0]
    if spared:
        advice = "rule='ceil1' takes one where there are two classes or more" if rule == "floor" else "single classes"
        warnings.warn(
            f"{len(spared)} of {len(counts)} strata give no OOD class at fraction {p} and stay ID: "
            f"{quote(spared)} ({advice}).",
            OodometerWarning,
            stacklevel=3,
        )

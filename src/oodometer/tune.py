"""Hyperparameters: expand a grid, score its points, say which of them act, and choose one on validation rows."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from oodometer import derived, detectors, metrics
from oodometer.bank import Bank
from oodometer.detectors import Detector
from oodometer.errors import NotFiniteError, OodometerError, OodometerWarning
from oodometer.metrics.risk import augrc, failures

Params = dict[str, Any]
Grid = Mapping[str, Iterable[Any]]
Status = Literal["acts", "inert", "invalid", "non-finite"]
Rule = Literal["auroc", "augrc"]
Scores = npt.NDArray[np.float64]


# ---------------------------------------------------------------------------------------------- sweep


@dataclass(frozen=True)
class Point:
    """One grid point: its parameters, what became of it, and its scores (None when there are none).

    A point is inert when it ranks the rows exactly as an earlier point does, so that no metric can tell them apart;
    it is invalid when the detector refuses it (k larger than the bank, no residual dimension, …), and non-finite when
    its scores overflow or are undefined.
    """

    params: Params
    status: Status
    scores: Scores | None
    reason: str = ""


def expand(grid: Grid) -> list[Params]:
    """All combinations, in fixed order: the last parameter varies fastest."""
    values = [tuple(options) for options in grid.values()]
    return [dict(zip(grid, point, strict=True)) for point in itertools.product(*values)]


def sweep(
    name: str,
    train: Bank,
    rows: Bank,
    *,
    val: Bank | None = None,
    grid: Grid | None = None,
    **fixed: Any,
) -> list[Point]:
    """Fit and score every point of a grid (the published one by default) on the same rows, in grid order."""
    points, outcomes = _swept(name, train, [rows], val=val, grid=grid, fixed=fixed)
    return list(_judged(points, [_joined(row) for row in outcomes]))


Outcome = Scores | OodometerError


def _swept(
    name: str, train: Bank, banks: Sequence[Bank], *, val: Bank | None, grid: Grid | None, fixed: Params
) -> tuple[list[Params], list[list[Outcome]]]:
    """The points, and what became of each on every bank: one bank's failure says nothing of the others."""
    points = expand(detectors.create(name, **fixed).grid if grid is None else grid)
    outcomes: list[list[Outcome]] = [[] for _ in points]
    for place in _largest_first(points):
        outcomes[place] = _outcomes(name, {**fixed, **points[place]}, train, banks, val)
    return points, outcomes


def _largest_first(points: Sequence[Params]) -> list[int]:
    """The largest neighbour search and subspace serve all the smaller ones."""

    def size(place: int) -> list[float]:
        return [-value for value in points[place].values() if isinstance(value, int | float)]

    return sorted(range(len(points)), key=size)


def _outcomes(name: str, params: Params, train: Bank, banks: Sequence[Bank], val: Bank | None) -> list[Outcome]:
    try:
        detector = detectors.create(name, **params).fit(train, val=val)
    except OodometerError as error:
        return [error] * len(banks)
    return [_scored(detector, bank) for bank in banks]


def _scored(detector: Detector, bank: Bank) -> Outcome:
    try:
        return detector.score(bank)
    except OodometerError as error:
        return error


def _joined(outcomes: Sequence[Outcome]) -> Outcome:
    """The scores on several banks, one after the other, or the first error."""
    scores: list[Scores] = []
    for outcome in outcomes:
        if isinstance(outcome, OodometerError):
            return outcome
        scores.append(outcome)
    return np.concatenate(scores)


def _judged(points: Sequence[Params], outcomes: Sequence[Outcome]) -> Iterator[Point]:
    seen: dict[bytes, Params] = {}
    for params, outcome in zip(points, outcomes, strict=True):
        if isinstance(outcome, OodometerError):
            status: Status = "non-finite" if isinstance(outcome, NotFiniteError) else "invalid"
            yield Point(params, status, None, str(outcome))
            continue
        ranks = np.unique(outcome, return_inverse=True)[1].tobytes()
        twin = seen.setdefault(ranks, params)
        if twin is params:
            yield Point(params, "acts", outcome)
        else:
            yield Point(params, "inert", outcome, f"ranks the rows exactly as {_listed(twin)} does")


def _listed(params: Params) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in params.items()) or "the defaults"


# ---------------------------------------------------------------------------------------------- choice


@dataclass(frozen=True)
class Train:
    """In-distribution rows that detectors are fitted on."""

    bank: Bank


@dataclass(frozen=True)
class Validation:
    """Rows that parameters are chosen on: in distribution, or out of distribution and then from a named source.

    In a nested dual cross-validation the OOD classes of the training folds are such rows. Test rows have no type
    here: nothing in this module accepts them.
    """

    bank: Bank
    source: str = ""


@dataclass(frozen=True)
class Trial:
    """One point of a search curve; `value` is the criterion, None where the point has none."""

    params: Params
    value: float | None
    status: Status
    reason: str = ""


@dataclass(frozen=True)
class Choice:
    """The chosen parameters and the whole search behind them, in grid order.

    `params` hold the fixed and the chosen ones: `choice.create()` is the tuned detector. `sources` are the OOD
    validation sources that took part, `shared` those of them that are also test sources: results tuned on them are
    not comparable with results that are not.
    """

    detector: str
    rule: Rule
    params: Params
    value: float
    curve: tuple[Trial, ...]
    sources: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    def create(self) -> Detector:
        """The detector with the chosen parameters, not fitted."""
        return detectors.create(self.detector, **self.params)

    def of_status(self, *statuses: Status) -> tuple[Trial, ...]:
        """The points that are inert, invalid, non-finite or that act."""
        return tuple(trial for trial in self.curve if trial.status in statuses)


def tune(
    name: str,
    train: Train,
    val: Validation,
    *,
    rule: Rule = "auroc",
    ood_val: Validation | Sequence[Validation] = (),
    grid: Grid | None = None,
    test_sources: Iterable[str] = (),
    **fixed: Any,
) -> Choice:
    """Choose a detector's parameters over a grid (the published one by default), on validation rows only.

    `rule="auroc"`: the largest AUROC of the ID rows against the OOD validation rows, averaged over their sources
    (OpenMIBOOD's automatic parameter search). `rule="augrc"`: the smallest AUGRC of the misclassified ID rows, without
    any OOD data. Of equal points the first in grid order wins. `fixed` parameters hold at every point;
    `test_sources` names the sources of the test sets, so that the choice can say which it shares.
    """
    every = [ood_val] if isinstance(ood_val, Validation) else list(ood_val)
    _check_rule(rule, every)
    found = search(name, train, val, ood_val=every, grid=grid, **fixed)
    return found.by_auroc(test_sources=test_sources) if rule == "auroc" else found.by_augrc()


def leave_one_source_out(
    name: str,
    train: Train,
    val: Validation,
    *,
    ood_val: Sequence[Validation],
    grid: Grid | None = None,
    **fixed: Any,
) -> dict[str, Choice]:
    """For each OOD source the parameters chosen by AUROC on all the others: use them to test on that source."""
    names = [one.source for one in ood_val]
    if len(names) < 2 or len(set(names)) < len(names) or not all(names):
        raise OodometerError(
            f"leaving one source out needs at least two OOD validation sources with names of their own; found "
            f"{', '.join(map(repr, names)) or 'none'}: pass ood_val=[Validation(bank, source='…'), …]"
        )
    found = search(name, train, val, ood_val=ood_val, grid=grid, **fixed)
    return {
        left_out: found.by_auroc([source for source in names if source != left_out], test_sources=[left_out])
        for left_out in names
    }


@dataclass(frozen=True)
class Search:
    """A grid scored once on validation rows; parameters can then be chosen by any rule and for any test set.

    A choice looks at the rows it is made on and at no others: what is inert or fails there says nothing elsewhere.
    """

    detector: str
    fixed: Params
    points: tuple[Params, ...]
    outcomes: tuple[tuple[Outcome, ...], ...]
    """Of every point: on the ID validation rows, and on every OOD source."""
    val: Validation
    ood_val: tuple[Validation, ...]

    def by_auroc(self, sources: Iterable[str] | None = None, *, test_sources: Iterable[str] = ()) -> Choice:
        """The largest mean AUROC of the ID rows against these OOD validation sources (all of them by default)."""
        wanted = [one.source for one in self.ood_val] if sources is None else list(sources)
        places = [place for place, one in enumerate(self.ood_val, 1) if one.source in wanted]
        criterion = _auroc(self.val, [self.ood_val[place - 1] for place in places])
        found = choose(self.detector, self._judged([0, *places]), criterion, rule="auroc", fixed=self.fixed)
        return replace(found, sources=tuple(wanted), shared=shares_source(wanted, test_sources))

    def by_augrc(self) -> Choice:
        """The smallest AUGRC of the misclassified ID rows."""
        return choose(self.detector, self._judged([0]), _augrc(self.val), rule="augrc", fixed=self.fixed)

    def _judged(self, places: Sequence[int]) -> list[Point]:
        return list(_judged(self.points, [_joined([row[place] for place in places]) for row in self.outcomes]))


def search(
    name: str,
    train: Train,
    val: Validation,
    *,
    ood_val: Sequence[Validation] = (),
    grid: Grid | None = None,
    **fixed: Any,
) -> Search:
    """Fit every point of a grid (the published one by default) and score the validation rows."""
    _check_rows(train, val, ood_val)
    banks = [val.bank, *(one.bank for one in ood_val)]
    points, outcomes = _swept(name, train.bank, banks, val=val.bank, grid=grid, fixed=fixed)
    return Search(name, fixed, tuple(points), tuple(map(tuple, outcomes)), val, tuple(ood_val))


def choose(
    name: str,
    points: Sequence[Point],
    criterion: Callable[[Scores], float],
    *,
    rule: Rule = "auroc",
    fixed: Params | None = None,
) -> Choice:
    """The first point of the best criterion (largest AUROC, smallest AUGRC); points without a finite one are listed."""
    curve = tuple(_trial(point, criterion, rule) for point in points)
    valid = [trial for trial in curve if trial.value is not None]
    if not valid:
        shown = "\n".join(f"  {_listed(trial.params)}: {trial.reason}" for trial in curve[:5])
        raise OodometerError(f"{name}: none of the {len(curve)} grid points can be used:\n{shown}\nGive another grid=")
    sign = 1 if rule == "auroc" else -1
    best = max(valid, key=lambda trial: sign * _value(trial))
    if len({trial.value for trial in valid}) == 1 < len(valid):
        warnings.warn(
            f"{name}: {rule.upper()} is {best.value:.6g} at all {len(valid)} usable grid points: the validation rows "
            f"cannot tell them apart, and the first one ({_listed(best.params)}) is taken",
            OodometerWarning,
            stacklevel=3,
        )
    return Choice(name, rule, {**(fixed or {}), **best.params}, _value(best), curve)


def shares_source(validation_sources: Iterable[str], test_sources: Iterable[str]) -> tuple[str, ...]:
    """The sources that are in both: a choice made on them has seen what its test sets look like."""
    tested = set(test_sources)
    return tuple(source for source in dict.fromkeys(validation_sources) if source in tested)


def _trial(point: Point, criterion: Callable[[Scores], float], rule: Rule) -> Trial:
    if point.scores is None:
        return Trial(point.params, None, point.status, point.reason)
    value = float(criterion(point.scores))
    if not math.isfinite(value):
        return Trial(point.params, None, "non-finite", f"its {rule.upper()} on the validation rows is {value}")
    return Trial(point.params, value, point.status, point.reason)


def _value(trial: Trial) -> float:
    assert trial.value is not None, "only points with a value are compared"
    return trial.value


def _auroc(val: Validation, every: Sequence[Validation]) -> Callable[[Scores], float]:
    """Mean AUROC of the ID rows (the first scores) against each source (the scores that follow)."""
    edges = np.cumsum([len(val.bank), *(len(one.bank) for one in every)])

    def criterion(scores: Scores) -> float:
        id_scores, *ood_scores = np.split(scores, edges[:-1])
        return float(np.mean([metrics.auroc(id_scores, s) for s in ood_scores]))

    return criterion


def _augrc(val: Validation) -> Callable[[Scores], float]:
    correct = derived.correct(val.bank)
    return lambda scores: augrc(*failures(scores, correct, protocol="misclassification"))


def _check_rows(train: Train, val: Validation, every: Sequence[Validation]) -> None:
    _check_role("train", Train, train)
    for role, found in (("val", val), *(("ood_val", one) for one in every)):
        _check_role(role, Validation, found)
        if found.bank is train.bank:
            raise OodometerError("the validation rows are the training rows: parameters chosen on them fit themselves")


def _check_role(role: str, kind: type[Train | Validation], found: Any) -> None:
    if not isinstance(found, kind):
        raise OodometerError(
            f"tuning needs {role}={kind.__name__}(bank), found {type(found).__name__}: say which rows a bank holds. "
            "Test rows have no place here"
        )
    if not len(found.bank):
        raise OodometerError(f"tuning needs rows to choose on; the {role} bank has none")


def _check_rule(rule: Rule, every: Sequence[Validation]) -> None:
    if rule not in ("auroc", "augrc"):
        raise OodometerError(f"rule must be 'auroc' or 'augrc'; found {rule!r}")
    if rule == "auroc" and not every:
        raise OodometerError(
            "rule='auroc' compares ID with OOD validation rows, and none were given: pass "
            "ood_val=Validation(bank, source='…'), or choose rule='augrc', which needs no OOD data"
        )
    if rule == "augrc" and every:
        raise OodometerError("rule='augrc' looks at ID rows alone: drop ood_val=, or choose rule='auroc'")

"""Every metric of one detector on one or many OOD sets as a tidy table; the ID scores are sorted once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from oodometer.errors import OodometerError, OodometerWarning
from oodometer.metrics._counts import Floats, Side, as_scores, blocks
from oodometer.metrics.intervals import check_level, delong_of
from oodometer.metrics.openset import ccr_at_fpr, oscr
from oodometer.metrics.ranking import RANKING, evaluate
from oodometer.metrics.risk import Protocol, augrc, aurc, failures
from oodometer.metrics.scale import Scale, fixed_scale
from oodometer.metrics.threshold import threshold_at_tnr, threshold_equal_error

if TYPE_CHECKING:
    from pandas import DataFrame

FEW_ROWS = 100
"""Below this one row moves a rate by more than a percentage point, and the table says so."""
FAILURE_PROTOCOLS: tuple[Protocol, ...] = ("discard_id_errors", "misclassification", "scod")
"""Which rows count as failures in the columns `augrc:PROTOCOL` and `aurc:PROTOCOL`."""

Row = dict[str, Any]
Groups = Mapping[str, Sequence[str]] | Mapping[str, str]
"""The OOD sets of each group, or the group of each OOD set."""


def summary(
    id_scores: ArrayLike,
    ood_scores: Mapping[str, ArrayLike] | ArrayLike,
    id_correct: ArrayLike | None = None,
    groups: Groups | None = None,
    *,
    calibration: ArrayLike | None = None,
    ood_validation: ArrayLike | None = None,
    level: float = 0.95,
) -> DataFrame:
    """One row an OOD set (kind "set"), then the unweighted mean of each group and of all sets (kind "mean").

    The ending of a name is its positive class (fpr95_ood, fpr95_id, aupr_ood, aupr_id, …); all are fractions.
    auroc_low and auroc_high are DeLong's interval; that of a mean respects that its sets share the ID rows.

    `id_correct` (predictions == labels) adds failure and open-set metrics. `calibration`, ID scores that are not
    evaluated here, adds AUTC and the errors at the threshold that keeps 95 % of them, the same for every set;
    `ood_validation`, OOD scores of another set, those at the threshold where FPR = FNR on these two.

    >>> summary(id_scores, {"textures": s, "svhn": t}, groups={"far": ["textures", "svhn"]})
    """
    check_level(level)
    named = ood_scores if isinstance(ood_scores, Mapping) else {"ood": ood_scores}
    if not named:
        raise OodometerError('ood_scores: at least one set was needed, as in {"textures": scores}.')
    members = _members(groups or {}, [str(name) for name in named])
    fixed = None if calibration is None else _Fixed.by(calibration, ood_validation)
    if fixed is None and ood_validation is not None:
        raise OodometerError("ood_validation needs calibration=, the ID scores that FPR = FNR is solved with.")
    id_rows = _Rows.of(id_scores, "ID", finite=fixed is not None)
    sets = {str(name): _Rows.of(scores, f"OOD {name!r}", finite=fixed is not None) for name, scores in named.items()}
    rows = []
    for name, ood in sets.items():
        row = _ranking(id_rows, ood, level) | ({} if fixed is None else fixed.row(id_rows, ood))
        if id_correct is not None:
            row |= _failures(id_rows, id_correct, ood)
        rows.append({"kind": "set", "dataset": name, "group": _group_of(name, members)} | row)
    means = []
    for group, chosen in _averaged(members, list(sets)):
        interval = _interval(id_rows, [sets[name] for name in chosen], level)
        means.append(_mean(group, [row for row in rows if row["dataset"] in chosen]) | interval)
    _warn_of_few(rows)
    return _table([*rows, *means])


@dataclass(frozen=True)
class _Rows:
    """Scores in their own order, in ascending order, and counted."""

    scores: Floats
    ordered: Floats
    side: Side

    @classmethod
    def of(cls, scores: ArrayLike, name: str, *, finite: bool) -> _Rows:
        values = as_scores(scores, name, finite=finite)
        ordered = np.sort(values)
        return cls(values, ordered, Side.of_sorted(ordered))


@dataclass(frozen=True)
class _Fixed:
    """What calibration rows fix before a test score is seen: the scale of AUTC, and thresholds by name."""

    scale: Scale
    thresholds: dict[str, float]

    @classmethod
    def by(cls, calibration: ArrayLike, ood_validation: ArrayLike | None) -> _Fixed:
        thresholds = {"95tnr": threshold_at_tnr(calibration)}
        if ood_validation is not None:
            thresholds["val"] = threshold_equal_error(calibration, ood_validation)
        return cls(fixed_scale(calibration), thresholds)

    def row(self, id_rows: _Rows, ood: _Rows) -> Row:
        """Areas on the scale, and both errors at each threshold."""
        fpr, fnr = float(self.scale.apply(id_rows.ordered).mean()), float(1 - self.scale.apply(ood.ordered).mean())
        row = {"autc": (fpr + fnr) / 2, "aufpr": fpr, "aufnr": fnr}
        row |= {"scale_low": self.scale.low, "scale_high": self.scale.high}
        for name, t in self.thresholds.items():
            row[f"threshold@{name}"] = t
            row[f"fpr@{name}"] = float((id_rows.ordered > t).mean())
            row[f"fnr@{name}"] = float((ood.ordered <= t).mean())
        return row


def _ranking(id_rows: _Rows, ood: _Rows, level: float) -> Row:
    values = {name: float(value) for name, value in evaluate(blocks(id_rows.side, ood.side)).items()}
    few = _note(id_rows.side.n, ood.side.n)
    head = {"n_id": id_rows.side.n, "n_ood": ood.side.n, "note": few, "auroc": values["auroc"]}
    return head | _interval(id_rows, [ood], level) | {name: values[name] for name in (*RANKING, "aupr_harmonic")}


def _interval(id_rows: _Rows, sets: Sequence[_Rows], level: float) -> Row:
    """DeLong's interval; none where a side has one row only."""
    if min(id_rows.side.n, *(ood.side.n for ood in sets)) < 2:
        return {"auroc_low": np.nan, "auroc_high": np.nan}
    found = delong_of(id_rows.side, [ood.side for ood in sets], level=level, transform="logit")
    return {"auroc_low": found.low, "auroc_high": found.high}


def _failures(id_rows: _Rows, id_correct: ArrayLike, ood: _Rows) -> Row:
    row: Row = {}
    for protocol in FAILURE_PROTOCOLS:
        chosen = failures(id_rows.scores, id_correct, ood.scores, protocol=protocol)
        row[f"augrc:{protocol}"], row[f"aurc:{protocol}"] = augrc(*chosen), aurc(*chosen)
    row["oscr"] = oscr(id_rows.scores, id_correct, ood.scores)
    row["ccr5"] = ccr_at_fpr(id_rows.scores, id_correct, ood.scores, fpr=0.05)
    return row


# --- Groups -----------------------------------------------------------------------------------------------------


def _by_group(groups: Groups) -> dict[str, list[str]]:
    members: dict[str, list[str]] = {}
    for key, value in groups.items():
        group, names = (value, [key]) if isinstance(value, str) else (key, value)
        members.setdefault(str(group), []).extend(map(str, names))
    return members


def _members(groups: Groups, names: Sequence[str]) -> dict[str, list[str]]:
    members = _by_group(groups)
    taken: dict[str, str] = {}
    for group, chosen in members.items():
        if not chosen:
            raise OodometerError(f"groups: {group!r} has no data sets; name at least one of {', '.join(names)}.")
        for name in chosen:
            if name not in names:
                raise OodometerError(f"groups: {group!r} names {name!r}; the OOD sets are {', '.join(names)}.")
            if name in taken:
                raise OodometerError(f"groups: {name!r} is in {taken[name]!r} and in {group!r}; one group is needed.")
            taken[name] = group
    return members


def _group_of(name: str, members: Mapping[str, Sequence[str]]) -> str:
    return next((group for group, chosen in members.items() if name in chosen), "")


def _averaged(members: Mapping[str, Sequence[str]], names: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    yield from members.items()
    if len(names) > 1 and not any(len(chosen) == len(names) for chosen in members.values()):
        yield "all", names


def _mean(group: str, rows: Sequence[Row]) -> Row:
    """The unweighted mean over data sets, so that large sets do not drown small ones."""
    mean: Row = {"kind": "mean", "dataset": group, "group": group, "n_id": rows[0]["n_id"], "n_ood": None, "note": ""}
    return mean | {name: float(np.mean([row[name] for row in rows])) for name in rows[0] if name not in mean}


# --- The table --------------------------------------------------------------------------------------------------


def _note(n: int, m: int) -> str:
    if min(n, m) >= FEW_ROWS:
        return ""
    which = " and ".join(f"{rows} {side}" for rows, side in ((n, "ID"), (m, "OOD")) if rows < FEW_ROWS)
    return f"{which} rows: one row moves a rate by {100 / min(n, m):.1f} points"


def _warn_of_few(rows: Sequence[Row]) -> None:
    few = [f"{row['dataset']}: {row['note']}" for row in rows if row["note"]]
    if few:
        warnings.warn(f"few rows; read the intervals. {'; '.join(few)}.", OodometerWarning, stacklevel=3)


def _table(rows: Sequence[Row]) -> DataFrame:
    import pandas as pd

    columns = [name for name in rows[0] if name != "note"]
    table = pd.DataFrame(rows, columns=[*columns, "note"])
    return table.astype({"n_id": "int64", "n_ood": "Int64"})  # a mean has no number of rows

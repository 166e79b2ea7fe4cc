"""Exact counts at every distinct score, from one sort of each side: what all ranking metrics are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oodometer.errors import OodometerError

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]

_BLOCK = 1 << 14  # entries that stay in a core's cache


def as_numpy(values: ArrayLike) -> NDArray[Any]:
    """The values as a NumPy array in their own precision; torch tensors are detached and moved to the CPU."""
    tensor: Any = values
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":  # NumPy has no such type; float32 holds it exactly
            tensor = tensor.float()
    return np.asarray(tensor)


def as_scores(scores: ArrayLike, side: str, *, finite: bool = False) -> Floats:
    """One-dimensional float64 scores without NaN, or an error that names the side and the row."""
    raw = as_numpy(scores)
    if raw.ndim != 1:
        raise OodometerError(
            f"{side} scores: one number a row was needed, an array of shape {raw.shape} was found. "
            "For maps or masks select the rows first, as in scores[labels != void].ravel()."
        )
    if raw.size == 0:
        raise OodometerError(f"{side} scores: at least one score was needed, none was found.")
    if raw.dtype.kind not in "biuf":
        raise OodometerError(f"{side} scores: real numbers were needed, dtype {raw.dtype} was found.")
    values = raw.astype(np.float64)
    _check_values(values, side, finite)
    if not _is_exact(values, raw):
        raise OodometerError(
            f"{side} scores: some {raw.dtype} values have no exact float64 and could become ties. "
            "Pass their ranks instead, for instance np.unique(scores, return_inverse=True)[1] on all rows."
        )
    values += 0.0  # −0.0 becomes +0.0
    return values


def _is_exact(values: Floats, raw: NDArray[Any]) -> bool:
    """Whether float64 holds every raw value."""
    if raw.dtype.kind not in "iu" or raw.dtype.itemsize < 8:
        return raw.dtype.itemsize <= 8 or bool((values.astype(raw.dtype) == raw).all())
    # An integer is exact iff it is a multiple of the distance between neighbouring float64. Casting back instead
    # would overflow at the end of the integer range.
    steps = np.maximum(np.abs(np.spacing(values)), 1).astype(raw.dtype)
    return not (raw % steps).any()


def _check_values(values: Floats, side: str, finite: bool) -> None:
    bad = ~np.isfinite(values) if finite else np.isnan(values)
    if bad.any():
        row = int(bad.argmax())
        needed = "finite scores were needed" if finite else "scores that can be ordered were needed"
        raise OodometerError(
            f"{side} scores: {needed}, {values[row]} was found in row {row} ({int(bad.sum())} such rows). "
            "Mend the detector, or drop these rows and say so."
        )


def as_flags(flags: ArrayLike, name: str, length: int) -> NDArray[np.bool_]:
    """A boolean vector of the given length; 0 and 1 are accepted."""
    raw = as_numpy(flags)
    if raw.shape != (length,):
        raise OodometerError(f"{name}: one flag a score ({length}) was needed, shape {raw.shape} was found.")
    if raw.dtype != np.bool_ and not np.isin(raw, (0, 1)).all():
        raise OodometerError(f"{name}: True/False (or 1/0) was needed; pass predictions == labels.")
    return raw.astype(np.bool_)


def check_fraction(value: float, name: str, *, open_low: bool = False) -> None:
    """Raise unless the value is a fraction; percentages are the usual mistake."""
    if not (0 < value <= 1 if open_low else 0 <= value <= 1):
        span = "(0, 1]" if open_low else "[0, 1]"
        raise OodometerError(f"{name}: a fraction in {span} was needed (95 % is .95), {value} was found.")


def check_positive(positive: str) -> str:
    """The name of the positive class, checked."""
    if positive not in ("ood", "id"):
        raise OodometerError(f'positive: "ood" or "id" was needed, {positive!r} was found.')
    return positive


def smallest_count(share: float, total: int) -> int:
    """The smallest k with k / total >= share, unharmed by rounding of share * total (.07 · 100 > 7)."""
    k = int(np.ceil(share * total))
    while k > 0 and (k - 1) / total >= share:
        k -= 1
    while k / total < share:
        k += 1
    return k


def largest_count(share: float, total: int) -> int:
    """The largest k with k / total <= share, unharmed by rounding of share * total (.29 · 100 < 29)."""
    k = int(np.floor(share * total))
    while k < total and (k + 1) / total <= share:
        k += 1
    while k > 0 and k / total > share:
        k -= 1
    return k


@dataclass(frozen=True)
class Side:
    """One set of scores: its distinct values, ascending, and where each of them starts in the sorted scores.

    Counts are whole numbers held as float64: exact to 2**53, and they divide without a conversion.
    """

    values: Floats
    n: int
    starts: Floats | None  # one longer than values, ending with n; None where no value repeats

    @classmethod
    def of(cls, scores: ArrayLike, side: str, *, finite: bool = False) -> Side:
        """Check and sort the scores once."""
        ordered = as_scores(scores, side, finite=finite)
        ordered.sort()
        return cls.of_sorted(ordered)

    @classmethod
    def of_sorted(cls, ordered: Floats) -> Side:
        """Of scores that were checked and sorted before; there may be none."""
        new = ordered[1:] != ordered[:-1]
        if new.all():
            return cls(ordered, len(ordered), None)
        starts = np.flatnonzero(np.concatenate(([True], new)))
        return cls(ordered[starts], len(ordered), np.append(starts, len(ordered)).astype(np.float64))

    def below(self, start: int = 0, stop: int | None = None) -> Floats:
        """How many scores lie below each of the values start … stop; stop itself may be past the last."""
        stop = len(self.values) if stop is None else stop
        return np.arange(start, stop + 1.0) if self.starts is None else self.starts[start : stop + 1]

    @property
    def at(self) -> Floats:
        """How many scores equal each distinct value."""
        below = self.below()
        return below[1:] - below[:-1]


@dataclass(frozen=True)
class View:
    """Counts at distinct values of the positive class, ascending, along the last axis.

    Thresholds between two positive values change no true positive, so these points are all a metric needs.
    Leading axes, if any, are repetitions of a bootstrap.
    """

    tp: Floats  # positives at least as positive as this value
    tp_before: Floats  # positives strictly more positive
    fp: Floats  # negatives at least as positive
    fp_before: Floats  # negatives strictly more positive
    n_pos: int
    n_neg: int
    rising: bool  # whether the counts grow along the axis (ID positive: low scores are the most positive ones)

    def reaching(self, positives: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """(TP, FP) at the most positive value that flags so many positives; all rows if no value here does."""
        found = np.count_nonzero(self.tp >= positives, axis=-1)
        place = self.tp.shape[-1] - found if self.rising else found - 1
        return _pick(self.tp, place, found, self.n_pos), _pick(self.fp, place, found, self.n_neg)

    def admitting(self, negatives: int) -> NDArray[Any]:
        """TP at the least positive value that flags at most so many negatives; 0 if no value here does."""
        found = np.count_nonzero(self.fp <= negatives, axis=-1)
        return _pick(self.tp, found - 1 if self.rising else self.tp.shape[-1] - found, found, 0)

    @cached_property
    def at(self) -> Floats:
        """Positives that share this value."""
        return self.tp - self.tp_before

    @cached_property
    def flagged(self) -> Floats:
        """Rows of either class at least as positive."""
        return self.tp + self.fp

    @cached_property
    def precision(self) -> Floats:
        """Precision when everything from this value on is flagged; 0 where a repetition drew nothing."""
        return np.true_divide(self.tp, np.maximum(self.flagged, 1))

    @cached_property
    def precision_before(self) -> Floats:
        """Precision just before this value; 1 where nothing lies before (scikit-learn's last point)."""
        flagged = self.tp_before + self.fp_before
        nothing = flagged == 0
        flagged += nothing
        return np.asarray(np.true_divide(self.tp_before + nothing, flagged))


def _pick(counts: Floats, place: Any, found: Any, otherwise: int) -> NDArray[Any]:
    """The count at a place of each row, where anything was found; counts are monotone, so this replaces a search."""
    if counts.ndim == 1:
        return np.asarray(counts[place] if found else otherwise)
    inside = np.clip(place, 0, counts.shape[-1] - 1)
    return np.where(found > 0, np.take_along_axis(counts, inside[..., None], -1)[..., 0], otherwise)


@dataclass(frozen=True)
class Merge:
    """Where the distinct values of two sides fall between each other."""

    id_below: Rows  # for each OOD value, how many distinct ID values are smaller
    id_upto: Rows  # … or equal
    ood_below: Rows
    ood_upto: Rows

    @classmethod
    def of(cls, id_values: Floats, ood_values: Floats) -> Merge:
        """A linear merge of two sorted runs, exact for any float64."""
        k, j = len(id_values), len(ood_values)
        # Timsort finds the two runs. Equal values keep the order ID, OOD.
        from_ood = np.argsort(np.concatenate((id_values, ood_values)), kind="stable") >= k
        id_upto = np.flatnonzero(from_ood) - np.arange(j)
        ood_below = np.flatnonzero(~from_ood) - np.arange(k)
        if min(k, j) == 0:
            return cls(id_upto, id_upto, ood_below, ood_below)
        # Index −1 (no ID value is as small) wraps to the largest ID value, which is larger: no false tie.
        id_tie = id_values[id_upto - 1] == ood_values
        if not id_tie.any():
            return cls(id_upto, id_upto, ood_below, ood_below)
        # Index j (no OOD value is as large) is clipped to the largest OOD value, which is smaller.
        ood_tie = ood_values.take(ood_below, mode="clip") == id_values
        return cls(id_upto - id_tie, id_upto, ood_below, ood_below + ood_tie)


@dataclass(frozen=True)
class Counts:
    """The two readings of one comparison: OOD as the positive class, and ID as the positive class."""

    ood: View
    id: View

    @classmethod
    def of(cls, id_side: Side, ood_side: Side) -> Counts:
        """Counts at all distinct values of both sides."""
        merge = Merge.of(id_side.values, ood_side.values)
        return cls.placed(id_side.below(), ood_side.below(), merge, id_side.n, ood_side.n)

    @classmethod
    def placed(cls, id_below: Floats, ood_below: Floats, merge: Merge, n: int, m: int) -> Counts:
        """Counts from the cumulative counts on both grids; leading axes are repetitions."""
        tied = merge.id_upto is not merge.id_below
        ood_from = m - ood_below
        id_from = n - id_below[..., merge.id_below]
        id_above = n - id_below[..., merge.id_upto] if tied else id_from
        ood_upto = ood_below[..., merge.ood_upto]
        ood_under = ood_below[..., merge.ood_below] if tied else ood_upto
        return cls(
            ood=View(ood_from[..., :-1], ood_from[..., 1:], id_from, id_above, n_pos=m, n_neg=n, rising=False),
            id=View(id_below[..., 1:], id_below[..., :-1], ood_upto, ood_under, n_pos=n, n_neg=m, rising=True),
        )


@dataclass(frozen=True)
class Piece:
    """One range of values: where its cumulative counts stand on either side, and how its values interleave."""

    id: slice
    ood: slice
    merge: Merge


def pieces(id_side: Side, ood_side: Side) -> Iterator[Piece]:
    """Ranges of distinct ID values that stay in the cache, with the OOD values among them."""
    starts = np.arange(0, len(id_side.values), _BLOCK)
    id_edges = [*starts.tolist(), len(id_side.values)]
    inner = np.searchsorted(ood_side.values, id_side.values[starts[1:]]).tolist()
    ood_edges = [0, *inner, len(ood_side.values)]
    for i, i_end, o, o_end in zip(id_edges, id_edges[1:], ood_edges, ood_edges[1:], strict=False):
        merge = Merge.of(id_side.values[i:i_end], ood_side.values[o:o_end])
        yield Piece(slice(i, i_end + 1), slice(o, o_end + 1), merge)


def blocks(id_side: Side, ood_side: Side) -> Iterator[Counts]:
    """The counts of one range of values after the other."""
    for piece in pieces(id_side, ood_side):
        id_below = id_side.below(piece.id.start, piece.id.stop - 1)
        ood_below = ood_side.below(piece.ood.start, piece.ood.stop - 1)
        yield Counts.placed(id_below, ood_below, piece.merge, id_side.n, ood_side.n)


@dataclass(frozen=True)
class Metric:
    """A number that is put together from parts of the counts: a sum, a minimum or a maximum over points."""

    positive: str
    join: np.ufunc
    part: Callable[[View], NDArray[Any]]
    finish: Callable[[NDArray[Any], View], NDArray[Any]]  # the view gives the sizes of the classes


def measure(pieces: Iterable[Counts], metrics: Mapping[str, Metric]) -> dict[str, NDArray[Any]]:
    """All metrics in one pass over the pieces."""
    parts: dict[str, NDArray[Any]] = {}
    for piece in pieces:
        views = {"ood": piece.ood, "id": piece.id}
        for name, metric in metrics.items():
            view = views[metric.positive]
            if view.tp.size:
                part = metric.part(view)
                parts[name] = metric.join(parts[name], part) if name in parts else part
    return {name: metric.finish(parts[name], views[metric.positive]) for name, metric in metrics.items()}

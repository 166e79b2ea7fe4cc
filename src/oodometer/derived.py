"""Quantities of a bank that are computed once and shared: logits, energies, moments, spectra, neighbours."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from oodometer import arrays
from oodometer.arrays import Array, Floats, Ints, like, namespace, real, slices, to_numpy
from oodometer.bank import Bank
from oodometer.errors import OodometerError

F64 = npt.NDArray[np.float64]
T = TypeVar("T")

MEMORY_BYTES = 1 << 30
"""How much derived memory all banks together keep; the least recently used goes first."""


# ---------------------------------------------------------------------------------------------- memory


class _Memory:
    """Remembers values with the bank they belong to, forgets them with it, and stays below a byte limit."""

    def __init__(self) -> None:
        self._order: OrderedDict[tuple[weakref.ref[Bank], Any], int] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, bank: Bank, key: Any, compute: Callable[[], T]) -> T:
        place = (weakref.ref(bank), key)
        with self._lock:
            if key in bank.memory:
                self._order.move_to_end(place)
                found: T = bank.memory[key]
                return found
        value = compute()
        size = _nbytes(value)
        if size <= MEMORY_BYTES // 2:
            with self._lock:
                bank.memory[key] = value
                self._order[place] = size
                self._shrink()
        return value

    def replace(self, bank: Bank, key: Any, value: Any) -> None:
        """Remember a better value (a longer neighbour list) in place of an older one."""
        with self._lock:
            bank.memory.pop(key, None)
            self._order.pop((weakref.ref(bank), key), None)
        self.get(bank, key, lambda: value)

    def _shrink(self) -> None:
        for place in [place for place in self._order if place[0]() is None]:
            del self._order[place]
        while sum(self._order.values()) > MEMORY_BYTES:
            (owner, key), _ = self._order.popitem(last=False)
            bank = owner()
            if bank is not None:
                bank.memory.pop(key, None)


_memory = _Memory()


def remember(bank: Bank, key: Any, compute: Callable[[], T]) -> T:
    """The value computed for this bank under this key, or computed and kept now (for quantities of one method)."""
    return _memory.get(bank, key, compute)


def _nbytes(value: Any) -> int:
    if isinstance(value, Bank):
        return 4 * value.classes * len(value)
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if isinstance(value, tuple):
        return sum(map(_nbytes, value))
    if hasattr(value, "__dataclass_fields__"):
        return sum(_nbytes(getattr(value, name)) for name in value.__dataclass_fields__)
    return 64


# ---------------------------------------------------------------------------------------------- rows


def logits(bank: Bank) -> Array:
    """Logits in working precision."""
    return real(bank.logits)


def with_logits(bank: Bank) -> Bank:
    """The bank with its logits stored, so that every detector shares one product with the head.

    Parts stay parts. A bank whose logits, or the rows it would have to gather for them, are large stays as it is.
    """
    if "logits" in bank.columns or "logits" not in bank or 4 * bank.classes * len(bank) > MEMORY_BYTES // 2:
        return bank
    if len(bank.parts) > 1:
        return _memory.get(bank, "with_logits", lambda: Bank.concat([with_logits(part) for part in bank.parts]))
    if bank.gathers and bank.width * len(bank) > GATHERED_BYTES:
        return bank
    return _memory.get(bank, "with_logits", lambda: bank.with_columns(logits=bank.logits))


GATHERED_BYTES = 128 << 20
"""How much of a bank of picked rows may be copied to store a column with it."""


def features(bank: Bank) -> Array:
    """Penultimate features in working precision."""
    return real(bank.features)


def predictions(bank: Bank) -> Ints:
    """argmax of the logits, as NumPy (first maximum)."""

    def compute() -> Ints:
        return _over_blocks(bank, lambda block: arrays.argmax(logits(block), block.xp)).astype(np.int64)

    return _memory.get(bank, "predictions", compute)


def energy(bank: Bank, temperature: float = 1.0) -> F64:
    """T·lse(z/T) of every row (the negative of the energy score)."""

    def compute() -> F64:
        def one(block: Bank) -> Array:
            z = logits(block)
            return temperature * arrays.logsumexp(z / temperature, namespace(z))

        return _over_blocks(bank, one).astype(np.float64)

    return _memory.get(bank, ("energy", temperature), compute)


def _over_blocks(bank: Bank, function: Callable[[Bank], Array]) -> npt.NDArray[Any]:
    pieces = [to_numpy(function(block)) for block in bank.blocks()]
    return np.concatenate(pieces) if pieces else np.zeros(0)


def labels(bank: Bank) -> Ints:
    """Labels checked against the number of classes."""

    def compute() -> Ints:
        found = bank.labels.astype(np.int64)
        if len(found) and (found.min() < 0 or found.max() >= bank.classes):
            row = int(np.flatnonzero((found < 0) | (found >= bank.classes))[0])
            raise OodometerError(
                f"label {int(found[row])} in row {row} is outside 0 … {bank.classes - 1} "
                f"({bank.classes} classes in the head or logits): drop such rows or renumber the classes"
            )
        return found

    return _memory.get(bank, "labels", compute)


def correct(bank: Bank) -> npt.NDArray[np.bool_]:
    """Which rows are classified correctly."""
    right: npt.NDArray[np.bool_] = predictions(bank) == labels(bank)
    return right


# ---------------------------------------------------------------------------------------------- moments


@dataclass(frozen=True)
class Moments:
    """Count, mean and scatter Σ(x−mean)(x−mean)ᵀ of a column; they add up over parts."""

    count: int
    mean: F64
    scatter: F64
    exact: bool = True
    """False when the products were taken in float32, block by block."""

    def about(self, point: F64) -> F64:
        """Σ(x−point)(x−point)ᵀ."""
        gap = self.mean - point
        return self.scatter + self.count * np.outer(gap, gap)


def moments(bank: Bank, column: str = "features", *, unit: bool = False, exact: bool = False) -> Moments:
    """Mean and scatter of a column (optionally of its unit vectors), one pass, float64 accumulation.

    Many float32 rows are multiplied in float32, half as dear, where no direction is so thin that it would show;
    `exact` asks for float64 products all the same.
    """

    def compute() -> Moments:
        if exact and moments(bank, column, unit=unit).exact:
            return moments(bank, column, unit=unit)
        if len(bank.parts) > 1:
            return _added([moments(part, column, unit=unit, exact=exact) for part in bank.parts])
        return _part_moments(bank, column, unit, exact)

    return _memory.get(bank, ("moments", column, unit, exact), compute)


def _part_moments(bank: Bank, column: str, unit: bool, exact: bool = False) -> Moments:
    def rows(size: int) -> Iterator[Array]:
        return (_rows_of(block, column, unit) for block in bank.blocks(size))

    if not exact and bank.on_cpu and len(bank) * _width(bank, column) > arrays.EXACT_ENTRIES:
        quick = _single_moments(rows(SINGLE_ROWS))
        if quick is not None and _steady(quick.scatter, quick.scatter.diagonal()):
            return quick
    return moments_of(rows(_block_rows(bank, column)))


SINGLE_ROWS = 1024
"""Rows of one float32 product: its round-off is 1e-6 of the variances, less over many blocks."""
STEADY = 1e-3
"""The thinnest direction, as a share of the variances, that float32 products keep to three digits at the worst."""


def _single_moments(blocks: Iterable[Array]) -> Moments | None:
    """The same by float32 products about a point near the mean, added up in float64; None for float64 rows."""
    rows: Iterator[Any] = map(to_numpy, blocks)
    first = next(rows, None)
    if first is None or first.dtype != np.float32:
        return None
    shift = first.mean(axis=0, dtype=np.float64).astype(np.float32)
    count, total, scatter = 0, np.zeros(len(shift)), np.zeros((len(shift), len(shift)))
    rows = chain([first], rows)
    with arrays.thread_map() as each:
        # A few blocks at a time, added in order: the sum depends on no number of threads.
        while wave := list(islice(rows, 8)):
            for n, sums, products in each(partial(_sums_about, shift), wave):
                count, total = count + n, total + sums
                scatter += products
    offset = total / count
    return Moments(count, shift + offset, scatter - count * np.outer(offset, offset), exact=False)


def _sums_about(shift: Floats, x: Floats) -> tuple[int, F64, Floats]:
    gap = x - shift
    return len(gap), arrays.column_sums(gap), gap.T @ gap


def _steady(scatter: F64, variances: F64) -> bool:
    """Whether no direction is thin beside the variances, and so none drowns in what float32 rounds off."""
    lengths = np.sqrt(np.maximum(variances, 0.0))
    if not lengths.all():
        return False
    with arrays.one_thread_if_small(scatter):
        return float(np.linalg.eigvalsh(scatter / np.outer(lengths, lengths))[0]) > STEADY


def moments_of(blocks: Iterable[Array]) -> Moments:
    """Mean and scatter of rows that come in blocks (for features that exist only while they are computed)."""
    count, shift, total, scatter = 0, None, None, None
    for block in blocks:
        xp = namespace(block)
        if shift is None:
            # Any point near the data keeps the products small; the exact mean is not needed for that.
            shift = xp.mean(arrays.double(block), axis=0)
            total, scatter = xp.zeros_like(shift), 0.0
        gap = block - shift  # in float64, as the shift
        scatter = scatter + gap.T @ gap
        total = total + xp.sum(gap, axis=0)
        count += gap.shape[0]
    if shift is None:
        raise OodometerError("no rows: fitting needs at least one training row")
    offset = to_numpy(total) / count
    about_shift = to_numpy(scatter)
    return Moments(count, to_numpy(shift) + offset, about_shift - count * np.outer(offset, offset))


def _added(parts: list[Moments]) -> Moments:
    count = sum(part.count for part in parts)
    mean: F64 = sum((part.count / count) * part.mean for part in parts)  # type: ignore[assignment]
    scatter: F64 = sum(part.about(mean) for part in parts)  # type: ignore[assignment]
    return Moments(count, mean, scatter, exact=all(part.exact for part in parts))


def _width(bank: Bank, column: str) -> int:
    return bank.classes if column in ("softmax", "logits") else int(np.prod(bank.row_shape(column), dtype=np.int64))


def _block_rows(bank: Bank, column: str) -> int:
    """Rows a block while moments are taken: float64 copies of one column."""
    return _bounded_rows(8 * _width(bank, column), cpu=bank.on_cpu)


def _bounded_rows(row_bytes: int, *, cpu: bool) -> int:
    """Rows a block of a column that may be far wider than the features: maps, many passes."""
    budget = MAP_BLOCK_BYTES if cpu else arrays.ACCELERATOR_BLOCK_BYTES
    return max(1, min(arrays.block_rows(row_bytes, cpu=cpu), budget // max(row_bytes, 1)))


def _rows_of(block: Bank, column: str, unit: bool) -> Array:
    if column == "softmax":
        z = logits(block)
        return arrays.softmax(z, namespace(z))
    x = logits(block) if column == "logits" else arrays.pooled(real(block[column]))
    return arrays.unit(x, namespace(x)) if unit else x


def column_blocks(bank: Bank, column: str) -> Iterator[Bank]:
    """Blocks of rows sized by one column, which may be far wider than the features (maps, many passes)."""
    return bank.blocks(_bounded_rows(arrays.row_bytes(bank.rows(slice(0, 0))[column]), cpu=bank.on_cpu))


MAP_BLOCK_BYTES = 64 << 20
"""The most that one block of a wide column takes on a CPU, however few rows that makes."""


def mean(bank: Bank, column: str = "features") -> F64:
    """Mean row of a column, alone: the moments cost a product of the column with itself."""

    def compute() -> F64:
        if len(bank.parts) > 1:
            shares = [len(part) / len(bank) for part in bank.parts]
            return np.asarray(sum(share * mean(part, column) for share, part in zip(shares, bank.parts, strict=True)))
        if column in bank.columns and len(bank.row_shape(column)) == 1:
            return column_sums(bank, column) / len(bank)
        total = np.zeros(())
        for block in column_blocks(bank, column):
            x = _rows_of(block, column, unit=False)
            xp = namespace(x)
            total = total + to_numpy(xp.sum(x, axis=0, dtype=xp.float64))
        return total / len(bank)

    return _memory.get(bank, ("mean", column), compute)


def column_sums(bank: Bank, column: str) -> F64:
    """Sum of a stored column over the rows, in one pass that shows as well whether every entry is finite."""

    def compute() -> F64:
        # The sums of an accelerator's blocks stay there: one transfer, and one wait, for all.
        sums = [arrays.column_sums(real(block[column])) for block in column_blocks(bank, column)]
        return np.asarray(to_numpy(sum(sums[1:], sums[0]))) if sums else np.zeros(bank.row_shape(column))

    return _memory.get(bank, ("column_sums", column), compute)


Grouping = Literal["label", "prediction", "correct"]


def class_sums(bank: Bank, column: str = "features", *, by: Grouping = "label") -> tuple[Ints, F64]:
    """Rows a class and their sums, grouped by label, by prediction, or by label among correct rows."""

    def compute() -> tuple[Ints, F64]:
        if len(bank.parts) > 1:
            found = [class_sums(part, column, by=by) for part in bank.parts]
            return sum(c for c, _ in found), sum(s for _, s in found)  # type: ignore[return-value]
        groups, classes = _groups(bank, by), bank.classes
        counts = np.bincount(groups[groups >= 0], minlength=classes)
        sums, start = None, 0
        for block in bank.blocks(_block_rows(bank, column)):
            found = arrays.segment_sums(
                _rows_of(block, column, unit=False), groups[start : start + len(block)], classes
            )
            sums = found if sums is None else sums + found
            start += len(block)
        return counts, np.zeros(()) if sums is None else to_numpy(sums)

    return _memory.get(bank, ("class_sums", column, by), compute)


def class_means(bank: Bank, column: str = "features", *, by: Grouping = "label") -> tuple[Ints, F64]:
    """Rows a class and their means (zero for an empty class: look at the counts)."""
    counts, sums = class_sums(bank, column, by=by)
    return counts, sums / np.maximum(counts, 1)[:, None]


def _groups(bank: Bank, by: Grouping) -> Ints:
    if by == "label":
        return labels(bank)
    if by == "prediction":
        return predictions(bank)
    return np.where(correct(bank), labels(bank), -1)


def within_scatter(bank: Bank, column: str = "features") -> F64:
    """Pooled scatter around the class means: total scatter minus the scatter between classes."""
    total = moments(bank, column)
    scatter = _within(bank, column, total)
    if total.exact or _steady(scatter, total.scatter.diagonal()):
        return scatter
    return _within(bank, column, moments(bank, column, exact=True))


def _within(bank: Bank, column: str, total: Moments) -> F64:
    counts, means = class_means(bank, column)
    gaps = (means - total.mean) * np.sqrt(counts)[:, None]
    return total.scatter - gaps.T @ gaps


# ---------------------------------------------------------------------------------------------- spectra


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues (descending) and eigenvectors (columns) of a covariance about a centre."""

    values: F64
    vectors: F64
    center: F64

    def components(self, variance: float) -> int:
        """How many components keep this share of the variance: #(cumulative share ≤ variance) + 1."""
        share = np.cumsum(self.values) / self.values.sum()
        return min(int((share <= variance).sum()) + 1, len(self.values))

    def rank(self, eps: float = float(np.finfo(np.float64).eps)) -> int:
        """How many eigenvalues stand above the round-off of the precision they were computed in."""
        return int((self.values > len(self.values) * eps * self.values[0]).sum())


def spectrum(bank: Bank, column: str = "features", *, unit: bool = False) -> Spectrum:
    """Principal components of a column around its mean, covariance divided by N."""

    def compute() -> Spectrum:
        found = moments(bank, column, unit=unit)
        return Spectrum(*arrays.psd_eigh(found.scatter / found.count, bank.sample), found.mean)

    return _memory.get(bank, ("spectrum", column, unit), compute)


def spectrum_about(bank: Bank, center: F64, name: str) -> Spectrum:
    """The same around a given centre (remembered under its name)."""

    def compute() -> Spectrum:
        found = moments(bank)
        return Spectrum(*arrays.psd_eigh(found.about(center) / found.count, bank.sample), center)

    return _memory.get(bank, ("spectrum_about", name, center.tobytes()), compute)


# ---------------------------------------------------------------------------------------------- neighbours


@dataclass(frozen=True)
class _Search:
    """What is compared: energies as weights, float64 products, a column for training rows of length zero."""

    guided: bool
    exact: bool
    origin: bool


def similarities(train: Bank, query: Bank, k: int, *, guided: bool = False) -> Array:
    """Cosines of each query row with its k most similar training rows, in descending order.

    With `guided` each training row's cosine is first multiplied by its energy (NNGuide). One search at the largest k
    serves every smaller one, and one search a part serves every bank joined from that part. A training row of length
    zero counts ½ (not guided), so that 2 − 2 times the similarity is its squared distance to a unit row as well.
    """
    return _most_similar(train, query, k, _Search(guided, is_small(train), not guided and has_zero_row(train)))


def _most_similar(train: Bank, query: Bank, k: int, how: _Search) -> Array:
    key, k = ("similarities", weakref.ref(train), how), min(k, len(train))
    found = query.memory.get(key)
    if found is None or found.shape[1] < k:
        found = _merged(train, query, k, how) if _lists_fit(train, query, k) else _searched(train, query, k, how)
        _memory.replace(query, key, found)
    return found[:, :k]


def _lists_fit(train: Bank, query: Bank, k: int) -> bool:
    """Whether the bank has parts, and few enough to keep a list of each."""
    entries = len(query) * sum(min(k, len(part)) for part in train.parts)
    return len(train.parts) > 1 and 8 * entries <= MEMORY_BYTES // 2


def _merged(train: Bank, query: Bank, k: int, how: _Search) -> Array:
    """The best of the parts' lists: folds share parts, and so each pair of rows is compared once."""
    lists = [_most_similar(part, query, k, how) for part in train.parts if len(part)]
    xp = namespace(lists[0])
    return arrays.top_values(xp.concat(lists, axis=1), k, xp)


def _searched(train: Bank, query: Bank, k: int, how: _Search) -> Array:
    pieces = []
    for rows in slices(len(query), QUERY_ROWS):
        q = features(query.rows(rows))
        xp = namespace(q)
        # The order of neighbours does not depend on the query's length; unit rows keep the products comparable.
        q = arrays.unit(arrays.double(q) if how.exact else q, xp)
        if how.origin:
            q = xp.concat([q, xp.ones_like(q[:, :1])], axis=1)
        keys = key_blocks(train, guided=how.guided, exact=how.exact, origin=how.origin)
        pieces.append(arrays.top_products(q, keys, k, xp))
    return namespace(pieces[0]).concat(pieces, axis=0)


def has_zero_row(train: Bank) -> bool:
    """Whether some feature vector has length zero, and so no direction."""

    def compute() -> bool:
        if len(train.parts) > 1:
            return any(map(has_zero_row, train.parts))
        return any(not arrays.to_numpy(arrays.norms(features(block), block.xp)).all() for block in train.blocks())

    return _memory.get(train, "has_zero_row", compute)


def is_small(train: Bank) -> bool:
    """Whether distances to these rows are worth float64 (see arrays.EXACT_ENTRIES)."""
    return len(train) * train.row_shape("features")[0] <= arrays.EXACT_ENTRIES


QUERY_ROWS = 16384
"""Query rows searched at a time …"""
KEY_ROWS = 8192
"""… against so many training rows at a time, so that these are made unit vectors a few times only."""


def distances(train: Bank, query: Bank, k: int) -> F64:
    """Squared Euclidean distances (not normalised) of each query row to its k nearest training rows, ascending."""

    def compute() -> F64:
        center = moments(train).mean

        exact = is_small(train)

        def centered(block: Bank) -> Array:
            x = arrays.double(features(block)) if exact else features(block)
            return x - like(center, x)

        def keys() -> Iterator[Array]:
            for block in train.blocks(KEY_ROWS):
                x = centered(block)
                xp = namespace(x)
                yield xp.concat([x, -0.5 * xp.sum(x * x, axis=-1)[:, None]], axis=1)

        pieces = []
        for rows in slices(len(query), QUERY_ROWS):
            q = centered(query.rows(rows))
            xp = namespace(q)
            # ‖q − x‖² = ‖q‖² − 2(q·x − ‖x‖²/2): the largest bracket is the nearest row.
            one = xp.ones_like(q[:, :1])
            best = arrays.top_products(xp.concat([q, one], axis=1), keys(), k, xp)
            pieces.append(to_numpy(xp.sum(q * q, axis=-1)[:, None] - 2 * best))
        return np.concatenate(pieces).astype(np.float64)

    return _memory.get(query, ("distances", weakref.ref(train), k), compute)


def key_blocks(train: Bank, *, guided: bool = False, exact: bool = False, origin: bool = False) -> Iterator[Array]:
    """Unit training rows, a block at a time (no normalised copy of the bank is ever held).

    `origin` adds a column that is ½ for rows of length zero and 0 for all others.
    """
    start, weights = 0, energy(train) if guided else None
    for block in train.blocks(KEY_ROWS):
        x = arrays.double(features(block)) if exact else features(block)
        x = arrays.unit(x, namespace(x))
        if weights is not None:
            x = x * like(weights[start : start + len(block)], x)[:, None]
            start += len(block)
        if origin:
            xp = namespace(x)
            half = xp.full_like(x[:, :1], 0.5)
            x = xp.concat([x, xp.where(arrays.norms(x, xp)[:, None] > 0, xp.zeros_like(half), half)], axis=1)
        yield x


def origin(bank: Bank) -> tuple[F64, int]:
    """ViM's origin u = −W⁺b and the rank found, rank-aware (methods: the head's rows nearly sum to zero)."""
    if bank.head is None:
        raise OodometerError("the origin −W⁺b needs a head: Bank(…, head=Head(weight, bias))")
    head = bank.head

    def compute() -> tuple[F64, int]:
        inverse, rank = arrays.pinv_rank_aware(to_numpy(head.weight), bank.sample)
        return -(inverse @ to_numpy(head.bias).astype(np.float64)), rank

    return _memory.get(bank, "origin", compute)


def project(x: Array, center: F64, basis: F64, *, exact: bool = False) -> Array:
    """(x − center) @ basis in the working precision of x, or (`exact`, see arrays.EXACT_ENTRIES) in float64."""
    x = arrays.double(x) if exact else x
    return (x - like(center, x)) @ like(basis, x)


def first_bad_row(bank: Bank, column: str) -> int | None:
    """The first row of a column with NaN or infinity, looked up once a bank."""
    if column not in bank.columns:
        return first_bad_row(bank, "features") if "features" in bank.columns else None
    start = 0
    for part in bank.parts:
        found = _memory.get(part, ("bad", column), partial(lambda part: (_scan(part, column),), part))[0]
        if found is not None:
            return start + found
        start += len(part)
    return None


def _scan(part: Bank, column: str) -> int | None:
    with np.errstate(invalid="ignore"):
        if np.isfinite(column_sums(part, column)).all():
            return None
    start = 0
    for block in part.blocks():
        bad = arrays.first_not_finite(block[column])
        if bad is not None:
            return start + bad
        start += len(block)
    return None


# ---------------------------------------------------------------------------------------------- whitening


@dataclass(frozen=True)
class Whitening:
    """x ↦ (x − center)·QΛ^(−1/2): squared lengths become Mahalanobis distances, with S⁺ for a deficient S."""

    center: F64
    basis: F64
    rank: int
    exact: bool

    @classmethod
    def of(
        cls,
        covariance: F64,
        center: F64,
        *,
        total: F64 | None = None,
        ridge: float = 0.0,
        rcond: float | None = None,
        exact: bool = False,
        near: Array | None = None,
    ) -> Whitening:
        """Whitening of a covariance; `total` is the one it was subtracted from, whose round-off it carries.

        `exact` whitens in float64 (see arrays.EXACT_ENTRIES), `near` says where (see arrays.psd_eigh).
        """
        values, vectors = arrays.psd_eigh(covariance + ridge * np.eye(len(covariance)), near)
        if values[0] <= 0:
            raise OodometerError(
                "the training features do not vary: a covariance needs rows that differ "
                "(for a within-class covariance, at least two different rows in one class)"
            )
        if rcond is not None:
            floor = rcond * values[0]
        else:
            largest = max(values[0], 0.0 if total is None else float(total.diagonal().max()))
            floor = len(values) * np.finfo(np.float64).eps * largest
        rank = int((values > floor).sum())
        if rank == 0:
            raise OodometerError("the within-class covariance is zero up to round-off: every class is a single point")
        return cls(arrays.frozen(center), arrays.frozen(vectors[:, :rank] / np.sqrt(values[:rank])), rank, exact)

    def points(self, rows: F64) -> F64:
        """Class means and the like, in float64."""
        return (rows - self.center) @ self.basis

    def __call__(self, x: Array) -> Array:
        return project(x, self.center, self.basis, exact=self.exact)

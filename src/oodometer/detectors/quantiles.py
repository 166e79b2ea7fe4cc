"""Percentiles of all entries of a column: exact, and in the memory of a few blocks however long the bank is."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from oodometer import arrays, derived
from oodometer.arrays import Array, Floats, namespace, on_cpu, real, slices, to_numpy
from oodometer.bank import Bank
from oodometer.derived import F64

SMALL_ENTRIES = 1 << 20
"""Up to so many entries are selected from at once."""
KEPT_ENTRIES = 1 << 25
"""The most entries held while the rest of a column streams by (128 MiB of float32)."""
SAMPLE_ENTRIES, SAMPLE_ROWS = 1 << 17, 64
"""How many entries guess where a percentile lies, in at least so many rows."""
CACHE_BYTES = 2 << 20
"""Entries looked at several times in a row: in blocks of this size they, a copy and masks stay in cache."""


def cache_blocks(bank: Bank, column: str) -> Iterator[Bank]:
    """Blocks of rows whose entries of one column fit the cache (on an accelerator: its memory)."""
    size = arrays.row_bytes(bank.rows(slice(0, 0))[column])
    budget = CACHE_BYTES if bank.on_cpu else arrays.ACCELERATOR_BLOCK_BYTES
    return bank.blocks(max(1, budget // max(size, 1)))


def on_host(x: Array) -> Array:
    """NumPy's view of an array in the host's memory; an array elsewhere as it is."""
    return to_numpy(x).view(np.ndarray) if on_cpu(x) else x


def percentile(bank: Bank, column: str, q: float) -> float:
    """The q-th percentile of all entries of a column (linear interpolation), remembered with the bank."""

    def compute() -> float:
        width = int(np.prod(bank.row_shape(column), dtype=np.int64))
        total = len(bank) * width
        if total <= SMALL_ENTRIES:
            return arrays.percentile(real(bank[column]), q)
        place = (total - 1) * q / 100
        low = int(place)
        below, above = _Selection(bank, column, total).neighbours(low)
        return below + (above - below) * (place - low)

    return derived.remember(bank, ("percentile", column, float(q)), compute)


def percentiles_by_entry(bank: Bank, column: str, q: tuple[float, ...]) -> F64:
    """The percentiles of each entry of a row over all rows: len(q) × the shape of a row."""

    def compute() -> F64:
        shape = bank.row_shape(column)
        width = int(np.prod(shape, dtype=np.int64))
        step = max(1, KEPT_ENTRIES // len(bank))
        found = [np.percentile(_gathered(bank, column, part), q, axis=1) for part in slices(width, step)]
        return np.concatenate(found, axis=1).reshape(len(q), *shape).astype(np.float64)

    return derived.remember(bank, ("percentiles_by_entry", column, q), compute)


def _gathered(bank: Bank, column: str, part: slice) -> Floats:
    """Some entries of every row, one line an entry."""
    lines = []
    for block in derived.column_blocks(bank, column):
        x = block[column]
        lines.append(to_numpy(real(x.reshape(x.shape[0], -1)[:, part])).T)
    return np.concatenate(lines, axis=1)


class _Selection:
    """Selects by rank: a sample brackets the rank, one pass counts what lies below and keeps what lies inside.

    The bracket is open, so that no number of ties has to be kept, and nothing is assumed of the sample: where the
    rank turns out to lie outside, the next pass looks there.
    """

    def __init__(self, bank: Bank, column: str, total: int) -> None:
        self.bank, self.column, self.total = bank, column, total
        rows = _sampled_rows(bank, column)
        self.rows: Floats = rows
        self.sample: Floats = np.sort(rows, axis=None)

    def neighbours(self, rank: int) -> tuple[float, float]:
        """The entries of this rank and of the next (0 is the smallest)."""
        value, following = self.select(rank)
        if rank + 1 >= self.total:
            return value, value
        return value, self.select(rank + 1)[0] if following is None else following

    def select(self, rank: int) -> tuple[float, float | None]:
        """The entry of a rank, and of the next rank when the same pass shows it."""
        low, high, before, inside = -np.inf, np.inf, 0, self.total
        sample, margin = self.sample, self._margin(rank / self.total)
        while True:
            a, b = _bracket(sample, (rank - before) / inside, margin, low, high)
            to_a, below_b, kept, complete = self._pass(a, b)
            if to_a <= rank < below_b:
                if complete:
                    return _of_rank(kept, rank - to_a)
                low, high, before, inside, sample = a, b, to_a, below_b - to_a, np.sort(kept)
                margin = 2 / math.sqrt(len(sample))
                continue
            below_a, to_b = self._ties(a, b)
            for value, first, end in ((a, below_a, to_a), (b, below_b, to_b)):
                if first <= rank < end:
                    return value, value if rank + 1 < end else None
            low, high, before, end = (low, a, before, below_a) if rank < below_a else (b, high, to_b, before + inside)
            inside, margin = end - before, 4 * margin
            sample = sample[(sample > low) & (sample < high)]

    def _margin(self, share: float) -> float:
        """Four standard errors of the sample's share below a value; the entries of a row count as dependent."""
        value = self.sample[min(int(share * len(self.sample)), len(self.sample) - 1)]
        spread = float((self.rows <= value).mean(axis=1).std())
        return 4 * spread / math.sqrt(len(self.rows)) + 2 / len(self.sample)

    def _pass(self, a: float, b: float) -> tuple[int, int, Floats, bool]:
        """How many entries are ≤ a, how many are < b, those in between, and whether they are all there."""
        above_a, inside, stride, held = 0, 0, 1, 0
        kept: list[Floats] = []
        for x in self._blocks():
            xp = namespace(x)
            mask = x > a
            above_a += int(xp.count_nonzero(mask))
            mask &= x < b
            found = to_numpy(x[mask])
            inside += len(found)
            kept.append(found[::stride])
            held += len(kept[-1])
            if held > KEPT_ENTRIES:
                kept, stride = [np.concatenate(kept)[::2]], 2 * stride
                held = len(kept[0])
        to_a = self.total - above_a
        return to_a, to_a + inside, np.concatenate(kept), stride == 1

    def _ties(self, a: float, b: float) -> tuple[int, int]:
        """How many entries are < a, and how many are ≤ b."""
        below_a = to_b = 0
        for x in self._blocks():
            xp = namespace(x)
            below_a += int(xp.count_nonzero(x < a))
            to_b += int(xp.count_nonzero(x <= b))
        return below_a, to_b

    def _blocks(self) -> Iterator[Array]:
        return (on_host(real(block[self.column])) for block in cache_blocks(self.bank, self.column))


def _sampled_rows(bank: Bank, column: str) -> Floats:
    """One row drawn from each of many equal stretches of the bank (as rows × entries)."""
    width = int(np.prod(bank.row_shape(column), dtype=np.int64))
    count = min(len(bank), max(SAMPLE_ROWS, SAMPLE_ENTRIES // width))
    draws: npt.NDArray[np.float64] = np.random.default_rng(0).random(count)
    picked = ((np.arange(count) + draws) * (len(bank) / count)).astype(np.int64)
    found, start = [], 0
    for part in bank.parts:
        # Part by part: rows picked across parts would gather all of the parts first.
        mine = picked[(picked >= start) & (picked < start + len(part))] - start
        found.append(to_numpy(real(part.rows(mine)[column])).reshape(len(mine), width))
        start += len(part)
    return np.concatenate(found)


def _bracket(sample: Floats, share: float, margin: float, low: float, high: float) -> tuple[float, float]:
    """Values that probably enclose the entry at this share; the known bounds where the sample does not reach."""
    first, last = int(np.floor((share - margin) * len(sample))) - 1, int(np.ceil((share + margin) * len(sample))) + 1
    a = float(sample[first]) if 0 <= first < len(sample) else low
    b = float(sample[last]) if 0 <= last < len(sample) else high
    return a, b


def _of_rank(values: Floats, rank: int) -> tuple[float, float | None]:
    """The value of a rank, and of the next rank if there is one."""
    parted = np.partition(values, rank)
    rest = parted[rank + 1 :]
    return float(parted[rank]), float(rest.min()) if len(rest) else None

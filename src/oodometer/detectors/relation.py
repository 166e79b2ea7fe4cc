"""Similarity to all training rows that share the prediction."""

from __future__ import annotations

import weakref
from functools import partial
from types import ModuleType

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, double, namespace, slices, softmax, thread_map, to_numpy, unit
from oodometer.bank import Bank
from oodometer.derived import F64, QUERY_ROWS
from oodometer.detectors.base import Detector, detector, param

TILE_ROWS, TILE_KEYS = 512, 1024
"""A tile of the kernel is read four times: this one stays in a core's cache."""
ACCELERATOR_KEYS = 8192


@detector(
    "relation",
    needs={"features", "logits"},
    grid={"power": (1, 2, 4, 6, 8)},
    cite="kim2023relation",
    equation="−Σ_t k_t^power·1[k_t > .03], k_t = max(0, cos(h, h_t))·⟨p, p_t⟩",
    cost="search",
)
class Relation(Detector):
    """Neural relation graph: kernel sum over the training rows (Kim et al., NeurIPS 2023)."""

    rowwise = False
    power: float = param(1, "exponent of the kernel, applied after the threshold", low=0, open=True)
    threshold: float = param(0.03, "kernels up to this value do not count", low=0.0)

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        self.train_ = train

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        # Sums over parts add up: folds that share a part compare its rows once.
        return -sum(self._part_sums(part, bank, xp) for part in self.train_.parts)

    def _part_sums(self, part: Bank, bank: Bank, xp: ModuleType) -> F64:
        def compute() -> F64:
            return np.concatenate([self._sums(part, bank.rows(rows), xp) for rows in slices(len(bank), QUERY_ROWS)])

        return derived.remember(bank, ("relation", weakref.ref(part), self.power, self.threshold), compute)

    def _sums(self, part: Bank, query: Bank, xp: ModuleType) -> F64:
        q, p = self._keys(query)
        total = double(xp.zeros_like(q[:, 0]))
        if not isinstance(q, np.ndarray):
            for block in part.blocks(ACCELERATOR_KEYS):
                total = total + self._kernel_sum(q, p, *self._keys(block), xp)
            return to_numpy(total)
        tiles = [(q[rows], p[rows]) for rows in slices(len(q), TILE_ROWS)]
        with thread_map() as each:
            for block in part.blocks(TILE_KEYS):
                keys = self._keys(block)
                total += np.concatenate(each(partial(self._tile_sum, keys), tiles))
        return to_numpy(total)

    def _tile_sum(self, keys: tuple[Array, Array], tile: tuple[Array, Array]) -> Array:
        return self._kernel_sum(*tile, *keys, np)

    def _keys(self, bank: Bank) -> tuple[Array, Array]:
        h, z = derived.features(bank), derived.logits(bank)
        return unit(h, namespace(h)), softmax(z, namespace(z))

    def _kernel_sum(self, q: Array, p: Array, keys: Array, key_p: Array, xp: ModuleType) -> Array:
        kernel = q @ keys.T
        kernel *= p @ key_p.T
        # Below the threshold nothing counts, so negative cosines need no clipping of their own.
        counts = kernel > self.threshold
        kernel *= counts if isinstance(kernel, np.ndarray) else xp.astype(counts, kernel.dtype)
        return xp.sum(power_of(kernel, self.power), axis=1)


def power_of(x: Array, power: float) -> Array:
    """x to a power; whole ones by repeated products, many times cheaper than pow where most entries are zero."""
    if power != int(power):
        return x**power
    result, left = None, int(power)
    while True:
        if left & 1:
            result = x if result is None else result * x
        left >>= 1
        if not left:
            return result
        x = x * x

"""CADet's intra-similarity: how alike the features of several views of one image are."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import ClassVar

from oodometer.arrays import Array, double
from oodometer.bank import Bank
from oodometer.detectors.base import Detector, detector, param
from oodometer.errors import OodometerError

PRODUCTS = "views.products"
"""Rows × views × views: inner products of the features of each row's views."""


@detector(
    "cadet",
    needs={PRODUCTS},
    cite="guille2023cadet",
    equation="−Σ_{i≠j} ⟨h_i, h_j⟩ / (n(n − 1)), h_i the features of view i",
    variants={"broad": {}},
)
class CADet(Detector):
    """Mean inner product of the features of different views of one input (CADet's m_in; Guille-Escuret et al., 2023).

    BROAD's five views are random resized crops with flips, and their features are not normalised.
    """

    scored: ClassVar[Mapping[str, str]] = {PRODUCTS: "columns=[…, 'views.products']"}
    views: int | None = param(None, "how many of the stored views count (None: all)", low=2)
    normalise: bool = param(False, "cosines instead of inner products", choices=(True, False))

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        products = double(bank[PRODUCTS])
        n = self._count(tuple(products.shape))
        products = products[:, :n, :n]
        if self.normalise:
            lengths = xp.sqrt(xp.clip(xp.linalg.diagonal(products), min=0.0))
            scale = lengths[:, :, None] * lengths[:, None, :]
            products = products / xp.where(scale > 0, scale, xp.ones_like(scale))
        same = xp.sum(xp.linalg.diagonal(products), axis=-1)
        return -(xp.sum(products, axis=(1, 2)) - same) / (n * (n - 1))

    def _count(self, shape: tuple[int, ...]) -> int:
        if len(shape) != 3 or shape[1] != shape[2] or shape[1] < (self.views or 2):
            raise OodometerError(
                f"cadet: {PRODUCTS!r} must be rows × views × views with {self.views or 2} views or more; found "
                f"{shape}: extract it with {self.scored[PRODUCTS]}"
            )
        return self.views or shape[1]

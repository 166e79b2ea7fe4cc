"""Similarity to the stored pattern of the predicted class."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, double, like, norms, row_products
from oodometer.bank import Bank
from oodometer.derived import F64
from oodometer.detectors.base import Detector, detector, param, warn
from oodometer.errors import OodometerError


@detector(
    "she",
    needs={"features", "logits", "labels"},
    grid={"metric": ("inner_product", "euclidean", "cosine")},
    cite="zhang2023she",
    equation="−⟨h, m_ŷ⟩, ‖h − m_ŷ‖ or −cos(h, m_ŷ), m_c the mean feature of correctly classified training rows of c",
    cost="classes",
    variants={"openood": {}, "openmibood-tuned": {"metric": "cosine"}},
)
class SHE(Detector):
    """Simplified Hopfield energy: how well the feature fits its predicted class's pattern (Zhang et al., ICLR 2023).

    Beside a zero vector every cosine counts as 0.
    """

    metric: Literal["inner_product", "euclidean", "cosine"] = param(
        "inner_product", "how feature and pattern are compared", choices=("inner_product", "euclidean", "cosine")
    )
    empty: Literal["raise", "class_mean"] = param(
        "raise", "a class without correctly classified rows: refuse, or take the mean of all its rows",
        choices=("raise", "class_mean"),
    )  # fmt: skip

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        counts, means = derived.class_means(train, by="correct")
        missing = counts == 0
        if missing.any() and self.empty == "class_mean":
            rows, fallback = derived.class_means(train)
            warn(f"she: classes {_some(missing)} have no correctly classified training rows: using all their rows")
            means, missing = np.where(missing[:, None], fallback, means), rows == 0
        if missing.any():
            rows_of, mend = (
                ("training rows", "add rows of them, or drop them from the head")
                if self.empty == "class_mean"
                else ("correctly classified training rows", "add rows of them, or choose empty='class_mean'")
            )
            raise OodometerError(f"she: classes {_some(missing)} have no {rows_of}, so no pattern: {mend}")
        self.patterns_: F64 = means
        self.exact_ = derived.is_small(train)

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        h = double(derived.features(bank)) if self.exact_ else derived.features(bank)
        pattern = xp.take(like(self.patterns_, h), xp.argmax(derived.logits(bank), axis=-1), axis=0)
        if self.metric == "euclidean":
            return norms(h - pattern, xp)
        product = row_products(h, pattern, xp)
        if self.metric == "inner_product":
            return -product
        length = norms(h, xp) * norms(pattern, xp)
        return -product / xp.where(length > 0, length, xp.ones_like(length))


def _some(missing: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> str:
    """The first few class numbers."""
    found = np.flatnonzero(missing)
    return ", ".join(map(str, found[:5])) + (f" … ({len(found)} in all)" if len(found) > 5 else "")

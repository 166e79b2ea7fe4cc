"""AdaScale: activations or logits rescaled by a percentile that each row's stability under a perturbation chooses."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import ClassVar, Literal

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, Floats, Ints, double, kth_largest, like, namespace, real, to_numpy
from oodometer.bank import Bank
from oodometer.derived import F64
from oodometer.detectors.base import CalibrationRows, Detector, detector, param, warn
from oodometer.detectors.quantiles import on_host
from oodometer.detectors.shaping import (
    end_scores,
    factors,
    kept_count,
    oddities,
    rescaled_energy,
    row_sums,
    top_mask,
    without_bias,
)
from oodometer.errors import OodometerError

MOVED = "features.adascale"
"""Features of the input after its least important entries were moved (rows × features)."""
SIDES = (60, 65, 70, 75, 80, 85, 90, 95, 99)
PAIRS = tuple((low, high) for low in SIDES for high in SIDES if low < high)


@detector(
    "adascale",
    needs={"features", "head", MOVED},
    grid={"percentiles": PAIRS},
    cite="regmi2025adascale",
    equation="−log Σ_c exp z_c, z = W·h·exp(s) + b, s = Σh/Σ_{top k} h, k by the rank of Q' among validation rows",
    cost="head",
    aliases=("adascale-a",),
    variants={"adascale-a": {}, "adascale-l": {"variant": "l"}, "openood": {"bank": "val"}},
)
class AdaScale(Detector):
    """SCALE with a percentile of its own for every row (AdaScale; Regmi, 2025).

    Q is how far the k₂ % largest features move when the input's least important entries do, Q' = λQ plus the moved
    values of the k₁ % largest. Rows whose Q' is large among the validation rows get a low percentile. Variant "a"
    scales the activations by exp(s), "l" the logits by s².
    """

    rowwise = False
    scored: ClassVar[Mapping[str, str]] = {MOVED: "columns=[…, 'features.adascale']"}
    variant: Literal["a", "l"] = param("a", "what is scaled: the activations or the logits", choices=("a", "l"))
    percentiles: tuple[float, float] = param((75.0, 85.0), "the smallest and the largest percentile of pruning")
    k1: float = param(5.0, "percent of the features whose moved values count in Q'", low=0.0, high=100.0, open=True)
    k2: float = param(1.0, "percent of the features whose shift counts in Q", low=0.0, high=100.0, open=True)
    lam: float = param(10.0, "weight λ of Q in Q'", low=0.0)
    samples: int | None = param(5000, "how many rows the distribution of Q' is taken from (None: all)", low=1)
    seed: int = param(0, "of those rows", low=0)
    bank: CalibrationRows = param(
        "auto", "rows Q' is compared with; auto: validation rows when given", choices=("auto", "train", "val")
    )

    def check_params(self) -> None:
        super().check_params()
        pair = tuple(self.percentiles)
        if (
            len(pair) != 2
            or not all(isinstance(p, int | float | np.number) for p in pair)
            or not 0 < pair[0] <= pair[1] < 100
        ):
            raise OodometerError(
                f"adascale: percentiles must be two numbers with 0 < low ≤ high < 100, e.g. (75, 85); found {pair!r}"
            )

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        if MOVED not in train.columns:
            raise self._missing(train, MOVED, "calibration")
        width = train.row_shape("features")[0]
        kept_count(width, self.percentiles[1], "adascale")
        # At least one: 1 percent of fewer than 100 features rounds down to none.
        self.counts_ = max(1, int(width * self.k1 / 100)), max(1, int(width * self.k2 / 100))
        if self.samples is not None and self.samples < len(train):
            picked = np.random.default_rng(self.seed).choice(len(train), self.samples, replace=False)
            train = train.rows(np.sort(picked))
        self.stability_ = np.sort(np.concatenate([self._stability(block) for block in train.blocks()]))

    def _stability(self, block: Bank) -> F64:
        """Q' = Σ_{top k₁} relu(h') + λ Σ_{top k₂} |h − h'|, the largest by h."""
        h, moved = on_host(derived.features(block)), on_host(real(block[MOVED]))
        xp = namespace(h)
        shown = row_sums(xp.where(_top(h, self.counts_[0], xp), xp.clip(moved, min=0), 0.0), xp)
        shift = row_sums(xp.where(_top(h, self.counts_[1], xp), xp.abs(h - moved), 0.0), xp)
        return shown + self.lam * shift

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        scores, sums = [], []
        for block in bank.blocks():
            found, pair = self._of_block(block)
            scores.append(found)
            sums.append(pair)
        told = oddities("adascale", sums)
        if told:
            warn(told)
        return np.concatenate(scores)

    def _of_block(self, block: Bank) -> tuple[F64, tuple[F64, F64]]:
        assert block.head is not None, "the door has refused a bank without a head"
        h = on_host(derived.features(block))
        total, kept = relu_sums(to_numpy(h), self._kept_counts(block, h.shape[-1]))
        product = without_bias(h, block.head)
        if self.variant == "a":
            return rescaled_energy(product, factors(total, kept), block.head), (total, kept)
        s = np.divide(total, kept, out=np.ones_like(total), where=kept > 0)
        z = double(product) + like(to_numpy(block.head.bias), double(product))
        return to_numpy(end_scores(z * like(s * s, z)[:, None], "energy")), (total, kept)

    def _kept_counts(self, block: Bank, width: int) -> Ints:
        """k = D − round(D·q/100) of each row, halves to even; q falls with the row's place among the fitted Q'."""
        low, high = self.percentiles
        share = np.searchsorted(self.stability_, self._stability(block), side="right") / len(self.stability_)
        percentile = low + (1 - share) * (high - low)
        return width - np.round(width * percentile / 100).astype(np.int64)


def relu_sums(h: Floats, counts: Ints) -> tuple[F64, F64]:
    """Σ relu(h) of each row, and the sum of so many of its largest entries."""
    summed = np.cumsum(np.sort(np.maximum(h, 0), axis=-1)[:, ::-1], axis=-1, dtype=np.float64)
    return summed[:, -1], summed[np.arange(len(h)), counts - 1]


def _top(h: Array, count: int, xp: ModuleType) -> Array:
    """Where the largest entries of each row are; of equal ones the first count."""
    return top_mask(h, count, kth_largest(h, count, xp), xp)

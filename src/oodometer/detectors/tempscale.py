"""Temperature scaling: the softmax of logits divided by a temperature fitted on labelled rows."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, block_rows, double, like, softmax, take_columns
from oodometer.bank import Bank
from oodometer.detectors.base import CalibrationRows, Detector, detector, param, warn
from oodometer.detectors.logits import max_softmax
from oodometer.errors import OodometerError
from oodometer.temperature import HIGH, LOW, bank_temperature


@detector(
    "tempscale",
    needs={"logits", "labels"},
    cite="guo2017calibration",
    equation="−max_c softmax(z/T*)_c, T* = argmin_T of the mean negative log-likelihood of the labels",
    aliases=("temperature_scaling",),
    variants={
        "openood": {"solver": "lbfgs50", "init": 1.5, "bank": "val"},
        "openmibood": {"solver": "lbfgs50", "init": 1.5, "bank": "val"},
        "pytorch-ood": {"solver": "lbfgs50", "init": 1.0},
    },
)
class TempScale(Detector):
    """Maximum softmax probability at the fitted temperature (Guo et al., ICML 2017).

    The exact solver finds the minimum; `lbfgs50` stops after fifty short L-BFGS steps from `init`, as published code
    does, which is often far from it.
    """

    solver: Literal["exact", "lbfgs50"] = param(
        "exact", "the minimum, or where fifty L-BFGS steps of length .01 end", choices=("exact", "lbfgs50")
    )
    init: float = param(1.5, "where lbfgs50 starts (the exact minimum needs no start)", low=0.0, open=True)
    bank: CalibrationRows = param("auto", "rows the temperature is fitted on", choices=("auto", "train", "val"))

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        if self.solver == "exact":
            self.temperature_ = exact_temperature(train, "tempscale")
        else:
            self.temperature_ = lbfgs_temperature(train, self.init)

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return -max_softmax(derived.logits(bank) / self.temperature_, xp)


def exact_temperature(bank: Bank, owner: str) -> float:
    """The temperature of least loss, with a warning where the loss still falls at the bound."""
    found = bank_temperature(bank)
    if found in (LOW, HIGH):
        side = "below" if found == LOW else "above"
        warn(
            f"{owner}: the loss of the {len(bank)} calibration rows has no minimum inside [{LOW:g}, {HIGH:g}] and "
            f"still falls {side}: T={found:g} is the bound (are all rows correct, or labels at odds with logits?)"
        )
    return found


def lbfgs_temperature(bank: Bank, init: float) -> float:
    """Where torch.optim.LBFGS(lr=.01, max_iter=50) leaves a float32 temperature: fifty short steps, not converged.

    In one dimension L-BFGS is the secant method: the newest pair of step and change of slope decides alone.
    """
    t, inverse_curvature = np.float32(init), np.float32(1)
    loss, slope = _loss_and_slope(bank, init)
    if abs(slope) <= 1e-7:
        return float(t)
    for n in range(50):
        direction = -slope * inverse_curvature
        step = np.float32(0.01) * direction * (min(np.float32(1), 1 / abs(slope)) if n == 0 else np.float32(1))
        if slope * direction > -1e-9:
            break
        t = t + step
        _check_positive(float(t), init)
        old_loss, old_slope = loss, slope
        loss, slope = _loss_and_slope(bank, float(t))
        if abs(slope) <= 1e-7 or abs(step) <= 1e-9 or abs(loss - old_loss) < 1e-9:
            break
        change = slope - old_slope
        if change * step > 1e-10:
            inverse_curvature = step / change
    return float(t)


def _check_positive(temperature: float, init: float) -> None:
    if not 0 < temperature < np.inf:
        raise OodometerError(
            f"tempscale: fifty L-BFGS steps from init={init:g} reach T={temperature:g}, which is no temperature: "
            "choose solver='exact', which stays positive, or another init"
        )


def _loss_and_slope(bank: Bank, temperature: float) -> tuple[np.float32, np.float32]:
    """Mean loss of the labels and its derivative in T, rounded to float32."""
    loss = slope = 0.0
    start, labels = 0, derived.labels(bank)
    for block in bank.blocks(block_rows(16 * bank.classes, cpu=bank.on_cpu)):
        xp = block.xp
        z = double(derived.logits(block)) / temperature
        z = z - xp.max(z, axis=-1, keepdims=True)
        target = take_columns(z, like(labels[start : start + len(block)], z), xp)
        p = softmax(z, xp)
        loss += float(xp.sum(xp.log(xp.sum(xp.exp(z), axis=-1)) - target))
        # d/dT log Σ exp(z_c/T) − z_y/T = (z_y − Σ p_c z_c)/T², of logits already divided by T.
        slope += float(xp.sum(target - xp.sum(p * z, axis=-1))) / temperature
        start += len(block)
    return np.float32(loss / len(bank)), np.float32(slope / len(bank))

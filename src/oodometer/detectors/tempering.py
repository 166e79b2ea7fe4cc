"""Any detector of the logits at a fitted temperature, as a composition: `tempered(detector)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from types import ModuleType
from typing import Any

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, real, to_numpy
from oodometer.bank import Bank, Head
from oodometer.detectors.base import CalibrationRows, Detector, create, detector, param
from oodometer.detectors.logits import Energy
from oodometer.detectors.tempscale import exact_temperature
from oodometer.errors import OodometerError


def tempered(detector: Detector | str, *, bank: CalibrationRows = "auto") -> Tempered:
    """The detector at the temperature of least loss.

    >>> tempered("energy").fit(train, val=val).score(test)
    >>> tempered(create("gen", gamma=0.5), bank="train")
    """
    return Tempered(detector=create(detector) if isinstance(detector, str) else detector, bank=bank)


def innermost(detector: Detector) -> Detector:
    """The detector inside all compositions."""
    inner = getattr(detector, "detector", None)
    return innermost(inner) if isinstance(inner, Detector) else detector


def check_inner(outer: Detector, inner: Any) -> None:
    """Refuse what is no detector, and an inner detector whose hyperparameters are refused."""
    if not isinstance(inner, Detector):
        raise OodometerError(
            f"{outer.card.name}: detector must be a detector, e.g. create('energy'); found {inner!r}. "
            f"create({outer.card.name!r}, detector=…) also takes its name"
        )
    inner.check_params()


@detector(
    "tempered",
    needs={"logits", "labels"},
    cite="guo2017calibration",
    equation="S(z/T*, W/T*, b/T*), T* = argmin_T of the mean negative log-likelihood of the labels",
)
class Tempered(Detector):
    """Any detector of the logits, at the temperature that fits them best (Guo et al., ICML 2017).

    The inner detector sees logits and head divided by the fitted temperature, both where it is fitted and where it
    scores. Projected features have a temperature of their own: `projected(tempered(detector))` fits it on the
    projected logits, `tempered(projected(detector))` on the plain ones.
    """

    rowwise = False
    detector: Detector = field(default_factory=Energy, metadata={"doc": "the score of logits that is tempered"})
    bank: CalibrationRows = param("auto", "rows the temperature is fitted on", choices=("auto", "train", "val"))

    @property
    def needs(self) -> frozenset[str]:
        return self.card.needs | self.detector.needs

    @property
    def grid(self) -> Mapping[str, tuple[Any, ...]]:
        return {f"detector__{name}": values for name, values in self.detector.grid.items()}

    def check_params(self) -> None:
        super().check_params()
        check_inner(self, self.detector)
        if not any(_scales_with_temperature(need) for need in self.detector.needs):
            raise OodometerError(
                f"tempered: {self.detector.card.name} reads {', '.join(sorted(self.detector.needs))}, which no "
                "temperature divides: use it as it is, or temper a detector of the logits, e.g. create('energy')"
            )

    def _fit_on(self, train: Bank, val: Bank | None) -> None:
        rows = derived.with_logits(self._fitting_rows(train, val))
        self.temperature_ = exact_temperature(rows, "tempered")
        self.detector_ = self.detector.clone()
        if self.detector_.is_fitted_needed:
            self.detector_.fit(self._shared(train), val=None if val is None else self._shared(val))

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        blocks = bank.blocks() if innermost(self.detector_).rowwise else [bank]
        return np.concatenate([self.detector_._score_all(scaled(block, self.temperature_)) for block in blocks])

    def _shared(self, bank: Bank) -> Bank:
        """The scaled bank, one for all detectors of the same temperature: what they derive from it is shared."""
        t = self.temperature_
        return derived.remember(bank, ("tempered", t), lambda: scaled(derived.with_logits(bank), t))


def _scales_with_temperature(column: str) -> bool:
    return column in ("logits", "head") or column.startswith("logits.")


def scaled(bank: Bank, temperature: float) -> Bank:
    """The bank with its logits and its head divided by a temperature."""
    head = bank.head and Head(to_numpy(bank.head.weight) / temperature, to_numpy(bank.head.bias) / temperature)
    return Bank.concat([_scaled_part(part, temperature, head) for part in bank.parts])


def _scaled_part(part: Bank, temperature: float, head: Head | None) -> Bank:
    columns = {name: real(part[name]) / temperature for name in part.columns if _scales_with_temperature(name)}
    # The old head would be compared with the new logits.
    bare = part.with_head(None)
    return (bare.with_columns(**columns) if columns else bare).with_head(head)

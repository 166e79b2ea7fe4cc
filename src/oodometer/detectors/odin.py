"""ODIN and iODIN: softmax at a high temperature of inputs moved towards their predicted class."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from oodometer.arrays import Array, double
from oodometer.bank import Bank
from oodometer.detectors.base import Detector, detector, param
from oodometer.detectors.logits import max_softmax
from oodometer.errors import OodometerError

ODIN_LOGITS, IODIN_LOGITS = "logits.odin", "logits.iodin"
"""Rows × settings × classes: the logits at x' for each temperature and, within it, each ε of the extraction."""
GRID = {"temperature": (1.0, 10.0, 100.0, 1000.0), "epsilon": (0.0014, 0.0028)}

Setting = tuple[float, ...]


def of_setting(bank: Bank, column: str, names: Sequence[str], wanted: Setting) -> Array:
    """The entry of a column (rows × settings × …) that was extracted with these values.

    Which settings a column holds, and in what order, is in the bank's provenance: lists of values by name, whose
    combinations follow each other with the last name varying fastest. A column of one setting needs none of that.
    """
    values = bank[column]
    if values.ndim < 3:
        raise OodometerError(f"{column!r} must be rows × settings × …; found shape {tuple(values.shape)}")
    known = _settings(bank.provenance, column, names)
    if known is None and values.shape[1] == 1:
        return values[:, 0, ...]
    if known is None or len(known) != values.shape[1]:
        raise OodometerError(
            f"{column!r} holds {values.shape[1]} settings and the bank's provenance names "
            f"{'none' if known is None else len(known)}: extract it again, or store one setting a bank"
        )
    if wanted not in known:
        here = "; ".join(_shown(names, setting) for setting in known)
        ask = ",".join(f"{name}={value:g}" for name, value in zip(names, wanted, strict=True))
        raise OodometerError(
            f"{column!r} was not extracted with {_shown(names, wanted)}; it has {here}: choose one of these, or "
            f"extract with columns=[…, '{column}:{ask}']"
        )
    return values[:, known.index(wanted), ...]


def _settings(provenance: Mapping[str, Any], column: str, names: Sequence[str]) -> list[Setting] | None:
    columns = provenance.get("extraction", {}).get("columns", ())
    told = [entry for entry in columns if isinstance(entry, Mapping)]
    entry = next((entry for entry in told if entry.get("name") == column), None)
    if entry is None or not set(names) <= set(entry):
        return None
    return list(itertools.product(*(tuple(map(float, entry[name])) for name in names)))


def _shown(names: Sequence[str], setting: Setting) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in zip(names, setting, strict=True))


def _score(bank: Bank, column: str, temperature: float, epsilon: float) -> Array:
    setting = (float(temperature), float(epsilon))
    z = of_setting(bank, column, ("temperatures", "epsilons"), setting) if epsilon else bank.logits
    # At T = 1000 all scores agree in their first digits.
    return -max_softmax(double(z) / temperature, bank.xp)


TEMPERATURE = "divides the logits, in the gradient's loss and in the softmax"
EPSILON = "how far inputs move, in units before the preprocessing divides by σ (0: not at all, the plain logits)"


@detector(
    "odin",
    needs={ODIN_LOGITS},
    grid=GRID,
    cite="liang2018odin",
    equation="−max_c softmax(z(x')/T)_c, x' = x − ε·sign(∇_x CE(z(x)/T, ŷ))/σ",
)
class ODIN(Detector):
    """Tempered softmax of inputs moved so that the predicted class gains (Liang et al., ICLR 2018).

    Extraction stores the logits of the moved inputs for each temperature and ε it is asked for. With ε = 0 nothing
    moves, and every temperature is scored from the plain logits.
    """

    scored: ClassVar[Mapping[str, str]] = {
        ODIN_LOGITS: "columns=[…, 'logits.odin:temperatures=(1,10,100,1000),epsilons=(0.0014,0.0028)']"
    }
    temperature: float = param(1000.0, TEMPERATURE, low=0.0, high=np.inf, open=True)
    epsilon: float = param(0.0014, EPSILON, low=0.0)

    @property
    def needs(self) -> frozenset[str]:
        return self.card.needs if self.epsilon else frozenset({"logits"})

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return _score(bank, ODIN_LOGITS, self.temperature, self.epsilon)


@detector(
    "iodin",
    needs={IODIN_LOGITS},
    grid=GRID,
    cite="zhang2023openood",
    equation="−max_c softmax(z(x')/T)_c, x' = x but for its entry of largest |∇_x CE|, moved by ε/σ",
)
class IODIN(Detector):
    """ODIN that moves only the entry of the input with the largest gradient (OpenOOD's iODIN)."""

    scored: ClassVar[Mapping[str, str]] = {
        IODIN_LOGITS: "columns=[…, 'logits.iodin:temperatures=1000,epsilons=0.0014']"
    }
    temperature: float = param(1000.0, TEMPERATURE, low=0.0, high=np.inf, open=True)
    epsilon: float = param(0.0014, EPSILON, low=0.0)

    @property
    def needs(self) -> frozenset[str]:
        return self.card.needs if self.epsilon else frozenset({"logits"})

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return _score(bank, IODIN_LOGITS, self.temperature, self.epsilon)

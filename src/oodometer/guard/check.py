"""What a guard does to fresh rows, against what it promised."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from oodometer.bank import Bank
from oodometer.errors import OodometerError, OodometerWarning
from oodometer.metrics import Interval, wilson

if TYPE_CHECKING:
    from oodometer.guard.guard import Guard

BROKEN = 0.01
"""A promise counts as broken where so many false alarms, or more, had at most this probability."""


@dataclass(frozen=True)
class Errors:
    """The share of wrong decisions on one data set, with its interval, under one name of a rule."""

    rule: str
    rows: int
    share: Interval


@dataclass(frozen=True)
class Check:
    """FPR on ID rows and FNR on OOD sets, all at the guard's one threshold."""

    threshold: float
    promised: float | None
    """The FPR that was promised; None if the threshold came from OOD rows."""
    fpr: Errors
    fnr: Mapping[str, Errors]
    p_value: float | None
    """The probability of so many false alarms or more if the promise holds."""
    level: float = 0.95
    """Confidence level of the intervals."""

    @property
    def kept(self) -> bool:
        """Whether the false alarms can be reconciled with the promise."""
        return self.p_value is None or self.p_value > BROKEN

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "kept": self.kept}

    def __str__(self) -> str:
        lines = [f"{'':<20} {'rule':<12} {'rows':>8}  {'error':<11}  {100 * self.level:g} % interval"]
        for name, kind, one in [("in distribution", "FPR", self.fpr), *((n, "FNR", e) for n, e in self.fnr.items())]:
            span = f"{100 * one.share.value:6.2f} %  [{100 * one.share.low:.2f}, {100 * one.share.high:.2f}]"
            lines.append(f"{name:<20} {one.rule:<12} {one.rows:>8,}  {kind} {span}")
        return "\n".join([*lines, self.verdict])

    @property
    def verdict(self) -> str:
        """One sentence on the promise."""
        if self.promised is None or self.p_value is None:
            return "The threshold came from OOD rows: no FPR was promised."
        word = "agrees with" if self.kept else "BREAKS"
        return f"The FPR {word} the promise of at most {100 * self.promised:.4g} % ({p_text(self.p_value)})."


def p_text(p: float) -> str:
    """A p-value as a reader wants it."""
    return "p < 0.0001" if p < 0.0001 else f"p = {p:.2g}"


def need_bank(value: Any, role: str) -> None:
    """Refuse anything but a bank, by its role."""
    if not isinstance(value, Bank):
        raise OodometerError(
            f"guard: the {role} rows must be a Bank, found {type(value).__name__}: "
            "wrap arrays as oodometer.Bank(features=…, logits=…, labels=…, head=Head(W, b))"
        )


def check_guard(guard: Guard, id_bank: Bank, ood: Mapping[str, Bank], *, level: float) -> Check:
    """Decide on every bank once. Nothing is chosen here: the threshold is the guard's."""
    known = {digest: role for role, digest in guard.facts["fingerprints"].items()}
    for name, bank in [("ID", id_bank), *ood.items()]:
        need_bank(bank, name)
        if not len(bank):
            raise OodometerError(f"guard: the {name} bank has no rows: a share of errors needs at least one")
    used = known.get(id_bank.fingerprint)
    if used is not None:
        warnings.warn(
            f"guard: the ID rows are those of the {used} bank, on which the guard was made: their FPR is no "
            "measurement of new rows",
            OodometerWarning,
            stacklevel=3,
        )
    rule = _rule_name(guard.facts)
    false_alarms, n = int(guard(id_bank).decision.sum()), len(id_bank)
    fnr = {}
    for name, bank in ood.items():
        missed = int((~guard(bank).decision).sum())
        own = known.get(bank.fingerprint) == "ood_validation"
        fnr[name] = Errors("@test" if own else rule, len(bank), wilson(missed, len(bank), level=level))
    promised = None if guard.facts["rule"] == "val" else guard.calibration.rate
    return Check(
        threshold=guard.threshold,
        promised=promised,
        fpr=Errors(rule, n, wilson(false_alarms, n, level=level)),
        fnr=fnr,
        p_value=None if promised is None else _surprise(guard, false_alarms, n),
        level=level,
    )


def _surprise(guard: Guard, false_alarms: int, n: int) -> float:
    """P(so many or more): beta-binomial, as the threshold's own FPR varies with the calibration rows."""
    from scipy.stats import betabinom

    tail = guard.calibration.tail
    law = betabinom(n, tail, guard.calibration.rows + 1 - tail)
    return min(1.0, float(law.pmf(np.arange(false_alarms, n + 1)).sum()))


def _rule_name(facts: Mapping[str, Any]) -> str:
    if facts["rule"] == "conformal":
        return f"@alpha={facts['alpha']:g}"
    return f"@{100 * facts['tnr']:g}TNR" if facts["rule"] == "tnr" else "@val"

"""A fitted detector with its threshold: fit, decide, check, save and load."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from oodometer import __version__
from oodometer.arrays import is_array, real, to_numpy
from oodometer.bank import Bank
from oodometer.derived import F64
from oodometer.detectors import Detector, create
from oodometer.errors import NotFittedError, OodometerError, OodometerWarning
from oodometer.guard import folder, state
from oodometer.guard.calibration import Calibration, Rule, calibrate, check_rule
from oodometer.guard.check import Check, check_guard, need_bank
from oodometer.guard.stream import Stream

SCORES = "calibration scores"
"""The name of the sorted calibration scores among a guard's arrays; no attribute has a blank in its name."""


class Decisions(NamedTuple):
    """One of each a row, or (for a single row) plain numbers; `decision` is True for out of distribution."""

    decision: Any
    score: Any
    p_value: Any


@dataclass(frozen=True, eq=False, repr=False)
class Guard:
    """A detector that decides: scores above a threshold chosen on calibration rows are out of distribution.

    >>> guard = Guard.fit("knn", train, calibration, alpha=0.05)
    >>> decision, score, p_value = guard(features=h, logits=z)
    >>> guard.save("guard"); Guard.load("guard").check(test, {"textures": other})
    """

    detector: Detector
    calibration: Calibration
    facts: Mapping[str, Any]
    """What was fitted, on what, when, and what was chosen."""

    # ------------------------------------------------------------------------------------------ fit

    @classmethod
    def fit(
        cls,
        detector: Detector | str,
        train: Bank,
        calibration: Bank,
        *,
        alpha: float = 0.05,
        rule: Rule = "conformal",
        tnr: float = 0.95,
        val: Bank | None = None,
        ood_validation: Bank | None = None,
    ) -> Self:
        """Fit a copy of the detector on `train` (and `val`, where it calibrates itself) and choose its threshold.

        `rule="conformal"`: a new ID row is flagged with probability at most `alpha`, whatever the detector, provided
        it is exchangeable with the calibration rows, which nothing else may have seen. `rule="tnr"`: the threshold
        keeps the share `tnr` of the calibration rows (@95TNR). `rule="val"`: as many errors on the calibration rows
        as on an OOD validation set (@val); such a threshold promises nothing about either.
        """
        check_rule(rule, alpha, tnr)
        if (rule == "val") != (ood_validation is not None):
            raise OodometerError(
                "guard: rule='val' chooses the threshold on an OOD validation set: pass ood_validation=Bank(…)"
                if rule == "val"
                else f"guard: ood_validation is read by rule='val' alone, and the rule is {rule!r}: leave one out"
            )
        maybe = {"val": val, "ood_validation": ood_validation}
        given = {"train": train, "calibration": calibration} | {k: v for k, v in maybe.items() if v is not None}
        for role, bank in given.items():
            need_bank(bank, role)
        fresh = create(detector) if isinstance(detector, str) else detector.clone()
        # The threshold is chosen with exactly what will be saved: host memory, and no column that is not read.
        fitted = state.decode(*state.encode(fresh.fit(train, val=val)))
        scores = {role: fitted.score(_on_host(bank)) for role, bank in given.items() if role not in ("train", "val")}
        chosen = calibrate(scores["calibration"], rule, alpha=alpha, tnr=tnr, ood_scores=scores.get("ood_validation"))
        _warn_of_shared_rows(calibration, {"train": train, "val": val})
        share = {"tnr": tnr} if rule == "tnr" else {"alpha": alpha}
        return cls(fitted, chosen, _facts(fitted, chosen, {"rule": rule, **share}, given))

    # ------------------------------------------------------------------------------------------ use

    @property
    def threshold(self) -> float:
        """Rows that score more are flagged."""
        return self.calibration.threshold

    def __call__(self, bank: Bank | None = None, /, **columns: Any) -> Decisions:
        """Decide on a bank, on arrays of rows, or (arrays without the rows' axis) on a single row.

        >>> guard(features=h)                            # n rows
        >>> guard(features=h[0]).decision                # one row: True or False
        >>> guard(**{"features": h, "layers.0": x})
        """
        if bank is None:
            columns, single = self._rows_of(columns)
            scores = self.score(Bank(columns))
        elif columns:
            raise OodometerError("guard: pass a Bank or arrays by column name, not both")
        else:
            scores, single = self.score(bank), False
        found = Decisions(scores > self.threshold, scores, self.calibration.p_values(scores))
        return Decisions(*(values[0].item() for values in found)) if single else found

    def score(self, bank: Bank) -> F64:
        """The detector's scores of a bank, of arrays on any device."""
        if not isinstance(bank, Bank):
            raise OodometerError(
                f"guard: a Bank or arrays by column name were needed, found {type(bank).__name__}: "
                "call guard(features=…, logits=…)"
            )
        return self.detector.score(_on_host(bank))

    def stream(self, *, delta: float = 0.01, window: int = 1000) -> Stream:
        """Decisions batch by batch, with a running alarm rate and a verdict on the stream itself."""
        return Stream(self, delta=delta, window=window)

    def check(self, id_bank: Bank, ood: Mapping[str, Bank] | None = None, *, level: float = 0.95) -> Check:
        """Errors on fresh rows against what was promised: the FPR of ID rows, the FNR of every OOD set."""
        return check_guard(self, id_bank, ood or {}, level=level)

    def _rows_of(self, columns: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """The columns with an axis of rows, and whether it had to be added."""
        if not columns:
            raise OodometerError(f"guard: no columns were given; {self.detector.card.name} reads {self._reads}")
        arrays = {name: value if is_array(value) else np.asarray(value) for name, value in columns.items()}
        shapes: dict[str, tuple[int, ...]] = dict(getattr(self.detector, "shapes_", {}))
        head = getattr(self.detector, "head_", None)
        if head is not None:
            shapes.setdefault("logits", (head.classes,))
        added = {name: array.ndim - len(shapes[name]) for name, array in arrays.items() if name in shapes}
        for name, axes in added.items():
            if axes not in (0, 1) or tuple(arrays[name].shape[axes:]) != shapes[name]:
                raise OodometerError(
                    f"guard: column {name!r} has shape {tuple(arrays[name].shape)}; rows of shape {shapes[name]} were "
                    "fitted on, and one row or an array of rows is needed"
                )
        if len(set(added.values())) > 1:
            raise OodometerError(f"guard: some columns hold one row and others many: {_shapes(arrays)}")
        single = 0 in added.values()
        return ({name: array[None, ...] for name, array in arrays.items()} if single else arrays), single

    @property
    def _reads(self) -> str:
        return ", ".join(sorted(self.detector.needs - {"labels", "head"})) or "nothing"

    def __repr__(self) -> str:
        facts = self.facts
        chosen = {"conformal": "alpha", "tnr": "tnr"}.get(facts["rule"])
        share = f", {chosen}={facts[chosen]:g}" if chosen else ""
        return (
            f"Guard({self.detector!r}, rule={facts['rule']!r}{share}: out of distribution above "
            f"{self.threshold:.6g}, from {self.calibration.rows:,} calibration rows)"
        )

    # ------------------------------------------------------------------------------------------ disk

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write one folder (JSON and safetensors, no pickle), complete or not at all."""
        path = Path(path)
        tree, arrays = state.encode(self.detector)
        saved = folder.Saved(
            schema=folder.SCHEMA,
            version=__version__,
            facts=dict(self.facts),
            threshold=self.threshold,
            tail=self.calibration.tail,
            detector=tree,
            bytes=0,
            sha256="",
        )
        folder.write(path, saved, {**arrays, SCORES: self.calibration.scores}, overwrite=overwrite)
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, verify: bool = True) -> Self:
        """Read a saved guard. `verify=False` skips the checksum of the arrays, for very large training banks.

        Training rows that a search needs are memory-mapped: processes that load the same guard share them.
        """
        saved, arrays = folder.read(Path(path), verify=verify)
        try:
            scores = np.array(arrays.pop(SCORES))
            fitted = state.decode(saved.detector, arrays)
        except (OodometerError, KeyError, TypeError, ValueError) as error:
            raise OodometerError(
                f"{path}: the detector {saved.detector.name!r} cannot be restored: {error}. It was saved by oodometer "
                f"{saved.version}, this is {__version__}; a detector of your own must be imported before it is loaded"
            ) from None
        if fitted.is_fitted_needed and not fitted.is_fitted:
            raise NotFittedError(f"{path} holds a detector that is not fitted: fit the guard again")
        if saved.version != __version__:
            warnings.warn(
                f"{path} was saved by oodometer {saved.version}, this is {__version__}: check that its scores are "
                "still those it was calibrated with (oodometer guard check)",
                OodometerWarning,
                stacklevel=2,
            )
        return cls(fitted, Calibration(scores, saved.threshold, saved.tail), saved.facts)


def _facts(
    detector: Detector, chosen: Calibration, rule: Mapping[str, Any], given: Mapping[str, Bank]
) -> dict[str, Any]:
    return {
        "detector": repr(detector),
        "needs": sorted(detector.needs - {"labels"}),
        **rule,
        "threshold": chosen.threshold,
        "expected_rate": chosen.rate,
        "n_calibration": chosen.rows,
        "rows": {role: len(bank) for role, bank in given.items()},
        "fingerprints": {role: bank.fingerprint for role, bank in given.items()},
        "fitted": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"oodometer": __version__, "numpy": np.__version__},
    }


def _on_host(bank: Bank) -> Bank:
    return bank if isinstance(bank.rows(slice(0, 0))[bank.columns[0]], np.ndarray) else bank.to("numpy")


def _shapes(arrays: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}{list(array.shape)}" for name, array in arrays.items())


# ---------------------------------------------------------------------------------------------- rows seen twice


def _warn_of_shared_rows(calibration: Bank, fitted: Mapping[str, Bank | None]) -> None:
    """A row that was fitted on scores lower than a new one: thresholds from such rows flag too much."""
    for role, bank in fitted.items():
        count = 0 if bank is None else _shared_rows(calibration, bank)
        if count:
            warnings.warn(
                f"guard: {count:,} of {len(calibration):,} calibration rows are rows of the {role} bank too: the "
                "promise holds for rows that nothing was fitted on. Calibrate on others",
                OodometerWarning,
                stacklevel=3,
            )


def _shared_rows(some: Bank, others: Bank) -> int:
    """How many rows of one bank are rows of another, by the widest column they share."""
    shared = [name for name in some.columns if name in others.columns and name != "labels" and some.row_shape(name)]
    if not shared:
        return 0
    usual = [name for name in ("features", "logits") if name in shared]
    widest = max(usual or shared, key=lambda name: int(np.prod(some.row_shape(name))))
    known = set().union(*_row_hashes(others, widest))
    return sum(key in known for block in _row_hashes(some, widest) for key in block)


def _row_hashes(bank: Bank, column: str) -> Any:
    for block in bank.blocks():
        rows: npt.NDArray[Any] = to_numpy(real(block[column]))
        yield [hash(row.tobytes()) for row in rows]

"""Scores of Monte-Carlo dropout: many stochastic passes of one network, stored as the column `logits.mcd`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Literal

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, double, like, log_softmax, logsumexp, namespace, take_columns, to_numpy
from oodometer.bank import Bank, Head
from oodometer.derived import F64
from oodometer.detectors.base import Detector, detector, param
from oodometer.detectors.logits import MSP, max_softmax
from oodometer.errors import OodometerError

MCD = "logits.mcd"
"""Rows × passes × classes."""
ACTIVE = 8 * float(np.finfo(np.float32).eps)
"""Passes that differ by less, relative to the largest logit, differ by round-off: no dropout was active."""


# ---------------------------------------------------------------------------------------------- passes


def over_passes(bank: Bank, function: Callable[[Array, ModuleType], Array]) -> F64:
    """A function of float64 logits (rows × passes × classes) over all rows, a block at a time."""
    check_active(bank)
    pieces = []
    for block in derived.column_blocks(bank, MCD):
        z = double(block[MCD])
        pieces.append(to_numpy(function(z, namespace(z))))
    return np.concatenate(pieces)


def check_active(bank: Bank) -> None:
    """Refuse passes that are all the same: peers left dropout switched off and scored the plain network R times."""
    shape = bank.row_shape(MCD)
    if len(shape) != 2 or shape[0] < 2:
        raise OodometerError(
            f"{MCD!r} must be rows × passes × classes with two passes or more; a row has shape {shape}"
        )
    for block in derived.column_blocks(bank, MCD):
        z = double(block[MCD])
        xp = namespace(z)
        spread, largest = xp.max(xp.abs(z - z[:, :1, :])), xp.max(xp.abs(z))
        if float(spread) > ACTIVE * float(largest):
            return
    raise OodometerError(
        f"all {shape[0]} passes of {MCD!r} are the same in all {len(bank)} rows: no dropout layer was active. Extract "
        "with the dropout layers (and only those) in training mode, or make passes from features and head with "
        "oodometer.detectors.mcd.dropout_logits(bank, passes=…)"
    )


@dataclass(frozen=True)
class Summary:
    """What the scores of the passes' softmax p_m share: one number a row each, from one reading of the passes."""

    predictive: F64
    expected: F64
    deviation: F64
    waic: F64


def summary(bank: Bank) -> Summary:
    """The summary of a bank's passes, remembered with it."""
    return derived.remember(bank, "mcd_summary", lambda: Summary(*over_passes(bank, _summarise).T))


def _summarise(z: Array, xp: ModuleType) -> Array:
    logp = log_softmax(z, xp)
    p = xp.exp(logp)
    mean, std = xp.mean(p, axis=1), xp.std(p, axis=1, correction=0.0)
    one = xp.ones_like(mean)
    # Where every pass underflows, 0·log 0 = 0.
    predictive = -xp.sum(mean * xp.log(xp.where(mean > 0, mean, one)), axis=-1)
    expected = -xp.mean(xp.sum(p * logp, axis=-1), axis=-1)
    top = xp.argmax(mean, axis=-1)
    waic = take_columns(mean, top, xp) - take_columns(std, top, xp)
    return xp.stack([predictive, expected, xp.mean(std, axis=-1), waic], axis=-1)


@detector(
    "mcd_pe",
    needs={MCD},
    cite="gal2016dropout",
    equation="H(p̄), p̄ = mean_m softmax(z_m)",
)
class MCDPredictiveEntropy(Detector):
    """Predictive entropy: of the mean of the passes' softmax."""

    rowwise = False

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return summary(bank).predictive


@detector(
    "mcd_ee",
    needs={MCD},
    cite="gal2016dropout",
    equation="mean_m H(softmax(z_m))",
)
class MCDExpectedEntropy(Detector):
    """Expected entropy: the mean of the passes' entropies."""

    rowwise = False

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return summary(bank).expected


@detector(
    "mcd_mi",
    needs={MCD},
    cite="jaeger2023call",
    equation="H(p̄) − mean_m H(p_m) ≥ 0",
)
class MCDMutualInformation(Detector):
    """Mutual information of class and network: how much the passes disagree."""

    rowwise = False

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        found = summary(bank)
        # Negative by round-off alone: entropy is concave.
        return np.maximum(found.predictive - found.expected, 0.0)


@detector(
    "mcd_sv",
    needs={MCD},
    cite="jaeger2023call",
    equation="mean_c std_m p_mc",
)
class MCDSoftmaxVariance(Detector):
    """Standard deviation of each class's probability over the passes, averaged over classes."""

    rowwise = False

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return summary(bank).deviation


@detector(
    "mcd_waic",
    needs={MCD},
    cite="jaeger2023call",
    equation="−(p̄_ŷ − std_m p_mŷ), ŷ = argmax p̄",
)
class MCDWAIC(Detector):
    """Mean probability of the predicted class less its own standard deviation over the passes."""

    rowwise = False

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return -summary(bank).waic


# ---------------------------------------------------------------------------------------------- from features and head


def dropout_masks(width: int, *, passes: int, p: float, seed: int) -> F64:
    """One mask a pass: zero with probability p, else 1/(1 − p). More passes begin with the same masks."""
    if not 0 < p < 1 or passes < 2:
        raise OodometerError(
            f"dropout needs a probability between 0 and 1 and two passes; found p={p}, passes={passes}"
        )
    return (np.random.default_rng(seed).random((passes, width)) >= p) / (1 - p)


def dropout_logits(bank: Bank, *, passes: int = 50, p: float = 0.5, seed: int = 0) -> Array:
    """The column `logits.mcd` of a network with dropout on its penultimate feature, from features and head alone.

    All rows of a pass share its mask, so that a row's passes depend neither on its neighbours nor on its place. The
    result holds rows × passes × classes numbers: `bank.with_columns(**{"logits.mcd": dropout_logits(bank)})`.
    """
    head = _head_of(bank, bank.head)
    masks = dropout_masks(head.weight.shape[1], passes=passes, p=p, seed=seed)
    pieces = []
    for block in bank.blocks():
        h = derived.features(block)
        pieces.append(block.xp.stack([head(h * like(mask, h)) for mask in masks], axis=1))
    return namespace(pieces[0]).concat(pieces, axis=0)


def _head_of(bank: Bank, head: Head | None) -> Head:
    if head is None or "features" not in bank.columns:
        raise OodometerError(
            f"dropout passes of the last layer need features and a head; this bank has {', '.join(bank.columns)}"
            f"{' and no head' if head is None else ''}: pass Bank(features=…, head=Head(W, b))"
        )
    if bank.row_shape("features") != (head.weight.shape[1],):
        raise OodometerError(
            f"the head reads {head.weight.shape[1]} features, rows of 'features' have shape "
            f"{bank.row_shape('features')}: extract both with one network"
        )
    return head


@detector(
    "dropout",
    needs={MCD},
    cite="gal2016dropout",
    equation="−max_c softmax(mean_m z_m)_c",
    variants={"openood": {"passes": 5}, "openmibood": {"passes": 15}, "pytorch-ood": {"passes": 30}},
)
class Dropout(Detector):
    """Maximum softmax probability of the mean logits over dropout passes (Gal & Ghahramani, ICML 2016).

    Reads `logits.mcd`. A bank without that column but with features and a head gets dropout on the penultimate
    feature, with one mask a pass for all rows: the parameters below describe it, and do not touch stored passes.
    """

    rowwise = False
    passes: int = param(50, "how many, where the bank stores none", low=2)
    p: float = param(0.5, "probability that a feature is dropped, where the bank stores no passes", low=0.0, high=1.0,
                     open=True)  # fmt: skip
    seed: int = param(0, "of the masks, where the bank stores no passes", low=0)

    def _can_compute(self, bank: Bank, column: str) -> bool:
        head = bank.head or getattr(self, "head_", None)
        return super()._can_compute(bank, column) or (column == MCD and "features" in bank.columns and head is not None)

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        if MCD in bank.columns:
            return over_passes(bank, lambda z, xp: -max_softmax(xp.mean(z, axis=1), xp))
        head = _head_of(bank, bank.head or getattr(self, "head_", None))
        masks = dropout_masks(head.weight.shape[1], passes=self.passes, p=self.p, seed=self.seed)
        # The head is linear: the mean of its logits over the masks is its logits of the mean mask.
        pieces = []
        for block in bank.blocks():
            h = derived.features(block)
            pieces.append(to_numpy(-max_softmax(head(h * like(masks.mean(axis=0), h)), block.xp)))
        return np.concatenate(pieces)


# ---------------------------------------------------------------------------------------------- any score of logits


def _check_inner(outer: Detector, inner: Detector) -> None:
    if not isinstance(inner, Detector):
        raise OodometerError(f"{outer.card.name}: detector must be a detector, e.g. create('energy'); found {inner!r}")
    more = inner.needs - {"logits", "labels"}
    if more:
        raise OodometerError(
            f"{outer.card.name}: {inner.card.name} reads {', '.join(sorted(more))}, and passes are logits alone: "
            "choose a detector of the logits, e.g. create('energy')"
        )


def _fitted(inner: Detector, train: Bank, val: Bank | None) -> Detector:
    """A copy of the inner detector, fitted (if it fits anything) on the plain logits of the training bank."""
    fresh = inner.clone()
    return fresh.fit(train, val=val) if fresh.is_fitted_needed else fresh


def _detector_field() -> Detector:
    doc = "the score of logits that reads the passes, e.g. create('energy'); create() also takes its name"
    made: Detector = field(default_factory=MSP, metadata={"doc": doc})
    return made


@detector(
    "mcd_mean",
    needs={MCD},
    cite="jaeger2023call",
    equation="S(mean_m z_m), or S of the mean softmax",
)
class MCDMean(Detector):
    """Any score S of the logits, of the mean over the passes ("MCD-S").

    `of="logits"` averages the logits. `of="softmax"` averages the probabilities and gives S their logarithms, so that
    S sees exactly that softmax; scores that read the level of the logits (mls, energy) cannot, and are refused.
    S is fitted, where it fits anything, on the plain logits of the training bank.
    """

    rowwise = False
    detector: Detector = _detector_field()
    of: Literal["logits", "softmax"] = param(
        "logits", "what is averaged over the passes", choices=("logits", "softmax")
    )

    def check_params(self) -> None:
        super().check_params()
        _check_inner(self, self.detector)

    @property
    def needs(self) -> frozenset[str]:
        return self.card.needs | (self.detector.needs - {"logits"})

    @property
    def grid(self) -> dict[str, tuple[object, ...]]:
        return {f"detector__{name}": values for name, values in self.detector.grid.items()}

    @property
    def is_fitted_needed(self) -> bool:
        return self.detector.is_fitted_needed

    def _fit_on(self, train: Bank, val: Bank | None) -> None:
        self.detector_ = _fitted(self.detector, train, val)

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        inner = self.detector_ if self.is_fitted else self.detector
        if self.of == "logits":
            mean = over_passes(bank, lambda z, xp: xp.mean(z, axis=1))
        else:
            mean = over_passes(bank, _log_mean_softmax)
            _check_level(self, inner, mean[:1])
        return inner.score(Bank(logits=mean))


def _log_mean_softmax(z: Array, xp: ModuleType) -> Array:
    logp = log_softmax(z, xp)
    return logsumexp(xp.moveaxis(logp, 1, -1), xp) - float(np.log(z.shape[1]))


def _check_level(outer: Detector, inner: Detector, logits: F64) -> None:
    """A softmax has lost the level of its logits: a score that changes with it would be an artefact."""
    here, there = inner.score(Bank(logits=logits)), inner.score(Bank(logits=logits + 1.0))
    if abs(float((here - there)[0])) > 1e-6 * max(1.0, abs(float(here[0]))):
        raise OodometerError(
            f"{outer.card.name}: {inner.card.name} reads the level of the logits, which the mean softmax has lost: "
            "use of='logits'"
        )


@detector(
    "mcd_expected",
    needs={MCD},
    cite="jaeger2023call",
    equation="mean_m S(z_m)",
)
class MCDExpected(Detector):
    """Any score S of the logits, averaged over the passes ("MCD-ES").

    S is fitted, where it fits anything, on the plain logits of the training bank.
    """

    rowwise = False
    detector: Detector = _detector_field()

    def check_params(self) -> None:
        super().check_params()
        _check_inner(self, self.detector)

    @property
    def needs(self) -> frozenset[str]:
        return self.card.needs | (self.detector.needs - {"logits"})

    @property
    def grid(self) -> dict[str, tuple[object, ...]]:
        return {f"detector__{name}": values for name, values in self.detector.grid.items()}

    @property
    def is_fitted_needed(self) -> bool:
        return self.detector.is_fitted_needed

    def _fit_on(self, train: Bank, val: Bank | None) -> None:
        self.detector_ = _fitted(self.detector, train, val)

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        inner = self.detector_ if self.is_fitted else self.detector

        def expected(z: Array, xp: ModuleType) -> F64:
            rows, passes, classes = z.shape
            scores = inner.score(Bank(logits=xp.reshape(z, (rows * passes, classes))))
            return np.asarray(scores.reshape(rows, passes).mean(axis=1))

        return over_passes(bank, expected)

"""Learned confidence: what a network trained to know its own errors says of a row (columns of `oodometer train`)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, double, log_softmax, namespace, to_numpy
from oodometer.bank import Bank
from oodometer.derived import F64
from oodometer.detectors.base import Detector, detector
from oodometer.errors import OodometerError

CONFIDNET, DEVRIES, GAMBLERS = "logits.confidnet", "logits.devries", "logits.deepgamblers"
"""The confidence before its sigmoid (one number a row); the C class logits and then the reservation's."""
PASSES = ".mcd"
"""Ends the name of the same column over dropout passes: rows × passes (× classes + 1)."""


def sigmoid(x: Array, xp: ModuleType) -> Array:
    """1/(1 + e^−x) without overflow."""
    e = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1 / (1 + e), e / (1 + e))


def doubt(bank: Bank, column: str) -> F64:
    """1 − σ(c), which a confidence near one does not round to zero."""
    return _over_rows(bank, column, 1, lambda c, xp: sigmoid(-c, xp))


def reservation(bank: Bank) -> F64:
    """p_{C+1} of softmax over the classes and the reservation."""
    return _over_rows(bank, GAMBLERS, 2, lambda z, xp: xp.exp(log_softmax(z, xp)[:, -1]))


def mean_doubt(bank: Bank, column: str, *, deviation: bool) -> F64:
    """Mean over passes of 1 − c_m, plus (`deviation`) its standard deviation: 1 − (mean c − std c)."""
    if column == GAMBLERS:
        return _over_passes(bank, column, 3, lambda z, xp: xp.exp(log_softmax(z, xp)[:, :, -1]), deviation)
    return _over_passes(bank, column, 2, lambda c, xp: sigmoid(-c, xp), deviation)


def _over_passes(
    bank: Bank, column: str, axes: int, function: Callable[[Array, ModuleType], Array], deviation: bool
) -> F64:
    def summarised(x: Array, xp: ModuleType) -> Array:
        found = function(x, xp)
        mean = xp.mean(found, axis=1)
        return mean + xp.std(found, axis=1, correction=0.0) if deviation else mean

    return _over_rows(bank, column + PASSES, axes, summarised)


def _over_rows(bank: Bank, column: str, axes: int, function: Callable[[Array, ModuleType], Array]) -> F64:
    """A function of the column in float64, a block of rows at a time."""
    shape = bank.row_shape(column)
    if len(shape) != axes - 1 or (axes > 1 and (shape[0] < 2 or shape[-1] < 2)):
        wanted = {CONFIDNET: "one number a row", DEVRIES: "one number a row", GAMBLERS: "rows × (classes + 1)"}
        passes = "; over passes: rows × passes, or rows × passes × (classes + 1), two passes or more"
        raise OodometerError(
            f"{column!r} must be {wanted[column.removesuffix(PASSES)]}{passes}; found rows of shape {shape}"
        )
    pieces = []
    for block in derived.column_blocks(bank, column):
        x = double(block[column])
        pieces.append(to_numpy(function(x, namespace(x))))
    return np.concatenate(pieces)


# ---------------------------------------------------------------------------------------------- ConfidNet


@detector("confidnet", needs={CONFIDNET}, cite="corbiere2019confidnet", equation="1 − σ(c(h)), c trained on p_y")
class ConfidNet(Detector):
    """ConfidNet: a branch that regresses the true-class probability (Corbière et al., NeurIPS 2019)."""

    rowwise = False

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return doubt(bank, CONFIDNET)


@detector("confidnet_mcd", needs={CONFIDNET + PASSES}, cite="jaeger2023call", equation="1 − mean_m σ(c_m)")
class ConfidNetMCD(Detector):
    """ConfidNet averaged over dropout passes."""

    rowwise = False

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return mean_doubt(bank, CONFIDNET, deviation=False)


@detector("confidnet_waic", needs={CONFIDNET + PASSES}, cite="jaeger2023call", equation="1 − (mean_m − std_m) σ(c_m)")
class ConfidNetWAIC(Detector):
    """ConfidNet averaged over dropout passes, less its standard deviation."""

    rowwise = False

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return mean_doubt(bank, CONFIDNET, deviation=True)


# ---------------------------------------------------------------------------------------------- DeVries & Taylor


@detector("devries", needs={DEVRIES}, cite="devries2018learning", equation="1 − σ(c(h)), c trained with hints")
class DeVries(Detector):
    """Learned confidence by hints (DeVries & Taylor, 2018), without input perturbation."""

    rowwise = False

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return doubt(bank, DEVRIES)


@detector("devries_mcd", needs={DEVRIES + PASSES}, cite="jaeger2023call", equation="1 − mean_m σ(c_m)")
class DeVriesMCD(Detector):
    """Learned confidence by hints, averaged over dropout passes."""

    rowwise = False

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return mean_doubt(bank, DEVRIES, deviation=False)


@detector("devries_waic", needs={DEVRIES + PASSES}, cite="jaeger2023call", equation="1 − (mean_m − std_m) σ(c_m)")
class DeVriesWAIC(Detector):
    """Learned confidence by hints, averaged over dropout passes, less its standard deviation."""

    rowwise = False

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return mean_doubt(bank, DEVRIES, deviation=True)


# ---------------------------------------------------------------------------------------------- Deep Gamblers


@detector("deepgamblers", needs={GAMBLERS}, cite="liu2019deepgamblers", equation="p_{C+1}, softmax over C + 1")
class DeepGamblers(Detector):
    """Deep Gamblers: the probability of keeping the stake (Liu et al., NeurIPS 2019)."""

    rowwise = False

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return reservation(bank)


@detector("deepgamblers_mcd", needs={GAMBLERS + PASSES}, cite="jaeger2023call", equation="mean_m p_{m,C+1}")
class DeepGamblersMCD(Detector):
    """Deep Gamblers' reservation averaged over dropout passes."""

    rowwise = False

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return mean_doubt(bank, GAMBLERS, deviation=False)


@detector("deepgamblers_waic", needs={GAMBLERS + PASSES}, cite="jaeger2023call", equation="(mean_m + std_m) p_{m,C+1}")
class DeepGamblersWAIC(Detector):
    """Deep Gamblers' reservation averaged over dropout passes, plus its standard deviation."""

    rowwise = False

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return mean_doubt(bank, GAMBLERS, deviation=True)

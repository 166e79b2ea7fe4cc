"""The one-line scores of the logits: maximum, energy and the family of entropies."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import numpy as np
from array_api_compat import device

from oodometer import derived
from oodometer.arrays import (
    Array,
    argmax,
    by_columns,
    double,
    largest_values,
    log_softmax,
    logsumexp,
    norms,
    row_sums,
    softmax,
    top_values,
)
from oodometer.bank import Bank
from oodometer.detectors.base import Detector, detector, param

ENERGY_GRID = (0.1, 0.5, 1.0, 1.5, 2.0)
GAMMAS = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
TOP_CLASSES = (1, 2, 3, 4, 5, 6, 7, 50, 100, 200)


def _temperature(default: float = 1.0) -> float:
    value: float = param(default, "the logits are divided by it", low=0.0, high=np.inf, open=True)
    return value


def cooled(z: Array, temperature: float) -> Array:
    """z/T, without a pass over the logits where T is one."""
    return z if temperature == 1 else z / temperature


def max_softmax(z: Array, xp: ModuleType) -> Array:
    """The largest softmax probability of each row."""
    if hasattr(z, "softmax"):
        return xp.max(z.softmax(-1), axis=-1)
    # max softmax = 1 / Σ exp(z − max z): no division of the whole matrix.
    z = by_columns(z)
    return 1 / row_sums(xp.exp(z - xp.max(z, axis=-1, keepdims=True)), xp)


def odds(z: Array, xp: ModuleType) -> Array:
    """p_c / max p for every class but the predicted one, whose place holds zero.

    Of a confident row 1 − p keeps no digit, its odds keep all: scores written in them do not tie.
    """
    z = by_columns(z)
    return xp.exp(others(z, NEVER, xp) - xp.max(z, axis=-1, keepdims=True))


NEVER = float(np.finfo(np.float32).min)
"""A logit whose probability is zero beside any other."""


def others(z: Array, place: Array, xp: ModuleType) -> Array:
    """The logits with another value in the place of the predicted class (the first of equals)."""
    if isinstance(z, np.ndarray):
        left = z.copy(order="K")
        # One entry a row is written: to choose between two whole matrices costs several times as much.
        left[np.arange(len(z)), argmax(z, xp)] = place
        return left
    top = xp.argmax(z, axis=-1)[:, None] == xp.arange(z.shape[-1], device=device(z))[None, :]
    return xp.where(top, place if isinstance(place, float) else place[:, None], z)


@detector(
    "msp",
    needs={"logits"},
    cite="hendrycks2017baseline",
    equation="−max_c softmax(z/T)_c",
)
class MSP(Detector):
    """Maximum softmax probability (Hendrycks & Gimpel, ICLR 2017)."""

    temperature: float = _temperature()

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return -max_softmax(cooled(derived.logits(bank), self.temperature), xp)


@detector(
    "mls",
    needs={"logits"},
    cite="hendrycks2022scaling",
    equation="−max_c z_c/T",
)
class MLS(Detector):
    """Maximum logit (Hendrycks et al., ICML 2022). The temperature rescales and never reorders."""

    temperature: float = _temperature()

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return -xp.max(by_columns(derived.logits(bank)), axis=-1) / self.temperature


@detector(
    "energy",
    needs={"logits"},
    grid={"temperature": ENERGY_GRID},
    cite="liu2020energy",
    equation="−T·log Σ_c exp(z_c/T)",
    aliases=("ebo",),
)
class Energy(Detector):
    """Free energy of the logits (Liu et al., NeurIPS 2020)."""

    temperature: float = _temperature()

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        return -self.temperature * logsumexp(cooled(derived.logits(bank), self.temperature), xp)


@detector(
    "entropy",
    needs={"logits"},
    cite="ovadia2019can",
    equation="−Σ_c p_c log p_c",
    aliases=("pe",),
)
class Entropy(Detector):
    """Shannon entropy of the softmax (predictive entropy)."""

    temperature: float = _temperature()

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        logp = log_softmax(cooled(derived.logits(bank), self.temperature), xp)
        return -row_sums(xp.exp(logp) * logp, xp)


@detector(
    "gen",
    needs={"logits"},
    grid={"gamma": GAMMAS, "m": TOP_CLASSES},
    cite="liu2023gen",
    equation="Σ_{i≤M} (p_(i)(1 − p_(i)))^γ",
    variants={"pytorch-ood": {"reduction": "mean", "clamp": 1e-7, "m": None}},
)
class GEN(Detector):
    """Generalised entropy of the top M probabilities (Liu et al., CVPR 2023)."""

    gamma: float = param(0.1, "exponent; small values weigh the tail", low=0.0, high=np.inf, open=True)
    m: int | None = param(100, "how many of the largest probabilities count (None: all classes)", low=1)
    temperature: float = _temperature()
    reduction: Literal["sum", "mean"] = param("sum", "over the top M", choices=("sum", "mean"))
    clamp: float = param(0.0, "probabilities are kept this far from 0 and 1", low=0.0, high=0.5)

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        # A small γ magnifies 1 − p, of which nothing is left when p is near one: it is the sum of the others instead.
        z = by_columns(derived.logits(bank))
        m, top = min(self.m or z.shape[-1], z.shape[-1]), double(xp.max(z, axis=-1, keepdims=True))
        # All logits but the predicted one, whose place the last one takes.
        left = others(z, z[:, -1], xp)[:, :-1]
        odd = xp.exp(cooled(double(left) - top, self.temperature))
        rest = xp.sum(odd, axis=-1, keepdims=True)
        if m < z.shape[-1]:
            # The largest are picked in the precision of the logits, and looked at in float64.
            odd = xp.exp(cooled(double(largest_values(left, m - 1, xp)) - top, self.temperature))
        odd = odd / (1 + rest)
        p = xp.concat([1 / (1 + rest), odd], axis=-1)
        complement = xp.concat([rest / (1 + rest), 1 - odd], axis=-1)
        if self.clamp:
            p, complement = (xp.clip(x, self.clamp, 1 - self.clamp) for x in (p, complement))
        terms = (p * complement) ** self.gamma
        return row_sums(terms, xp) if self.reduction == "sum" else xp.mean(terms, axis=-1)


@detector(
    "collision",
    needs={"logits"},
    cite="renyi1961measures",
    equation="−log Σ_c p_c²",
    aliases=("pce",),
)
class Collision(Detector):
    """Collision entropy of the softmax (Rényi entropy of order 2)."""

    temperature: float = _temperature()

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        o = odds(cooled(derived.logits(bank), self.temperature), xp)
        # With p = o/(1 + Σo): Σp² = (1 + Σo²)/(1 + Σo)².
        return 2 * xp.log1p(row_sums(o, xp)) - xp.log1p(norms(o, xp) ** 2)


@detector(
    "doctor_alpha",
    needs={"logits"},
    cite="granese2021doctor",
    equation="(1 − g)/g, g = Σ_c p_c²",
    aliases=("doctor",),
)
class DoctorAlpha(Detector):
    """DOCTOR's D_α: odds that two draws from the softmax differ (Granese et al., NeurIPS 2021). Ranks as collision."""

    temperature: float = _temperature()

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        o = odds(cooled(derived.logits(bank), self.temperature), xp)
        total, squares = row_sums(o, xp), norms(o, xp) ** 2
        return (2 * total + (total * total - squares)) / (1 + squares)


@detector(
    "renyi",
    needs={"logits"},
    grid={"gamma": GAMMAS, "m": TOP_CLASSES[1:]},
    cite="renyi1961measures",
    equation="log Σ_{i≤M} p_(i)^γ / (1 − γ); at γ = 1: −Σ_{i≤M} p_(i) log p_(i)",
    aliases=("ren",),
)
class Renyi(Detector):
    """Rényi entropy of the top M probabilities.

    Over all classes it tends to the entropy as γ → 1. Over fewer the sum is not one, the limit does not exist, and
    γ = 1 means the entropy terms of the top M. For m = 1 and γ < 1 certain rows get the higher score: use gen there.
    """

    gamma: float = param(0.1, "order; small values weigh the tail", low=0.0, high=np.inf, open=True)
    m: int | None = param(None, "how many of the largest probabilities count (None: all classes)", low=1)
    temperature: float = _temperature()

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        # 1/(1 − γ) magnifies the round-off of the logarithm.
        logp = log_softmax(cooled(double(derived.logits(bank)), self.temperature), xp)
        if self.m is not None and self.m < logp.shape[-1]:
            logp = top_values(logp, self.m, xp)
        if self.gamma == 1:
            return -row_sums(xp.exp(logp) * logp, xp)
        return logsumexp(self.gamma * logp, xp) / (1 - self.gamma)


@detector(
    "guessing",
    needs={"logits"},
    cite="massey1994guessing",
    equation="Σ_{i≤M} i·p_(i)",
    aliases=("ge",),
)
class Guessing(Detector):
    """Guessing entropy: how many guesses, best first, until the class is found.

    With m below the number of classes an even spread over many classes counts as certain.
    """

    m: int | None = param(None, "how many of the largest probabilities count (None: all classes)", low=1)
    temperature: float = _temperature()

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        p = softmax(cooled(derived.logits(bank), self.temperature), xp)
        top = top_values(p, self.m or p.shape[-1], xp)
        places = xp.arange(1, top.shape[-1] + 1, dtype=top.dtype, device=device(top))
        return row_sums(top * places, xp)

"""The Bayesian signed-rank test: how probable it is that a method is better, practically equal, or worse."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from oodometer.arrays import slices
from oodometer.errors import OodometerError
from oodometer.stats.blocks import Floats
from oodometer.stats.paired import paired_samples

_DRAWS_AT_ONCE = 4096


@dataclass(frozen=True)
class BayesianSignedRank:
    """Posterior over the differences of two samples; the three regions are first larger, equivalent, second larger."""

    first: float
    """Probability that "the first is larger by more than the rope" is the most probable region."""
    equivalent: float
    second: float
    expected: tuple[float, float, float]
    """Posterior mean of the three regions' probabilities, without simulation."""
    rope: float
    n: int
    draws: int

    def __str__(self) -> str:
        return (
            f"Bayesian signed-rank, rope ±{self.rope:g}: P(first larger) = {self.first:.3f}, "
            f"P(equivalent) = {self.equivalent:.3f}, P(second larger) = {self.second:.3f} ({self.n} pairs)"
        )


def bayesian_signed_rank(
    x: ArrayLike, y: ArrayLike, *, rope: float, seed: int, draws: int = 50_000, prior: float = 0.6
) -> BayesianSignedRank:
    """Benavoli et al. 2014: a Dirichlet process prior of strength `prior` at a difference of zero.

    `rope` is the half-width of the region of practical equivalence, in units of the metric.
    """
    if not (np.isfinite(rope) and rope >= 0 and prior > 0 and draws >= 1):
        raise OodometerError(
            f"bayesian_signed_rank: rope ≥ 0, prior > 0 and draws ≥ 1 were needed, {rope}, {prior}, {draws} were found."
        )
    x, y = paired_samples(x, y)
    z = np.concatenate([[0.0], x - y])
    weight = np.concatenate([[prior], np.ones(len(x))])
    walsh = z[:, None] + z[None, :]
    larger, smaller = (walsh > 2 * rope).astype(np.float64), (walsh < -2 * rope).astype(np.float64)
    wins = _wins(larger, smaller, weight, np.random.default_rng(seed), draws)
    up, down = _expected(larger, weight), _expected(smaller, weight)
    first, equivalent, second = (wins / draws).tolist()
    return BayesianSignedRank(first, equivalent, second, (up, 1 - up - down, down), rope, len(x), draws)


def _wins(larger: Floats, smaller: Floats, weight: Floats, rng: np.random.Generator, draws: int) -> Floats:
    """How often each region has the largest mass, ties shared: Σ_ij w_i w_j [z_i + z_j in the region]."""
    wins = np.zeros(3)
    for part in slices(draws, _DRAWS_AT_ONCE):
        w = rng.dirichlet(weight, size=min(part.stop, draws) - part.start)
        up = np.einsum("ij,ij->i", w @ larger, w)
        down = np.einsum("ij,ij->i", w @ smaller, w)
        mass = np.stack([up, 1 - up - down, down], axis=1)
        leads = mass == mass.max(axis=1, keepdims=True)
        wins += (leads / leads.sum(axis=1, keepdims=True)).sum(axis=0)
    return wins


def _expected(region: Floats, weight: Floats) -> float:
    """E[w_i w_j] = (α_i α_j + [i = j] α_i) / (A (A + 1)) under a Dirichlet distribution."""
    total = weight.sum()
    moments = (np.outer(weight, weight) + np.diag(weight)) / (total * (total + 1))
    return float((moments * region).sum())

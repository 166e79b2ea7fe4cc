"""Scores of the logits against closed forms, brute-force loops and SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats

from oodometer import Bank, create

RNG = np.random.default_rng(0)
LOGITS = 3 * RNG.standard_normal((60, 7))
P = scipy.special.softmax(LOGITS, axis=1)


def score(name: str, logits: np.ndarray, **params: object) -> np.ndarray:
    return create(name, **params).score(Bank(logits=logits))


# ---------------------------------------------------------------------------------------------- entropies


def test_collision_is_minus_log_of_the_sum_of_squares() -> None:
    np.testing.assert_allclose(score("collision", LOGITS), -np.log((P**2).sum(1)), rtol=1e-12)
    np.testing.assert_allclose(score("pce", LOGITS, temperature=2.0), score("collision", LOGITS / 2), rtol=1e-14)


def test_doctor_alpha_is_exp_of_collision_minus_one() -> None:
    g = (P**2).sum(1)
    np.testing.assert_allclose(score("doctor", LOGITS), (1 - g) / g, rtol=1e-12)
    np.testing.assert_allclose(score("doctor_alpha", LOGITS), np.expm1(score("collision", LOGITS)), rtol=1e-12)


@pytest.mark.parametrize("kind", ["numpy", pytest.param("torch", marks=pytest.mark.torch)])
def test_gen_of_confident_rows_keeps_one_minus_p(kind: str) -> None:
    """Of two classes with margin m both have p(1 − p) = e^−m/(1 + e^−m)²; from m = 37 on 1 − p underflows."""
    margins = np.array([0.0, 20.0, 40.0, 60.0, 600.0])
    logits = np.stack([margins, np.zeros(5)], axis=1)
    expected = 2 * (np.exp(-margins) / (1 + np.exp(-margins)) ** 2) ** 0.1
    found = create("gen").score(Bank(logits=logits).to(kind))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    first = create("gen", m=1).score(Bank(logits=logits).to(kind))
    np.testing.assert_allclose(first, expected / 2, rtol=1e-12)


def test_gen_of_order_one_over_all_classes_is_one_minus_the_sum_of_squares() -> None:
    np.testing.assert_allclose(score("gen", LOGITS, gamma=1.0, m=None), 1 - (P**2).sum(1), rtol=1e-12)
    assert np.array_equal(np.argsort(score("gen", LOGITS, gamma=1.0, m=None)), np.argsort(score("collision", LOGITS)))


@pytest.mark.parametrize("gamma", [0.01, 0.5, 0.999999, 1.7, 10.0])
@pytest.mark.parametrize("m", [2, 5, None])
def test_renyi_by_its_formula_and_by_the_norm(gamma: float, m: int | None) -> None:
    top = np.sort(P, axis=1)[:, ::-1][:, :m]
    found = score("renyi", LOGITS, gamma=gamma, m=m)
    np.testing.assert_allclose(found, np.log((top**gamma).sum(1)) / (1 - gamma), rtol=1e-9, atol=1e-9)
    norm = (top**gamma).sum(1) ** (1 / gamma)
    np.testing.assert_allclose(found, gamma / (1 - gamma) * np.log(norm), rtol=1e-9, atol=1e-9)


def test_renyi_at_its_special_orders() -> None:
    np.testing.assert_allclose(score("renyi", LOGITS, gamma=2.0), score("collision", LOGITS), rtol=1e-12)
    np.testing.assert_allclose(score("ren", LOGITS, gamma=1.0), scipy.stats.entropy(P, axis=1), rtol=1e-12)
    np.testing.assert_allclose(score("renyi", LOGITS, gamma=1 - 1e-7), scipy.stats.entropy(P, axis=1), rtol=1e-5)
    np.testing.assert_allclose(score("renyi", LOGITS, gamma=1e-9), math.log(7), rtol=1e-7)
    top = np.sort(P, axis=1)[:, -3:]
    np.testing.assert_allclose(score("renyi", LOGITS, gamma=1.0, m=3), -(top * np.log(top)).sum(1), rtol=1e-12)


@pytest.mark.parametrize("m", [1, 3, None])
def test_guessing_counts_the_guesses(m: int | None) -> None:
    expected = [sum((i + 1) * p for i, p in enumerate(sorted(row, reverse=True)[:m])) for row in P.tolist()]
    np.testing.assert_allclose(score("guessing", LOGITS, m=m), expected, rtol=1e-12)
    np.testing.assert_allclose(score("ge", np.zeros((1, 9))), 5.0, rtol=1e-12)


@pytest.mark.parametrize("name", ["gen", "renyi", "guessing"])
def test_more_classes_than_there_are_change_nothing(name: str) -> None:
    whole = score(name, LOGITS, m=7)
    for m in (8, 100, None):
        assert np.array_equal(score(name, LOGITS, m=m), whole)


def test_mcm_is_the_tempered_softmax_of_the_cosines() -> None:
    cosines = np.tanh(LOGITS)
    expected = -scipy.special.softmax(cosines / 0.01, axis=1).max(1)
    np.testing.assert_allclose(score("mcm", cosines, tau=0.01), expected, rtol=1e-12)


ENTROPIES = ["entropy", "gen", "renyi", "collision", "doctor_alpha", "guessing"]


@pytest.mark.parametrize("name", ENTROPIES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_entropies_of_huge_logits_are_their_limits(name: str, dtype: type) -> None:
    """Certain, a tie of two, and a tie of all: no overflow, no 0·log 0."""
    z = np.array([[1e4, -1e4, 0, 0], [1e4, 1e4, -1e4, -1e4], [-1e4, -1e4, -1e4, -1e4]], dtype)
    limits = {
        "entropy": [0, math.log(2), math.log(4)],
        "gen": [0, 2 * 0.25**0.1, 4 * (0.25 * 0.75) ** 0.1],
        "renyi": [0, math.log(2), math.log(4)],
        "collision": [0, math.log(2), math.log(4)],
        "doctor_alpha": [0, 1, 3],
        "guessing": [1, 1.5, 2.5],
    }
    np.testing.assert_allclose(score(name, z), limits[name], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", [*ENTROPIES, "msp", "energy", "mcm"])
def test_one_class_leaves_no_doubt(name: str) -> None:
    expected = {"msp": -1.0, "mcm": -1.0, "energy": -3.0, "guessing": 1.0}.get(name, 0.0)
    assert score(name, np.array([[3.0]]))[0] == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("name", ["collision", "doctor_alpha"])
def test_confident_rows_do_not_tie(name: str) -> None:
    """1 − Σp² is zero in float32 from a gap of 17 on; the score must still order the rows."""
    gaps = np.array([15, 20, 30, 60, 80], np.float32)
    found = score(name, np.stack([gaps, np.zeros_like(gaps), np.zeros_like(gaps)], axis=1))
    # To first order both are 2·Σ odds.
    np.testing.assert_allclose(found, 4 * np.exp(-gaps.astype(np.float64)), rtol=1e-5)


@pytest.mark.parametrize("name", [*ENTROPIES, "msp", "energy"])
def test_uncertain_rows_score_higher(name: str) -> None:
    """A peer returns its entropy unnegated; here every score rises with uncertainty."""
    found = score(name, np.array([[9.0, 0, 0, 0], [3.0, 0, 0, 0], [1.0, 0, 0, 0], [0.0, 0, 0, 0]]))
    assert (np.diff(found) > 0).all()

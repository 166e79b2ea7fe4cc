"""The fitted temperature against SciPy's minimiser, closed forms and hard logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.special

from oodometer import Bank, temperature
from oodometer.errors import OodometerError
from oodometer.temperature import fit_temperature, nll


def sample(seed: int, rows: int = 300, classes: int = 6, *, true: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Labels drawn from softmax(z/true)."""
    rng = np.random.default_rng(seed)
    z = 3 * rng.standard_normal((rows, classes))
    p = scipy.special.softmax(z / true, axis=1)
    return z, np.array([rng.choice(classes, p=row) for row in p])


def loss(z: np.ndarray, y: np.ndarray, t: float) -> float:
    return float(-scipy.special.log_softmax(z / t, axis=1)[np.arange(len(y)), y].mean())


# ---------------------------------------------------------------------------------------------- the loss


@pytest.mark.parametrize("t", [0.05, 0.7, 1.0, 20.0])
def test_nll_is_the_mean_negative_log_softmax(t: float) -> None:
    z, y = sample(0)
    assert nll(z, y, t) == pytest.approx(loss(z, y, t), rel=1e-12)


def test_nll_of_huge_logits_is_finite() -> None:
    z = np.array([[1e4, -1e4], [-1e4, 1e4]], np.float32)
    assert nll(z, [0, 1]) == 0.0
    assert nll(z, [1, 1], 2.0) == pytest.approx(5e3, rel=1e-12)


# ---------------------------------------------------------------------------------------------- the minimum


@pytest.mark.parametrize("seed", range(8))
def test_temperature_is_the_minimum_that_scipy_finds(seed: int) -> None:
    z, y = sample(seed, true=[0.4, 1.0, 2.5, 6.0][seed % 4])
    found = fit_temperature(z, y)
    oracle = scipy.optimize.minimize_scalar(
        lambda b: loss(z, y, 1 / b), bounds=(1 / 20, 20), method="bounded", options={"xatol": 1e-12}
    )
    assert found == pytest.approx(1 / oracle.x, rel=1e-6)
    assert loss(z, y, found) <= oracle.fun + 1e-15


def test_temperature_is_a_root_of_the_slope_to_round_off() -> None:
    """N28: peers' gradient descent stops far from the optimum."""
    z, y = sample(3, rows=500)
    beta = 1 / fit_temperature(z, y)
    p = scipy.special.softmax(beta * z, axis=1)
    slope = (p * z).sum(1) - z[np.arange(len(y)), y]
    assert abs(slope.mean()) < 1e-13 * np.abs(slope).mean()


def test_two_classes_have_a_closed_form() -> None:
    # Margin m, right in a share q of the rows: σ(m/T) = q.
    z = np.tile([[2.0, 0.0]], (10, 1))
    y = np.array([0] * 7 + [1] * 3)
    assert fit_temperature(z, y) == pytest.approx(2.0 / math.log(0.7 / 0.3), rel=1e-14)


def test_scaling_the_logits_scales_the_temperature() -> None:
    z, y = sample(5)
    assert fit_temperature(3 * z, y) == pytest.approx(3 * fit_temperature(z, y), rel=1e-12)


def test_shifting_rows_changes_nothing() -> None:
    z, y = sample(6)
    shift = np.random.default_rng(0).uniform(-1e3, 1e3, (len(z), 1))
    assert fit_temperature(z + shift, y) == pytest.approx(fit_temperature(z, y), rel=1e-10)


# ---------------------------------------------------------------------------------------------- bounds and edges


def test_rows_that_are_all_correct_end_at_the_lower_bound() -> None:
    z, _ = sample(1)
    assert fit_temperature(z, z.argmax(1)) == 0.05
    assert fit_temperature(z, z.argmax(1), low=0.3) == 0.3


def test_rows_that_are_worse_than_chance_end_at_the_upper_bound() -> None:
    z, _ = sample(1)
    assert fit_temperature(z, z.argmin(1)) == 20.0
    assert fit_temperature(z, z.argmin(1), high=4.0) == 4.0


SATURATED = np.array([[1e4, -1e4, -1e4]] * 5, np.float32)


@pytest.mark.parametrize("z", [np.zeros((5, 3)), np.full((5, 1), 7.0), SATURATED])
def test_a_loss_that_does_not_depend_on_the_temperature_leaves_it_at_one(z: np.ndarray) -> None:
    assert fit_temperature(z, np.zeros(5, int)) == 1.0
    assert fit_temperature(z, np.zeros(5, int), low=2.0) == 2.0


def test_blocks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    z, y = sample(2, rows=1000)
    whole = fit_temperature(z, y)
    monkeypatch.setattr(temperature, "block_rows", lambda *_, **__: 64)
    assert fit_temperature(z, y) == pytest.approx(whole, rel=1e-13)


@pytest.mark.torch
def test_tensors_give_the_same_temperature() -> None:
    torch = pytest.importorskip("torch")
    z, y = sample(4)
    assert fit_temperature(torch.as_tensor(z), torch.as_tensor(y)) == pytest.approx(fit_temperature(z, y), rel=1e-13)


def test_a_bank_fits_once_and_names_wrong_labels() -> None:
    z, y = sample(7)
    bank = Bank(logits=z, labels=y)
    assert temperature.bank_temperature(bank) == fit_temperature(z, y)
    assert bank.memory["temperature", 0.05, 20.0] == fit_temperature(z, y)
    with pytest.raises(OodometerError, match="label 6 in row 0"):
        temperature.bank_temperature(Bank(logits=z, labels=np.full(len(y), 6)))


def test_wrong_input_is_explained() -> None:
    z, y = sample(0)
    with pytest.raises(OodometerError, match="one label a row"):
        fit_temperature(z, y[:-1])
    with pytest.raises(OodometerError, match=r"0 … 5.*found 0 … 6"):
        fit_temperature(z, np.where(y == 5, 6, y))
    with pytest.raises(OodometerError, match="low ≤ high"):
        fit_temperature(z, y, low=3.0, high=2.0)
    with pytest.raises(OodometerError, match="positive"):
        nll(z, y, 0.0)

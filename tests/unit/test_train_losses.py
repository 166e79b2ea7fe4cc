"""Training losses against loops in plain Python, closed forms and numeric gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from oodometer.errors import OodometerError

torch = pytest.importorskip("torch")
from oodometer.models.train import losses  # noqa: E402

pytestmark = pytest.mark.torch
CLASSES = 4


def rows(seed: int, columns: int = CLASSES, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.from_numpy(np.random.default_rng(seed).standard_normal((6, columns)))


LABELS = torch.tensor([0, 3, 1, 1, 2, 0])


def softmax(row: list[float]) -> list[float]:
    total = math.fsum(map(math.exp, row))
    return [math.exp(value) / total for value in row]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def assert_rows(found: torch.Tensor, wanted: list[float]) -> None:
    assert found.shape == (len(wanted),)
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)


def test_cross_entropy_by_loop() -> None:
    z = rows(0)
    wanted = [-math.log(softmax(row)[label]) for row, label in zip(z.tolist(), LABELS.tolist(), strict=True)]
    assert_rows(losses.cross_entropy(z, LABELS), wanted)


def test_uniform_cross_entropy_by_loop_and_its_least_value() -> None:
    z = rows(1)
    wanted = [-sum(math.log(p) for p in softmax(row)) / CLASSES for row in z.tolist()]
    assert_rows(losses.uniform_cross_entropy(z), wanted)
    assert_rows(losses.uniform_cross_entropy(torch.full((1, CLASSES), 7.0, dtype=torch.float64)), [math.log(CLASSES)])


@pytest.mark.parametrize("reward", [1.01, 2.2, 4.0])
def test_gambler_by_loop(reward: float) -> None:
    z = rows(2, CLASSES + 1)
    wanted = []
    for row, label in zip(z.tolist(), LABELS.tolist(), strict=True):
        p = softmax(row)
        wanted.append(-math.log(p[label] + p[CLASSES] / reward))
    assert_rows(losses.gambler(z, LABELS, reward), wanted)


def test_gambler_without_reservation_is_cross_entropy() -> None:
    z = rows(3)
    nothing_kept = torch.cat([z, torch.full((6, 1), -1e4, dtype=z.dtype)], dim=1)
    assert torch.allclose(losses.gambler(nothing_kept, LABELS, 2.0), losses.cross_entropy(z, LABELS), rtol=1e-14)


def test_gambler_is_finite_where_probabilities_underflow() -> None:
    z = torch.tensor([[0.0, 1000.0, -1000.0]])
    assert losses.gambler(z, torch.tensor([0]), 2.0).item() == pytest.approx(1000.0)


@pytest.mark.parametrize("reward", [1.0, 0.5, 4.01, math.nan, math.inf])
def test_rewards_that_decide_the_bet_beforehand_are_refused(reward: float) -> None:
    with pytest.raises(OodometerError, match=r"above 1 and at most the number of classes, 4"):
        losses.gambler(rows(4, CLASSES + 1), LABELS, reward)


def test_hints_mix_the_label_in_where_they_were_asked_for() -> None:
    z, c = rows(5), rows(6, 1)[:, 0]
    asked = torch.tensor([True, False, True, True, False, False])
    wanted = []
    for row, label, value, hint in zip(z.tolist(), LABELS.tolist(), c.tolist(), asked.tolist(), strict=True):
        share = sigmoid(value) if hint else 1.0
        mixed = [share * p + (1 - share) * (k == label) for k, p in enumerate(softmax(row))]
        wanted.append(-math.log(mixed[label]))
    assert_rows(losses.hinted(z, c, LABELS, asked), wanted)


def test_hinted_loss_and_gradient_are_finite_for_certain_networks() -> None:
    z = torch.tensor([[0.0, 800.0], [800.0, 0.0]], requires_grad=True)
    c = torch.tensor([200.0, -200.0], requires_grad=True)
    found = losses.hinted(z, c, torch.tensor([0, 0]), torch.tensor([True, True]))
    found.sum().backward()
    assert found.tolist() == pytest.approx([200.0, 0.0], abs=1e-30)
    assert z.grad is not None
    assert c.grad is not None
    assert bool(z.grad.isfinite().all() and c.grad.isfinite().all())


def test_price_of_hints_by_loop() -> None:
    c = rows(7, 1)[:, 0]
    assert_rows(losses.asking(c), [-math.log(sigmoid(value)) for value in c.tolist()])


def test_budget_moves_the_weight_one_percent() -> None:
    weight = torch.tensor(0.1, dtype=torch.float64)
    assert losses.budgeted(weight, torch.tensor(0.2), 0.3).item() == pytest.approx(0.1 / 1.01, rel=1e-15)
    assert losses.budgeted(weight, torch.tensor(0.4), 0.3).item() == pytest.approx(0.1 / 0.99, rel=1e-15)
    assert losses.budgeted(weight, torch.tensor(0.3), 0.3).item() > 0.1, "a price that meets the budget raises it too"


def test_true_class_error_by_loop_and_without_gradient_to_the_classifier() -> None:
    z, c = rows(8).requires_grad_(), rows(9, 1)[:, 0].requires_grad_()
    found = losses.true_class_error(c, z, LABELS)
    wanted = [
        (sigmoid(value) - softmax(row)[label]) ** 2
        for row, label, value in zip(z.tolist(), LABELS.tolist(), c.tolist(), strict=True)
    ]
    assert_rows(found, wanted)
    found.sum().backward()
    assert z.grad is None
    assert c.grad is not None


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, c: losses.cross_entropy(z, LABELS).sum() + 0 * c.sum(),
        lambda z, c: losses.uniform_cross_entropy(z).sum() + 0 * c.sum(),
        lambda z, c: losses.gambler(z, LABELS % 3, 2.2).sum() + 0 * c.sum(),
        lambda z, c: losses.hinted(z, c, LABELS, torch.arange(6) % 2 == 0).sum() + losses.asking(c).sum(),
    ],
)
def test_gradients_are_numeric_gradients(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    z, c = rows(10).requires_grad_(), rows(11, 1)[:, 0].requires_grad_()
    assert torch.autograd.gradcheck(loss, (z, c))

"""RankFeat against full singular value decompositions and partial networks by hand, on a small real network."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from scipy.special import logsumexp  # noqa: E402
from tests.network_fixture import Digits, far_images, images, pass_of, trained  # noqa: E402

from oodometer import Bank, create, metrics  # noqa: E402
from oodometer.errors import OodometerError  # noqa: E402
from oodometer.models.columns.rankfeat import (  # noqa: E402
    RankFeat,
    RankFeatPower,
    without_power_iterate,
    without_rank_one,
)

pytestmark = pytest.mark.torch


def by_svd(matrix: np.ndarray) -> np.ndarray:
    u, s, vt = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    return matrix - s[0] * np.outer(u[:, 0], vt[0])


@pytest.mark.parametrize("shape", [(24, 9), (9, 24), (12, 12), (5, 1)])
def test_the_rank_one_part_is_that_of_a_full_decomposition(shape: tuple[int, int]) -> None:
    a = np.random.default_rng(0).random((7, *shape)).astype(np.float32)
    expected = np.stack([by_svd(matrix) for matrix in a])
    np.testing.assert_allclose(without_rank_one(torch.from_numpy(a)), expected, atol=1e-6)
    start = torch.from_numpy(np.random.default_rng(1).standard_normal(shape[0]))
    np.testing.assert_allclose(without_power_iterate(torch.from_numpy(a), start, 60), expected, atol=1e-5)


def test_zero_maps_stay_zero() -> None:
    zero = torch.zeros(2, 6, 4)
    np.testing.assert_array_equal(without_rank_one(zero), zero)
    np.testing.assert_array_equal(without_power_iterate(zero, torch.ones(6, dtype=torch.float64), 20), zero)


def by_power(matrix: np.ndarray, iterations: int = 20) -> np.ndarray:
    a = matrix.astype(np.float64)
    u = np.random.default_rng(0).standard_normal(len(a))
    for _ in range(iterations):
        v = a.T @ u / np.linalg.norm(a.T @ u)
        u = a @ v / np.linalg.norm(a @ v)
    return a - (u @ a @ v) * np.outer(u, v)


def by_hand(model: torch.nn.Module, x: torch.Tensor, reduce: Callable[[np.ndarray], np.ndarray] = by_svd) -> np.ndarray:
    """The network cut in two after each block: rows × blocks × classes."""
    with torch.no_grad():
        first = model.first(x)
        second = model.second(first)
        changed = []
        for map_ in (first, second):
            flat = map_.flatten(2).numpy()
            changed.append(torch.as_tensor(np.stack([reduce(one) for one in flat])).reshape(map_.shape).to(map_.dtype))
        ends = [model.second(changed[0]), changed[1]]
        return np.stack([model.fc(model.pool(end).flatten(1)).numpy() for end in ends], axis=1)


@pytest.mark.parametrize(("channels", "dims"), [(1, 2), (3, 2), (2, 3), (1, 1)])
def test_logits_are_those_of_the_network_cut_after_each_block(channels: int, dims: int) -> None:
    torch.manual_seed(3)
    model = Digits(channels, classes=5, dims=dims).eval()
    x = torch.randn(4, channels, *[8] * dims, generator=torch.Generator().manual_seed(2))
    expected = by_hand(model, x)
    for column in (RankFeat(), RankFeat(blocks=("first", "second"))):
        np.testing.assert_allclose(column(pass_of(model, x, gradients=False)), expected, atol=2e-5)
    exact = RankFeatPower(iterations=200)(pass_of(model, x, gradients=False))
    np.testing.assert_allclose(exact, expected, atol=2e-4)
    np.testing.assert_allclose(
        RankFeat(blocks=("second",))(pass_of(model, x, layers=(), gradients=False)), expected[:, 1:], atol=2e-5
    )


class ChannelsLast(torch.nn.Module):
    """A block that gives rows × height × width × channels inside a tuple, as some transformers do."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.block = model, Turned()

    def forward(self, x):
        turned, _ = self.block(self.model.second(self.model.first(x)))
        return self.model.fc(self.model.pool(turned.movedim(-1, 1)).flatten(1))


class Turned(torch.nn.Module):
    def forward(self, x):
        return x.movedim(1, -1), None


def test_channels_last_maps_inside_tuples_are_changed_alike() -> None:
    model, x = trained(), images()[0][:5]
    found = RankFeat(blocks=("block",))(pass_of(ChannelsLast(model), x, layers=(), gradients=False))
    np.testing.assert_allclose(found, by_hand(model, x)[:, 1:], atol=2e-5)


def bank_of(x: torch.Tensor) -> Bank:
    run = pass_of(trained(), x, gradients=False)
    return Bank({"logits.rankfeat": RankFeat()(run).numpy(), "logits.rankfeat.power": RankFeatPower()(run).numpy()})


@pytest.mark.parametrize("accelerate", [False, True])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 1000.0])
def test_scores_are_the_energy_of_the_mean_logits_and_oriented(accelerate: bool, temperature: float) -> None:
    x = images()[0][1200:1300]
    bank, far = bank_of(x), bank_of(far_images(100))
    detector = create("rankfeat", accelerate=accelerate, temperature=temperature)
    z = by_hand(trained(), x, by_power if accelerate else by_svd).mean(1).astype(np.float64)
    expected = -temperature * logsumexp(z / temperature, axis=1)
    np.testing.assert_allclose(detector.score(bank), expected, atol=1e-4, rtol=1e-7)
    if temperature <= 1:
        assert metrics.auroc(detector.score(bank), detector.score(far)) > 0.5


def test_rows_do_not_depend_on_their_batch_and_runs_repeat() -> None:
    x = images()[0][:16]
    for column in (RankFeat(), RankFeatPower()):
        whole = column(pass_of(trained(), x, gradients=False))
        singles = torch.cat([column(pass_of(trained(), x[i : i + 1], gradients=False)) for i in range(16)])
        np.testing.assert_allclose(whole, singles, atol=2e-5)
        np.testing.assert_array_equal(whole, column(pass_of(trained(), x, gradients=False)))
    assert not trained()._forward_hooks
    other = RankFeatPower(iterations=1, seed=1)(pass_of(trained(), x, gradients=False))
    assert float((other - RankFeatPower(iterations=1)(pass_of(trained(), x, gradients=False))).abs().max()) > 1e-6


def test_what_is_not_a_map_or_not_there_is_named() -> None:
    x = images()[0][:3]
    with pytest.raises(OodometerError, match="name the last blocks"):
        RankFeat()(pass_of(trained(), x, layers=(), gradients=False))
    with pytest.raises(OodometerError, match="must give maps"):
        RankFeat(blocks=("fc",))(pass_of(trained(), x, gradients=False))
    with pytest.raises(OodometerError, match="did you mean 'second'"):
        RankFeat(blocks=("secnd",))(pass_of(trained(), x, gradients=False))
    with pytest.raises(OodometerError, match="iterations"):
        RankFeatPower(iterations=0)
    with pytest.raises(OodometerError, match="rows × blocks × classes"):
        create("rankfeat").score(Bank({"logits.rankfeat": np.zeros((3, 10))}))

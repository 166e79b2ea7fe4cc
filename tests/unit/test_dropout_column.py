"""Dropout passes against networks with explicit masks, on small real networks."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.network_fixture import Digits, far_images, images, pass_of, trained  # noqa: E402
from torch import nn  # noqa: E402

from oodometer import Bank, Head, create, metrics  # noqa: E402
from oodometer.detectors.mcd import dropout_logits  # noqa: E402
from oodometer.errors import OodometerError, OodometerWarning  # noqa: E402
from oodometer.models.columns.dropout import MCDropout, dropped  # noqa: E402

pytestmark = pytest.mark.torch


class Masked(nn.Module):
    """Multiplies by masks drawn here, the next one each call."""

    def __init__(self, seed: int, number: int, p: float, channels: bool = False) -> None:
        super().__init__()
        self.key, self.p, self.channels, self.call = (seed, number), p, channels, 0

    def forward(self, x):
        shape = (1, x.shape[1], *[1] * (x.ndim - 2)) if self.channels else (1, *x.shape[1:])
        keep = np.random.default_rng((*self.key, self.call)).random(shape) >= self.p
        return x * torch.as_tensor(keep / (1 - self.p), dtype=x.dtype)


def deep() -> nn.Module:
    """Dropout of channels between the blocks and of units before the head; batch normalisation in between."""
    model = copy.deepcopy(trained())
    model.first = nn.Sequential(model.first, nn.Dropout2d(0.25))
    return model.eval()


def test_passes_are_those_of_a_network_with_these_masks() -> None:
    model, x = deep(), images()[0][1200:1216]
    found = MCDropout(passes=4, seed=3)(pass_of(model, x, layers=(), gradients=False))
    for number in range(4):
        other = copy.deepcopy(model)
        other.first[1], other.drop = Masked(3, number, 0.25, channels=True), Masked(3, number, 0.2)
        other.drop.call = 1  # the second layer to drop in the pass
        with torch.no_grad():
            np.testing.assert_allclose(found[:, number], other(x), atol=1e-5)


def test_dropout_before_the_head_runs_the_network_once_and_gives_the_same() -> None:
    model, x = copy.deepcopy(trained()), images()[0][:8]
    run, calls = pass_of(model, x, gradients=False), []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    found = MCDropout(passes=6)(run)
    handle.remove()
    assert len(calls) == 1
    for number in range(6):
        other = copy.deepcopy(model)
        other.drop = Masked(0, number, 0.2)
        with torch.no_grad():
            np.testing.assert_allclose(found[:, number], other(x), atol=1e-5)


def test_nothing_but_dropout_changes() -> None:
    model, x = deep(), images()[0][:16]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    run = pass_of(model, x, gradients=False)
    found = MCDropout(passes=3)(run)
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    np.testing.assert_array_equal(found, MCDropout(passes=3)(run))
    np.testing.assert_array_equal(found, MCDropout(passes=5)(run)[:, :3])
    singles = torch.cat([MCDropout(passes=3)(pass_of(model, x[i : i + 1], gradients=False)) for i in range(16)])
    np.testing.assert_allclose(found, singles, atol=1e-4)
    assert float((found - MCDropout(passes=3, seed=1)(run)).abs().max()) > 0.1


def test_the_mean_over_passes_is_the_expectation_of_a_linear_network() -> None:
    """Without a non-linearity after the dropout its expectation is the plain pass."""
    model, x = trained(), images()[0][:4]
    run = pass_of(model, x, gradients=False)
    found = MCDropout(passes=4000)(run)
    error = found.std(1) / 4000**0.5
    assert float(((found.mean(1) - run.logits).abs() / error).max()) < 5


def without_dropout() -> nn.Module:
    model = copy.deepcopy(trained())
    model.drop = nn.Identity()
    return model


def test_a_network_without_dropout_gets_it_on_the_penultimate_features_and_says_so() -> None:
    model, x = without_dropout(), images()[0][:9]
    run = pass_of(model, x, gradients=False)
    with pytest.warns(OodometerWarning, match="no dropout layer"):
        found = MCDropout(passes=7, p=0.4, seed=2)(run)
    head = Head(model.fc.weight.detach().numpy(), model.fc.bias.detach().numpy())
    bank = Bank(features=run.features.numpy(), head=head)
    np.testing.assert_allclose(found, dropout_logits(bank, passes=7, p=0.4, seed=2), atol=1e-5)
    np.testing.assert_array_equal(found, MCDropout(passes=7, p=0.4, seed=2, where="features")(run))
    with pytest.raises(OodometerError, match=r"no dropout layer with p > 0.*where='features'"):
        MCDropout(where="layers")(run)
    model.drop = nn.Dropout(0.0)
    with pytest.raises(OodometerError, match="no dropout layer"):
        MCDropout(where="layers")(pass_of(model, x, gradients=False))


def test_passes_that_cannot_be_made_are_refused() -> None:
    class Idle(Digits):
        def forward(self, x):
            return self.fc(self.pool(self.second(self.first(x))).flatten(1))

    with pytest.raises(OodometerError, match="ran: use where='features'"):
        MCDropout()(pass_of(Idle().eval(), images()[0][:2], gradients=False))

    class Turned(Digits):
        def forward(self, x):
            h = self.pool(self.second(self.first(x))).flatten(1)
            return self.fc(self.drop(h.T).T)

    with pytest.raises(OodometerError, match="whose first axis is not the 5 rows"):
        MCDropout()(pass_of(Turned().eval(), images()[0][:5], gradients=False))
    for params in ({"passes": 1}, {"p": 0.0}, {"p": 1.0}, {"where": "head"}):
        with pytest.raises(OodometerError, match="two passes or more"):
            MCDropout(**params)


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d])
def test_dropping_keeps_the_mean_and_what_it_drops_together(kind) -> None:
    shape = {nn.Dropout: (1, 400, 5), nn.Dropout1d: (1, 2000, 3), nn.Dropout2d: (1, 2000, 3, 2)}.get(
        kind, (1, 2000, 2, 2, 2)
    )
    found = dropped(torch.ones(shape, dtype=torch.float64), kind(0.3), np.random.default_rng(0))
    assert set(np.unique(found)) == {0.0, 1 / 0.7}
    kept = (found > 0).double()
    assert abs(float(kept.mean()) - 0.7) < 0.04
    together = bool((kept.flatten(2).amax(2) == kept.flatten(2).amin(2)).all())
    assert together == (kind is not nn.Dropout)
    assert not dropped(torch.ones(shape), kind(1.0), np.random.default_rng(0)).any()


@pytest.mark.parametrize("kind", [nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_alpha_dropout_gives_the_values_of_the_layer_in_training(kind) -> None:
    x, layer = torch.full((1, 500, 4), 0.7), kind(0.3)
    expected = np.unique(layer.train()(x).numpy().round(5))
    found = dropped(x, layer, np.random.default_rng(0))
    np.testing.assert_allclose(np.unique(found.numpy().round(5)), expected, atol=2e-5)


@pytest.mark.parametrize("name", ["dropout", "mcd_pe", "mcd_ee"])
def test_the_scores_of_the_passes_are_oriented(name: str) -> None:
    def bank_of(x: torch.Tensor) -> Bank:
        return Bank({"logits.mcd": MCDropout(passes=20)(pass_of(deep(), x, layers=(), gradients=False)).numpy()})

    detector = create(name)
    assert metrics.auroc(detector.score(bank_of(images()[0][1200:1400])), detector.score(bank_of(far_images()))) > 0.8

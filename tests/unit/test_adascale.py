"""AdaScale against loops over rows and coordinates, on a small real network."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from statsmodels.distributions.empirical_distribution import ECDF

torch = pytest.importorskip("torch")

from tests.network_fixture import far_images, images, pass_of, trained  # noqa: E402

from oodometer import Bank, Head, create, metrics  # noqa: E402
from oodometer.errors import OodometerError  # noqa: E402
from oodometer.models.columns.adascale import AdaScale, smallest_entries  # noqa: E402

pytestmark = pytest.mark.torch


def test_the_features_are_those_of_the_moved_input() -> None:
    model, x = copy.deepcopy(trained()).double(), images()[0][1200:1206].double()
    found = AdaScale()(pass_of(model, x))
    for place, row in enumerate(x):
        leaf = row[None].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(leaf).max(), leaf)
        g, moved = gradient.numpy().ravel(), row.numpy().ravel().copy()
        for entry in sorted(range(64), key=lambda i: (abs(g[i]), i))[: int(64 * 0.05)]:
            moved[entry] += 0.5 * np.sign(g[entry])
        with torch.no_grad():
            h = model.pool(model.second(model.first(torch.as_tensor(moved).reshape(1, 1, 8, 8)))).flatten()
        np.testing.assert_allclose(found[place], h, atol=1e-12)


def test_of_equal_gradients_the_first_entries_move() -> None:
    gradient = torch.tensor([[3.0, -1.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(smallest_entries(gradient, 2), [[0, 1, 1, 0, 0], [1, 1, 0, 0, 0]])


def bank_of(x: torch.Tensor) -> Bank:
    run = pass_of(trained(), x)
    model = trained()
    head = Head(model.fc.weight.detach().numpy(), model.fc.bias.detach().numpy())
    return Bank(
        {"features": run.features.detach().numpy(), "features.adascale": AdaScale()(run).detach().numpy()}, head=head
    )


def by_loops(val: Bank, test: Bank, variant: str, low: float, high: float, k1=5.0, k2=1.0, lam=10.0) -> np.ndarray:
    """OpenOOD's steps written out."""
    width = val.row_shape("features")[0]
    n1, n2 = max(1, int(width * k1 / 100)), max(1, int(width * k2 / 100))

    def stability(bank: Bank) -> np.ndarray:
        found = []
        for h, moved in zip(np.asarray(bank.features), np.asarray(bank["features.adascale"]), strict=True):
            order = sorted(range(width), key=lambda i: (-h[i], i))
            shown = sum(max(float(moved[i]), 0.0) for i in order[:n1])
            shift = sum(abs(float(h[i]) - float(moved[i])) for i in order[:n2])
            found.append(shown + lam * shift)
        return np.array(found)

    ecdf, scores = ECDF(stability(val)), []
    weight, bias = (np.asarray(part, np.float64) for part in (test.head.weight, test.head.bias))
    for h, q in zip(np.asarray(test.features, np.float64), stability(test), strict=True):
        percentile = low + (1 - ecdf(q)) * (high - low)
        k = width - int(torch.round(torch.tensor(width * percentile / 100, dtype=torch.float64)))
        positive = np.maximum(h, 0)
        s = positive.sum() / np.sort(positive)[::-1][:k].sum()
        z = weight @ (h * np.exp(s)) + bias if variant == "a" else (weight @ h + bias) * s**2
        scores.append(-np.log(np.exp(z - z.max()).sum()) - z.max())
    return np.array(scores)


VAL, TEST, FAR = bank_of(images()[0][1200:1400]), bank_of(images()[0][1400:1500]), bank_of(far_images(100))


@pytest.mark.parametrize("variant", ["a", "l"])
@pytest.mark.parametrize(("low", "high"), [(75, 85), (60, 99), (70, 70)])
def test_scores_are_the_published_steps_and_oriented(variant: str, low: float, high: float) -> None:
    detector = create("adascale", variant=variant, percentiles=(low, high), samples=None).fit(TEST, val=VAL)
    np.testing.assert_allclose(detector.score(TEST), by_loops(VAL, TEST, variant, low, high), rtol=1e-5)
    if high < 90:  # beyond, one of the 96 features is left, and s says little
        assert metrics.auroc(detector.score(TEST), detector.score(FAR)) > 0.8


def test_other_weights_and_shares_act() -> None:
    params = {"k1": 30.0, "k2": 10.0, "lam": 2.0}
    detector = create("adascale", samples=None, **params).fit(TEST, val=VAL)
    np.testing.assert_allclose(detector.score(TEST), by_loops(VAL, TEST, "a", 75, 85, **params), rtol=1e-5)


def test_one_percentile_is_scale() -> None:
    found = create("adascale", percentiles=(80, 80)).fit(VAL).score(TEST)
    np.testing.assert_allclose(found, create("scale", percentile=80).fit(VAL).score(TEST), rtol=1e-5)


def test_the_subset_is_seeded_and_drawn_from_validation_rows() -> None:
    made = [create("adascale", samples=20, seed=seed).fit(TEST, val=VAL) for seed in (0, 0, 1)]
    assert len(made[0].stability_) == 20
    np.testing.assert_array_equal(made[0].stability_, made[1].stability_)
    assert not np.array_equal(made[0].stability_, made[2].stability_)
    every = create("adascale", samples=None).fit(TEST, val=VAL).stability_
    assert np.isin(made[0].stability_, every).all()
    assert len(every) == len(VAL)


def test_what_is_missing_or_out_of_range_is_named() -> None:
    plain = TEST.select(["features"]).with_columns(logits=TEST.logits)
    assert create("adascale").fit(plain, val=VAL).score(TEST).shape == (100,)
    with pytest.raises(
        OodometerError, match=r"adascale needs 'features.adascale' .*columns=\[…, 'features.adascale'\]"
    ):
        create("adascale").fit(plain)
    for pair in ((85, 75), (0, 50), (50, 100), (50,), ("a", "b")):
        with pytest.raises(OodometerError, match="percentiles must be two numbers"):
            create("adascale", percentiles=pair)
    with pytest.raises(OodometerError, match="keeps none of 96"):
        create("adascale", percentiles=(50, 99.9)).fit(VAL)
    for params in ({"share": 0.0}, {"share": 1.5}, {"step": 0.0}):
        with pytest.raises(OodometerError, match="share"):
            AdaScale(**params)
    with pytest.raises(OodometerError, match="is none"):
        AdaScale(share=0.001)(pass_of(trained(), images()[0][:2]))

"""CADet's views against slices and loops by hand, on a small real network."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.network_fixture import Digits, images, pass_of, trained  # noqa: E402

from oodometer import Bank, create, metrics  # noqa: E402
from oodometer.errors import OodometerError  # noqa: E402
from oodometer.models.columns.cadet import Views, draw  # noqa: E402

pytestmark = pytest.mark.torch


def by_loops(model: torch.nn.Module, column: Views, x: torch.Tensor) -> np.ndarray:
    """Mean inner product of different views, one row at a time, resized by nested loops."""
    views = column.drawn(tuple(x.shape[2:]))
    found = []
    for row in x:
        features = []
        for view in views:
            part = resized(row[0][view.crop].numpy(), row.shape[1:])
            part = part[:, ::-1].copy() if view.flip else part
            with torch.no_grad():
                h = model.pool(model.second(model.first(torch.as_tensor(part, dtype=torch.float32)[None, None])))
            features.append(h.flatten().double().numpy())
        pairs = [a @ b for i, a in enumerate(features) for j, b in enumerate(features) if i != j]
        found.append(np.mean(pairs))
    return np.array(found)


def resized(image: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Bilinear with pixel centres aligned, edges repeated."""
    out = np.zeros(size)
    for i in range(size[0]):
        for j in range(size[1]):
            y = min(max((i + 0.5) * image.shape[0] / size[0] - 0.5, 0), image.shape[0] - 1)
            x = min(max((j + 0.5) * image.shape[1] / size[1] - 0.5, 0), image.shape[1] - 1)
            top, left = int(y), int(x)
            bottom, right = min(top + 1, image.shape[0] - 1), min(left + 1, image.shape[1] - 1)
            a, b = y - top, x - left
            upper = image[top, left] * (1 - b) + image[top, right] * b
            lower = image[bottom, left] * (1 - b) + image[bottom, right] * b
            out[i, j] = upper * (1 - a) + lower * a
    return out


def bank_of(x: torch.Tensor, column: Views) -> Bank:
    return Bank({"views.products": column(pass_of(trained(), x, gradients=False)).numpy()})


def test_the_score_is_the_mean_inner_product_of_different_views() -> None:
    column, x = Views(scale=(0.2, 1.0)), images()[0][1200:1206]
    assert len({repr(view) for view in column.drawn((8, 8))}) == 5
    found = create("cadet").score(bank_of(x, column))
    np.testing.assert_allclose(found, -by_loops(trained(), column, x), rtol=1e-5)


def test_cosines_and_fewer_views_come_from_the_same_products() -> None:
    h = np.random.default_rng(0).standard_normal((6, 5, 7))
    bank = Bank({"views.products": h @ h.transpose(0, 2, 1)})
    for n, views in ((5, None), (3, 3)):
        for normalise in (False, True):
            u = h[:, :n] / (np.linalg.norm(h[:, :n], axis=2, keepdims=True) if normalise else 1)
            expected = [-np.mean([r[i] @ r[j] for i in range(n) for j in range(n) if i != j]) for r in u]
            found = create("cadet", views=views, normalise=normalise).score(bank)
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)
    silent = Bank({"views.products": np.zeros((2, 5, 5))})
    np.testing.assert_array_equal(create("cadet", normalise=True).score(silent), [0, 0])
    more, fewer = (bank_of(images()[0][:4], Views(views=n)) for n in (5, 3))
    expected = create("cadet").score(fewer)
    np.testing.assert_allclose(create("cadet", views=3).score(more), expected, rtol=1e-6)


def test_grey_noise_scores_higher_than_digits() -> None:
    """Products that are not normalised fall with the features' size: noise around mid-grey excites few of them."""
    column, grey = Views(), torch.rand(200, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 0.6 - 0.3
    bank, far = bank_of(images()[0][1200:1400], column), bank_of(grey, column)
    assert metrics.auroc(create("cadet").score(bank), create("cadet").score(far)) > 0.9


def test_rows_do_not_depend_on_their_batch_order_or_run() -> None:
    column, x = Views(), images()[0][:16]
    whole = bank_of(x, column)["views.products"]
    np.testing.assert_array_equal(whole, bank_of(x, column)["views.products"])
    np.testing.assert_allclose(bank_of(x.flip(0), column)["views.products"][::-1], whole, rtol=1e-4)
    singles = np.concatenate([bank_of(x[i : i + 1], column)["views.products"] for i in range(16)])
    np.testing.assert_allclose(singles, whole, rtol=1e-4)
    other = bank_of(x, Views(seed=1))["views.products"]
    assert np.abs(other - whole).max() > 0.1


def test_crops_keep_their_bounds_and_their_distribution() -> None:
    rng = np.random.default_rng(0)
    views = [draw(rng, (64, 48), (0.2, 0.5), (3 / 4, 4 / 3)) for _ in range(4000)]
    sides = np.array([[one.stop - one.start for one in view.crop] for view in views])
    starts = np.array([[one.start for one in view.crop] for view in views])
    shares, ratios = sides.prod(1) / (64 * 48), sides[:, 1] / sides[:, 0]
    assert 0.19 < shares.min() < 0.22
    assert 0.48 < shares.max() < 0.52
    assert 0.70 < ratios.min() < 0.77
    assert 1.30 < ratios.max() < 1.40
    assert abs(np.log(ratios).mean()) < 0.01
    assert abs(shares.mean() - 0.35) < 0.005
    assert (starts >= 0).all()
    assert (starts + sides <= [64, 48]).all()
    assert abs(np.mean([view.flip for view in views]) - 0.5) < 0.03
    # No crop of this share has an allowed shape: the largest one of the image that does.
    long = draw(rng, (10, 100), (1.0, 1.0), (3 / 4, 4 / 3))
    assert [one.stop - one.start for one in long.crop] == [10, 13]


@pytest.mark.parametrize("dims", [1, 3])
def test_signals_and_volumes_are_cropped_along_every_axis(dims: int) -> None:
    torch.manual_seed(0)
    model = Digits(2, classes=3, dims=dims).eval()
    x = torch.randn(3, 2, *[8] * dims)
    column = Views(views=2, scale=(0.3, 0.6))
    for view in column.drawn((8,) * dims):
        share = np.prod([one.stop - one.start for one in view.crop]) / 8**dims
        assert 0.1 < share < 0.9
        mode = {1: "linear", 3: "trilinear"}[dims]
        part = torch.nn.functional.interpolate(x[(slice(None), slice(None), *view.crop)], [8] * dims, mode=mode)
        np.testing.assert_array_equal(view(x), part.flip(-1) if view.flip else part)
    assert column(pass_of(model, x, gradients=False)).shape == (3, 2, 2)


def test_what_cannot_be_viewed_is_named() -> None:
    with pytest.raises(OodometerError, match="images, volumes or signals"):
        Views()(pass_of(torch.nn.Linear(4, 3), torch.zeros(2, 4), layers=(), gradients=False))
    for params in ({"views": 1}, {"scale": (0.0, 1.0)}, {"scale": (0.5, 0.2)}, {"ratio": (2.0, 1.0)}):
        with pytest.raises(OodometerError, match="views"):
            Views(**params)
    with pytest.raises(OodometerError, match="with 6 views or more"):
        create("cadet", views=6).score(Bank({"views.products": np.ones((2, 5, 5))}))

"""KL matching, OpenMax and temperature scaling against their definitions, SciPy and PyTorch."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats

from oodometer import Bank, Head, create
from oodometer.detectors import openmax
from oodometer.detectors.tempscale import lbfgs_temperature
from oodometer.errors import OodometerError, OodometerWarning
from oodometer.temperature import fit_temperature

GOLDEN = Path(__file__).parents[1] / "golden" / "synth.npz"


def sample(seed: int, rows: int = 200, classes: int = 5, *, gap: float = 3.0) -> Bank:
    """Logits around a corner a class; some rows are wrong."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, rows)
    y[:classes] = np.arange(classes)
    z = 1.5 * rng.standard_normal((rows, classes)) + gap * np.eye(classes)[y]
    return Bank(logits=z, labels=y)


TRAIN, VAL, TEST = sample(0), sample(1, 90), sample(2, 40, gap=1.0)

# ---------------------------------------------------------------------------------------------- KL matching


def klm_by_loops(fit: np.ndarray, test: np.ndarray) -> np.ndarray:
    p_fit, p = scipy.special.softmax(fit, axis=1), scipy.special.softmax(test, axis=1)
    predicted = fit.argmax(1)
    templates = [p_fit[predicted == c].mean(0) for c in np.unique(predicted)]
    return np.array([min(scipy.special.rel_entr(row, d).sum() for d in templates) for row in p])


def test_klm_is_the_divergence_from_the_nearest_template() -> None:
    expected = klm_by_loops(TRAIN.logits, TEST.logits)
    np.testing.assert_allclose(create("klm").fit(TRAIN).score(TEST), expected, rtol=1e-9, atol=1e-13)


def test_klm_fits_on_validation_rows_when_there_are_any() -> None:
    on_val, on_train = klm_by_loops(VAL.logits, TEST.logits), klm_by_loops(TRAIN.logits, TEST.logits)
    for bank, expected in (("auto", on_val), ("val", on_val), ("train", on_train)):
        found = create("klm", bank=bank).fit(TRAIN, val=VAL).score(TEST)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-13)
    with pytest.raises(OodometerError, match="validation rows"):
        create("klm", bank="val").fit(TRAIN)


def test_klm_groups_by_prediction_and_reads_no_labels() -> None:
    """N23: a peer groups by the true label."""
    shuffled = Bank(logits=TRAIN.logits, labels=TRAIN.labels[::-1].copy())
    bare = Bank(logits=TRAIN.logits)
    expected = create("klm").fit(TRAIN).score(TEST)
    for bank in (shuffled, bare):
        assert np.array_equal(create("klm").fit(bank).score(TEST), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_klm_of_certain_rows_is_zero_and_never_nan(dtype: type) -> None:
    """N23: 0·log 0 is 0. Certain rows of one class, templates that underflow elsewhere."""
    z = 1e4 * np.eye(3, dtype=dtype)
    detector = create("klm").fit(Bank(logits=np.repeat(z, 4, axis=0)))
    found = detector.score(Bank(logits=np.concatenate([z, np.zeros((1, 3), dtype)])))
    np.testing.assert_allclose(found[:3], 0, atol=1e-12)
    # KL from the uniform row to a corner is infinite; it stays finite, and above every certain row's.
    floor = -math.log(np.finfo(np.float64).tiny)
    assert found[3] == pytest.approx(2 / 3 * floor - math.log(3), rel=1e-12)


def test_klm_of_a_class_never_predicted() -> None:
    """Left out, or a corner that is at distance zero of rows exactly as certain and infinitely far from others."""
    fit = Bank(logits=TRAIN.logits[TRAIN.logits.argmax(1) != 2].astype(np.float32))
    rows = np.zeros((3, 5), np.float32)
    rows[0, 2], rows[1, 2], rows[2, 1] = 200, 20, 200
    test = Bank(logits=rows)
    dropped = create("klm", empty="drop").fit(fit).score(test)
    corner = create("klm", empty="onehot").fit(fit).score(test)
    np.testing.assert_allclose(dropped, klm_by_loops(fit.logits, rows), rtol=1e-5)
    assert corner[0] == 0
    assert dropped[0] > 1
    np.testing.assert_array_equal(corner[1:], dropped[1:])


# ---------------------------------------------------------------------------------------------- OpenMax: Weibulls


def fitted_weibull(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    shape, log_scale = openmax.fit_weibull(np.log(x), np.ones(x.shape, bool))
    return shape, np.exp(log_scale)


@pytest.mark.parametrize("true", [0.6, 1.0, 2.3, 40.0])
def test_weibulls_are_those_that_scipy_finds(true: float) -> None:
    x = 3 * np.random.default_rng(0).weibull(true, (6, 20))
    for row, shape, scale in zip(x, *fitted_weibull(x), strict=True):
        c, _, s = scipy.stats.weibull_min.fit(row, floc=0)
        assert shape == pytest.approx(c, rel=1e-4)
        assert scale == pytest.approx(s, rel=1e-4)
        ours, scipys = (scipy.stats.weibull_min.logpdf(row, a, scale=b).sum() for a, b in ((shape, scale), (c, s)))
        assert ours >= scipys - 1e-12 * abs(scipys)


def test_weibulls_are_stationary_to_round_off() -> None:
    x = np.random.default_rng(1).gamma(3.0, size=(50, 7))
    shape, scale = fitted_weibull(x)
    power = (x / scale[:, None]) ** shape[:, None]
    np.testing.assert_allclose(power.mean(1), 1, rtol=1e-12)
    slope = 1 / shape + np.log(x / scale[:, None]).mean(1) - (power * np.log(x / scale[:, None])).mean(1)
    assert np.abs(slope * shape).max() < 1e-12


def test_weibulls_do_not_depend_on_their_neighbours_or_on_empty_places() -> None:
    x = np.random.default_rng(2).weibull(2.0, (4, 9))
    filled = np.arange(9) < np.array([9, 5, 2, 0])[:, None]
    shape, log_scale = openmax.fit_weibull(np.where(filled, np.log(x), 77.0), filled)
    for c, n in enumerate([9, 5, 2]):
        alone = openmax.fit_weibull(np.log(x[c : c + 1, :n]), np.ones((1, n), bool))
        np.testing.assert_allclose([shape[c], log_scale[c]], np.ravel(alone), rtol=1e-12)
    assert np.isfinite(shape).all()


def test_largest_takes_the_tail_of_each_group() -> None:
    rng = np.random.default_rng(3)
    values, groups = rng.random(60), rng.integers(-1, 4, 60)
    groups[groups == 2] = 1
    found, filled = openmax.largest(values, groups, 4, 25)
    for c in range(4):
        expected = np.sort(values[groups == c])[::-1][:25]
        np.testing.assert_array_equal(found[c][filled[c]], expected)


def test_fit_high_is_libmrs() -> None:
    """Scale, shape and w_score of libmr 0.1.9 for `MR().fit_high([3, 4, 5, 6, 9], 5)`: its search stops near 1e-5."""
    found = openmax.fit_high(np.array([[9.0, 6, 5, 4, 3]]), np.ones((1, 5), bool))
    assert found.start[0] == 2.0
    assert np.exp(found.log_scale[0]) == pytest.approx(3.836439692377114, rel=1e-5)
    assert found.shape[0] == pytest.approx(1.745688029317736, rel=1e-5)
    distances = np.array([2.5, 3, 4.5, 9, 12])
    w_scores = [0.028116457206707635, 0.09120960995241978, 0.3771830123376766, 0.9425631492578237, 0.9951323438761627]
    np.testing.assert_allclose(found.cdf(np.zeros(5, int), distances, np), w_scores, rtol=1e-5)


# ---------------------------------------------------------------------------------------------- OpenMax: scores


def weibull_cdf(tail: np.ndarray, distance: float) -> float:
    """libmr's fit_high: the tail moved to begin at 1, then two-parameter maximum likelihood by SciPy's root."""
    start = tail.min() - 1
    y = np.log(tail - start)

    def slope(k: float) -> float:
        return float((y * np.exp(k * (y - y.max()))).sum() / np.exp(k * (y - y.max())).sum() - y.mean() - 1 / k)

    k = scipy.optimize.brentq(slope, 1e-3, 1e9, xtol=1e-9)
    scale = np.exp(y.max()) * np.exp(k * (y - y.max())).mean() ** (1 / k)
    return float(scipy.stats.weibull_min.cdf(distance - start, k, scale=scale))


def openmax_by_loops(
    train: Bank, test: np.ndarray, *, tail: int = 20, alpha: int = 3, every: bool = False
) -> np.ndarray:
    z, y, classes = train.logits, train.labels, train.logits.shape[1]
    means, tails = [], []
    for c in range(classes):
        rows = z[(y == c) & (every | (z.argmax(1) == c))]
        means.append(rows.mean(0))
        tails.append(np.sort(np.linalg.norm(rows - means[-1], axis=1))[-tail:])
    scores = []
    for row in test:
        revised = row.copy()
        for place, c in enumerate(np.argsort(-row)[:alpha]):
            f = weibull_cdf(tails[c], float(np.linalg.norm(row - means[c])))
            revised[c] = row[c] * (1 - (alpha - place) / alpha * f)
        scores.append(scipy.special.softmax([*revised, (row - revised).sum()])[-1])
    return np.array(scores)


@pytest.mark.parametrize("tail", [5, 20, 1000])
@pytest.mark.parametrize("alpha", [1, 3, 5])
@pytest.mark.parametrize("mav", ["correct", "all"])
def test_openmax_by_its_definition(tail: int, alpha: int, mav: str) -> None:
    expected = openmax_by_loops(TRAIN, TEST.logits, tail=tail, alpha=alpha, every=mav == "all")
    assert np.ptp(expected) > 0.1
    found = create("openmax", tail=tail, alpha=alpha, mav=mav).fit(TRAIN).score(TEST)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_openmax_presets_differ_as_their_papers_do() -> None:
    peer = create("openmax", preset="pytorch-ood")
    assert (peer.tail, peer.alpha, peer.mav) == (25, 10, "all")
    found = peer.fit(TRAIN).score(TEST)
    np.testing.assert_allclose(found, openmax_by_loops(TRAIN, TEST.logits, tail=25, alpha=5, every=True), rtol=1e-6)


def test_openmax_of_fewer_classes_than_alpha() -> None:
    """Peers crash or repeat classes."""
    two = sample(5, 60, 2)
    whole = create("openmax", alpha=2).fit(two).score(two)
    assert np.array_equal(create("openmax", alpha=3).fit(two).score(two), whole)
    np.testing.assert_allclose(whole, openmax_by_loops(two, two.logits, alpha=2), rtol=1e-6)


@pytest.mark.parametrize("scale", [1e3, 1e4])
def test_openmax_of_large_logits_does_not_overflow(scale: float) -> None:
    """N26: exp(logit) of a peer is infinite from 709 on. At a large scale the score is certain."""
    train = Bank(logits=scale * TRAIN.logits, labels=TRAIN.labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = create("openmax").fit(train).score(Bank(logits=scale * TEST.logits))
    assert ((found >= 0) & (found <= 1)).all()
    assert found.max() > 0.99
    assert found.min() < 0.01


def test_openmax_rows_far_from_every_mean_are_unknown() -> None:
    far = np.full((1, 5), -20.0)
    far[0, 3] = 40.0
    near = TRAIN.logits[:1]
    found = create("openmax").fit(TRAIN).score(Bank(logits=np.concatenate([far, near])))
    # F = 1: 40 − 20·2/3 − 20/3 = 20 moves to the unknown class; 0, −20/3, −40/3, −20 and −20 stay.
    assert found[0] == pytest.approx(scipy.special.softmax([0, -20 / 3, -40 / 3, -20, -20, 20])[-1], rel=1e-14)
    assert found[1] < 0.5


def test_openmax_never_revises_a_class_too_small_to_model() -> None:
    keep = (TRAIN.labels != 4) | (np.cumsum(TRAIN.labels == 4) <= 1)
    train = TRAIN.rows(keep)
    with pytest.warns(OodometerWarning, match="class 4: its logit is never revised"):
        detector = create("openmax", alpha=1, mav="all").fit(train)
    row = np.array([[0.0, 0, 0, 0, 50.0]])
    # F = 0: nothing moves to the unknown class, whose activation stays zero.
    assert detector.score(Bank(logits=row))[0] == pytest.approx(scipy.special.softmax([*row[0], 0])[-1], rel=1e-9)


def test_openmax_without_any_class_to_model_says_so() -> None:
    wrong = Bank(logits=np.roll(10 * np.eye(3), 1, axis=1), labels=np.arange(3))
    with pytest.raises(OodometerError, match="two correctly classified training rows"):
        create("openmax").fit(wrong)


def test_openmax_of_equal_distances_is_a_step() -> None:
    """Two rows are equally far from their mean, and repeated rows are at it: no shape is steep enough for either."""
    z = np.array([[4.0, 0], [6.0, 0], [0, 9.0], [0, 9.0], [0, 9.0]])
    detector = create("openmax", alpha=1).fit(Bank(logits=z, labels=np.array([0, 0, 1, 1, 1])))
    rows = np.array([[5.99, 0], [6.01, 0], [0, 9.01]])
    inside, outside = np.exp(0) / (np.exp(5.99) + 2), np.exp(6.01) / (2 + np.exp(6.01))
    expected = [inside, outside, np.exp(9.01) / (2 + np.exp(9.01))]
    np.testing.assert_allclose(detector.score(Bank(logits=rows)), expected, rtol=1e-6)


# ---------------------------------------------------------------------------------------------- temperature scaling


def test_tempscale_is_msp_at_the_temperature_of_least_loss() -> None:
    t = fit_temperature(VAL.logits, VAL.labels)
    expected = -scipy.special.softmax(TEST.logits / t, axis=1).max(1)
    detector = create("tempscale").fit(TRAIN, val=VAL)
    assert detector.temperature_ == t
    np.testing.assert_allclose(detector.score(TEST), expected, rtol=1e-12)
    on_train = create("tempscale", bank="train").fit(TRAIN, val=VAL)
    assert on_train.temperature_ == fit_temperature(TRAIN.logits, TRAIN.labels) != t


@pytest.mark.parametrize(("right", "bound", "side"), [(True, 0.05, "below"), (False, 20.0, "above")])
def test_tempscale_reports_an_active_bound(right: bool, bound: float, side: str) -> None:
    z = 5 * np.eye(3)
    bank = Bank(logits=z if right else -z, labels=np.arange(3))
    with pytest.warns(OodometerWarning, match=rf"still falls {side}: T={bound:g} is the bound"):
        detector = create("tempscale").fit(bank)
    assert detector.temperature_ == bound


@pytest.mark.parametrize(("init", "peer"), [(1.5, 1.16755998), (1.0, 0.87086785)])
def test_lbfgs50_stops_where_the_peers_stop(init: float, peer: float) -> None:
    """N28: on rows that are all correct the loss falls down to T = 0; fifty short steps end half-way."""
    golden = np.load(GOLDEN)
    head = Head(golden["in_W"], golden["in_b"])
    train = Bank(features=golden["in_train"], labels=golden["in_ytrain"], head=head)
    detector = create("tempscale", solver="lbfgs50", init=init).fit(train)
    assert detector.temperature_ == pytest.approx(peer, abs=2e-7)


@pytest.mark.torch
@pytest.mark.parametrize("init", [1.0, 1.5, 6.0])
@pytest.mark.parametrize("seed", range(4))
def test_lbfgs50_takes_the_steps_of_pytorch(init: float, seed: int) -> None:
    torch = pytest.importorskip("torch")
    bank = sample(seed, gap=[0.0, 1.0, 3.0, 8.0][seed])
    z, y = torch.tensor(bank.logits, dtype=torch.float32), torch.tensor(bank.labels)
    t = torch.nn.Parameter(torch.ones(1) * init)
    optimizer = torch.optim.LBFGS([t], lr=0.01, max_iter=50)

    def closure() -> object:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(z / t, y)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert lbfgs_temperature(bank, init) == pytest.approx(t.item(), rel=1e-5)


def test_lbfgs50_that_leaves_the_positive_temperatures_says_so() -> None:
    with pytest.raises(OodometerError, match="choose solver='exact'"):
        create("tempscale", solver="lbfgs50", init=0.5).fit(sample(3, gap=8.0))

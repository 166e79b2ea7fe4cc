"""Activation shaping against its definitions in plain loops, at its edges, and in bounded memory."""

from __future__ import annotations

import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.special

from oodometer import Bank, Head, create, detectors, tune
from oodometer.detectors import quantiles
from oodometer.errors import OodometerError, OodometerWarning

RNG = np.random.default_rng(0)
C, D, N, M = 4, 20, 300, 40
TRAIN = np.maximum(RNG.standard_normal((N, D)) + 0.5, 0)
VAL = np.maximum(1.5 * RNG.standard_normal((50, D)) + 0.5, 0)
TEST = np.maximum(RNG.standard_normal((M, D)) + 0.3, 0)
HEAD = Head(RNG.standard_normal((C, D)) / 3, RNG.standard_normal(C))
MAPS = np.maximum(RNG.standard_normal((M, D, 3, 2)) + 0.2, 0)
TRAIN_MAPS = np.maximum(RNG.standard_normal((N, D, 3, 2)) + 0.2, 0)
SHAPERS = ("react", "ash", "scale", "dice", "vra")


def lse(z: np.ndarray) -> float:
    return float(scipy.special.logsumexp(z))


def energies(shaped: np.ndarray, weight: np.ndarray = HEAD.weight) -> np.ndarray:
    return np.array([-lse(weight @ row + HEAD.bias) for row in shaped])


def score(name: str, test: np.ndarray = TEST, **params: object) -> np.ndarray:
    detector = create(name, **params).fit(Bank(features=TRAIN, head=HEAD), val=Bank(features=VAL, head=HEAD))
    return detector.score(Bank(features=test, head=HEAD))


def score_maps(name: str, maps: np.ndarray = MAPS, **params: object) -> np.ndarray:
    train = Bank({"features.map": TRAIN_MAPS}, head=HEAD)
    return create(name, where="map", **params).fit(train).score(Bank({"features.map": maps}, head=HEAD))


def kept(row: np.ndarray, percentile: float) -> np.ndarray:
    """Indices of the k largest, of equal ones the first."""
    k = row.size - round(row.size * percentile / 100)
    return np.argsort(-row, kind="stable")[:k]


def ash_row(row: np.ndarray, percentile: float, variant: str) -> np.ndarray:
    places, shaped = kept(row, percentile), np.zeros_like(row)
    shaped[places] = row[places]
    if variant == "b":
        shaped[places] = row.sum() / len(places)
    if variant == "s":
        shaped *= np.exp(row.sum() / row[places].sum())
    return shaped


def scale_row(row: np.ndarray, percentile: float) -> np.ndarray:
    return row * np.exp(row.sum() / row[kept(row, percentile)].sum())


# ---------------------------------------------------------------------------------------------- definitions


@pytest.mark.parametrize("percentile", [60, 85, 95])
def test_react_cuts_at_the_percentile_of_all_activations(percentile: float) -> None:
    threshold = np.percentile(TRAIN, percentile)
    expected = energies(np.minimum(TEST, threshold))
    np.testing.assert_allclose(score("react", percentile=percentile, bank="train"), expected, rtol=1e-12)


def test_react_takes_its_threshold_from_the_bank_it_is_told() -> None:
    by_val = energies(np.minimum(TEST, np.percentile(VAL, 90)))
    by_train = energies(np.minimum(TEST, np.percentile(TRAIN, 90)))
    assert np.abs(by_val - by_train).max() > 1e-3
    np.testing.assert_allclose(score("react"), by_val, rtol=1e-12)
    np.testing.assert_allclose(score("react", bank="val"), by_val, rtol=1e-12)
    train, test = Bank(features=TRAIN, head=HEAD), Bank(features=TEST, head=HEAD)
    np.testing.assert_allclose(create("react").fit(train).score(test), by_train, rtol=1e-12)
    with pytest.raises(OodometerError, match="bank='val' fits on validation rows"):
        create("react", bank="val").fit(train)


def test_react_can_end_in_other_scores_of_the_logits() -> None:
    z = np.minimum(TEST, np.percentile(TRAIN, 99)) @ HEAD.weight.T + HEAD.bias
    msp = -scipy.special.softmax(z, axis=1).max(1)
    np.testing.assert_allclose(score("react", percentile=99, bank="train", then="msp"), msp, rtol=1e-12)
    np.testing.assert_allclose(score("react", percentile=99, bank="train", then="mls"), -z.max(1), rtol=1e-12)


@pytest.mark.parametrize("variant", ["s", "b", "p"])
@pytest.mark.parametrize("percentile", [65, 90])
def test_ash_keeps_the_largest(variant: str, percentile: float) -> None:
    expected = energies(np.array([ash_row(row, percentile, variant) for row in TEST]))
    np.testing.assert_allclose(score("ash", percentile=percentile, variant=variant), expected, rtol=1e-12)


@pytest.mark.parametrize("percentile", [65, 85])
def test_scale_stretches_the_whole_row(percentile: float) -> None:
    expected = energies(np.array([scale_row(row, percentile) for row in TEST]))
    np.testing.assert_allclose(score("scale", percentile=percentile), expected, rtol=1e-12)
    np.testing.assert_allclose(score("scale", percentile=percentile, relu=True), expected, rtol=1e-12)


@pytest.mark.parametrize("percentile", [60, 90])
def test_dice_keeps_the_strongest_weights(percentile: float) -> None:
    contribution = TRAIN.mean(0) * HEAD.weight
    weight = np.where(contribution > np.percentile(contribution, percentile), HEAD.weight, 0)
    assert (weight != 0).sum() == round(C * D * (1 - percentile / 100))
    np.testing.assert_allclose(score("dice", percentile=percentile), energies(TEST, weight), rtol=1e-12)


@pytest.mark.parametrize("per_element", [False, True])
@pytest.mark.parametrize("below", ["clip", "zero"])
def test_vra_clips_from_both_sides(below: str, per_element: bool) -> None:
    low, high = np.percentile(TRAIN, [45, 85], axis=0 if per_element else None)
    shaped = np.clip(TEST, low, high) if below == "clip" else np.where(low > TEST, 0, np.minimum(TEST, high))
    found = score("vra", low=45, high=85, below=below, per_element=per_element, bank="train")
    np.testing.assert_allclose(found, energies(shaped), rtol=1e-12)


def test_maps_are_shaped_before_they_are_pooled() -> None:
    def pool(maps: np.ndarray) -> np.ndarray:
        return maps.mean((2, 3))

    def each(row_function: object, *arguments: object) -> np.ndarray:
        return np.array([row_function(m.ravel(), *arguments).reshape(m.shape) for m in MAPS])  # type: ignore[operator]

    low, high = np.percentile(TRAIN_MAPS, [50, 90])
    lows, highs = np.percentile(TRAIN_MAPS, [50, 90], axis=0)
    for expected, found in (
        (np.minimum(MAPS, high), score_maps("react", percentile=90)),
        (np.clip(MAPS, low, high), score_maps("vra", low=50, high=90)),
        (np.clip(MAPS, lows, highs), score_maps("vra", low=50, high=90, per_element=True)),
        (each(scale_row, 65), score_maps("scale", percentile=65)),
        *((each(ash_row, 65, v), score_maps("ash", percentile=65, variant=v)) for v in "sbp"),
    ):
        np.testing.assert_allclose(found, energies(pool(expected)), rtol=1e-12)
    pooled_first = score("react", MAPS.mean((2, 3)), percentile=90)
    assert np.abs(score_maps("react", percentile=90) - pooled_first).max() > 1e-2


def test_maps_of_one_position_are_the_pooled_features() -> None:
    train = Bank({"features.map": TRAIN[:, :, None]}, head=HEAD)
    test = Bank({"features.map": TEST[:, :, None]}, head=HEAD)
    for name in ("react", "ash", "scale", "vra"):
        pooled = create(name).fit(Bank(features=TRAIN, head=HEAD)).score(Bank(features=TEST, head=HEAD))
        np.testing.assert_allclose(create(name, where="map").fit(train).score(test), pooled, rtol=1e-12)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["react", "ash", "scale", "vra"])
def test_maps_score_alike_in_pytorch(name: str) -> None:
    train, test = Bank({"features.map": TRAIN_MAPS}, head=HEAD), Bank({"features.map": MAPS}, head=HEAD)
    found = create(name, where="map").fit(train.to("torch")).score(test.to("torch"))
    np.testing.assert_allclose(found, create(name, where="map").fit(train).score(test), rtol=1e-12)


@pytest.mark.parametrize("name", ["react", "ash", "scale", "vra"])
def test_maps_that_cannot_be_pooled_into_features_are_refused(name: str) -> None:
    for maps in (MAPS.transpose(0, 2, 3, 1), TEST):
        bank = Bank({"features.map": maps}, head=HEAD)
        with pytest.raises(OodometerError, match=f"{name}: rows of 'features.map' must be maps .* 20 channels"):
            create(name, where="map").fit(bank).score(bank)
    with pytest.raises(OodometerError, match=r"needs 'features.map' .* pass Bank\(…, \*\*{'features.map': …}\)"):
        create(name, where="map").fit(Bank(features=TRAIN, head=HEAD))


def test_scale_reads_stored_logits_instead_of_multiplying_again() -> None:
    stored = Bank(features=TEST, logits=TEST @ HEAD.weight.T + HEAD.bias, head=HEAD)
    np.testing.assert_allclose(create("scale").score(stored), score("scale"), rtol=1e-12)


# ---------------------------------------------------------------------------------------------- N21: sweeps act


@pytest.mark.parametrize("name", SHAPERS)
def test_n21_every_value_of_the_sweep_acts_and_refits(name: str) -> None:
    train, test = Bank(features=TRAIN + 0.1, head=HEAD), Bank(features=TEST + 0.1, head=HEAD)
    points = tune.sweep(name, train, test)
    distinct = {np.round(point.scores, 9).tobytes() for point in points if point.scores is not None}
    # 35 % of the activations are one value, and so are the low percentiles of vra.
    assert len(distinct) == (4 if name == "vra" else len(points))
    detector = create(name)
    for point in points:
        detector.set_params(**point.params).fit(train)
        assert np.array_equal(detector.score(test), point.scores)


def test_defaults_and_published_grids() -> None:
    tens = (65, 70, 75, 80, 85, 90, 95)
    grids = {"react": (85, 90, 95, 99), "ash": tens, "scale": tens, "dice": (60, *tens)}
    assert {name: detectors.get(name).card.grid["percentile"] for name in grids} == grids
    assert detectors.get("vra").card.grid == {"high": (85, 90, 95, 99), "low": (1, 5, 10, 15)}
    assert [create(name).get_params()["percentile"] for name in grids] == [90, 90, 85, 90]
    assert create("ash", preset="openood").get_params()["variant"] == "b"
    assert create("ash", preset="openmibood").get_params()["variant"] == "s"


# ---------------------------------------------------------------------------------------------- edges


def hand(weight: list[float], bias: float = 0.0) -> Head:
    return Head(np.array([weight]), np.array([bias]))


def one_row(name: str, row: list[float], head: Head, **params: object) -> float:
    return float(create(name, **params).score(Bank(features=np.array([row]), head=head))[0])


def test_half_of_an_odd_number_of_features_is_rounded_to_even() -> None:
    # D = 5, q = 50: round(2.5) = 2 are pruned, 3 kept; D = 3: round(1.5) = 2 are pruned, 1 kept.
    assert one_row("ash", [5, 4, 3, 2, 1], hand([1, 1, 1, 1, 1]), percentile=50, variant="p") == -12
    assert one_row("ash", [3, 2, 1], hand([1, 1, 1]), percentile=50, variant="p") == -3


def test_of_equal_activations_the_first_are_kept() -> None:
    head = hand([1, 10, 100, 1000])
    assert one_row("ash", [2, 2, 2, 2], head, percentile=50, variant="p") == -22
    assert one_row("ash", [1, 3, 1, 1], head, percentile=50, variant="p") == -31
    assert one_row("ash", [1, 3, 1, 1], head, percentile=50, variant="b") == -(3 * 1 + 3 * 10)
    # Two of three zeros are pruned; the first of them becomes s1/k.
    assert one_row("ash", [0, 0, 4, 0], head, percentile=50, variant="b") == -(2 * 1 + 2 * 100)
    assert one_row("ash", [2, 2, 2, 2], head, percentile=50) == pytest.approx(-22 * np.exp(2), rel=1e-12)
    assert one_row("scale", [2, 2, 2, 2], head, percentile=50) == pytest.approx(-2222 * np.exp(2), rel=1e-12)


@pytest.mark.parametrize("name", ["ash", "scale"])
def test_zero_rows_have_the_factor_one_and_are_reported(name: str) -> None:
    silent = TEST.copy()
    silent[[3, 7]] = 0
    with pytest.warns(OodometerWarning, match=f"{name}: 2 of 40 rows have no positive sum s2") as caught:
        found = score(name, silent)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    np.testing.assert_allclose(found[[3, 7]], -lse(HEAD.bias), rtol=1e-12)
    np.testing.assert_array_equal(np.delete(found, [3, 7]), np.delete(score(name), [3, 7]))
    for variant in "bp":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            np.testing.assert_allclose(score("ash", silent, variant=variant)[3], -lse(HEAD.bias), rtol=1e-12)


def test_negative_features_are_reported_and_relu_mends_them() -> None:
    head = hand([1, 1, 1, 1], 0.5)
    with pytest.warns(OodometerWarning, match="1 of 1 rows have no positive sum .* negative activations"):
        assert one_row("scale", [-1, -2, -3, -4], head, percentile=50) == 10 - 0.5
    with pytest.warns(OodometerWarning, match="negative activations, .* set relu=True"):
        found = one_row("scale", [3, 1, -1, -1], head, percentile=50)
    assert found == pytest.approx(-(2 * np.exp(2 / 4) + 0.5), rel=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert one_row("scale", [3, 1, -1, -1], head, percentile=50, relu=True) == pytest.approx(-4 * np.e - 0.5)
        assert one_row("ash", [3, 1, -1, -1], head, percentile=75, relu=True) == pytest.approx(-3 * np.exp(4 / 3) - 0.5)


@pytest.mark.parametrize("name", ["ash", "scale"])
def test_kept_activations_that_nearly_cancel_stay_finite(name: str) -> None:
    # s2 = 1e-9 and s1 ≈ −4: the factor exp(−4e9) is zero, and only the bias is left.
    rows = np.array([[1, -1 + 1e-9, -2, -2], [1, 1, 1, 1]])
    with pytest.warns(OodometerWarning, match=f"{name}: 1 of 2 rows have negative activations"):
        found = create(name, percentile=50).score(Bank(features=rows, head=hand([1, 0, 0, 0], 0.5)))
    np.testing.assert_allclose(found, [-0.5, -0.5 - np.exp(2)], rtol=1e-12)


def test_the_cap_is_at_700() -> None:
    # A thousand activations of which one is kept: s1/s2 = 1000.
    rows, head = np.ones((3, 1000)), Head(np.full((1, 1000), 1e-3), np.zeros(1))
    rows[2, 1:] = 0
    with pytest.warns(OodometerWarning, match="ash: 2 of 3 rows have s1/s2 above 700, where it is capped") as caught:
        found = create("ash", percentile=99.9).score(Bank(features=rows, head=head))
    assert len(caught) == 1
    np.testing.assert_allclose(found, [-1e-3 * np.exp(700), -1e-3 * np.exp(700), -1e-3 * np.e], rtol=1e-12)
    with pytest.warns(OodometerWarning, match="scale: 2 of 3 rows have s1/s2 above 700"):
        found = create("scale", percentile=99.9).score(Bank(features=rows, head=head))
    np.testing.assert_allclose(found, [-np.exp(700), -np.exp(700), -1e-3 * np.e], rtol=1e-12)


def test_float32_features_with_factors_beyond_float32() -> None:
    rows, head = np.ones((1, 300), np.float32), Head(np.full((1, 300), 1 / 300, np.float32), np.zeros(1, np.float32))
    found = create("scale", percentile=99.6).score(Bank(features=rows, head=head))
    np.testing.assert_allclose(found, -np.exp(300.0), rtol=1e-5)


def test_a_percentile_that_keeps_nothing_is_refused() -> None:
    for name in ("ash", "scale"):
        with pytest.raises(OodometerError, match=f"{name}: percentile=99 keeps none of 20 activations"):
            score(name, percentile=99)
        assert np.isfinite(score(name, percentile=95)).all()
    with pytest.raises(OodometerError, match="dice: no mean contribution"):
        score("dice", percentile=100)
    silent = Bank(features=np.zeros((5, D)), head=HEAD)
    with pytest.raises(OodometerError, match="features that are all zero"):
        create("dice").fit(silent)


def test_dice_is_strict_where_contributions_tie() -> None:
    head = hand([1, 1, 1, 2])
    detector = create("dice", percentile=25).fit(Bank(features=np.ones((3, 4)), head=head))
    np.testing.assert_array_equal(detector.masked_head_.weight, [[0, 0, 0, 2]])


def test_vra_refuses_thresholds_in_the_wrong_order() -> None:
    with pytest.raises(OodometerError, match="vra: low=90 must be smaller than high=10"):
        score("vra", low=90, high=10)


@pytest.mark.parametrize("name", SHAPERS)
def test_percentiles_out_of_range_are_refused(name: str) -> None:
    parameter = "high" if name == "vra" else "percentile"
    for value in (-1, 100.5, "90", None, True):
        with pytest.raises(OodometerError, match=f"{parameter} must be a number ≥ 0 and ≤ 100"):
            create(name, **{parameter: value})


# ---------------------------------------------------------------------------------------------- percentiles in blocks


SHAPES = {
    "continuous": RNG.standard_normal((3000, 7)),
    "mostly zero": np.maximum(RNG.standard_normal((3000, 7)) - 0.5, 0),
    "two values": (RNG.random((3000, 7)) < 0.3).astype(float),
    "constant": np.full((3000, 7), 0.1),
    "sorted rows": np.sort(RNG.standard_normal(21000)).reshape(3000, 7),
    "one far column": RNG.standard_normal((3000, 7)) + np.array([0, 0, 0, 0, 0, 0, 1e6]),
    "rare rows": np.where(np.arange(3000)[:, None] % 997 == 0, 50.0, 1.0) * RNG.random((3000, 7)),
}


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits small enough that every way through the selection is walked."""
    for name, value in (("SMALL_ENTRIES", 0), ("SAMPLE_ENTRIES", 700), ("SAMPLE_ROWS", 30), ("CACHE_BYTES", 6000)):
        monkeypatch.setattr(quantiles, name, value)


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize("kind", ["numpy", pytest.param("torch", marks=pytest.mark.torch)])
@pytest.mark.parametrize("kept_entries", [1 << 25, 1500])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_percentile_of_blocks_is_the_percentile(
    shape: str, kept_entries: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantiles, "KEPT_ENTRIES", kept_entries)
    x = SHAPES[shape]
    bank = Bank.concat([Bank(features=part).to(kind) for part in np.split(x, [500, 1400])])
    # At this percentile the zeros end, where there are any.
    step = 100 * float(np.mean(x == 0))
    for q in (0, 0.01, 10, 50, 85, 99, 99.99, 100, step, max(step - 0.002, 0), min(step + 0.002, 100)):
        assert quantiles.percentile(bank, "features", q) == pytest.approx(np.percentile(x, q), rel=1e-12, abs=1e-15)


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize("sample", [[1e9], [-1e9], [-0.3, -0.2], [2.5]])
def test_a_sample_that_misleads_costs_passes_and_no_digit(sample: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantiles, "_sampled_rows", lambda bank, column: np.array([sample]))
    x = SHAPES["continuous"]
    for q in (3, 60, 97):
        found = quantiles.percentile(Bank(features=x), "features", q)
        assert found == pytest.approx(np.percentile(x, q), rel=1e-12)


def test_a_long_bank_on_disk_is_never_held_whole(tmp_path: Path) -> None:
    rows = np.maximum(np.random.default_rng(1).standard_normal((40_000, 256), dtype=np.float32), 0)
    bank = Bank.open(Bank(features=rows, head=Head(np.ones((2, 256), np.float32), np.zeros(2))).save(tmp_path / "bank"))
    tracemalloc.start()
    for name in ("react", "dice", "vra"):
        create(name).fit(bank)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < rows.nbytes / 2, f"{peak / 2**20:.0f} MiB for a bank of {rows.nbytes / 2**20:.0f} MiB"
    assert create("react").fit(bank).threshold_ == pytest.approx(np.percentile(rows.astype(np.float64), 90), rel=1e-12)


def test_c4_dice_never_builds_rows_by_classes_by_features() -> None:
    classes, width, rows = 200, 256, 1000
    rng = np.random.default_rng(2)
    head = Head(rng.standard_normal((classes, width)).astype(np.float32), np.zeros(classes, np.float32))
    bank = Bank(features=rng.random((rows, width), dtype=np.float32), head=head)
    detector = create("dice").fit(bank)
    tracemalloc.start()
    detector.score(bank)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * rows * classes * width / 20

"""Scores of intermediate layers against their definitions in plain NumPy loops."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegressionCV

from oodometer import Bank, arrays, create, metrics
from oodometer.detectors.gram import gram_sums, split_rows
from oodometer.detectors.mds_layers import with_ood
from oodometer.errors import OodometerError, OodometerWarning

C, N, M = 3, 120, 30
RNG = np.random.default_rng(0)
SHAPES = {"layers.stem": (5, 4, 3), "layers.block": (7, 6), "layers.last": (9,)}
CENTERS = {name: RNG.standard_normal((C, *shape)) for name, shape in SHAPES.items()}
LAYERS = tuple(SHAPES)


def make_bank(seed: int, rows: int, *, far: bool = False, dtype: str = "float64") -> Bank:
    rng = np.random.default_rng(seed)
    labels = np.arange(rows) % C
    spread = 2.5 if far else 1.0
    columns = {
        name: (0 if far else CENTERS[name][labels]) + spread * rng.standard_normal((rows, *shape))
        for name, shape in SHAPES.items()
    }
    columns["features"] = columns["layers.last"][:, :6]
    columns["logits"] = rng.standard_normal((rows, C)) + (0 if far else 4 * np.eye(C)[labels])
    return Bank({name: column.astype(dtype) for name, column in columns.items()}, labels=labels)


TRAIN, VAL, TEST, FAR = make_bank(1, N), make_bank(2, M), make_bank(3, M), make_bank(4, M, far=True)


def changed(bank: Bank, **columns: np.ndarray) -> Bank:
    return bank.with_columns(**{name.replace("__", "."): column for name, column in columns.items()})


# ---------------------------------------------------------------------------------------------- Mahalanobis


def pooled(bank: Bank, name: str) -> np.ndarray:
    return bank[name].reshape(len(bank), bank[name].shape[1], -1).mean(axis=2)


def nearest_distance(train: Bank, test: Bank, name: str) -> np.ndarray:
    x, y = pooled(train, name), train.labels
    means = np.stack([x[y == c].mean(0) for c in range(C)])
    centred = x - means[y]
    precision = np.linalg.pinv(centred.T @ centred / len(x))
    return np.array([min((h - m) @ precision @ (h - m) for m in means) for h in pooled(test, name)])


EXPECTED = {name: nearest_distance(TRAIN, TEST, name) for name in (*LAYERS, "features")}


def test_each_layer_is_half_the_distance_to_its_nearest_class() -> None:
    first, last = (create(name).fit(TRAIN).score(TEST) for name in ("mds_first", "mds_last"))
    np.testing.assert_allclose(first, 0.5 * EXPECTED["layers.stem"], rtol=1e-9)
    np.testing.assert_allclose(last, 0.5 * EXPECTED["layers.last"], rtol=1e-9)
    for layers, alone in (("first", first), ("last", last)):
        assert np.array_equal(create("mds_layers", layers=layers).fit(TRAIN).score(TEST), alone)
    np.testing.assert_allclose(create("mds_last", scale=1.0).fit(TRAIN).score(TEST), 2 * last)


def test_n7_all_layers_are_used_and_count_alike() -> None:
    detector = create("mds_all").fit(TRAIN)
    assert detector.layers_ == LAYERS
    assert detector.weights_.tolist() == [1.0, 1.0, 1.0]
    score = detector.score(TEST)
    np.testing.assert_allclose(score, 0.5 * sum(EXPECTED[name] for name in LAYERS), rtol=1e-9)
    for name in LAYERS:
        moved = detector.score(TEST.with_columns(**{name: TEST[name] + 1.0}))
        assert np.abs(moved - score).min() > 1e-3


def test_n7_all_layers_of_a_bank_with_one_are_said_to_be_one() -> None:
    one = TRAIN.select(["layers.stem", "labels"])
    with pytest.warns(OodometerWarning, match="one layer, 'layers.stem'"):
        found = create("mds_all").fit(one).score(TEST)
    np.testing.assert_allclose(found, 0.5 * EXPECTED["layers.stem"], rtol=1e-9)


def test_chosen_layers_weights_and_the_penultimate_features() -> None:
    detector = create("mds_layers", layers=("features", "layers.block"), weights=(2.0, -0.5)).fit(TRAIN)
    expected = EXPECTED["features"] - 0.25 * EXPECTED["layers.block"]
    np.testing.assert_allclose(detector.score(TEST), expected, rtol=1e-9)
    # Columns that were not chosen need not be there.
    np.testing.assert_allclose(detector.score(TEST.select(["features", "layers.block"])), expected, rtol=1e-9)
    with pytest.raises(OodometerError, match=r"needs 'layers.block' in the score bank"):
        detector.score(TEST.select(["features", "layers.stem"]))


def test_features_alone_are_half_of_mds() -> None:
    found = create("mds_layers", layers=("features",)).fit(TRAIN).score(TEST)
    np.testing.assert_allclose(found, 0.5 * create("mds").fit(TRAIN).score(TEST), rtol=1e-12)


def test_learned_weights_are_the_coefficients_of_the_cross_validated_regression() -> None:
    val = with_ood(VAL, FAR)
    detector = create("mds_layers", preset="mdsens").fit(TRAIN, val=val)
    confidences = -0.5 * np.stack(
        [np.concatenate([nearest_distance(TRAIN, bank, name) for bank in (VAL, FAR)]) for name in LAYERS], axis=1
    )
    model = LogisticRegressionCV(Cs=10, cv=5, scoring="accuracy", l1_ratios=(0.0,), use_legacy_attributes=False)
    model.fit(confidences, np.repeat([1, 0], [M, M]))
    np.testing.assert_allclose(detector.weights_, model.coef_[0], rtol=1e-5)
    expected = sum(w * 0.5 * EXPECTED[name] for w, name in zip(detector.weights_, LAYERS, strict=True))
    np.testing.assert_allclose(detector.score(TEST), expected, rtol=1e-8)
    assert metrics.auroc(detector.score(TEST), detector.score(make_bank(9, M, far=True))) > 0.95


def test_learned_weights_follow_the_layer_that_tells_the_rows_apart() -> None:
    rng = np.random.default_rng(5)
    ood = changed(make_bank(6, M), layers__block=6 * rng.standard_normal((M, *SHAPES["layers.block"])))
    weights = create("mds_layers", weights="learned").fit(TRAIN, val=with_ood(VAL, ood)).weights_
    assert weights[1] > 0
    assert weights[1] > 5 * np.abs(weights[[0, 2]]).max()


@pytest.mark.parametrize(
    ("val", "message"),
    [
        (None, "no validation rows were given"),
        (VAL, "val has no column 'is_ood'"),
        (with_ood(VAL, FAR.rows(slice(0, 4))), "30 ID and 4 OOD rows"),
        (VAL.with_columns(is_ood=np.full(M, 2)), "of 0 .ID. and 1 .OOD.*values .2."),
    ],
)
def test_learned_weights_say_what_they_need(val: Bank | None, message: str) -> None:
    with pytest.raises(OodometerError, match=message):
        create("mds_layers", weights="learned").fit(TRAIN, val=val)


def test_a_regression_that_stops_early_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(self: LogisticRegressionCV, x: np.ndarray, y: np.ndarray) -> LogisticRegressionCV:
        import warnings

        warnings.warn("lbfgs failed to converge", ConvergenceWarning, stacklevel=1)
        self.coef_ = np.ones((1, x.shape[1]))
        return self

    monkeypatch.setattr(LogisticRegressionCV, "fit", stopped)
    with pytest.warns(OodometerWarning, match="did not converge"):
        create("mds_layers", weights="learned").fit(TRAIN, val=with_ood(VAL, FAR))


def test_with_ood_marks_the_rows_and_leaves_labels_out() -> None:
    both = with_ood(VAL, FAR.select(["layers.stem", "labels"]))
    assert set(both.columns) == {"layers.stem", "is_ood"}
    assert both["is_ood"].tolist() == [0] * M + [1] * M
    with pytest.raises(OodometerError, match="share no column"):
        with_ood(VAL.select(["logits"]), FAR.select(["features"]))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"layers": "middle"}, "layers must be 'all', 'first', 'last' or a tuple"),
        ({"layers": ("layers.stem", "layers.stem")}, "name each column once"),
        ({"layers": ("logits",)}, "'layers.…' or 'features'"),
        ({"layers": ("layers.9",)}, "needs 'layers.9' in the train bank"),
        ({"weights": "equal"}, "weights must be 'uniform', 'learned'"),
        ({"weights": (1.0, 2.0)}, "weights must be 3 finite numbers"),
        ({"weights": (1.0, np.nan, 2.0)}, "weights must be 3 finite numbers"),
        ({"weights": (0.0, 0.0, 0.0)}, "not all zero"),
    ],
)
def test_layers_and_weights_that_make_no_sense_are_refused(params: dict[str, object], message: str) -> None:
    with pytest.raises(OodometerError, match=message):
        create("mds_layers", **params).fit(TRAIN)


def test_a_layer_that_does_not_vary_is_named() -> None:
    dead = changed(TRAIN, layers__block=np.zeros((N, *SHAPES["layers.block"])))
    with pytest.raises(OodometerError, match=r"layer 'layers.block'.*do not vary.*layers=\(…\)"):
        create("mds_all").fit(dead)


def test_a_layer_without_channels_is_refused() -> None:
    flat = changed(TRAIN, layers__last=np.zeros(N))
    for name in ("mds_last", "gram"):
        with pytest.raises(OodometerError, match=r"'layers.last' has one number a row"):
            create(name).fit(flat)


# ---------------------------------------------------------------------------------------------- Gram


def gram_by_loops(maps: np.ndarray, p: int) -> np.ndarray:
    """Row sums of the full Gram matrix of one row (channels × positions)."""
    raised = maps.reshape(len(maps), -1) ** p
    sums = (raised @ raised.T).sum(axis=1)
    return np.array([np.sign(s) * abs(s) ** (1 / p) for s in sums])


def deviation_by_loops(g: np.ndarray, low: np.ndarray, high: np.ndarray) -> float:
    total = 0.0
    for value, lo, hi in zip(g, low, high, strict=True):
        total += max(lo - value, 0) / abs(lo + 1e-6) + max(value - hi, 0) / abs(hi + 1e-6)
    return total


def gram_score_by_loops(
    train: Bank, test: Bank, held: np.ndarray, powers: tuple[int, ...]
) -> tuple[np.ndarray, dict[str, float]]:
    score, expected = np.zeros(len(test)), {}
    predicted = test.logits.argmax(axis=1)
    for name in train.layers:
        deviations, held_deviations = np.zeros(len(test)), np.zeros(int(held.sum()))
        for p in powers:
            g = np.stack([gram_by_loops(row, p) for row in train[name]])
            kept = {c: g[~held & (train.labels == c)] for c in range(C)}
            low, high = ([extreme(kept[c], axis=0) for c in range(C)] for extreme in (np.min, np.max))
            held_rows = zip(g[held], train.labels[held], strict=True)
            held_deviations += [deviation_by_loops(row, low[c], high[c]) for row, c in held_rows]
            tested = zip(test[name], predicted, strict=True)
            deviations += [deviation_by_loops(gram_by_loops(row, p), low[c], high[c]) for row, c in tested]
        expected[name] = held_deviations.mean()
        score += deviations / expected[name]
    return score, expected


@pytest.mark.parametrize("powers", [(1, 2, 3, 4, 5), (2, 5)])
@pytest.mark.parametrize("block", [7, 1 << 20])
def test_gram_is_the_normalised_deviation_from_the_predicted_class(
    powers: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "block_rows", lambda row_bytes, *, cpu=True: block)
    detector = create("gram", powers=powers, seed=3).fit(TRAIN)
    score, expected = gram_score_by_loops(TRAIN, TEST, split_rows(TRAIN.labels, 0.1, 3), powers)
    assert detector.expected_ == pytest.approx(expected, rel=1e-9)
    odds = np.exp(TEST.logits - TEST.logits.max(axis=1, keepdims=True)).sum(axis=1)
    np.testing.assert_allclose(detector.score(TEST), score * odds, rtol=1e-9)
    undivided = create("gram", powers=powers, seed=3, divide_by_msp=False).fit(TRAIN)
    np.testing.assert_allclose(undivided.score(TEST), score, rtol=1e-9)


def test_gram_sums_by_hand() -> None:
    # Channels (1, 2) and (3, −1): rows of the Gram matrix [[5, 1], [1, 10]] and of [[17, 13], [13, 82]].
    maps = np.array([[[1.0, 2.0], [3.0, -1.0]]])
    one, two = gram_sums(maps, (1, 2), arrays.namespace(maps))
    np.testing.assert_allclose(one, [[6, 11]])
    np.testing.assert_allclose(two, np.sqrt([[30, 95]]))
    (negative,) = gram_sums(np.array([[[-1.0], [3.0]]]), (3,), arrays.namespace(maps))
    np.testing.assert_allclose(negative, [[-(26 ** (1 / 3)), 702 ** (1 / 3)]])


def test_a_column_without_positions_counts_as_one_position() -> None:
    one_position = changed(TRAIN, layers__last=TRAIN["layers.last"][:, :, None])
    test = changed(TEST, layers__last=TEST["layers.last"][:, :, None])
    assert np.array_equal(create("gram").fit(one_position).score(test), create("gram").fit(TRAIN).score(TEST))


def test_n9_rows_that_leave_the_range_score_higher() -> None:
    for divide in (True, False):
        detector = create("gram", divide_by_msp=divide).fit(TRAIN)
        assert metrics.auroc(detector.score(TEST), detector.score(FAR)) > 0.95


def test_c15_the_split_is_seeded_and_takes_its_share_of_each_class() -> None:
    labels = np.repeat([0, 1, 2, 3], [40, 25, 3, 1])
    held = split_rows(labels, 0.1, 0)
    assert [int(held[labels == c].sum()) for c in range(4)] == [4, 2, 1, 0]
    assert np.array_equal(held, split_rows(labels, 0.1, 0))
    assert not np.array_equal(held, split_rows(labels, 0.1, 1))
    first, again, other = (create("gram", seed=seed).fit(TRAIN).score(TEST) for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_layer_without_expected_deviation_is_skipped_and_reported() -> None:
    rng = np.random.default_rng(8)
    pattern = rng.standard_normal((C, *SHAPES["layers.block"]))
    still, test = (changed(bank, layers__block=pattern[bank.labels]) for bank in (TRAIN, TEST))
    with pytest.warns(OodometerWarning, match=r"never leave the training range in layers.block: skipped"):
        detector = create("gram").fit(still)
    assert detector.skipped_ == ("layers.block",)
    rest = ["layers.stem", "layers.last", "logits", "labels"]
    assert np.array_equal(detector.score(test), create("gram").fit(TRAIN.select(rest)).score(TEST))
    with pytest.raises(OodometerError, match=r"in any layer \(layers.block\)"):
        create("gram").fit(still.select(["layers.block", "logits", "labels"]))


def test_a_class_without_rows_is_held_to_the_range_of_all() -> None:
    train = TRAIN.rows(TRAIN.labels != 2)
    with pytest.warns(OodometerWarning, match=r"no training rows of classes \[2\]"):
        detector = create("gram").fit(train)
    for bounds in detector.bounds_.values():
        np.testing.assert_array_equal(bounds.low[:, 2], bounds.low[:, :2].min(axis=1))
        np.testing.assert_array_equal(bounds.high[:, 2], bounds.high[:, :2].max(axis=1))
    assert np.isfinite(detector.score(TEST)).all()


def test_too_few_rows_to_hold_out() -> None:
    with pytest.warns(OodometerWarning, match="3 classes are too small for held_out=0.1"):
        create("gram").fit(TRAIN.rows(slice(0, 24)))
    with pytest.raises(OodometerError, match="leave none to hold out"):
        create("gram").fit(TRAIN.rows(slice(0, 3)))


@pytest.mark.parametrize("powers", [(), (0, 1), (2, 1), (1, 1), (1.5,)])
def test_powers_that_make_no_sense_are_refused(powers: tuple[float, ...]) -> None:
    with pytest.raises(OodometerError, match="rising integers ≥ 1"):
        create("gram", powers=powers)


def test_tenth_powers_of_float32_maps_do_not_overflow() -> None:
    train, test = (changed(make_bank(s, n, dtype="float32")) for s, n in ((1, N), (3, M)))
    large = [bank.with_columns(**{name: (bank[name] * np.float32(1e6)) for name in LAYERS}) for bank in (train, test)]
    # Gram sums are of degree two, so all deviations are relative (up to the 10⁻⁶) and no score changes.
    found, plain = create("gram").fit(large[0]).score(large[1]), create("gram").fit(train).score(test)
    np.testing.assert_allclose(found, plain, rtol=1e-3)


def test_c5_gram_vectors_are_never_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    rows, channels = 20_000, 32
    bank = Bank(
        {"layers.0": rng.random((rows, channels, 4), dtype=np.float32)},
        logits=np.eye(4, dtype=np.float32)[np.arange(rows) % 4],
        labels=np.arange(rows) % 4,
    )
    monkeypatch.setattr(arrays, "BLOCK_BYTES", 1 << 17)
    create("gram").fit(bank.rows(slice(0, 400))).score(bank.rows(slice(0, 400)))  # imports, before measuring
    tracemalloc.start()
    create("gram").fit(bank).score(bank)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    vectors = rows * channels * 5 * 8
    assert peak < vectors / 4

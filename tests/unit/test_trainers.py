"""Trainers against their definitions: losses by loop, numeric gradients, scikit-learn's optimum, held-out outliers."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.special
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from oodometer import Bank, Head, trainers
from oodometer.errors import OodometerError, OodometerWarning
from oodometer.trainers import cross_entropy, network_objective, uniform_cross_entropy


def blobs(seed: int, rows: int = 200, width: int = 6, classes: int = 3) -> Bank:
    """Overlapping classes on uneven scales, far from the origin."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, rows)
    labels[:classes] = np.arange(classes)
    centres = np.random.default_rng(99).standard_normal((classes, width))
    x = (rng.standard_normal((rows, width)) + centres[labels]) * 10.0 ** np.arange(width - 3, -3, -1) + 50.0
    return Bank(features=x, labels=labels)


def digits(held_out: tuple[int, ...] = (8, 9)) -> tuple[Bank, Bank, Bank, Bank]:
    """Train and test rows of the other digits, and the held-out ones for exposure and for the test."""
    x, y = load_digits(return_X_y=True)
    x = x.astype(np.float32)
    known = ~np.isin(y, held_out)
    numbers = np.unique(y[known], return_inverse=True)[1]
    bank = Bank(features=x[known], labels=numbers)
    even = np.arange(len(bank)) % 3 > 0
    shown, tested = (Bank(features=x[y == digit]) for digit in held_out)
    return bank.rows(even), bank.rows(~even), shown, tested


def max_softmax(classifier: trainers.Classifier, bank: Bank) -> np.ndarray:
    return scipy.special.softmax(np.asarray(classifier.apply(bank).logits, np.float64), axis=1).max(axis=1)


# ---------------------------------------------------------------------------------------------- losses


def test_cross_entropy_by_loop() -> None:
    rng = np.random.default_rng(0)
    z, y = 4 * rng.standard_normal((7, 5)), rng.integers(0, 5, 7)
    losses, _ = cross_entropy(z, y)
    for row, label, loss in zip(z, y, losses, strict=True):
        assert loss == pytest.approx(-math.log(math.exp(row[label]) / sum(map(math.exp, row))), rel=1e-13)


def test_uniform_cross_entropy_by_loop() -> None:
    """The cross-entropy from the uniform distribution: −Σ_c (1/C)·log p_c."""
    z = 4 * np.random.default_rng(1).standard_normal((7, 5))
    losses, _ = uniform_cross_entropy(z)
    for row, loss in zip(z, losses, strict=True):
        total = sum(map(math.exp, row))
        assert loss == pytest.approx(-sum(math.log(math.exp(v) / total) / 5 for v in row), rel=1e-13)


def test_uniform_cross_entropy_is_least_for_equal_logits() -> None:
    losses, gradient = uniform_cross_entropy(np.full((1, 4), 3.0))
    assert losses[0] == pytest.approx(math.log(4), rel=1e-15)
    assert np.abs(gradient).max() < 1e-16


def test_losses_of_huge_logits_are_finite() -> None:
    z = np.array([[1e4, -1e4, 0.0]], np.float32)
    assert cross_entropy(z, np.array([1]))[0][0] == 2e4
    assert uniform_cross_entropy(z)[0][0] == 1e4


def gradient_error(objective: Any, theta: np.ndarray, gradient: np.ndarray) -> float:
    numeric = scipy.optimize.approx_fprime(theta, objective, 1e-6)
    return float(np.abs(numeric - gradient).max() / np.abs(gradient).max())


@pytest.mark.parametrize("loss", [lambda z: cross_entropy(z, np.array([2, 0, 1, 1])), uniform_cross_entropy])
def test_gradients_of_losses_are_numeric_gradients(loss: Any) -> None:
    z = np.random.default_rng(2).standard_normal((4, 3))
    assert gradient_error(lambda t: loss(t.reshape(4, 3))[0].sum(), z.ravel(), loss(z)[1].ravel()) < 1e-6


@pytest.mark.parametrize("exposed", [False, True])
def test_gradient_of_the_linear_objective(exposed: bool) -> None:
    train, outliers = blobs(0, rows=40), blobs(1, rows=15)
    scaling = trainers.Scaling.of(train)
    rows = trainers._Rows(train, scaling)
    probe = trainers.Probe(outlier_weight=0.7)
    shown = trainers._Rows(outliers, scaling) if exposed else None
    task = trainers._Task(probe, rows, train.labels, rows, train.labels, 3, shown)
    rng = np.random.default_rng(3)
    weight, bias = rng.standard_normal((6, 3)), rng.standard_normal(3)

    def value(theta: np.ndarray) -> float:
        return trainers.linear_objective(task, theta[:18].reshape(6, 3), theta[18:], 0.3)[0]

    loss, by_weight, by_bias = trainers.linear_objective(task, weight, bias, 0.3)
    theta = np.concatenate([weight.ravel(), bias])
    assert gradient_error(value, theta, np.concatenate([by_weight.ravel(), by_bias])) < 1e-6
    z = scaling.standardised(train.features) @ weight + bias
    told = -scipy.special.log_softmax(z, axis=1)[np.arange(40), train.labels].mean() + 0.15 * (weight**2).sum()
    if exposed:
        z = scaling.standardised(outliers.features) @ weight + bias
        told += 0.7 * (scipy.special.logsumexp(z, axis=1) - z.mean(axis=1)).mean()
    assert loss == pytest.approx(told, rel=1e-12)


@pytest.mark.parametrize("exposed", [False, True])
def test_gradient_of_the_network_objective(exposed: bool) -> None:
    rng = np.random.default_rng(4)
    x, y = rng.standard_normal((9, 4)), rng.integers(0, 3, 9)
    outliers = rng.standard_normal((5, 4)) if exposed else None
    shapes = [(4, 6), (6,), (6, 3), (3,)]
    theta = rng.standard_normal(sum(map(math.prod, shapes)))

    def weights(theta: np.ndarray) -> tuple[np.ndarray, ...]:
        cuts = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
        return tuple(part.reshape(shape) for part, shape in zip(np.split(theta, cuts), shapes, strict=True))

    def value(theta: np.ndarray) -> float:
        return network_objective(weights(theta), x, y, outliers, factor=0.7, l2=0.3)[0]

    _, gradient = network_objective(weights(theta), x, y, outliers, factor=0.7, l2=0.3)
    assert gradient_error(value, theta, np.concatenate([part.ravel() for part in gradient])) < 1e-6


# ---------------------------------------------------------------------------------------------- linear probe


@pytest.mark.parametrize("strength", [1.0, 1e-2, 1e-4])
def test_linear_probe_is_the_optimum_that_scikit_learn_finds(strength: float) -> None:
    train, val = blobs(0, rows=600), blobs(1)
    scaling = trainers.Scaling.of(train)
    oracle = LogisticRegression(C=1 / (strength * len(train)), tol=1e-11, max_iter=100_000)
    oracle.fit(scaling.standardised(train.features), train.labels)
    found = trainers.create("probe", l2=strength, tol=1e-8).fit(train, val, seed=0)
    p = scipy.special.softmax(found.apply(val).logits, axis=1)
    told = oracle.predict_proba(scaling.standardised(val.features))
    assert np.abs(p - told).max() < 1e-6
    nll = -np.log(oracle.predict_proba(scaling.standardised(train.features)))[np.arange(600), train.labels].mean()
    assert found.facts["loss"] == pytest.approx(nll + 0.5 * strength * (oracle.coef_**2).sum(), abs=1e-9)
    assert found.facts["converged"] and found.facts["gradient_norm"] <= 1e-8


def test_default_tolerance_is_within_a_thousandth_of_scikit_learn_on_float32_digits() -> None:
    train, val, _, _ = digits()
    found = trainers.create("probe", l2=1e-3).fit(train, val, seed=0)
    x = trainers.Scaling.of(train).standardised
    oracle = LogisticRegression(C=1e3 / len(train), tol=1e-8, max_iter=10_000).fit(x(train.features), train.labels)
    gap = scipy.special.softmax(found.apply(val).logits, axis=1) - oracle.predict_proba(x(val.features))
    assert np.abs(gap).max() < 1e-3
    assert found.facts["val_accuracy"] == oracle.score(x(val.features), val.labels)


def test_constant_features_get_no_weight() -> None:
    """Digits have pixels that are never set; a training set of them has no scale."""
    train, val, _, _ = digits()
    head = trainers.create("probe").fit(train, val, seed=0).apply(val).head
    constant = np.ptp(train.features, axis=0) == 0
    assert constant.any() and not head.weight[:, constant].any()


def test_strength_is_chosen_by_validation_loss_and_the_path_stops_where_it_rises() -> None:
    train, val, _, _ = digits()
    path = trainers.create("probe", tol=1e-8).fit(train, val, seed=0).facts["l2_path"]
    losses = [loss for _, loss in path]
    assert [l2 for l2, _ in path] == list(trainers.L2_PATH[: len(path)])
    assert losses[-1] > losses[-2] == min(losses)
    for l2, loss in path[:-1]:
        z = trainers.create("probe", l2=l2, tol=1e-8).fit(train, val, seed=0).apply(val).logits
        nll = -scipy.special.log_softmax(z, axis=1)[np.arange(len(val)), val.labels].mean()
        assert loss == pytest.approx(nll, rel=1e-3)


def test_chosen_strength_gives_the_same_head_as_that_strength_given() -> None:
    train, val = blobs(0), blobs(1)
    chosen = trainers.create("probe", tol=1e-8).fit(train, val, seed=0)
    given = trainers.create("probe", tol=1e-9, l2=chosen.facts["l2"]).fit(train, val, seed=0)
    np.testing.assert_allclose(chosen.head.weight, given.head.weight, rtol=1e-5, atol=1e-7)


def test_logits_sum_to_zero_so_that_energies_of_two_probes_compare() -> None:
    train, val = blobs(0), blobs(1)
    logits = trainers.create("probe").fit(train, val, seed=0).apply(val).logits
    assert np.abs(logits.sum(axis=1)).max() < 1e-9


def test_exposure_reaches_the_optimum_of_the_joint_loss_wherever_it_starts() -> None:
    train, val, outliers = blobs(0), blobs(1), blobs(5, rows=50).select(["features"])
    probe = trainers.create("probe", l2=1e-2, tol=1e-8)
    near = probe.fit(train, val, seed=0).expose(outliers, train, val, seed=0)
    again = near.expose(outliers, train, val, seed=1)
    assert near.facts["converged"] and near.facts["outliers"] == 50 and near.facts["outlier_weight"] == 0.5
    assert again.facts["iterations"] <= 1
    np.testing.assert_allclose(again.head.weight, near.head.weight, rtol=1e-6, atol=1e-8)


def test_warm_start_needs_fewer_iterations_than_a_cold_one() -> None:
    train, val, shown, _ = digits()
    fitted = trainers.create("probe", l2=1e-3).fit(train, val, seed=0)
    exposed = fitted.expose(shown.rows(slice(0, 2)), train, val, seed=0)
    assert 0 < exposed.facts["iterations"] < fitted.facts["iterations"]


# ---------------------------------------------------------------------------------------------- both kinds


@pytest.mark.parametrize("hidden", [0, 48])
def test_exposure_makes_held_out_outlier_classes_less_certain_and_keeps_the_accuracy(hidden: int) -> None:
    train, test, shown, tested = digits()
    plain = trainers.create("probe", hidden=hidden).fit(train, test, seed=0)
    exposed = plain.expose(shown, train, test, seed=0)
    assert plain.facts["val_accuracy"] > 0.95
    assert exposed.facts["val_accuracy"] > plain.facts["val_accuracy"] - 0.03
    before, after = max_softmax(plain, tested).mean(), max_softmax(exposed, tested).mean()
    assert after < before - 0.02, f"{before:.3f} → {after:.3f}"
    assert max_softmax(exposed, shown).mean() < max_softmax(plain, shown).mean() - 0.1


@pytest.mark.parametrize("hidden", [0, 16])
def test_equal_seeds_give_equal_bytes(hidden: int) -> None:
    train, val, shown, _ = digits()

    def run() -> tuple[str, str]:
        fitted = trainers.create("probe", hidden=hidden).fit(train, val, seed=3)
        exposed = fitted.expose(shown, train, val, seed=3)
        return exposed.apply(val).fingerprint, json.dumps([fitted.facts, exposed.facts], allow_nan=False)

    assert run() == run()


def test_another_seed_starts_a_hidden_layer_elsewhere() -> None:
    train, val, _, _ = digits()
    one, other = (trainers.create("probe", hidden=8).fit(train, val, seed=seed) for seed in (0, 1))
    assert not np.array_equal(one.apply(val).features, other.apply(val).features)


@pytest.mark.parametrize("hidden", [0, 16])
def test_logits_are_the_head_of_the_original_or_hidden_features(hidden: int) -> None:
    train, val, _, _ = digits()
    bank = val.with_columns(
        **{"logits": np.zeros((len(val), 3)), "logits.mcd": np.zeros(len(val)), "other": val.labels}
    )
    fitted = trainers.create("probe", hidden=hidden).fit(train, val, seed=0)
    applied = fitted.apply(bank)
    assert applied.columns == ("features", "labels", "other") and applied.head is fitted.head
    np.testing.assert_array_equal(applied.labels, val.labels)
    np.testing.assert_array_equal(applied.logits, applied.head(applied.features))
    inside = trainers.Scaling.of(train).standardised(val.features)
    if hidden:
        w1, b1, w2, b2 = fitted.weights
        inside = np.maximum(inside @ w1 + b1, 0)
        np.testing.assert_allclose(applied.features, inside, atol=1e-4)
        assert applied.row_shape("features") == (hidden,)
    else:
        assert applied.features is not None and np.array_equal(applied.features, val.features)
        w2, b2 = fitted.weights
    z = inside @ w2 + b2
    np.testing.assert_allclose(applied.logits, z - z.mean(axis=1, keepdims=True), atol=1e-4)


def test_hidden_training_keeps_the_best_epoch_and_waits_three() -> None:
    train, val, _, _ = digits()
    found = trainers.create("probe", hidden=32).fit(train, val, seed=0)
    assert found.facts["converged"] and found.facts["iterations"] == found.facts["best_epoch"] + 3
    z = found.apply(val).logits.astype(np.float64)
    nll = -scipy.special.log_softmax(z, axis=1)[np.arange(len(val)), val.labels].mean()
    assert found.facts["val_loss"] == pytest.approx(nll, rel=1e-4)


def test_adam_steps_by_its_definition() -> None:
    theta, gradients = np.array([1.0, -2.0]), [np.array([0.3, -4.0]), np.array([-0.1, 1.0])]
    steps = trainers._Adam((theta,), 0.01)
    m, v = np.zeros(2), np.zeros(2)
    for t, g in enumerate(gradients, 1):
        steps.step([g])
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        theta = theta - 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    np.testing.assert_allclose(steps.weights[0], theta, rtol=1e-6)


@pytest.mark.parametrize("hidden", [0, 16])
def test_saved_and_joined_banks_give_the_same_classifier(
    hidden: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory-mapped, in parts, and too large to be kept in memory."""
    train, val, shown, _ = digits()
    probe = trainers.create("probe", hidden=hidden, l2=1e-2, tol=1e-8)
    whole = probe.fit(train, val, seed=0).expose(shown, train, val, seed=0)
    train.rows(slice(0, 500)).save(tmp_path / "a")
    train.rows(slice(500, None)).save(tmp_path / "b")
    monkeypatch.setattr(trainers, "HELD_BYTES", 0)
    joined = Bank.concat([Bank.open(tmp_path / name) for name in "ab"])
    mapped = probe.fit(joined, val, seed=0).expose(shown, joined, val, seed=0)
    applied = mapped.apply(joined)
    assert len(applied.parts) == 2 and len(applied) == len(train)
    np.testing.assert_allclose(applied.logits, whole.apply(train).logits, atol=1e-4)


@pytest.mark.torch
@pytest.mark.parametrize("hidden", [0, 16])
def test_tensors_give_the_same_classifier(hidden: int) -> None:
    pytest.importorskip("torch")
    train, val, shown, _ = digits()
    plain = trainers.create("probe", hidden=hidden).fit(train, val, seed=0)
    tensors = trainers.create("probe", hidden=hidden).fit(train.to("torch"), val.to("torch"), seed=0)
    np.testing.assert_array_equal(tensors.head.weight, plain.head.weight)
    logits = tensors.expose(shown.to("torch"), train.to("torch"), val, seed=0).apply(val.to("torch")).logits
    assert type(logits).__module__ == "torch"
    np.testing.assert_allclose(
        logits.numpy(), plain.expose(shown, train, val, seed=0).apply(val).logits, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("hidden", [0, 4])
def test_empty_banks_are_applied(hidden: int) -> None:
    train, val = blobs(0), blobs(1)
    applied = trainers.create("probe", hidden=hidden).fit(train, val, seed=0).apply(val.rows(slice(0, 0)))
    assert applied.logits.shape == (0, 3)


# ---------------------------------------------------------------------------------------------- frozen


def test_frozen_is_the_bank_itself_and_refuses_exposure() -> None:
    rng = np.random.default_rng(0)
    head = Head(rng.standard_normal((3, 4)), rng.standard_normal(3))
    bank = Bank(features=rng.standard_normal((20, 4)), labels=rng.integers(0, 3, 20), head=head)
    frozen = trainers.create("frozen").fit(bank, bank, seed=0)
    assert frozen.apply(bank) is bank
    assert frozen.facts == {"val_accuracy": float((bank.logits.argmax(1) == bank.labels).mean())}
    with pytest.raises(OodometerError, match="choose trainer 'probe'"):
        frozen.expose(bank, bank, bank, seed=0)


def test_frozen_needs_logits_that_its_labels_number() -> None:
    with pytest.raises(OodometerError, match=r"needs logits.*train bank has features, labels"):
        trainers.create("frozen").fit(blobs(0), blobs(1), seed=0)
    bank = Bank(logits=np.zeros((4, 2)), labels=[0, 1, 2, 0])
    with pytest.raises(OodometerError, match="label 2 in row 2"):
        trainers.create("frozen").fit(bank, bank, seed=0)


# ---------------------------------------------------------------------------------------------- refusals


def test_names_and_parameters_are_checked() -> None:
    assert {"frozen", "probe"} <= set(trainers.names())
    with pytest.raises(OodometerError, match="did you mean 'probe'"):
        trainers.create("prob")
    with pytest.raises(OodometerError, match="unknown name 'hiden'; did you mean 'hidden'"):
        trainers.create("probe", hiden=3)
    with pytest.raises(OodometerError, match="known: no parameters"):
        trainers.create("frozen", l2=1.0)


@pytest.mark.parametrize(
    "params", [{"hidden": -1}, {"hidden": 2.5}, {"l2": 0.0}, {"l2": math.nan}, {"outlier_weight": -1}, {"max_iter": 0}]
)
def test_parameters_outside_their_range_are_named(params: dict[str, Any]) -> None:
    with pytest.raises(OodometerError, match=f"{next(iter(params))} needs a .*found"):
        trainers.create("probe", **params)


def labelled(labels: Any, rows: int = 6) -> Bank:
    return Bank(features=np.random.default_rng(0).standard_normal((rows, 2)), labels=np.resize(labels, rows))


GOOD = labelled([0, 1])
NOT_FINITE = Bank(features=np.array([[0.0, 1.0], [np.nan, 0.0]]), labels=[0, 1])


@pytest.mark.parametrize(
    ("train", "val", "message"),
    [
        (labelled([1]), GOOD, "without gaps; the training labels are 1"),
        (labelled([0]), GOOD, "at least two classes"),
        (labelled([0, 2]), GOOD, "labels are 0, 2: renumber"),
        (labelled([-1, 0, 1]), GOOD, "labels are -1, 0, 1"),
        (GOOD, labelled([0, 5]), "classes that no training row has: 5"),
        (GOOD, GOOD.rows(slice(0, 0)), "validation bank has none"),
        (GOOD.select(["features"]), GOOD, "needs labels; the train bank has features"),
        (GOOD, GOOD.select(["labels"]), "needs features; the validation bank has labels"),
        (NOT_FINITE, GOOD, "train bank has NaN or infinity in row 1"),
        (GOOD, Bank(features=np.zeros((2, 3)), labels=[0, 1]), r"shape \(2,\), validation features \(3,\)"),
        (Bank(features=np.zeros((2, 3, 3)), labels=[0, 1]), GOOD, r"one vector a row.*\(3, 3\)"),
    ],
)
def test_wrong_rows_are_explained(train: Bank, val: Bank, message: str) -> None:
    with pytest.raises(OodometerError, match=message):
        trainers.create("probe").fit(train, val, seed=0)


def test_wrong_outliers_are_explained() -> None:
    fitted = trainers.create("probe").fit(GOOD, GOOD, seed=0)
    for outliers, message in (
        (GOOD.rows(slice(0, 0)), "outlier bank has no rows"),
        (Bank(features=np.zeros((2, 3))), r"2 features a row, as in training; the outlier bank has rows of shape (3,)"),
        (Bank(features=np.full((2, 2), np.inf)), "outlier bank has NaN or infinity in row 0"),
    ):
        with pytest.raises(OodometerError, match=re.escape(message)):
            fitted.expose(outliers, GOOD, GOOD, seed=0)
    with pytest.raises(OodometerError, match="2 classes the probe was trained on; the train bank has 3"):
        fitted.expose(GOOD, labelled([0, 1, 2]), GOOD, seed=0)


def test_a_search_that_ends_early_says_so() -> None:
    with pytest.warns(OodometerWarning, match="after 1 iterations, above tol=1e-06"):
        found = trainers.create("probe", l2=1e-4, max_iter=1).fit(blobs(0), blobs(1), seed=0)
    assert found.facts["converged"] is False and found.facts["iterations"] == 1
    with pytest.warns(OodometerWarning, match="still fell after 1 epochs"):
        assert not trainers.create("probe", hidden=4, max_iter=1).fit(blobs(0), blobs(1), seed=0).facts["converged"]

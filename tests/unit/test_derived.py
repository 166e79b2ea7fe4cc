"""Derived quantities against plain NumPy, over parts, blocks and a bounded memory."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oodometer import Bank, Head, arrays, derived
from oodometer.errors import OodometerError

RNG = np.random.default_rng(0)
N, D, C = 90, 7, 4
FEATURES = (3 + RNG.standard_normal((N, D))).astype(np.float32)
LABELS = RNG.integers(0, C, N)
HEAD = Head(RNG.standard_normal((C, D)).astype(np.float32), RNG.standard_normal(C).astype(np.float32))
LOGITS = (FEATURES @ HEAD.weight.T + HEAD.bias).astype(np.float64)
X = FEATURES.astype(np.float64)


def whole() -> Bank:
    return Bank(features=FEATURES, labels=LABELS, head=HEAD)


def parted(*cuts: int) -> Bank:
    edges = [0, *cuts, N]
    return Bank.concat([whole().rows(slice(a, b)) for a, b in itertools.pairwise(edges)])


banks = pytest.mark.parametrize("bank", [whole(), parted(30), parted(1, 2, 60)], ids=["whole", "2 parts", "4 parts"])


@banks
def test_moments_are_the_covariance(bank: Bank) -> None:
    found = derived.moments(bank)
    np.testing.assert_allclose(found.mean, X.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.scatter / N, np.cov(X.T, bias=True), rtol=1e-9, atol=1e-12)
    about = found.about(np.ones(D))
    np.testing.assert_allclose(about, (X - 1).T @ (X - 1), rtol=1e-9)


def test_moments_far_from_zero_keep_their_digits() -> None:
    far = (FEATURES * 1e-3 + 1e4).astype(np.float32)
    expected = np.cov(far.astype(np.float64).T, bias=True)
    np.testing.assert_allclose(derived.moments(Bank(features=far)).scatter / N, expected, rtol=1e-6, atol=1e-14)


@banks
def test_unit_moments_and_softmax_moments(bank: Bank) -> None:
    unit = X / np.linalg.norm(X, axis=1, keepdims=True)
    np.testing.assert_allclose(derived.moments(bank, unit=True).mean, unit.mean(0), rtol=1e-6)
    p = np.exp(LOGITS - LOGITS.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    np.testing.assert_allclose(derived.moments(bank, "softmax").mean, p.mean(0), rtol=1e-4, atol=1e-6)


@banks
@pytest.mark.parametrize("by", ["label", "prediction", "correct"])
def test_class_means_by_every_grouping(bank: Bank, by: str) -> None:
    predicted = LOGITS.argmax(1)
    groups = {"label": LABELS, "prediction": predicted, "correct": np.where(predicted == LABELS, LABELS, -1)}[by]
    counts, means = derived.class_means(bank, by=by)
    for c in range(C):
        inside = X[groups == c]
        assert counts[c] == len(inside)
        np.testing.assert_allclose(means[c], inside.mean(0) if len(inside) else np.zeros(D), rtol=1e-12)


@banks
def test_within_scatter_is_the_sum_over_classes(bank: Bank) -> None:
    classes = [X[c == LABELS] for c in range(C)]
    expected = sum((x - x.mean(0)).T @ (x - x.mean(0)) for x in classes)
    np.testing.assert_allclose(derived.within_scatter(bank), expected, rtol=1e-9, atol=1e-9)


@banks
def test_energy_predictions_and_correct(bank: Bank) -> None:
    np.testing.assert_allclose(derived.energy(bank, 2.0), 2 * np.log(np.exp(LOGITS / 2).sum(1)), rtol=1e-5)
    np.testing.assert_array_equal(derived.predictions(bank), LOGITS.argmax(1))
    np.testing.assert_array_equal(derived.correct(bank), LOGITS.argmax(1) == LABELS)


@banks
def test_the_spectrum_diagonalises_the_covariance(bank: Bank) -> None:
    found = derived.spectrum(bank)
    covariance = np.cov(X.T, bias=True)
    np.testing.assert_allclose((found.vectors * found.values) @ found.vectors.T, covariance, rtol=1e-9, atol=1e-10)
    share = np.cumsum(np.sort(np.linalg.eigvalsh(covariance))[::-1]) / np.trace(covariance)
    assert found.components(0.8) == min(int((share <= 0.8).sum()) + 1, D)
    assert found.rank() == D


def test_the_rank_of_fewer_rows_than_features() -> None:
    assert derived.spectrum(Bank(features=FEATURES[:4])).rank() == 3


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, N - 1), max_size=3), st.integers(1, 12), st.booleans(), st.integers(0, 3))
def test_neighbours_of_parts_are_those_of_the_whole(cuts: list[int], k: int, guided: bool, seed: int) -> None:
    """The k largest cosines, in any order of requests, whatever the parts."""
    train = parted(*sorted(cuts)) if cuts else whole()
    query = Bank(features=np.random.default_rng(seed).standard_normal((11, D)).astype(np.float32))
    q = query.features / np.linalg.norm(query.features, axis=1, keepdims=True)
    keys = X / np.linalg.norm(X, axis=1, keepdims=True)
    if guided:
        keys = keys * np.log(np.exp(LOGITS).sum(1))[:, None]
    expected = -np.sort(-(q @ keys.T), axis=1)
    for size in (k, 3, k + 5, 1):
        found = arrays.to_numpy(derived.similarities(train, query, size, guided=guided))
        np.testing.assert_allclose(found, expected[:, :size], rtol=1e-4, atol=1e-5)


def test_stored_logits_keep_parts_and_never_copy_many_picked_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [Bank(features=FEATURES[:40], head=HEAD), Bank(features=FEATURES[40:], head=HEAD)]
    joined = derived.with_logits(Bank.concat(parts))
    assert [len(part) for part in joined.parts] == [40, N - 40]
    assert joined.parts[0] is derived.with_logits(parts[0])
    np.testing.assert_array_equal(joined.logits, HEAD(FEATURES))
    picked = Bank(features=FEATURES, head=HEAD).rows([5, 3, 8])
    assert "logits" in derived.with_logits(picked).columns
    monkeypatch.setattr(derived, "GATHERED_BYTES", 10)
    assert derived.with_logits(picked.rows([0, 1])).columns == ("features",)


def large(width: int = 60, rows: int = 20_000) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.standard_normal((rows, width)) * np.geomspace(1, 1e-3, width) + 5).astype(np.float32)


def test_many_rows_are_multiplied_in_float32_and_still_give_the_covariance() -> None:
    """Scales from 1 to 1e-3 around a mean of 5: round-off follows the variances, not the largest of them."""
    x = large()
    found = derived.moments(Bank(features=x))
    assert not found.exact
    gaps = x.astype(np.float64) - x.mean(0, dtype=np.float64)
    spread = np.sqrt((gaps**2).mean(0))
    error = (found.scatter - gaps.T @ gaps) / len(x) / np.outer(spread, spread)
    assert np.abs(error).max() < 3e-6
    np.testing.assert_allclose(found.mean, x.mean(0, dtype=np.float64), rtol=1e-8)


def test_a_thin_direction_is_multiplied_in_float64() -> None:
    x = large()
    x[:, 1] = x[:, 0] + 1e-3 * x[:, 1]
    for thin in (x, np.concatenate([x, x[:, :1]], axis=1), np.concatenate([x, x[:, :1] * 0], axis=1)):
        found = derived.moments(Bank(features=thin))
        assert found.exact
        np.testing.assert_allclose(
            found.scatter, np.cov(thin.T.astype(np.float64), bias=True) * len(x), rtol=1e-7, atol=1e-6
        )


def test_a_thin_direction_within_classes_is_multiplied_in_float64() -> None:
    """Between classes every direction is wide; within them one is a ten-thousandth of it."""
    x, labels = large(), np.arange(20_000) % 2
    x[:, 0] = 5 + 2 * labels + 1e-2 * (x[:, 0] - 5)
    bank = Bank(features=x, labels=labels, logits=np.zeros((20_000, 2), np.float32))
    assert not derived.moments(bank).exact
    gaps = np.concatenate(
        [x[labels == c].astype(np.float64) - x[labels == c].mean(0, dtype=np.float64) for c in (0, 1)]
    )
    within = (gaps.T @ gaps)[0, 0]
    assert derived.within_scatter(bank)[0, 0] == pytest.approx(within, rel=1e-7)
    assert derived.moments(bank, exact=True).exact


def test_distances_are_squared_and_ascending() -> None:
    query = Bank(features=FEATURES[:5] + 0.3)
    expected = np.sort(((query.features[:, None].astype(np.float64) - X[None]) ** 2).sum(2), axis=1)
    np.testing.assert_allclose(derived.distances(parted(40), query, 6), expected[:, :6], rtol=1e-5)


def test_a_quantity_of_parts_is_computed_once_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folds share their parts: five training complements cost what one pass costs."""
    calls: list[int] = []
    original = derived._part_moments
    monkeypatch.setattr(
        derived, "_part_moments", lambda bank, *rest: (calls.append(len(bank)), original(bank, *rest))[1]
    )
    parts = [whole().rows(slice(a, a + 18)) for a in range(0, N, 18)]
    for fold in range(5):
        rest = Bank.concat([part for place, part in enumerate(parts) if place != fold])
        keep = np.r_[0 : 18 * fold, 18 * fold + 18 : N]
        np.testing.assert_allclose(derived.moments(rest).scatter / 72, np.cov(X[keep].T, bias=True), rtol=1e-9)
    assert calls == [18] * 5


def test_rows_of_a_shared_part_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five training complements search each part once."""
    calls: list[tuple[int, int]] = []
    original = derived._searched
    monkeypatch.setattr(
        derived, "_searched", lambda part, *rest: (calls.append((len(part), rest[1])), original(part, *rest))[1]
    )
    parts = [whole().rows(slice(a, a + 18)) for a in range(0, N, 18)]
    query = Bank(features=FEATURES[:7] + 0.1)
    for fold in range(5):
        rest = Bank.concat([part for place, part in enumerate(parts) if place != fold])
        found = derived.similarities(rest, query, 6)
        keep = np.r_[0 : 18 * fold, 18 * fold + 18 : N]
        direct = -np.sort(-(arrays.unit(query.features, np) @ arrays.unit(X[keep], np).T), axis=1)
        np.testing.assert_allclose(found, direct[:, :6], rtol=1e-5)
    assert calls == [(18, 6)] * 5


def test_memory_is_bounded_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derived, "MEMORY_BYTES", 8_000)
    monkeypatch.setattr(derived, "_memory", derived._Memory())
    bank = whole()
    for key in range(10):
        derived.remember(bank, key, lambda: np.zeros(250))
    assert [key for key in bank.memory if isinstance(key, int)] == [6, 7, 8, 9]
    derived.remember(bank, "huge", lambda: np.zeros(1000))
    assert "huge" not in bank.memory


def test_what_is_derived_dies_with_its_bank() -> None:
    bank = whole()
    derived.moments(bank)
    order = derived._memory._order
    owned = [place for place in order if place[0]() is bank]
    assert owned
    del bank
    gc.collect()
    assert all(place[0]() is None for place in owned)
    derived.moments(whole())
    assert not any(place in order for place in owned)


def test_labels_out_of_range_are_named() -> None:
    labels = LABELS.copy()
    labels[17] = C
    with pytest.raises(OodometerError, match=r"label 4 in row 17 is outside 0 … 3"):
        derived.labels(Bank(features=FEATURES, labels=labels, head=HEAD))


def test_the_first_bad_row_counts_over_parts() -> None:
    bad = FEATURES.copy()
    bad[41, 2] = np.nan
    parts = [Bank(features=bad[:40]), Bank(features=bad[40:])]
    assert derived.first_bad_row(Bank.concat(parts), "features") == 41
    assert derived.first_bad_row(Bank(features=FEATURES), "features") is None


def test_whitening_turns_distances_into_mahalanobis() -> None:
    covariance = np.cov(X.T, bias=True)
    whitening = derived.Whitening.of(covariance, X.mean(0), exact=True)
    gap = X - X.mean(0)
    expected = np.einsum("ij,jk,ik->i", gap, np.linalg.inv(covariance), gap)
    np.testing.assert_allclose((whitening(X) ** 2).sum(1), expected, rtol=1e-9)
    assert whitening.rank == D


def test_a_deficient_covariance_is_pseudo_inverted() -> None:
    flat = np.concatenate([X, X[:, :1] - X[:, 1:2]], axis=1)
    covariance = np.cov(flat.T, bias=True)
    whitening = derived.Whitening.of(covariance, flat.mean(0), exact=True)
    gap = flat - flat.mean(0)
    expected = np.einsum("ij,jk,ik->i", gap, np.linalg.pinv(covariance, rcond=1e-12), gap)
    assert whitening.rank == D
    np.testing.assert_allclose((whitening(flat) ** 2).sum(1), expected, rtol=1e-7)


def test_a_covariance_of_nothing_is_refused() -> None:
    with pytest.raises(OodometerError, match="do not vary"):
        derived.Whitening.of(np.zeros((3, 3)), np.zeros(3))

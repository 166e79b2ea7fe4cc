"""Neighbour, Mahalanobis and subspace scores against their definitions in plain NumPy loops."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import scipy.stats

from oodometer import Bank, Head, create
from oodometer.errors import OodometerError, OodometerWarning

RNG = np.random.default_rng(0)
C, D, N, M = 4, 12, 160, 30
CENTERS = 2 * RNG.standard_normal((C, D))
LABELS = RNG.integers(0, C, N)
TRAIN = (CENTERS[LABELS] + RNG.standard_normal((N, D))).astype(np.float64)
TEST = np.concatenate([CENTERS[RNG.integers(0, C, M)] + RNG.standard_normal((M, D)), 3 * RNG.standard_normal((M, D))])
W = CENTERS / 3
HEAD = Head(W, RNG.standard_normal(C))
Z_TRAIN, Z_TEST = TRAIN @ W.T + HEAD.bias, TEST @ W.T + HEAD.bias


def lse(z: np.ndarray) -> np.ndarray:
    return scipy.special.logsumexp(z, axis=1)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def score(name: str, **params: object) -> np.ndarray:
    train = Bank(features=TRAIN, labels=LABELS, head=HEAD)
    return create(name, **params).fit(train).score(Bank(features=TEST, head=HEAD))


def mahalanobis(x: np.ndarray, mean: np.ndarray, precision: np.ndarray) -> np.ndarray:
    return np.array([(row - mean) @ precision @ (row - mean) for row in x])


def of_class(c: int) -> np.ndarray:
    return TRAIN[c == LABELS]


def within_covariance() -> np.ndarray:
    centred = np.concatenate([of_class(c) - of_class(c).mean(0) for c in range(C)])
    return centred.T @ centred / N


def class_distances(precision: np.ndarray) -> np.ndarray:
    return np.stack([mahalanobis(TEST, of_class(c).mean(0), precision) for c in range(C)], axis=1)


# ---------------------------------------------------------------------------------------------- neighbours


@pytest.mark.parametrize("k", [1, 7, N])
def test_knn_is_the_kth_distance(k: int) -> None:
    def brute(query: np.ndarray, keys: np.ndarray) -> np.ndarray:
        return np.array([np.sort(((keys - row) ** 2).sum(1))[k - 1] for row in query])

    np.testing.assert_allclose(score("knn", k=k), brute(unit(TEST), unit(TRAIN)), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(score("knn", k=k, squared=False) ** 2, score("knn", k=k), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(score("knn", k=k, normalise=False), brute(TEST, TRAIN), rtol=1e-9)


def test_knn_with_more_neighbours_than_rows_is_refused() -> None:
    with pytest.raises(OodometerError, match="k=161 neighbours are needed and the training bank has 160"):
        score("knn", k=N + 1)


def test_n25_a_zero_feature_vector_is_one_from_every_direction() -> None:
    train, zero = Bank(features=TRAIN), Bank(features=np.zeros((1, D)))
    np.testing.assert_allclose(create("knn", k=3).fit(train).score(zero), 1.0)
    both = Bank(features=np.concatenate([TRAIN, np.zeros((1, D))]))
    np.testing.assert_allclose(create("knn", k=1).fit(both).score(zero), 0.0)


@pytest.mark.parametrize("power", [1, 2.5, 4, 7])
@pytest.mark.parametrize("threshold", [0.03, 0.4])
def test_relation_is_the_kernel_sum_with_the_threshold_before_the_power(power: float, threshold: float) -> None:
    p_train, p_test = scipy.special.softmax(Z_TRAIN, axis=1), scipy.special.softmax(Z_TEST, axis=1)
    expected = []
    for h, p in zip(unit(TEST), p_test, strict=True):
        kernel = np.array([max(0, h @ ht) * (p @ pt) for ht, pt in zip(unit(TRAIN), p_train, strict=True)])
        expected.append(-(kernel[kernel > threshold] ** power).sum())
    np.testing.assert_allclose(score("relation", power=power, threshold=threshold), expected, rtol=1e-10)


@pytest.mark.parametrize("k", [1, 10])
def test_nnguide_guides_the_energy_by_confident_neighbours(k: int) -> None:
    keys = unit(TRAIN) * lse(Z_TRAIN)[:, None]
    guidance = np.array([np.sort(keys @ row)[-k:].mean() for row in unit(TEST)])
    np.testing.assert_allclose(score("nnguide", k=k, alpha=1.0), -lse(Z_TEST) * guidance, rtol=1e-9)


def test_n8_nnguide_draws_a_seeded_random_share_and_a_sweep_refits() -> None:
    first, again, other = (score("nnguide", k=5, alpha=0.2, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    order = np.argsort(LABELS, kind="stable")  # an unshuffled loader: the first rows are all of class 0
    detector = create("nnguide", k=5, alpha=0.2).fit(Bank(features=TRAIN[order], logits=Z_TRAIN[order]))
    assert len(np.unique(Z_TRAIN[order][:32].argmax(1))) < len(np.unique(detector.train_.logits.argmax(1)))
    detector.set_params(alpha=0.5).fit(Bank(features=TRAIN, logits=Z_TRAIN))
    assert len(detector.train_) == N // 2


def test_nnguide_averages_what_there_is_and_says_so() -> None:
    with pytest.warns(OodometerWarning, match="has 16 rows"):
        few = score("nnguide", k=50, alpha=0.1)
    assert np.array_equal(few, score("nnguide", k=16, alpha=0.1))


# ---------------------------------------------------------------------------------------------- Mahalanobis


def test_mds_is_the_nearest_class_by_the_pooled_covariance() -> None:
    np.testing.assert_allclose(score("mds"), class_distances(np.linalg.inv(within_covariance())).min(1), rtol=1e-9)


def test_mds_variants_of_peers() -> None:
    precision = np.linalg.inv(within_covariance())
    np.testing.assert_allclose(score("mds", scale=0.5), score("mds") / 2, rtol=1e-12)
    ridge = np.linalg.inv(within_covariance() * N + 1e-6 * np.eye(D))
    peers = score("mds", scale=0.5, normalise=False, ridge=1e-6)
    np.testing.assert_allclose(peers, class_distances(ridge).min(1) / 2, rtol=1e-9)
    np.testing.assert_allclose(score("mds", ddof=1), score("mds") * (N - 1) / N, rtol=1e-9)
    total = np.linalg.inv(np.cov(TRAIN.T, bias=True))
    predicted = class_distances(total)[np.arange(2 * M), Z_TEST.argmax(1)]
    np.testing.assert_allclose(score("mds", cov="total", target="predicted"), predicted, rtol=1e-9)
    assert precision.shape == (D, D)


def test_rmds_subtracts_the_background_with_the_same_normalisation() -> None:
    nearest = class_distances(np.linalg.inv(within_covariance())).min(1)
    background = mahalanobis(TEST, TRAIN.mean(0), np.linalg.inv(np.cov(TRAIN.T, bias=True)))
    np.testing.assert_allclose(score("rmds"), nearest - background, rtol=1e-8, atol=1e-9)


def test_n4_rmds_is_not_mds() -> None:
    assert scipy.stats.spearmanr(score("rmds"), score("mds")).statistic < 0.99


def test_mds_with_fewer_rows_than_features_uses_the_pseudo_inverse() -> None:
    few, labels = TRAIN[:10], np.arange(10) % 2
    centred = np.concatenate([few[labels == c] - few[labels == c].mean(0) for c in (0, 1)])
    precision = np.linalg.pinv(centred.T @ centred / 10, rcond=1e-10)
    expected = np.stack([mahalanobis(TEST, few[labels == c].mean(0), precision) for c in (0, 1)], axis=1).min(1)
    found = create("mds").fit(Bank(features=few, labels=labels)).score(Bank(features=TEST))
    np.testing.assert_allclose(found, expected, rtol=1e-7)


def test_an_empty_class_is_never_the_nearest() -> None:
    labels = np.where(LABELS == 3, 2, LABELS)  # the head still has four classes; class 3 has no rows
    train = Bank(features=TRAIN, labels=labels, head=HEAD)
    centred = np.concatenate([TRAIN[labels == c] - TRAIN[labels == c].mean(0) for c in range(3)])
    precision = np.linalg.inv(centred.T @ centred / N)
    near_zero = Bank(features=np.zeros((1, D)), head=HEAD)
    expected = min(mahalanobis(np.zeros((1, D)), TRAIN[labels == c].mean(0), precision)[0] for c in range(3))
    np.testing.assert_allclose(create("mds").fit(train).score(near_zero), expected, rtol=1e-9)


# ---------------------------------------------------------------------------------------------- subspaces


def null_space(dim: int, center: np.ndarray) -> np.ndarray:
    gap = TRAIN - center
    values, vectors = np.linalg.eigh(gap.T @ gap / N)
    return vectors[:, np.argsort(-values)[dim:]]


def test_residual_and_vim_are_their_formulas_around_the_origin() -> None:
    u = -np.linalg.pinv(W) @ HEAD.bias
    null = null_space(5, u)
    residual = np.linalg.norm((TEST - u) @ null, axis=1)
    np.testing.assert_allclose(score("residual", dim=5), residual, rtol=1e-8)
    alpha = Z_TRAIN.max(1).mean() / np.linalg.norm((TRAIN - u) @ null, axis=1).mean()
    np.testing.assert_allclose(score("vim", dim=5), alpha * residual - lse(Z_TEST), rtol=1e-8)
    mean = TRAIN.mean(0)
    centred = np.linalg.norm((TEST - mean) @ null_space(5, mean), axis=1)
    np.testing.assert_allclose(score("residual", dim=5, origin="mean"), centred, rtol=1e-8)


@pytest.mark.parametrize("name", ["vim", "residual"])
@pytest.mark.parametrize("dim", [D, D + 5, 0, -1, 1.5, "half", True])
def test_n5_a_dim_without_a_residual_space_is_refused(name: str, dim: object) -> None:
    with pytest.raises(OodometerError, match="leaves no residual space of 12 features"):
        score(name, dim=dim)


@pytest.mark.parametrize(("width", "expected"), [(12, 6), (800, 512), (2048, 1000)])
def test_the_ladder_of_the_paper(width: int, expected: int) -> None:
    from oodometer.derived import Spectrum
    from oodometer.detectors.vim import principal_dim

    assert principal_dim("paper", Spectrum(np.ones(width), np.eye(1), np.zeros(1)), "vim") == expected


def test_pca_is_the_relative_reconstruction_error() -> None:
    mean = TRAIN.mean(0)
    values = np.sort(np.linalg.eigvalsh(np.cov(TRAIN.T, bias=True)))[::-1]
    kept = int((np.cumsum(values) / values.sum() <= 0.9).sum()) + 1
    error = np.linalg.norm((TEST - mean) @ null_space(kept, mean), axis=1)
    np.testing.assert_allclose(score("pca", variance=0.9, regularised=False), error, rtol=1e-8)
    np.testing.assert_allclose(score("pca", variance=0.9), error / np.linalg.norm(TEST, axis=1), rtol=1e-8)


def test_n32_a_clip_treats_every_row_alike() -> None:
    """Published code clips OOD rows and not ID rows; a score may not depend on which side a row is from."""
    detector = create("pca", clip=1.0).fit(Bank(features=TRAIN))
    clipped = Bank(features=np.minimum(TEST, 1.0))
    np.testing.assert_allclose(detector.score(Bank(features=TEST)), detector.score(clipped), rtol=1e-12)


def test_neco_is_the_share_of_length_in_the_principal_subspace() -> None:
    x, t = (TEST - TRAIN.mean(0)) / TRAIN.std(0), (TRAIN - TRAIN.mean(0)) / TRAIN.std(0)
    values, vectors = np.linalg.eigh(np.cov(t.T, bias=True))
    inside = np.linalg.norm(x @ vectors[:, np.argsort(-values)[:3]], axis=1)
    expected = -inside / np.linalg.norm(x, axis=1) * Z_TEST.max(1)
    np.testing.assert_allclose(score("neco", k=3), expected, rtol=1e-8)
    np.testing.assert_allclose(score("neco", k=3, use_maxlogit=False), expected / Z_TEST.max(1), rtol=1e-8)
    with pytest.warns(OodometerWarning, match="span 12 directions"):
        np.testing.assert_allclose(score("neco", k=100, use_maxlogit=False), -1.0, rtol=1e-10)


def test_kpca_with_cosines_is_pca_of_unit_features() -> None:
    t, x = unit(TRAIN), unit(TEST)
    values, vectors = np.linalg.eigh(np.cov(t.T, bias=True))
    order = np.argsort(-values)
    kept = int((np.cumsum(values[order]) / values.sum() <= 0.85).sum()) + 1
    expected = np.linalg.norm((x - t.mean(0)) @ vectors[:, order[kept:]], axis=1)
    np.testing.assert_allclose(score("kpca", method="cop"), expected, rtol=1e-8)


def test_kpca_through_all_landmarks_is_exact_kernel_pca() -> None:
    """With every training row a landmark, the Nyström map is the kernel's own feature map."""
    gamma = 0.5

    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.exp(-gamma * ((a[:, None] - b[None]) ** 2).sum(2))

    t, x = unit(TRAIN), unit(TEST)
    gram, cross = kernel(t, t), kernel(x, t)
    centre = np.eye(N) - 1 / N
    values, vectors = np.linalg.eigh(centre @ gram @ centre)
    order = np.argsort(-values)
    values, vectors = np.maximum(values[order], 0), vectors[:, order]
    kept = int((np.cumsum(values) / values.sum() <= 0.9).sum()) + 1
    centred = cross - cross.mean(1, keepdims=True) - gram.mean(0) + gram.mean()
    length = 1 - 2 * cross.mean(1) + gram.mean()
    inside = ((centred @ (vectors[:, :kept] / np.sqrt(values[:kept]))) ** 2).sum(1)
    found = score("kpca", method="nystrom", gamma=gamma, landmarks=N, variance=0.9)
    # Outside the span of the training rows the map through landmarks sees nothing: compare where it can.
    train_like = create("kpca", gamma=gamma, landmarks=N, variance=0.9).fit(Bank(features=TRAIN, logits=Z_TRAIN))
    on_train = train_like.score(Bank(features=TRAIN, logits=Z_TRAIN))
    gap_train = gram - gram.mean(1, keepdims=True) - gram.mean(0) + gram.mean()
    rest = np.diag(gap_train) - ((gap_train @ (vectors[:, :kept] / np.sqrt(values[:kept]))) ** 2).sum(1)
    np.testing.assert_allclose(on_train**2, rest, atol=1e-6)
    assert (found**2 <= length - inside + 1e-6).all()


def test_mcm_is_the_softmax_of_cosines() -> None:
    cosines = np.clip(RNG.standard_normal((9, 5)), -1, 1)
    for tau in (0.01, 1.0):
        found = create("mcm", tau=tau).score(Bank(logits=cosines))
        np.testing.assert_allclose(found, -scipy.special.softmax(cosines / tau, axis=1).max(1), rtol=1e-12)

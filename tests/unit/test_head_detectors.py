"""Scores of head, class means and densities against their definitions in plain loops."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import scipy.special
import scipy.stats

from oodometer import Bank, Head, create
from oodometer.detectors.fdbd import inverse_gaps
from oodometer.errors import OodometerError, OodometerWarning

RNG = np.random.default_rng(0)
C, D, N, M = 4, 10, 150, 25
CENTERS = 2 * RNG.standard_normal((C, D))
LABELS = RNG.integers(0, C, N)
TRAIN = CENTERS[LABELS] + 3 * RNG.standard_normal((N, D))
TEST = np.concatenate([CENTERS[RNG.integers(0, C, M)] + RNG.standard_normal((M, D)), 3 * RNG.standard_normal((M, D))])
W, B = CENTERS / 3, RNG.standard_normal(C)
HEAD = Head(W, B)
Z_TRAIN, Z_TEST = TRAIN @ W.T + B, TEST @ W.T + B
PREDICTED, RIGHT = Z_TEST.argmax(1), Z_TRAIN.argmax(1) == LABELS
TRAIN_BANK = Bank(features=TRAIN, labels=LABELS, head=HEAD)
MEAN = TRAIN.mean(0)

assert len(np.unique(LABELS[RIGHT])) == len(np.unique(LABELS[~RIGHT])) == C, "every class needs right and wrong rows"


def score(name: str, test: np.ndarray = TEST, *, train: Bank = TRAIN_BANK, **params: object) -> np.ndarray:
    return create(name, **params).fit(train).score(Bank(features=test, head=train.head))


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def right_mean(c: int) -> np.ndarray:
    return TRAIN[RIGHT & (c == LABELS)].mean(0)


# ---------------------------------------------------------------------------------------------- she


@pytest.mark.parametrize(
    ("metric", "one"),
    [
        ("inner_product", lambda h, m: -(h @ m)),
        ("euclidean", lambda h, m: np.linalg.norm(h - m)),
        ("cosine", lambda h, m: -cosine(h, m)),
    ],
)
def test_she_compares_with_the_pattern_of_the_predicted_class(metric: str, one) -> None:  # type: ignore[no-untyped-def]
    expected = [one(h, right_mean(c)) for h, c in zip(TEST, PREDICTED, strict=True)]
    np.testing.assert_allclose(score("she", metric=metric), expected, rtol=1e-12)


def test_n24_she_refuses_a_class_without_correct_rows_or_takes_all_its_rows() -> None:
    kept = ~(RIGHT & (LABELS == 1))
    train = Bank(features=TRAIN[kept], labels=LABELS[kept], head=HEAD)
    with pytest.raises(OodometerError, match=r"classes 1 have no correctly classified training rows.*class_mean"):
        score("she", train=train)
    with pytest.warns(OodometerWarning, match="classes 1 have no correctly classified"):
        found = score("she", train=train, empty="class_mean")
    wrong_mean = TRAIN[kept & (LABELS == 1)].mean(0)
    expected = [-(h @ (wrong_mean if c == 1 else right_mean(c))) for h, c in zip(TEST, PREDICTED, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert (PREDICTED == 1).any()


@pytest.mark.filterwarnings("ignore::oodometer.errors.OodometerWarning")
def test_she_refuses_a_class_without_any_rows() -> None:
    train = Bank(features=TRAIN[LABELS != 2], labels=LABELS[LABELS != 2], head=HEAD)
    with pytest.raises(OodometerError, match="classes 2 have no training rows"):
        score("she", train=train, empty="class_mean")


# ---------------------------------------------------------------------------------------------- fdbd


def boundary_sum(z: np.ndarray, weight: np.ndarray = W) -> float:
    top = int(z.argmax())
    others = [c for c in range(len(z)) if c != top and np.any(weight[c] != weight[top])]
    return float(sum((z[top] - z[c]) / np.linalg.norm(weight[top] - weight[c]) for c in others))


def test_fdbd_sums_the_distances_to_the_boundaries() -> None:
    sums = np.array([boundary_sum(z) for z in Z_TEST])
    to_mean, to_zero = np.linalg.norm(TEST - MEAN, axis=1), np.linalg.norm(TEST, axis=1)
    np.testing.assert_allclose(score("fdbd"), -sums / to_mean, rtol=1e-12)
    np.testing.assert_allclose(score("fdbd", distance_to_mean=False), -sums / to_zero, rtol=1e-12)
    np.testing.assert_allclose(score("fdbd", reduction="mean"), -sums / (C - 1) / to_mean, rtol=1e-12)


def test_fdbd_recomputes_gaps_that_cancel_in_the_gram_form() -> None:
    weight = 1e4 + np.random.default_rng(1).standard_normal((6, 8)) * np.array([1e-6, 1e-6, 1e-3, 1, 1, 1])[:, None]
    found = inverse_gaps(weight)
    for i in range(6):
        for j in range(6):
            expected = 0.0 if i == j else 1 / np.linalg.norm(weight[i] - weight[j])
            np.testing.assert_allclose(found[i, j], expected, rtol=1e-12)


def test_fdbd_leaves_out_classes_with_equal_weights() -> None:
    weight = W.copy()
    weight[3] = weight[1]
    head = Head(weight, B)
    train = Bank(features=TRAIN, head=head)
    with pytest.warns(OodometerWarning, match="1 pairs of classes have equal weights \\(classes 1 and 3"):
        found = score("fdbd", train=train)
    sums = np.array([boundary_sum(z, weight) for z in TEST @ weight.T + B])
    np.testing.assert_allclose(found, -sums / np.linalg.norm(TEST - MEAN, axis=1), rtol=1e-12)


@pytest.mark.parametrize("head", [Head(W[:1], B[:1]), Head(W[[2, 2, 2]], B[:3]), Head(np.zeros((3, D)), B[:3])])
def test_fdbd_needs_a_boundary(head: Head) -> None:
    with pytest.raises(OodometerError, match="no decision boundary"):
        score("fdbd", train=Bank(features=TRAIN, head=head))


@pytest.mark.parametrize(("distance_to_mean", "point"), [(True, MEAN), (False, np.zeros(D))])
def test_n25_fdbd_at_the_limit_is_finite_and_most_in_distribution(distance_to_mean: bool, point: np.ndarray) -> None:
    near = point + 1e-3 * np.eye(D)[:1]
    rows = np.concatenate([point[None, :], near, TEST])
    found = score("fdbd", rows, distance_to_mean=distance_to_mean)
    floor = np.finfo(np.float32).eps * np.linalg.norm(MEAN)
    np.testing.assert_allclose(found[0], -boundary_sum(point @ W.T + B) / floor, rtol=1e-9)
    assert found[0] < found[1] < found[2:].min()


# ---------------------------------------------------------------------------------------------- nci


@pytest.mark.parametrize("alpha", [0.0, 1e-4, 0.1])
def test_nci_is_the_centred_closeness_to_the_predicted_weight_plus_the_l1_norm(alpha: float) -> None:
    expected = [
        -(W[c] @ (h - MEAN) / np.linalg.norm(h - MEAN) + alpha * np.abs(h).sum())
        for h, c in zip(TEST, PREDICTED, strict=True)
    ]
    np.testing.assert_allclose(score("nci", alpha=alpha), expected, rtol=1e-12)


def test_nci_at_the_mean_has_no_direction() -> None:
    np.testing.assert_allclose(score("nci", MEAN[None, :], alpha=0.5), -0.5 * np.abs(MEAN).sum(), rtol=1e-12)


# ---------------------------------------------------------------------------------------------- ctm


def test_ctm_is_the_largest_cosine_to_a_weight() -> None:
    expected = [-max(cosine(h, w) for w in W) for h in TEST]
    np.testing.assert_allclose(score("ctm"), expected, rtol=1e-12)
    assert np.array_equal(create("ctm").score(Bank(features=TEST, head=HEAD)), score("ctm")), "nothing to fit"


def test_ctmmean_is_the_largest_cosine_to_a_class_mean() -> None:
    means = [TRAIN[c == LABELS].mean(0) for c in range(C)]
    np.testing.assert_allclose(score("ctmmean"), [-max(cosine(h, m) for m in means) for h in TEST], rtol=1e-12)
    right = [right_mean(c) for c in range(C)]
    of_right = [-max(cosine(h, m) for m in right) for h in TEST]
    np.testing.assert_allclose(score("ctmmean", correct=True), of_right, rtol=1e-12)
    assert create("ctmmean", preset="oc").get_params() == {"correct": True}


def test_ctmmean_with_empty_classes() -> None:
    present = LABELS != 2
    train = Bank(features=TRAIN[present], labels=LABELS[present], head=HEAD)
    means = [TRAIN[c == LABELS].mean(0) for c in (0, 1, 3)]
    expected = [-max(cosine(h, m) for m in means) for h in TEST]
    np.testing.assert_allclose(score("ctmmean", train=train), expected, rtol=1e-12)
    all_wrong = Bank(features=TRAIN[~RIGHT], labels=LABELS[~RIGHT], head=HEAD)
    with pytest.warns(OodometerWarning, match="4 classes have no correctly classified training rows"):
        found = score("ctmmean", train=all_wrong, correct=True)
    np.testing.assert_array_equal(found, score("ctmmean", train=all_wrong))


@pytest.mark.filterwarnings("ignore::oodometer.errors.OodometerWarning")
@pytest.mark.parametrize(("name", "params"), [("ctm", {}), ("ctmmean", {}), ("she", {"metric": "cosine"})])
def test_n25_a_zero_vector_is_at_a_right_angle_to_everything(name: str, params: dict[str, object]) -> None:
    assert score(name, np.zeros((1, D)), **params).tolist() == [0.0]
    silent = Head(np.concatenate([W[:3], np.zeros((1, D))]), B)
    train = Bank(features=TRAIN, labels=LABELS, head=silent)
    assert np.isfinite(score(name, train=train, **({"empty": "class_mean"} if name == "she" else {}))).all()


# ---------------------------------------------------------------------------------------------- pnml


def pnml_by_definition(train: np.ndarray, test: np.ndarray, variant: str, tol: float) -> np.ndarray:
    """The formula with an explicit pseudo-inverse, one row and one class at a time."""

    def extended(x: np.ndarray) -> np.ndarray:
        length = np.linalg.norm(x, axis=1, keepdims=True)
        return np.concatenate([np.ones((len(x), 1)), x / np.where(length > 0, length, 1)], axis=1)

    rows = extended(train)
    correlation = rows.T @ rows
    precision = np.linalg.pinv(correlation, rcond=1e-12, hermitian=True)
    found = []
    for x in extended(test):
        inside = x @ precision @ x
        outside = x @ (x - precision @ correlation @ x)
        outside = outside if outside > tol else 0.0
        g = max(outside, inside / (1 + inside))
        if variant == "theory":
            g = 1.0 if outside > 0 else inside / (1 + inside)
        q = scipy.special.softmax(B + W @ x[1:])
        found.append(np.log(sum(p / (p + (1 - p) * p**g) for p in q)) / np.log(C))
    return np.array(found)


@pytest.mark.parametrize("variant", ["max", "theory"])
def test_pnml_is_the_regret_by_an_explicit_pseudo_inverse(variant: str) -> None:
    expected = pnml_by_definition(TRAIN, TEST, variant, 1e-9)
    np.testing.assert_allclose(score("pnml", variant=variant), expected, rtol=1e-9)
    assert create("pnml").fit(TRAIN_BANK).rank_ == D + 1
    assert ((expected > 0) & (expected < 1)).all()


@pytest.mark.parametrize("variant", ["max", "theory"])
def test_pnml_of_training_rows_that_span_less(variant: str) -> None:
    flat = TRAIN.copy()
    flat[:, 7:] = 0
    inside = TEST.copy()
    inside[:, 7:] = 0
    test = np.concatenate([TEST, inside, np.zeros((1, D))])
    train = Bank(features=flat, head=HEAD)
    with pytest.warns(OodometerWarning, match="span 8 of 11 directions"):
        detector = create("pnml", variant=variant).fit(train)
    found = detector.score(Bank(features=test, head=HEAD))
    np.testing.assert_allclose(found, pnml_by_definition(flat, test, variant, 1e-9), rtol=1e-8)
    assert detector.rank_ == 8
    tolerant = create("pnml", variant=variant, tol=1.0)
    with pytest.warns(OodometerWarning, match="span"):
        tolerant.fit(train)
    np.testing.assert_allclose(tolerant.score(Bank(features=test, head=HEAD)),
                               pnml_by_definition(flat, test, variant, 2.0), rtol=1e-8)  # fmt: skip


def test_pnml_of_confident_rows_neither_ties_nor_overflows() -> None:
    sharp = Head(40 * W, B)
    found = score("pnml", train=Bank(features=TRAIN, head=sharp))
    assert len(np.unique(found)) == len(found)
    assert (found > 0).all()
    extreme = score("pnml", train=Bank(features=TRAIN, head=Head(1e5 * W, B)))
    assert ((extreme >= 0) & (extreme <= 1)).all()


def test_pnml_needs_two_classes() -> None:
    with pytest.raises(OodometerError, match="at least 2 classes"):
        score("pnml", train=Bank(features=TRAIN, head=Head(W[:1], B[:1])))


# ---------------------------------------------------------------------------------------------- gradnorm


@pytest.mark.torch
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_gradnorm_is_the_gradient_of_autograd(temperature: float) -> None:
    torch = pytest.importorskip("torch")
    expected = []
    for h in TEST:
        weight = torch.tensor(W, requires_grad=True)
        z = (weight @ torch.tensor(h) + torch.tensor(B)) / temperature
        (-torch.log_softmax(z, dim=0).sum()).backward()
        expected.append(-float(weight.grad.abs().sum()))
    np.testing.assert_allclose(score("gradnorm", temperature=temperature), expected, rtol=1e-11)


def test_gradnorm_is_the_gradient_by_finite_differences() -> None:
    def loss(weight: np.ndarray, h: np.ndarray) -> float:
        return -float(scipy.special.log_softmax(weight @ h + B).sum())

    step, h = 1e-5, TEST[0]
    total = 0.0
    for c in range(C):
        for d in range(D):
            bump = np.zeros((C, D))
            bump[c, d] = step
            total += abs(loss(W + bump, h) - loss(W - bump, h)) / (2 * step)
    np.testing.assert_allclose(score("gradnorm")[0], -total, rtol=1e-7)


def test_gradnorm_needs_no_fit_and_takes_stored_logits_as_they_are() -> None:
    unfitted = create("gradnorm").score(Bank(features=TEST, logits=Z_TEST))
    np.testing.assert_allclose(unfitted, score("gradnorm"), rtol=1e-13)
    stored = Bank(features=TRAIN, logits=Z_TRAIN)
    np.testing.assert_array_equal(create("gradnorm").fit(stored).score(Bank(features=TEST, logits=Z_TEST)), unfitted)


def test_gradnorm_of_one_class_has_no_gradient() -> None:
    assert not score("gradnorm", train=Bank(features=TRAIN, head=Head(W[:1], B[:1]))).any()


# ---------------------------------------------------------------------------------------------- gmm


def log_mixture(weights: np.ndarray, means: np.ndarray, covariances: list[np.ndarray]) -> np.ndarray:
    parts = [
        np.log(p) + scipy.stats.multivariate_normal(m, s).logpdf(TEST)
        for p, m, s in zip(weights, means, covariances, strict=True)
    ]
    return scipy.special.logsumexp(np.stack(parts, axis=1), axis=1)


@pytest.mark.parametrize("covariance", ["tied", "full"])
@pytest.mark.parametrize("ridge", [0.0, 1e-6, 0.5])
def test_gmm_of_classes_is_the_mixture_density(covariance: str, ridge: float) -> None:
    of = [TRAIN[c == LABELS] for c in range(C)]
    counts, means = np.array([len(rows) for rows in of]), np.array([rows.mean(0) for rows in of])
    own = [np.cov(rows.T, bias=True) for rows in of]
    tied = sum(n * s for n, s in zip(counts, own, strict=True)) / N
    covariances = [s + ridge * np.eye(D) for s in (own if covariance == "full" else [tied] * C)]
    expected = -log_mixture(counts / N, means, covariances)
    np.testing.assert_allclose(score("gmm", covariance=covariance, ridge=ridge), expected, rtol=1e-9)


def test_gmm_of_one_component_is_a_gaussian() -> None:
    expected = -scipy.stats.multivariate_normal(MEAN, np.cov(TRAIN.T, bias=True) + 1e-6 * np.eye(D)).logpdf(TEST)
    np.testing.assert_allclose(score("gmm", components=1), expected, rtol=1e-9)


@pytest.mark.parametrize("covariance", ["tied", "full"])
def test_gmm_of_a_number_of_components_scores_as_the_fitted_mixture(covariance: str) -> None:
    from sklearn.mixture import GaussianMixture

    mixture = GaussianMixture(3, covariance_type=covariance, reg_covar=1e-3, random_state=5).fit(TRAIN)
    params = {"components": 3, "covariance": covariance, "ridge": 1e-3, "seed": 5}
    unlabelled = Bank(features=TRAIN)
    found = create("gmm", **params).fit(unlabelled).score(Bank(features=TEST))
    np.testing.assert_allclose(found, -mixture.score_samples(TEST), rtol=1e-9)
    again = create("gmm", **params).fit(Bank(features=TRAIN)).score(Bank(features=TEST))
    assert again.tobytes() == found.tobytes()


def test_gmm_far_out_does_not_underflow() -> None:
    far = 1e3 * np.arange(1, 5)[:, None] * np.ones(D)
    found = score("gmm", far)
    assert (np.diff(found) > 0).all()
    assert found[0] > 1e5, "exp of minus this is zero in float64"


def test_gmm_errors_name_their_remedy() -> None:
    single = Bank(features=TRAIN[:40], labels=np.r_[np.zeros(39, int), 1])
    with pytest.raises(OodometerError, match=r"class 1 has 1 training row.*tied"):
        create("gmm", covariance="full").fit(single)
    with pytest.raises(OodometerError, match=r"has rank 9 of 10.*raise ridge"):
        create("gmm", ridge=0.0).fit(Bank(features=np.c_[TRAIN[:, :9], TRAIN[:, 8]], labels=LABELS))
    with pytest.raises(OodometerError, match="components=200 but the training bank has 150 rows"):
        create("gmm", components=200).fit(TRAIN_BANK)
    for wrong in (0, -1, 2.5, True, "class"):
        with pytest.raises(OodometerError, match="components must be an integer ≥ 1 or 'classes'"):
            create("gmm", components=wrong)


# ---------------------------------------------------------------------------------------------- all


def test_validation_rows_are_checked_where_they_are_read() -> None:
    bad = Bank(features=np.full((3, D), np.nan), labels=LABELS[:3], head=HEAD)
    assert np.array_equal(create("fdbd").fit(TRAIN_BANK, val=bad).score(Bank(features=TEST)), score("fdbd"))
    with pytest.raises(OodometerError, match="column 'features' of the val bank has NaN or infinity in row 0"):
        create("residual", dim=2, bank="val").fit(TRAIN_BANK, val=bad)


VARIANTS = [
    ("she", {"metric": "euclidean"}), ("she", {"metric": "cosine"}), ("fdbd", {"distance_to_mean": False}),
    ("fdbd", {"reduction": "mean"}), ("nci", {"alpha": 0.1}), ("ctmmean", {"correct": True}),
    ("pnml", {"variant": "theory"}), ("gradnorm", {"temperature": 3.0}), ("gmm", {"covariance": "full"}),
    ("gmm", {"components": 3}),
]  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize(("name", "params"), VARIANTS)
def test_every_variant_agrees_on_torch(name: str, params: dict[str, object]) -> None:
    found = create(name, **params).fit(TRAIN_BANK.to("torch")).score(Bank(features=TEST, head=HEAD).to("torch"))
    np.testing.assert_allclose(found, score(name, **params), rtol=1e-10)


@pytest.mark.parametrize("name", ["she", "fdbd", "nci", "ctm", "ctmmean", "pnml", "gradnorm", "gmm"])
def test_c4_no_rows_by_rows_and_no_rows_by_classes_by_features_array(name: str) -> None:
    rows, classes, width = 20_000, 100, 32
    rng = np.random.default_rng(0)
    head = Head(rng.standard_normal((classes, width)), np.zeros(classes))
    features = rng.standard_normal((rows, width))
    features[:classes] = 9 * np.asarray(head.weight)
    labels = (features @ np.asarray(head.weight).T).argmax(1)
    train, test = Bank(features=features, labels=labels, head=head), Bank(features=features, head=head)
    tracemalloc.start()
    create(name).fit(train).score(test)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Two sets of logits are 32 MB; rows × classes × features would be 512 MB and rows × rows 3.2 GB.
    assert peak < 120e6

"""`projected(detector, kind)` against projections by scikit-learn's PCA and loops over rows and classes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import scipy.special
from sklearn.base import clone
from sklearn.decomposition import PCA

import oodometer
from oodometer import Bank, Head, create, detectors, projected, tempered, tune
from oodometer.cli.score import parse_detector
from oodometer.detectors.projection import KINDS, ONE_FEATURE, Projected, kinds
from oodometer.errors import OodometerError, OodometerWarning
from oodometer.temperature import fit_temperature

CLASSES, WIDTH, VARIANCE = 4, 9, 0.85


def bank(seed: int, rows: int, *, dtype: type = np.float64, noise: float = 1.0) -> Bank:
    """Classes that overlap, each with directions of its own; some rows are classified wrongly."""
    world = np.random.default_rng(5)
    centers, mixing = 2 * world.random((CLASSES, WIDTH)), world.standard_normal((CLASSES, WIDTH, WIDTH)) / 3
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, rows)
    spread = np.einsum("nij,nj->ni", mixing[y], rng.standard_normal((rows, WIDTH)) * noise * 0.9 ** np.arange(WIDTH))
    weight = 2 * (centers - centers.mean(0))
    bias = -0.5 * (weight * (centers + centers.mean(0))).sum(1)
    return Bank(features=(centers[y] + spread).astype(dtype), labels=y, head=Head(weight, bias))


TRAIN, VAL, TEST = bank(0, 160), bank(1, 70), bank(2, 40, noise=2.0)
W, B = TRAIN.head.weight, TRAIN.head.bias
H = TEST.features
PREDICTED = (H @ W.T + B).argmax(1)


def versions(*names: str) -> pytest.MarkDecorator:
    """Every projection that each of these detectors has."""
    return pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in names for kind in kinds(create(name))])


def kept(pca: PCA, variance: float) -> np.ndarray:
    return pca.components_[: int((np.cumsum(pca.explained_variance_ratio_) <= variance).sum()) + 1]


def onto(rows: np.ndarray, h: np.ndarray, variance: float = VARIANCE) -> np.ndarray:
    """h projected onto the principal subspace of these rows."""
    pca = PCA().fit(rows)
    u = kept(pca, variance)
    return pca.mean_ + (h - pca.mean_) @ u.T @ u


def rows_of(c: int, train: Bank = TRAIN) -> np.ndarray:
    h, y = train.features, train.labels
    right = (h @ W.T + B).argmax(1) == y
    return h[(y == c) & (right if (right & (y == c)).any() else True)]


def by_class(h: np.ndarray, variance: float = VARIANCE, train: Bank = TRAIN) -> np.ndarray:
    """ĥ_c of every row: classes × rows × features."""
    return np.stack([onto(rows_of(c, train), h, variance) for c in range(CLASSES)])


def class_logits(h: np.ndarray) -> np.ndarray:
    return np.stack([p @ W[c] + B[c] for c, p in enumerate(by_class(h))], axis=1)


def by_kind(kind: str, h: np.ndarray) -> np.ndarray:
    """The projected features of these rows."""
    if kind == "global":
        return onto(TRAIN.features, h)
    if kind == "class_avg":
        return by_class(h).mean(0)
    return by_class(h)[(h @ W.T + B).argmax(1), np.arange(len(h))]


def logits_by_kind(kind: str, h: np.ndarray) -> np.ndarray:
    return class_logits(h) if kind == "class" else by_kind(kind, h) @ W.T + B


def by_hand(one: Bank, kind: str) -> Bank:
    return Bank(features=by_kind(kind, one.features), labels=one.labels, head=one.head)


def fitted(name: str, kind: str, **params: object) -> np.ndarray:
    detector = projected(create(name, **params), kind, variance=VARIANCE).fit(TRAIN, val=VAL)
    return detector.score(TEST)


# ---------------------------------------------------------------------------------------------- the table


OF_LOGITS = ["msp", "mls", "energy", "entropy", "gen", "renyi", "collision", "guessing", "doctor_alpha"]
OF_FEATURES = ["gradnorm", "fdbd", "mds", "nnguide", "pnml", "ctmmean"]


def test_the_applicability_is_the_papers() -> None:
    for name in [*OF_LOGITS, "ctm", "pca", "kpca"]:
        assert kinds(create(name)) == KINDS
    for name in OF_FEATURES:
        assert kinds(create(name)) == ONE_FEATURE
    for name in ["residual", "vim", "neco"]:
        assert kinds(create(name)) == ()


@pytest.mark.filterwarnings("ignore::oodometer.errors.OodometerWarning")
@pytest.mark.parametrize("name", detectors.names())
def test_every_detector_has_finite_versions_or_a_clear_error(name: str) -> None:
    inner = create(name)
    for kind in KINDS:
        if kind in kinds(inner):
            assert np.isfinite(fitted(name, kind)).all()
        else:
            with pytest.raises(OodometerError, match=r"(choose kind=|no projected version)"):
                projected(inner, kind).fit(TRAIN)


@pytest.mark.parametrize("name", ["residual", "vim", "neco", "pca-fused", "mcd_pe", "gram", "projected"])
def test_a_detector_without_projected_versions_says_which_have_some(name: str) -> None:
    with pytest.raises(OodometerError, match=rf"{name} has no projected version .*gradnorm, fdbd, mds"):
        projected(name).fit(TRAIN)


def test_class_logits_are_no_features() -> None:
    with pytest.raises(OodometerError, match="choose kind= 'global', 'class_pred', 'class_avg'"):
        create("projected", detector="gradnorm", kind="class")


# ---------------------------------------------------------------------------------------------- scores of logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OF_LOGITS)
def test_scores_of_logits_read_the_projected_ones(name: str, kind: str) -> None:
    expected = create(name).score(Bank(logits=logits_by_kind(kind, H)))
    np.testing.assert_allclose(fitted(name, kind), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_fitted_scores_of_logits_are_fitted_on_the_projected_ones(kind: str) -> None:
    hand = [Bank(logits=logits_by_kind(kind, one.features), labels=one.labels) for one in (TRAIN, VAL, TEST)]
    expected = create("klm").fit(hand[0], val=hand[1]).score(hand[2])
    np.testing.assert_allclose(fitted("klm", kind), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_each_branch_has_its_own_temperature(kind: str) -> None:
    """projected(tempered(…)) fits T on the projected logits, tempered(projected(…)) on the plain ones."""
    t = fit_temperature(logits_by_kind(kind, VAL.features), VAL.labels)
    detector = projected(tempered("msp"), kind, variance=VARIANCE).fit(TRAIN, val=VAL)
    assert detector.detector_.temperature_ == pytest.approx(t, rel=1e-9)
    expected = -scipy.special.softmax(logits_by_kind(kind, H) / t, axis=1).max(1)
    np.testing.assert_allclose(detector.score(TEST), expected, rtol=1e-8)

    plain = fit_temperature(VAL.logits, VAL.labels)
    assert plain != pytest.approx(t, rel=1e-3)
    outside = tempered(projected("msp", kind, variance=VARIANCE)).fit(TRAIN, val=VAL)
    assert outside.temperature_ == plain
    expected = -scipy.special.softmax(logits_by_kind(kind, H) / plain, axis=1).max(1)
    np.testing.assert_allclose(outside.score(TEST), expected, rtol=1e-8)


# ---------------------------------------------------------------------------------------------- scores of features


@pytest.mark.parametrize("kind", ONE_FEATURE)
@pytest.mark.parametrize("name", ["gradnorm", "mds", "nnguide", "pnml", "ctm", "ctmmean", "knn", "she", "nci", "react"])
def test_scores_of_features_are_refitted_on_the_projected_ones(name: str, kind: str) -> None:
    expected = create(name).fit(by_hand(TRAIN, kind), val=by_hand(VAL, kind)).score(by_hand(TEST, kind))
    np.testing.assert_allclose(fitted(name, kind), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["global", "class_avg"])
def test_fdbd_reads_the_logits_of_the_projected_features(kind: str) -> None:
    expected = create("fdbd").fit(by_hand(TRAIN, kind)).score(by_hand(TEST, kind))
    np.testing.assert_allclose(fitted("fdbd", kind), expected, rtol=1e-8)


def test_fdbd_of_the_predicted_class_reads_the_class_logits() -> None:
    z, h = class_logits(H), by_kind("class_pred", H)
    mean = by_kind("class_pred", TRAIN.features).mean(0)
    expected = []
    for row, feature in zip(z, h, strict=True):
        top = int(row.argmax())
        gaps = [(row[top] - row[c]) / np.linalg.norm(W[top] - W[c]) for c in range(CLASSES) if c != top]
        expected.append(-sum(gaps) / np.linalg.norm(feature - mean))
    np.testing.assert_allclose(fitted("fdbd", "class_pred"), expected, rtol=1e-8)


def test_class_ctm_compares_each_class_with_its_own_projection() -> None:
    cosines = [p @ W[c] / np.linalg.norm(p, axis=1) / np.linalg.norm(W[c]) for c, p in enumerate(by_class(H))]
    np.testing.assert_allclose(fitted("ctm", "class"), -np.max(cosines, axis=0), rtol=1e-9)


# ---------------------------------------------------------------------------------------------- reconstruction errors


def errors(projections: np.ndarray, h: np.ndarray = H) -> np.ndarray:
    return np.linalg.norm(h - projections, axis=-1) / np.linalg.norm(h, axis=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_pca_errors_are_those_of_the_projections(kind: str) -> None:
    expected = errors(by_class(H)).min(0) if kind == "class" else errors(by_kind(kind, H))
    np.testing.assert_allclose(fitted("pca", kind), expected, rtol=1e-8)
    lengths = np.linalg.norm(H, axis=1)
    np.testing.assert_allclose(fitted("pca", kind, regularised=False), expected * lengths, rtol=1e-8)


def test_the_global_pca_and_kpca_errors_are_the_plain_ones() -> None:
    for name in ("pca", "kpca"):
        plain = create(name, variance=VARIANCE).fit(TRAIN).score(TEST)
        np.testing.assert_allclose(fitted(name, "global"), plain, rtol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_pca_errors_clip_every_row_alike(kind: str) -> None:
    clip = 1.5
    h, pooled = np.minimum(H, clip), np.minimum(TRAIN.features, clip)
    groups = [np.minimum(rows_of(c), clip) for c in range(CLASSES)]
    found = np.stack([onto(rows, h) for rows in groups])
    expected = {
        "global": lambda: errors(onto(pooled, h), h),
        "class": lambda: errors(found, h).min(0),
        "class_pred": lambda: errors(found[PREDICTED, np.arange(len(h))], h),
        "class_avg": lambda: errors(found.mean(0), h),
    }[kind]()
    np.testing.assert_allclose(fitted("pca", kind, clip=clip), expected, rtol=1e-8)


def test_cop_errors_are_pca_errors_of_unit_features_of_each_class() -> None:
    def unit(h: np.ndarray) -> np.ndarray:
        return h / np.linalg.norm(h, axis=1, keepdims=True)

    u = unit(H)
    found = np.stack([onto(unit(rows_of(c)), u) for c in range(CLASSES)])
    each = np.linalg.norm(u - found, axis=-1)
    np.testing.assert_allclose(fitted("kpca", "class", method="cop"), each.min(0), rtol=1e-8)
    predicted = each[PREDICTED, np.arange(len(u))]
    np.testing.assert_allclose(fitted("kpca", "class_pred", method="cop"), predicted, rtol=1e-8)
    np.testing.assert_allclose(fitted("kpca", "class_avg", method="cop"), np.linalg.norm(u - found.mean(0), axis=1))


@pytest.mark.parametrize("method", ["nystrom", "corp"])
def test_kernel_errors_come_from_one_kernel_pca_a_class(method: str) -> None:
    params = {"method": method, "features": 64} if method == "corp" else {"method": method, "landmarks": 12}
    alone = []
    for c in range(CLASSES):
        rows = rows_of(c)
        one = create("kpca", **params, variance=VARIANCE).fit(Bank(features=rows, logits=rows @ W.T + B))
        alone.append(one.score(Bank(features=H, logits=H @ W.T + B)))
    np.testing.assert_allclose(fitted("kpca", "class", **params), np.min(alone, axis=0), rtol=1e-6)
    predicted = np.array(alone)[PREDICTED, np.arange(len(H))]
    np.testing.assert_allclose(fitted("kpca", "class_pred", **params), predicted, rtol=1e-6)


def test_the_averaged_nystrom_error_averages_the_residuals_of_the_classes() -> None:
    """Each class's map φ_c = K(ĥ, L_c)K(L_c, L_c)^(−1/2) is centred and projected; the residuals are averaged."""
    gamma, m = 0.2, 10
    u, total = H / np.linalg.norm(H, axis=1, keepdims=True), 0.0
    for c in range(CLASSES):
        rows = rows_of(c)
        energy = scipy.special.logsumexp(rows @ W.T + B, axis=1)
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        landmarks = unit[np.sort(np.argsort(energy)[:m])]

        def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            return np.exp(-gamma * ((a[:, None] - b[None]) ** 2).sum(-1))

        values, vectors = np.linalg.eigh(kernel(landmarks, landmarks))
        root = vectors / np.sqrt(np.maximum(values, 1e-12)) @ vectors.T
        train, test = kernel(unit, landmarks) @ root, kernel(u, landmarks) @ root
        pca = PCA().fit(train)
        components = kept(pca, VARIANCE)
        centred = test - train.mean(0)
        total = total + (centred - centred @ components.T @ components) / CLASSES
    found = fitted("kpca", "class_avg", landmarks=m, gamma=gamma)
    np.testing.assert_allclose(found, np.linalg.norm(total, axis=1), rtol=1e-5)


def test_the_variance_of_an_error_is_the_projections() -> None:
    with pytest.raises(OodometerError, match=r"write projected\(pca, variance=0\.95\)"):
        create("projected", detector=create("pca", variance=0.95))
    assert set(projected("pca").grid) == {"variance"}
    assert set(projected("kpca").grid) == {"variance", "detector__gamma"}


@pytest.mark.parametrize(("name", "kind"), [("ctm", "class"), ("kpca", "class_pred")])
def test_a_temperature_goes_around_versions_of_their_own(name: str, kind: str) -> None:
    with pytest.raises(OodometerError, match=rf"write tempered\(projected\({name}, '{kind}'\)\)"):
        projected(tempered(name), kind).fit(TRAIN)
    assert np.isfinite(tempered(projected(name, kind)).fit(TRAIN, val=VAL).score(TEST)).all()


# ---------------------------------------------------------------------------------------------- edge cases


def test_a_class_without_correct_rows_falls_back_to_all_its_rows() -> None:
    predictions = TRAIN.logits.argmax(1)
    keep = (TRAIN.labels != 3) | (predictions != 3)
    train = Bank(features=TRAIN.features[keep], labels=TRAIN.labels[keep], head=TRAIN.head)
    assert (train.labels == 3).sum() >= 5
    assert not ((train.labels == 3) & (train.logits.argmax(1) == 3)).any()
    with pytest.warns(OodometerWarning, match="1 classes have no correctly classified rows"):
        detector = projected("pca", "class", variance=VARIANCE).fit(train)
    np.testing.assert_allclose(detector.score(TEST), errors(by_class(H, train=train)).min(0), rtol=1e-8)


def test_a_class_without_rows_is_named() -> None:
    with pytest.raises(OodometerError, match=r"class 2 has no training rows .* choose kind='global'"):
        projected("msp", "class").fit(TRAIN.rows(TRAIN.labels != 2))


def test_a_class_of_one_row_is_its_mean() -> None:
    first = np.flatnonzero((TRAIN.labels == 1) & (TRAIN.logits.argmax(1) == 1))[0]
    keep = (TRAIN.labels != 1) | (np.arange(len(TRAIN)) == first)
    with pytest.warns(OodometerWarning, match="the rows of 1 classes do not vary"):
        detector = projected("msp", "class", variance=VARIANCE).fit(TRAIN.rows(keep))
    z = class_logits(H)
    z[:, 1] = TRAIN.features[first] @ W[1] + B[1]
    np.testing.assert_allclose(detector.score(TEST), -scipy.special.softmax(z, axis=1).max(1), rtol=1e-9)


def test_repeated_rows_do_not_vary() -> None:
    same = Bank(features=np.tile(np.float32(0.1) * np.arange(1, 10, dtype=np.float32), (30, 1)), head=TRAIN.head)
    with pytest.raises(OodometerError, match="do not vary"):
        projected("msp").fit(same)


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_rows_than_features_in_a_class(kind: str) -> None:
    """The rows' products give the subspace that the covariance would."""
    few = TRAIN.rows(np.concatenate([np.flatnonzero(TRAIN.labels == c)[:6] for c in range(CLASSES)]))
    wide = np.random.default_rng(3).standard_normal((WIDTH, 40))
    back = np.linalg.pinv(wide)
    head = Head(W @ back.T, B)
    train, test = (Bank(features=one.features @ wide, labels=one.labels, head=head) for one in (few, TEST))
    detector = projected("energy", kind, variance=VARIANCE).fit(train)
    h, y = train.features, train.labels
    right = train.logits.argmax(1) == y
    groups = [h[(y == c) & (right if (right & (y == c)).any() else True)] for c in range(CLASSES)]
    each = np.stack([onto(rows, test.features) for rows in groups])
    rows = np.arange(len(H))
    z = {
        "global": lambda: onto(h, test.features) @ head.weight.T + B,
        "class": lambda: np.einsum("cnd,cd->nc", each, head.weight) + B,
        "class_pred": lambda: each[PREDICTED, rows] @ head.weight.T + B,
        "class_avg": lambda: each.mean(0) @ head.weight.T + B,
    }[kind]()
    np.testing.assert_allclose(detector.score(test), -scipy.special.logsumexp(z, axis=1), rtol=1e-8)


@versions("msp", "mds", "pca", "kpca", "ctm")
def test_parts_blocks_and_batches_change_nothing(name: str, kind: str) -> None:
    expected = fitted(name, kind)
    parts = Bank.concat([TRAIN.rows(slice(0, 70)), TRAIN.rows(slice(70, None))])
    detector = projected(name, kind, variance=VARIANCE).fit(parts)
    pieces = [detector.score(TEST.rows(rows)) for rows in (slice(0, 1), slice(1, 13), slice(13, None))]
    np.testing.assert_allclose(np.concatenate(pieces), expected, rtol=1e-7)
    joined = Bank.concat([TEST.rows(slice(0, 11)), TEST.rows(slice(11, None))])
    np.testing.assert_allclose(detector.score(joined), expected, rtol=1e-7)


@pytest.mark.torch
@versions("energy", "fdbd", "ctm", "pca", "kpca", "nnguide")
def test_torch_and_numpy_agree(name: str, kind: str) -> None:
    inner = tempered(name) if name == "energy" else create(name)
    ours = projected(inner, kind, variance=VARIANCE).fit(TRAIN, val=VAL).score(TEST)
    theirs = projected(inner, kind, variance=VARIANCE).fit(TRAIN.to("torch"), val=VAL.to("torch"))
    np.testing.assert_allclose(theirs.score(TEST.to("torch")), ours, rtol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_large_banks_are_projected_in_single_precision(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oodometer.arrays.EXACT_ENTRIES", 0)
    train, test = bank(0, 160, dtype=np.float32), bank(2, 40, dtype=np.float32, noise=2.0)
    for name in ("energy", "pca"):
        found = projected(name, kind, variance=VARIANCE).fit(train).score(test)
        np.testing.assert_allclose(found, fitted(name, kind), rtol=3e-5)


def test_few_classes_are_projected_without_a_copy_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows: every block meets every class, and nothing depends on where blocks end."""
    monkeypatch.setattr("oodometer.detectors.projection.BLOCK_BYTES", 1)
    monkeypatch.setattr("oodometer.arrays.BLOCK_BYTES", 1)
    big = Bank.concat([bank(seed, 300) for seed in range(10, 13)])
    whole = projected("energy", "class_pred").fit(TRAIN).score(big)
    alone = np.concatenate([projected("energy", "class_pred").fit(TRAIN).score(part) for part in big.parts])
    np.testing.assert_allclose(whole, alone, rtol=1e-12)


# ---------------------------------------------------------------------------------------------- habits


def test_scikit_learn_habits() -> None:
    detector = projected(tempered(create("gen", gamma=0.5)), "class", variance=0.95)
    assert repr(detector) == ("Projected(detector=Tempered(detector=GEN(gamma=0.5)), kind='class', variance=0.95)")
    assert detector.get_params()["detector__detector__gamma"] == 0.5
    detector.set_params(detector__detector__gamma=1.0, kind="global")
    assert detector.detector.detector.gamma == 1.0
    for copy in (clone(detector), detector.clone()):
        assert repr(copy) == repr(detector)
        assert copy.detector.detector is not detector.detector.detector
    fit = detector.fit(TRAIN, val=VAL)
    assert not detector.detector.is_fitted
    assert np.array_equal(pickle.loads(pickle.dumps(fit)).score(TEST), fit.score(TEST))


@pytest.mark.parametrize(
    ("name", "kind"), [("pca", "class"), ("kpca", "class_avg"), ("ctm", "class"), ("mds", "global")]
)
def test_fitted_versions_survive_pickling(name: str, kind: str) -> None:
    fit = projected(name, kind).fit(TRAIN)
    assert np.array_equal(pickle.loads(pickle.dumps(fit)).score(TEST), fit.score(TEST))


def test_by_name_from_the_registry_and_the_command_line() -> None:
    expected = projected(create("gen", m=2), "class", variance=0.95).fit(TRAIN).score(TEST)
    for detector in (
        create("projected", detector="gen", kind="class", variance=0.95, detector__m=2),
        parse_detector("projected:detector=gen,kind=class,variance=0.95,detector__m=2"),
    ):
        assert isinstance(detector, Projected)
        assert np.array_equal(detector.fit(TRAIN).score(TEST), expected)
    nested = parse_detector("projected:detector=tempered,detector__detector=msp,kind=class_pred")
    assert repr(nested) == repr(projected(tempered("msp"), "class_pred"))
    assert oodometer.detectors.projected is projected


def test_a_sweep_searches_variance_and_the_inner_grid() -> None:
    assert projected("gradnorm").grid == {"variance": (0.85, 0.9, 0.95, 0.99)}
    assert set(projected(tempered("gen")).grid) == {"variance", "detector__detector__gamma", "detector__detector__m"}
    grid = {"variance": (0.5, 0.9), "detector__gamma": (0.1, 1.0)}
    points = tune.sweep("projected", TRAIN, TEST, detector="gen", grid=grid)
    assert len(points) == 4
    for point in points:
        variance, gamma = point.params["variance"], point.params["detector__gamma"]
        expected = projected(create("gen", gamma=gamma), variance=variance).fit(TRAIN).score(TEST)
        assert np.array_equal(point.scores, expected)


def test_needs_follow_from_what_is_read() -> None:
    assert projected("knn").needs == {"features"}
    assert projected("msp").needs == {"features", "logits", "head"}
    assert projected("mds", "class_pred").needs == {"features", "logits", "labels"}
    assert projected("pca", "class").needs == {"features", "logits", "labels"}
    with pytest.raises(OodometerError, match="projected needs 'head'"):
        projected("msp").fit(Bank(features=TRAIN.features, logits=TRAIN.logits))

"""Scores of Monte-Carlo dropout passes against their definitions in plain NumPy loops."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import entropy

from oodometer import Bank, Head, arrays, create
from oodometer.arrays import take_columns
from oodometer.detectors.mcd import dropout_logits, dropout_masks
from oodometer.errors import OodometerError

N, R, C, D = 40, 7, 5, 16
RNG = np.random.default_rng(0)
PASSES = 3 * RNG.standard_normal((N, 1, C)) + RNG.standard_normal((N, R, C))
HEAD = Head(RNG.standard_normal((C, D)), RNG.standard_normal(C))
FEATURES = RNG.standard_normal((N, D))
BANK = Bank({"logits.mcd": PASSES})
SCORES = ("mcd_pe", "mcd_ee", "mcd_mi", "mcd_sv", "mcd_waic")


def with_passes(passes: np.ndarray) -> Bank:
    return Bank({"logits.mcd": passes})


def score(name: str, passes: np.ndarray = PASSES, **params: object) -> np.ndarray:
    return create(name, **params).score(with_passes(passes))


# ---------------------------------------------------------------------------------------------- definitions


def by_loops() -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in (*SCORES, "dropout")}
    for row in PASSES:
        p = np.stack([softmax(z) for z in row])
        mean = p.mean(axis=0)
        expected = float(np.mean([entropy(one) for one in p]))
        deviations = [np.sqrt(np.mean((p[:, c] - mean[c]) ** 2)) for c in range(C)]
        found["mcd_pe"].append(entropy(mean))
        found["mcd_ee"].append(expected)
        found["mcd_mi"].append(float(np.mean([entropy(one, mean) for one in p])))
        found["mcd_sv"].append(float(np.mean(deviations)))
        found["mcd_waic"].append(-(mean.max() - deviations[int(mean.argmax())]))
        found["dropout"].append(-softmax(row.mean(axis=0)).max())
    return found


@pytest.mark.parametrize("block", [1, 13, 1 << 20])
@pytest.mark.parametrize("name", [*SCORES, "dropout"])
def test_the_scores_are_their_definitions(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "block_rows", lambda row_bytes, *, cpu=True: block)
    np.testing.assert_allclose(score(name), by_loops()[name], rtol=1e-10)


def test_mutual_information_is_what_expected_entropy_leaves_of_the_predictive_one() -> None:
    np.testing.assert_allclose(score("mcd_mi"), score("mcd_pe") - score("mcd_ee"), rtol=1e-12)
    almost = np.repeat(PASSES[:, :1], R, axis=1)
    almost[0] += RNG.standard_normal((R, C))
    assert score("mcd_mi", almost)[0] > 1e-3
    assert (score("mcd_mi", almost) >= 0).all()
    np.testing.assert_allclose(score("mcd_mi", almost)[1:], 0, atol=1e-15)


def test_n15_waic_takes_the_deviation_of_the_rows_own_class() -> None:
    table = np.arange(12.0).reshape(3, 4)
    assert take_columns(table, np.array([1, 2, 3]), np).tolist() == [1, 6, 11]
    # Two passes p ± d: the standard deviation of the predicted class is d, the others have another one.
    p = np.array([[0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.2, 0.3, 0.5]])
    d = np.array([[0.2, -0.15, -0.05], [0.05, -0.1, 0.05], [-0.02, -0.01, 0.03]])
    found = score("mcd_waic", np.log(np.stack([p + d, p - d], axis=1)))
    np.testing.assert_allclose(found, [-(0.6 - 0.2), -(0.7 - 0.1), -(0.5 - 0.03)], rtol=1e-12)


def test_c21_underflowing_probabilities_are_not_nan() -> None:
    certain = np.zeros((2, 3, 4))
    certain[..., 0] = [[2000.0, 2001.0, 2002.0], [2000.0, 2000.0, 2000.0]]
    certain[1, 2] = [0, 3000, 0, 0]
    assert score("mcd_pe", certain)[0] == 0
    p = np.array([2 / 3, 1 / 3])
    np.testing.assert_allclose(score("mcd_pe", certain)[1], -(p * np.log(p)).sum(), rtol=1e-12)
    np.testing.assert_allclose(score("mcd_mi", certain)[1], -(p * np.log(p)).sum(), rtol=1e-12)
    np.testing.assert_allclose(score("mcd_expected", certain, detector="entropy"), 0)


def test_the_passes_are_read_once_for_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    from oodometer.detectors import mcd

    calls = []
    monkeypatch.setattr(mcd, "_summarise", lambda z, xp, known=mcd._summarise: calls.append(1) or known(z, xp))
    bank = with_passes(PASSES)
    for name in SCORES:
        create(name).score(bank)
    assert len(calls) == 1


# ---------------------------------------------------------------------------------------------- the door


@pytest.mark.parametrize("name", [*SCORES, "dropout", "mcd_mean", "mcd_expected"])
@pytest.mark.parametrize("noise", [0.0, 1e-7])
def test_n6_equal_passes_are_refused(name: str, noise: float) -> None:
    inactive = np.repeat(PASSES[:, :1], R, axis=1) * (1 + noise * RNG.standard_normal((N, R, C)))
    with pytest.raises(OodometerError, match=r"all 7 passes of 'logits.mcd' are the same in all 40 rows"):
        score(name, inactive)


@pytest.mark.parametrize("passes", [PASSES[:, :1], PASSES[:, 0], PASSES[..., None]])
def test_passes_of_another_shape_are_refused(passes: np.ndarray) -> None:
    with pytest.raises(OodometerError, match="must be rows × passes × classes with two passes or more"):
        score("mcd_pe", passes)


def test_a_training_bank_need_not_carry_passes() -> None:
    train = Bank(logits=PASSES[:, 0], labels=np.arange(N) % C)
    for name in SCORES:
        assert np.array_equal(create(name).fit(train).score(BANK), score(name))
    with pytest.raises(OodometerError, match=r"needs 'logits.mcd' in the score bank.*\*\*\{'logits.mcd': …\}"):
        create("mcd_pe").fit(train).score(train)


# ---------------------------------------------------------------------------------------------- compositions


LOGIT_SCORES = ("msp", "mls", "energy", "entropy", "gen", "collision", "guessing")


@pytest.mark.parametrize("name", LOGIT_SCORES)
def test_expected_is_the_mean_of_the_scores(name: str) -> None:
    each = [create(name).score(Bank(logits=PASSES[:, m])) for m in range(R)]
    np.testing.assert_allclose(score("mcd_expected", detector=create(name)), np.mean(each, axis=0), rtol=1e-12)


@pytest.mark.parametrize("name", LOGIT_SCORES)
def test_mean_is_the_score_of_the_mean_logits(name: str) -> None:
    expected = create(name).score(Bank(logits=PASSES.mean(axis=1)))
    np.testing.assert_allclose(score("mcd_mean", detector=create(name)), expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["msp", "entropy", "gen", "collision", "guessing"])
def test_mean_is_the_score_of_the_mean_softmax(name: str) -> None:
    mean = np.log(softmax(PASSES, axis=2).mean(axis=1))
    expected = create(name).score(Bank(logits=mean))
    np.testing.assert_allclose(score("mcd_mean", detector=create(name), of="softmax"), expected, rtol=1e-10)


def test_identities_between_compositions_and_named_scores() -> None:
    np.testing.assert_allclose(score("mcd_mean", detector="entropy", of="softmax"), score("mcd_pe"), rtol=1e-12)
    np.testing.assert_allclose(score("mcd_expected", detector="entropy"), score("mcd_ee"), rtol=1e-12)
    assert np.array_equal(score("mcd_mean", detector="msp"), score("dropout"))
    soft, hard = (score("mcd_mean", detector="msp", of=of) for of in ("softmax", "logits"))
    np.testing.assert_allclose(soft, -softmax(PASSES, axis=2).mean(axis=1).max(axis=1), rtol=1e-12)
    assert np.abs(soft - hard).max() > 1e-2


@pytest.mark.parametrize("name", ["energy", "mls"])
def test_scores_of_the_level_cannot_read_a_mean_softmax(name: str) -> None:
    with pytest.raises(OodometerError, match=f"{name} reads the level of the logits.*use of='logits'"):
        score("mcd_mean", detector=name, of="softmax")


def test_an_inner_detector_is_named_and_tuned_from_outside() -> None:
    detector = create("mcd_mean", detector="gen", detector__gamma=0.5, detector__m=3)
    assert detector.get_params()["detector__gamma"] == 0.5
    assert detector.grid["detector__gamma"] == create("gen").grid["gamma"]
    expected = create("gen", gamma=0.5, m=3).score(Bank(logits=PASSES.mean(axis=1)))
    np.testing.assert_allclose(detector.score(BANK), expected, rtol=1e-12)
    copy = detector.clone().set_params(detector__gamma=2.0)
    assert detector.detector.gamma == 0.5
    assert copy.detector.gamma == 2.0
    with pytest.raises(OodometerError, match="unknown name 'nothing'"):
        create("mcd_mean", detector__nothing=1)
    with pytest.raises(OodometerError, match="unknown name 'no_such_score'"):
        create("mcd_mean", detector="no_such_score")


@pytest.mark.parametrize("name", ["mcd_mean", "mcd_expected"])
def test_only_scores_of_logits_can_read_passes(name: str) -> None:
    with pytest.raises(OodometerError, match="knn reads features"):
        create(name, detector=create("knn"))
    with pytest.raises(OodometerError, match="must be a detector"):
        create(name, detector=3)


def test_an_inner_detector_that_fits_is_fitted_on_the_plain_logits() -> None:
    rng = np.random.default_rng(2)
    labels = np.arange(300) % C
    train = Bank(logits=2 * np.eye(C)[labels] + rng.standard_normal((300, C)), labels=labels)
    for inner in ("klm", "tempscale"):
        fitted = create(inner).fit(train, val=train)
        outer = create("mcd_expected", detector=inner).fit(train, val=train)
        each = [fitted.score(Bank(logits=PASSES[:, m])) for m in range(R)]
        np.testing.assert_allclose(outer.score(BANK), np.mean(each, axis=0), rtol=1e-10)
        with pytest.raises(OodometerError, match="not fitted"):
            create("mcd_expected", detector=inner).score(BANK)


# ---------------------------------------------------------------------------------------------- features and head


def test_dropout_passes_are_the_head_of_the_masked_features() -> None:
    bank = Bank(features=FEATURES, head=HEAD)
    found = dropout_logits(bank, passes=6, p=0.3, seed=4)
    masks = dropout_masks(D, passes=6, p=0.3, seed=4)
    assert found.shape == (N, 6, C)
    for m, mask in enumerate(masks):
        np.testing.assert_allclose(found[:, m], (FEATURES * mask) @ HEAD.weight.T + HEAD.bias, rtol=1e-12)
    assert set(np.unique(masks)) == {0.0, 1 / 0.7}


def test_masks_drop_their_share_and_more_passes_begin_alike() -> None:
    masks = dropout_masks(2000, passes=50, p=0.2, seed=0)
    assert abs((masks == 0).mean() - 0.2) < 0.005
    assert abs(masks.mean() - 1) < 0.005
    assert np.array_equal(masks[:9], dropout_masks(2000, passes=9, p=0.2, seed=0))
    assert not np.array_equal(masks, dropout_masks(2000, passes=50, p=0.2, seed=1))


def test_dropout_scores_features_and_head_as_it_scores_the_passes_they_give() -> None:
    bank = Bank(features=FEATURES, head=HEAD)
    detector = create("dropout", passes=9, p=0.4, seed=2)
    passes = dropout_logits(bank, passes=9, p=0.4, seed=2)
    np.testing.assert_allclose(detector.score(bank), score("dropout", passes), rtol=1e-10)
    assert np.abs(detector.score(bank) - create("msp").score(bank)).max() > 1e-2
    # Stored passes go first.
    both = bank.with_columns(**{"logits.mcd": PASSES})
    assert np.array_equal(detector.score(both), score("dropout"))


def test_a_rows_passes_depend_on_neither_its_neighbours_nor_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = Bank(features=FEATURES, head=HEAD)
    whole = dropout_logits(bank, seed=1)
    order = np.random.default_rng(3).permutation(N)
    np.testing.assert_allclose(dropout_logits(bank.rows(order), seed=1), whole[order], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(dropout_logits(bank.rows([5]), seed=1), whole[[5]], rtol=1e-12, atol=1e-12)
    monkeypatch.setattr("oodometer.bank.block_rows", lambda row_bytes, *, cpu=True: 3)
    np.testing.assert_allclose(dropout_logits(bank, seed=1), whole, rtol=1e-12, atol=1e-12)


def test_the_head_of_training_serves_test_features() -> None:
    detector = create("dropout").fit(Bank(features=FEATURES, head=HEAD))
    expected = create("dropout").score(Bank(features=FEATURES, head=HEAD))
    assert np.array_equal(detector.score(Bank(features=FEATURES)), expected)
    assert np.array_equal(detector.score(Bank(features=FEATURES, logits=HEAD(FEATURES))), expected)


@pytest.mark.parametrize(
    ("bank", "message"),
    [
        (Bank(features=FEATURES), "needs 'logits.mcd' in the score bank"),
        (Bank(logits=PASSES[:, 0]), "needs 'logits.mcd' in the score bank"),
        (Bank(features=np.where(np.arange(N)[:, None] == 3, np.nan, FEATURES), head=HEAD), "NaN or infinity in row 3"),
    ],
)
def test_dropout_says_what_it_lacks(bank: Bank, message: str) -> None:
    with pytest.raises(OodometerError, match=message):
        create("dropout").score(bank)


def test_passes_from_features_say_what_they_lack() -> None:
    with pytest.raises(OodometerError, match="this bank has features and no head"):
        dropout_logits(Bank(features=FEATURES))
    with pytest.raises(OodometerError, match=r"shape \(15,\).*head reads \(16,\)"):
        create("dropout").fit(Bank(features=FEATURES, head=HEAD)).score(Bank(features=FEATURES[:, 1:]))
    for p, passes in ((0.0, 5), (1.0, 5), (0.5, 1)):
        with pytest.raises(OodometerError, match=f"found p={p}, passes={passes}"):
            dropout_logits(Bank(features=FEATURES, head=HEAD), p=p, passes=passes)


@pytest.mark.torch
def test_torch_agrees() -> None:
    bank = Bank({"logits.mcd": PASSES.astype(np.float32), "features": FEATURES.astype(np.float32)}, head=HEAD)
    moved = bank.to("torch")
    for name in (*SCORES, "dropout", "mcd_mean", "mcd_expected"):
        np.testing.assert_allclose(create(name).score(moved), create(name).score(bank), rtol=1e-9)
    np.testing.assert_allclose(dropout_logits(moved).numpy(), dropout_logits(bank), rtol=1e-5, atol=1e-5)

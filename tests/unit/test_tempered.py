"""`tempered(detector)` against the same detector on logits and a head divided by hand."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import scipy.special
from sklearn.base import clone

import oodometer
from oodometer import Bank, Head, create, tempered, tune
from oodometer.cli.score import parse_detector
from oodometer.detectors.tempering import Tempered
from oodometer.errors import OodometerError, OodometerWarning
from oodometer.temperature import fit_temperature

CLASSES, WIDTH = 4, 7
OF_LOGITS = ["msp", "mls", "energy", "entropy", "gen", "collision", "doctor_alpha", "guessing", "renyi"]
FITTED = ["klm", "openmax"]
OF_FEATURES = ["fdbd", "gradnorm", "vim", "neco", "nnguide", "relation", "react", "pnml", "nci", "she", "dice"]


def bank(seed: int, rows: int, *, stored: bool = True) -> Bank:
    """Labels drawn from softmax(z/2): some rows are wrong, and the best temperature is near two."""
    world = np.random.default_rng(99)
    weight, bias = world.standard_normal((CLASSES, WIDTH)), world.standard_normal(CLASSES)
    rng = np.random.default_rng(seed)
    features = np.abs(rng.standard_normal((rows, WIDTH)))
    logits = features @ weight.T + bias
    y = np.array([rng.choice(CLASSES, p=p) for p in scipy.special.softmax(logits / 2, axis=1)])
    columns = {"logits": logits} if stored else {}
    return Bank(features=features, labels=y, head=Head(weight, bias), **columns)


TRAIN, VAL, TEST = bank(0, 120), bank(1, 80), bank(2, 50)
T = fit_temperature(VAL.logits, VAL.labels)


def divided(one: Bank, t: float) -> Bank:
    head = Head(one.head.weight / t, one.head.bias / t)
    return Bank(features=one.features, logits=one.logits / t, labels=one.labels, head=head)


def test_the_best_temperature_of_these_rows_is_inside_the_bounds_and_not_one() -> None:
    assert 1.3 < T < 4


@pytest.mark.filterwarnings("ignore::oodometer.errors.OodometerWarning")
@pytest.mark.parametrize("name", [*OF_LOGITS, *FITTED, *OF_FEATURES])
def test_tempered_is_the_detector_on_divided_logits_and_head(name: str) -> None:
    small = {"vim": {"dim": 3}, "neco": {"k": 3}, "nnguide": {"k": 5}}.get(name, {})
    inner = create(name, **small)
    expected = inner.clone().fit(divided(TRAIN, T), val=divided(VAL, T)).score(divided(TEST, T))
    detector = tempered(inner).fit(TRAIN, val=VAL)
    assert detector.temperature_ == T
    np.testing.assert_allclose(detector.score(TEST), expected, rtol=1e-10, atol=1e-12)
    # Stored logits or computed ones: the same.
    rows = [bank(seed, n, stored=False) for seed, n in ((0, 120), (1, 80), (2, 50))]
    computed = tempered(inner).fit(rows[0], val=rows[1]).score(rows[2])
    np.testing.assert_allclose(computed, expected, rtol=1e-9, atol=1e-11)


def test_tempered_msp_is_tempscale() -> None:
    expected = create("tempscale").fit(TRAIN, val=VAL).score(TEST)
    assert np.array_equal(tempered("msp").fit(TRAIN, val=VAL).score(TEST), expected)


def test_tempered_energy_ranks_as_the_energy_at_that_temperature() -> None:
    at_t = create("energy", temperature=T).score(TEST)
    np.testing.assert_allclose(tempered("energy").fit(TRAIN, val=VAL).score(TEST), at_t / T, rtol=1e-12)


def test_the_rows_the_temperature_is_fitted_on() -> None:
    on_train = fit_temperature(TRAIN.logits, TRAIN.labels)
    assert on_train != T
    assert tempered("msp").fit(TRAIN).temperature_ == on_train
    assert tempered("msp", bank="train").fit(TRAIN, val=VAL).temperature_ == on_train
    with pytest.raises(OodometerError, match="validation rows"):
        tempered("msp", bank="val").fit(TRAIN)
    with pytest.raises(OodometerError, match="'labels' in the val bank"):
        tempered("msp").fit(TRAIN, val=Bank(logits=VAL.logits))


def test_an_active_bound_is_reported() -> None:
    certain = Bank(logits=5 * np.eye(3), labels=np.arange(3))
    with pytest.warns(OodometerWarning, match=r"tempered: the loss .* T=0\.05 is the bound"):
        tempered("energy").fit(certain)


def test_parts_of_banks_are_divided_apart() -> None:
    parts = Bank.concat([TRAIN.rows(slice(0, 50)), TRAIN.rows(slice(50, None))])
    expected = tempered("klm", bank="train").fit(TRAIN).score(TEST)
    found = tempered("klm", bank="train").fit(parts).score(Bank.concat([TEST.rows([0, 1]), TEST.rows(slice(2, None))]))
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_the_inner_detector_given_stays_unfitted_and_unchanged() -> None:
    inner = create("klm")
    before = repr(inner)
    tempered(inner).fit(TRAIN, val=VAL)
    assert not inner.is_fitted
    assert repr(inner) == before
    gen = create("gen")
    create("tempered", detector=gen, detector__gamma=0.7)
    assert gen.gamma == 0.1


def test_scikit_learn_habits() -> None:
    detector = tempered(create("gen", gamma=0.5), bank="train")
    assert detector.get_params()["detector__gamma"] == 0.5
    detector.set_params(detector__gamma=2.0, bank="auto")
    assert repr(detector) == "Tempered(detector=GEN(gamma=2.0))"
    for copy in (clone(detector), detector.clone()):
        assert repr(copy) == repr(detector)
        assert copy.detector is not detector.detector
    fitted = detector.fit(TRAIN, val=VAL)
    again = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(again.score(TEST), fitted.score(TEST))


def test_by_name_from_the_registry_and_the_command_line() -> None:
    expected = tempered(create("gen", gamma=0.5, m=3)).fit(TRAIN, val=VAL).score(TEST)
    for detector in (
        create("tempered", detector="gen", detector__gamma=0.5, detector__m=3),
        create("tempered", detector=create("gen", gamma=0.5), detector__m=3),
        parse_detector("tempered:detector=gen,detector__gamma=0.5,detector__m=3"),
    ):
        assert isinstance(detector, Tempered)
        assert np.array_equal(detector.fit(TRAIN, val=VAL).score(TEST), expected)
    assert oodometer.detectors.tempered is tempered


def test_a_sweep_searches_the_inner_grid() -> None:
    points = tune.sweep("tempered", TRAIN, TEST, val=VAL, detector="gen", grid={"detector__gamma": (0.1, 1.0)})
    for point, gamma in zip(points, (0.1, 1.0), strict=True):
        expected = tempered(create("gen", gamma=gamma)).fit(TRAIN, val=VAL).score(TEST)
        assert point.params == {"detector__gamma": gamma}
        assert np.array_equal(point.scores, expected)
    assert tempered("gen").grid == {f"detector__{name}": values for name, values in create("gen").grid.items()}


@pytest.mark.parametrize("name", ["knn", "mds", "pca"])
def test_a_detector_that_reads_no_logits_is_refused(name: str) -> None:
    with pytest.raises(OodometerError, match=f"{name} reads .*, which no temperature divides"):
        tempered(name).fit(TRAIN, val=VAL)


def test_what_is_no_detector_is_refused() -> None:
    with pytest.raises(OodometerError, match=r"must be a detector, e\.g\. create"):
        tempered(3).fit(TRAIN)  # type: ignore[arg-type]
    with pytest.raises(OodometerError, match="gamma"):
        tempered(create("gen").set_params(gamma=-1.0)).fit(TRAIN)


def test_dropout_passes_are_divided_too() -> None:
    passes = np.random.default_rng(0).standard_normal((50, 6, CLASSES)) + TEST.logits[:, None]
    test = TEST.with_columns(**{"logits.mcd": passes})
    expected = -scipy.special.softmax(passes.mean(1) / T, axis=1).max(1)
    found = tempered(create("mcd_mean", detector="msp")).fit(TRAIN, val=VAL).score(test)
    np.testing.assert_allclose(found, expected, rtol=1e-12)

"""What every registered detector must do, tested with no line of code of its own."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable

import array_api_strict
import numpy as np
import pytest
from sklearn.base import clone

from oodometer import Bank, Head, create, detectors, metrics, tune
from oodometer.errors import NotFittedError, OodometerError
from tests.conformance.conftest import CLASSES, WIDTH, make_bank

NAMES = detectors.names()
NAMESPACES = ["numpy", pytest.param("torch", marks=pytest.mark.torch)]

pytestmark = pytest.mark.filterwarnings("ignore::oodometer.errors.OodometerWarning")
each = pytest.mark.parametrize("name", NAMES)

KNOWN_NEEDS = {"labels", "head", "features", "logits", "layers.*", *make_bank(0, 10).columns}

# The far set is far for every method: low energy, off every class direction.
FAR_AUROC = 0.6


def made(name: str, **params: object) -> detectors.Detector:
    """The detector with defaults that this small bank can serve."""
    # Features of this bank reach 9: the published clip at 1 belongs to a network whose features stay below it.
    small = {"knn": {"k": 10}, "neco": {"k": 8}, "pca-fused": {"clip": 5.0}, "she": {"empty": "class_mean"}}.get(
        name, {}
    )
    return create(name, **{**small, **params})


def fitted(name: str, banks: dict[str, Bank], **params: object) -> detectors.Detector:
    return made(name, **params).fit(banks["train"], val=banks["val"])


def columns_of(bank: Bank) -> dict[str, np.ndarray]:
    return {name: np.asarray(bank[name]) for name in bank.columns}


def changed(bank: Bank, change: Callable[[dict[str, np.ndarray]], None], *, head: Head | None = None) -> Bank:
    """A copy of the bank after `change` edited its columns; logits follow the features where both are there."""
    columns = {name: array.copy() for name, array in columns_of(bank).items()}
    change(columns)
    return Bank(columns, head=head if head is not None else bank.head, provenance=bank.provenance)


def scores_or_clear_error(action: Callable[[], np.ndarray]) -> np.ndarray | None:
    """Finite scores, or an OodometerError that says something; anything else fails the test."""
    try:
        found = action()
    except OodometerError as error:
        assert len(str(error)) > 30, "an error must say what was needed, found, and how to mend it"
        return None
    assert found.dtype == np.float64
    assert np.isfinite(found).all()
    return found


def close(a: np.ndarray, b: np.ndarray, tolerance: float = 1e-5) -> bool:
    return bool(np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-30))


# ---------------------------------------------------------------------------------------------- the contract


@each
@pytest.mark.parametrize("kind", NAMESPACES)
def test_score_is_finite_float64_and_oriented(name: str, kind: str, banks: dict[str, Bank]) -> None:
    moved = {role: bank.to(kind) for role, bank in banks.items()}
    detector = fitted(name, moved)
    id_scores, far_scores = detector.score(moved["test"]), detector.score(moved["far"])
    assert id_scores.dtype == np.float64
    assert id_scores.shape == (120,)
    assert np.isfinite(id_scores).all()
    assert metrics.auroc(id_scores, far_scores) > FAR_AUROC


@each
@pytest.mark.torch
def test_torch_and_numpy_agree(name: str, banks: dict[str, Bank]) -> None:
    moved = {role: bank.to("torch") for role, bank in banks.items()}
    assert close(fitted(name, moved).score(moved["test"]), fitted(name, banks).score(banks["test"]), 2e-5)


@each
def test_nothing_but_the_array_standard_is_used(name: str, banks: dict[str, Bank]) -> None:
    """Arrays that know the standard and not a thing more give the same scores."""
    strict = {role: bank.to(array_api_strict) for role, bank in banks.items()}
    assert close(fitted(name, strict).score(strict["test"]), fitted(name, banks).score(banks["test"]), 2e-5)


@each
def test_rows_do_not_depend_on_their_batch_or_order(name: str, banks: dict[str, Bank]) -> None:
    detector, test = fitted(name, banks), banks["test"]
    whole = detector.score(test)
    halves = np.concatenate([detector.score(test.rows(slice(0, 37))), detector.score(test.rows(slice(37, None)))])
    order = np.random.default_rng(0).permutation(len(test))
    assert close(halves, whole)
    assert close(detector.score(test.rows(order)), whole[order])
    assert close(detector.score(test.rows([5])), whole[[5]])


@each
def test_parts_of_a_training_bank_count_as_the_whole(name: str, banks: dict[str, Bank]) -> None:
    train = banks["train"]
    parts = Bank.concat([train.rows(slice(0, 150)), train.rows(slice(150, 400))])
    joined = made(name).fit(parts, val=banks["val"]).score(banks["test"])
    assert close(joined, fitted(name, banks).score(banks["test"]), 2e-5)


@each
def test_labels_are_never_read_to_score(name: str, banks: dict[str, Bank]) -> None:
    detector, test = fitted(name, banks), banks["test"]
    without = test.select([column for column in test.columns if column != "labels"])
    assert np.array_equal(detector.score(without), detector.score(test))


@each
def test_the_head_of_training_serves_a_test_bank_of_features_alone(name: str, banks: dict[str, Bank]) -> None:
    needs = detectors.get(name).card.needs
    if not needs <= {"features", "logits", "labels", "head"}:
        return  # such a score reads columns that only extraction can give
    bare = Bank(features=banks["test"].features)
    assert close(fitted(name, banks).score(bare), fitted(name, banks).score(banks["test"]), 2e-5)


@each
def test_refitting_forgets(name: str, banks: dict[str, Bank]) -> None:
    detector = made(name).fit(banks["far"], val=banks["val"])
    detector.fit(banks["train"], val=banks["val"])
    assert np.array_equal(detector.score(banks["test"]), fitted(name, banks).score(banks["test"]))


@each
def test_nothing_it_is_given_changes(name: str, banks: dict[str, Bank]) -> None:
    before = {role: {c: a.tobytes() for c, a in columns_of(bank).items()} for role, bank in banks.items()}
    detector = made(name)
    params = repr(detector.get_params())
    detector.fit(banks["train"], val=banks["val"]).score(banks["test"])
    assert repr(detector.get_params()) == params
    assert before == {role: {c: a.tobytes() for c, a in columns_of(bank).items()} for role, bank in banks.items()}


@each
def test_equal_seeds_give_equal_bytes(name: str, banks: dict[str, Bank]) -> None:
    fresh = {"train": make_bank(1, 400), "val": make_bank(2, 150)}
    assert fitted(name, fresh).score(make_bank(3, 120)).tobytes() == fitted(name, banks).score(banks["test"]).tobytes()


@each
def test_scikit_learn_habits(name: str, banks: dict[str, Bank]) -> None:
    detector = fitted(name, banks)
    copies = [clone(detector), detector.clone(), made(name).set_params(**detector.get_params(deep=False))]
    for copy in copies:
        assert repr(copy) == repr(detector)
        assert not copy.is_fitted
    assert repr(detector).startswith(type(detector).__name__)


@each
def test_a_fitted_detector_survives_pickling_to_workers(name: str, banks: dict[str, Bank]) -> None:
    detector = fitted(name, banks)
    copy = pickle.loads(pickle.dumps(detector))
    assert close(copy.score(banks["test"]), detector.score(banks["test"]), 1e-6)


# ---------------------------------------------------------------------------------------------- the door


@each
def test_unfitted_says_so(name: str, banks: dict[str, Bank]) -> None:
    detector = made(name)
    if detector.is_fitted_needed:
        with pytest.raises(NotFittedError, match="fit"):
            detector.score(banks["test"])
    else:
        assert np.isfinite(detector.score(banks["test"])).all()


@each
def test_arrays_instead_of_banks_are_explained(name: str, banks: dict[str, Bank]) -> None:
    with pytest.raises(OodometerError, match="Bank"):
        made(name).fit(banks["train"].features)


@each
def test_a_missing_column_is_named(name: str, banks: dict[str, Bank]) -> None:
    spare = Bank(spare=np.zeros(50))
    needs = made(name).card.needs
    if needs:
        with pytest.raises(OodometerError, match="needs '(" + "|".join(n.replace("*", r"\*") for n in needs) + ")'"):
            made(name).fit(spare, val=spare)


@each
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_values_are_located(name: str, value: float, banks: dict[str, Bank]) -> None:
    def poison(columns: dict[str, np.ndarray]) -> None:
        for column in set(columns) - {"labels"}:
            columns[column][17, ...] = value

    bad, detector = changed(banks["test"], poison), fitted(name, banks)
    with pytest.raises(OodometerError, match="row 17"):
        detector.score(bad)
    if made(name).is_fitted_needed:
        with pytest.raises(OodometerError, match="row 17"):
            made(name).fit(bad, val=bad)


@each
def test_other_shapes_than_trained_on_are_refused(name: str, banks: dict[str, Bank]) -> None:
    narrow = {c: a[:, :-1] if a.ndim > 1 else a for c, a in columns_of(banks["test"]).items()}
    detector = fitted(name, banks)
    if detector.is_fitted_needed:
        with pytest.raises(OodometerError, match="shape"):
            detector.score(Bank(narrow))


@each
def test_parameters_out_of_range_are_refused(name: str) -> None:
    for parameter in detectors.get(name).card.parameters:
        below = None if parameter.low is None else parameter.low - 1
        if below is not None:
            with pytest.raises(OodometerError, match=parameter.name):
                create(name, **{parameter.name: below})
        if parameter.choices:
            with pytest.raises(OodometerError, match=parameter.name):
                create(name, **{parameter.name: "no such choice"})
    with pytest.raises(OodometerError, match="unknown"):
        create(name, no_such_parameter=1)


@each
def test_no_rows(name: str, banks: dict[str, Bank]) -> None:
    empty = banks["test"].rows(slice(0, 0))
    assert fitted(name, banks).score(empty).shape == (0,)
    if made(name).is_fitted_needed:
        with pytest.raises(OodometerError, match="no rows"):
            made(name).fit(empty)


# ---------------------------------------------------------------------------------------------- hard inputs


@each
def test_half_precision(name: str, banks: dict[str, Bank]) -> None:
    half = {role: make_bank(seed, n, dtype="float16") for role, seed, n in (("train", 1, 400), ("val", 2, 150))}
    found = scores_or_clear_error(lambda: fitted(name, half).score(make_bank(3, 120, dtype="float16")))
    assert found is not None
    full = fitted(name, banks).score(banks["test"])
    assert np.corrcoef(np.argsort(np.argsort(found)), np.argsort(np.argsort(full)))[0, 1] > 0.97


@each
@pytest.mark.parametrize("scale", [1e4, 1e-4])
def test_extreme_logits(name: str, scale: float, banks: dict[str, Bank]) -> None:
    def stretch(columns: dict[str, np.ndarray]) -> None:
        for column in ("logits", "logits.mcd"):
            columns[column] *= np.float32(scale / np.abs(columns[column]).max())

    def stretched(bank: Bank) -> Bank:
        factor = scale / float(np.abs(bank.logits).max())
        head = Head(np.asarray(bank.head.weight) * factor, np.asarray(bank.head.bias) * factor)
        return changed(bank, stretch, head=head)

    one = stretched(banks["train"])
    test = changed(banks["test"], lambda c: c.update(logits=one.head(c["features"])), head=one.head)
    scores_or_clear_error(lambda: made(name).fit(one, val=one).score(test))


@each
def test_zero_vectors(name: str, banks: dict[str, Bank]) -> None:
    def silence(columns: dict[str, np.ndarray]) -> None:
        for column in ("features", "layers.0", "layers.1"):
            columns[column][:3] = 0
        columns["logits"][:3] = np.asarray(banks["train"].head.bias)

    silent = changed(banks["test"], silence)
    scores_or_clear_error(lambda: fitted(name, banks).score(silent))
    scores_or_clear_error(lambda: made(name).fit(changed(banks["train"], silence), val=silent).score(silent))


@each
def test_negative_zero_is_zero(name: str, banks: dict[str, Bank]) -> None:
    def negate(columns: dict[str, np.ndarray]) -> None:
        for column in set(columns) - {"labels"}:
            columns[column][columns[column] == 0] = -0.0

    assert np.array_equal(
        fitted(name, banks).score(changed(banks["test"], negate)), fitted(name, banks).score(banks["test"])
    )


@each
def test_fewer_rows_than_features(name: str, banks: dict[str, Bank]) -> None:
    few = banks["train"].rows(slice(0, 15))
    detector = made(name)
    for key in ("k", "dim"):
        if key in detector.get_params():
            detector.set_params(**{key: 3})
    found = scores_or_clear_error(lambda: detector.fit(few, val=few).score(banks["test"]))
    assert found is not None or name in {"gmm", "openmax"}


@each
def test_constant_and_duplicate_columns(name: str, banks: dict[str, Bank]) -> None:
    def flatten(columns: dict[str, np.ndarray]) -> None:
        for column in ("features", "layers.1"):
            columns[column][:, 3] = 0.25
            columns[column][:, 4] = columns[column][:, 5]
        columns["logits"] = banks["train"].head(columns["features"])

    train, test = changed(banks["train"], flatten), changed(banks["test"], flatten)
    assert scores_or_clear_error(lambda: made(name).fit(train, val=train).score(test)) is not None


@each
def test_an_empty_class(name: str, banks: dict[str, Bank]) -> None:
    present = banks["train"].labels != 2
    train = banks["train"].rows(present)
    scores_or_clear_error(lambda: made(name).fit(train, val=train).score(banks["test"]))


@each
def test_one_class(name: str, banks: dict[str, Bank]) -> None:
    head = Head(np.asarray(banks["train"].head.weight)[:1], np.asarray(banks["train"].head.bias)[:1])

    def only(bank: Bank) -> Bank:
        columns = columns_of(bank)
        columns |= {"labels": columns["labels"] * 0, "logits": columns["logits"][:, :1]}
        columns["logits.mcd"] = columns["logits.mcd"][:, :, :1]
        return Bank(columns, head=head)

    scores_or_clear_error(
        lambda: made(name).fit(only(banks["train"]), val=only(banks["val"])).score(only(banks["test"]))
    )


@each
def test_a_rank_deficient_head(name: str, banks: dict[str, Bank]) -> None:
    weight = np.asarray(banks["train"].head.weight).copy()
    weight[1] = weight[0]
    head = Head(weight, np.asarray(banks["train"].head.bias))

    def rehead(bank: Bank) -> Bank:
        return changed(bank, lambda c: c.update(logits=head(c["features"])), head=head)

    train, test = rehead(banks["train"]), rehead(banks["test"])
    found = scores_or_clear_error(lambda: made(name).fit(train, val=train).score(test))
    assert found is not None or name == "she"


@each
def test_tied_and_repeated_rows_get_equal_scores(name: str, banks: dict[str, Bank]) -> None:
    twice = banks["test"].rows(np.repeat(np.arange(20), 2))
    found = fitted(name, banks).score(twice)
    assert close(found[::2], found[1::2], 1e-6)


@each
def test_labels_out_of_range_are_named(name: str, banks: dict[str, Bank]) -> None:
    wrong = changed(banks["train"], lambda c: c["labels"].__setitem__(9, CLASSES))
    if "labels" in made(name).card.needs:
        with pytest.raises(OodometerError, match=f"label {CLASSES} in row 9"):
            made(name).fit(wrong, val=wrong)


# ---------------------------------------------------------------------------------------------- cards and grids


@each
def test_the_card_is_complete(name: str) -> None:
    card = detectors.get(name).card
    assert card.title.endswith(".")
    assert card.equation
    assert card.cite
    assert card.needs <= KNOWN_NEEDS
    assert all(parameter.doc for parameter in card.parameters)
    assert set(card.grid) <= {parameter.name for parameter in card.parameters}
    for preset, params in card.variants.items():
        assert create(name, preset=preset).get_params(deep=False).items() >= dict(params).items()


@each
def test_every_grid_value_acts_or_is_reported_inert(name: str, banks: dict[str, Bank]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        points = tune.sweep(name, banks["train"], banks["test"], val=banks["val"])
    seen: list[np.ndarray] = []
    for point in points:
        if point.status == "acts":
            assert all(not np.array_equal(point.scores, other) for other in seen)
            seen.append(point.scores)
        else:
            assert point.reason
    assert points[0].status in ("acts", "invalid")


def test_the_suite_sees_every_detector() -> None:
    assert len(NAMES) >= 5
    assert make_bank(0, 10).row_shape("features")[0] == WIDTH

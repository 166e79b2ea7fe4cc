"""The choice of parameters against hand loops, on validation rows only."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from tests.conformance.conftest import make_bank

from oodometer import Bank, create, derived, metrics, tune
from oodometer.errors import OodometerError, OodometerWarning
from oodometer.metrics.risk import augrc
from oodometer.tune import Choice, Point, Train, Validation, choose, leave_one_source_out, shares_source

GRID = {"k": (3, 50, 1, 10)}
GEN = {"gamma": (0.01, 0.5, 2.0), "m": (2, 3, 5, 50)}


@pytest.fixture(scope="module")
def train() -> Train:
    return Train(make_bank(1, 200))


@pytest.fixture(scope="module")
def val() -> Validation:
    """Rows with some mistakes: noise on the features moves a few over the boundary."""
    bank = make_bank(2, 150)
    noisy = np.asarray(bank.features) + 1.5 * np.random.default_rng(0).standard_normal((150, 24))
    found = Bank(features=noisy.astype(np.float32), labels=bank.labels, head=bank.head)
    assert 5 < (~derived.correct(found)).sum() < 100
    return Validation(found)


@pytest.fixture(scope="module")
def sources() -> list[Validation]:
    banks = {f"far{seed}": make_bank(seed, 60 + 10 * seed, far=True) for seed in (4, 5, 6)}
    return [
        Validation(Bank(features=np.asarray(bank.features) * (0.3 + i), head=bank.head), source=name)
        for i, (name, bank) in enumerate(banks.items())
    ]


def hand_aurocs(name: str, points: list[dict], train: Train, val: Validation, ood: Validation) -> list[float]:
    found = []
    for params in points:
        detector = create(name, **params).fit(train.bank, val=val.bank)
        found.append(metrics.auroc(detector.score(val.bank), detector.score(ood.bank)))
    return found


# ---------------------------------------------------------------------------------------------- rules


def test_auroc_is_the_first_maximum_of_a_hand_loop(train: Train, val: Validation, sources: list[Validation]) -> None:
    choice = tune.tune("knn", train, val, ood_val=sources[0], grid=GRID)
    values = hand_aurocs("knn", tune.expand(GRID), train, val, sources[0])
    assert [trial.value for trial in choice.curve] == values
    assert [trial.params for trial in choice.curve] == [{"k": k} for k in (3, 50, 1, 10)]
    assert choice.params == {"k": GRID["k"][int(np.argmax(values))]}
    assert choice.value == max(values)
    assert choice.sources == ("far4",)
    assert repr(choice.create()) == f"KNN(k={choice.params['k']})"


def test_auroc_is_averaged_over_sources(train: Train, val: Validation, sources: list[Validation]) -> None:
    choice = tune.tune("knn", train, val, ood_val=sources, grid=GRID)
    by_source = [hand_aurocs("knn", tune.expand(GRID), train, val, source) for source in sources]
    assert [trial.value for trial in choice.curve] == pytest.approx(np.mean(by_source, axis=0), rel=1e-14)


def test_augrc_is_the_smallest_area_of_a_hand_loop_and_reads_no_ood(train: Train, val: Validation) -> None:
    choice = tune.tune("gen", train, val, rule="augrc", grid=GEN)
    wrong = ~derived.correct(val.bank)
    values = [augrc(create("gen", **params).score(val.bank), wrong) for params in tune.expand(GEN)]
    assert [trial.value for trial in choice.curve] == values
    assert choice.params == tune.expand(GEN)[int(np.argmin(values))]
    assert (choice.value, choice.sources, choice.rule) == (min(values), (), "augrc")


def test_each_source_is_served_by_all_the_others(train: Train, val: Validation, sources: list[Validation]) -> None:
    chosen = leave_one_source_out("knn", train, val, ood_val=sources, grid=GRID)
    by_source = [hand_aurocs("knn", tune.expand(GRID), train, val, source) for source in sources]
    assert list(chosen) == ["far4", "far5", "far6"]
    for place, (name, choice) in enumerate(chosen.items()):
        others = np.mean([values for i, values in enumerate(by_source) if i != place], axis=0)
        assert [trial.value for trial in choice.curve] == pytest.approx(others, rel=1e-14)
        assert choice.params == {"k": GRID["k"][int(np.argmax(others))]}
        assert name not in choice.sources
        assert len(choice.sources) == 2


def test_fixed_parameters_hold_at_every_point_and_stay_in_the_choice(
    train: Train, val: Validation, sources: list[Validation]
) -> None:
    choice = tune.tune("knn", train, val, ood_val=sources, grid={"k": (1, 5)}, normalise=False)
    points = [{"k": k, "normalise": False} for k in (1, 5)]
    values = np.mean([hand_aurocs("knn", points, train, val, source) for source in sources], axis=0)
    assert [trial.value for trial in choice.curve] == pytest.approx(values, rel=1e-14)
    assert choice.params == points[int(np.argmax(values))]


def test_the_published_grid_is_the_default_and_no_grid_is_one_point(
    train: Train, val: Validation, sources: list[Validation]
) -> None:
    choice = tune.tune("energy", train, val, ood_val=sources)
    assert [trial.params["temperature"] for trial in choice.curve] == [0.1, 0.5, 1.0, 1.5, 2.0]
    assert tune.tune("msp", train, val, ood_val=sources).curve[0].params == {}


# ---------------------------------------------------------------------------------------------- points


def test_equal_points_leave_the_first_and_inert_ones_are_listed(
    train: Train, val: Validation, sources: list[Validation]
) -> None:
    choice = tune.tune("gen", train, val, ood_val=sources, grid={"gamma": (0.5,), "m": (50, 5, 2)})
    assert [trial.status for trial in choice.curve] == ["acts", "inert", "acts"]
    assert choice.curve[0].value == choice.curve[1].value
    assert "gamma=0.5, m=50" in choice.of_status("inert")[0].reason
    with pytest.warns(OodometerWarning, match="cannot tell them apart"):
        assert tune.tune("gen", train, val, ood_val=sources, grid={"m": (100, 5)}).params == {"m": 100}


def test_n22_points_without_scores_are_skipped_and_listed(
    train: Train, val: Validation, sources: list[Validation]
) -> None:
    choice = tune.tune("knn", train, val, ood_val=sources, grid={"k": (500, 10, 201)})
    assert [trial.status for trial in choice.curve] == ["invalid", "acts", "invalid"]
    assert choice.params == {"k": 10}
    assert "the training bank has 200 rows" in choice.curve[0].reason
    assert choice.curve[0].value is None


def test_n22_non_finite_scores_are_skipped_and_listed(val: Validation) -> None:
    huge = Bank(logits=np.full((20, 3), 1e38, np.float32) * [[3.0, 1.0, 2.0]], labels=np.zeros(20, int))
    with np.errstate(all="ignore"):
        points = tune.sweep("mls", huge, huge, grid={"temperature": (1e-300, 1.0)})
    assert [point.status for point in points] == ["non-finite", "acts"]


def test_n22_a_criterion_that_is_nan_never_wins() -> None:
    points = [Point({"a": a}, "acts", np.array([float(a)])) for a in (1, 2, 3, 4, 5)]
    values = {1.0: np.nan, 2.0: 0.3, 3.0: np.inf, 4.0: 0.3, 5.0: 0.1}
    choice = choose("x", points, lambda scores: values[scores[0]])
    assert choice.params == {"a": 2}
    assert [trial.status for trial in choice.curve] == ["non-finite", "acts", "non-finite", "acts", "acts"]
    assert "AUROC on the validation rows is nan" in choice.curve[0].reason


def test_n22_negative_and_zero_values_can_win() -> None:
    points = [Point({"a": a}, "acts", np.array([float(a)])) for a in (0, -1, -2)]
    assert choose("x", points, lambda scores: scores[0] - 1).params == {"a": 0}
    assert choose("x", points, lambda scores: scores[0], rule="augrc").params == {"a": -2}


def test_n22_no_usable_point_is_an_error_with_the_reasons(
    train: Train, val: Validation, sources: list[Validation]
) -> None:
    with pytest.raises(OodometerError, match=r"none of the 2 grid points(.|\n)*k=500: knn: k=500 neighbours"):
        tune.tune("knn", train, val, ood_val=sources, grid={"k": (500, 501)})


def test_grid_points_share_one_neighbour_search(
    train: Train, val: Validation, sources: list[Validation], monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = []
    search = derived._searched
    monkeypatch.setattr(derived, "_searched", lambda *args: searched.append(args[2]) or search(*args))
    fresh = [Validation(one.bank.rows(slice(0, 40)), one.source) for one in (val, *sources)]
    tune.tune("knn", train, fresh[0], ood_val=fresh[1:], grid=GRID)
    assert searched == [50] * 4


# ---------------------------------------------------------------------------------------------- leaks


def test_sources_shared_with_the_test_are_marked(train: Train, val: Validation, sources: list[Validation]) -> None:
    choice = tune.tune("knn", train, val, ood_val=sources, grid=GRID, test_sources=["far6", "mnist", "far4"])
    assert choice.shared == ("far4", "far6")
    assert tune.tune("knn", train, val, ood_val=sources, grid=GRID, test_sources=["mnist"]).shared == ()
    assert shares_source(["a", "b", "a"], {"a", "c"}) == ("a",)


def test_only_rows_that_say_so_are_tuned_on(train: Train, val: Validation, sources: list[Validation]) -> None:
    with pytest.raises(OodometerError, match=r"val=Validation\(bank\), found Bank"):
        tune.tune("knn", train, val.bank, ood_val=sources)
    with pytest.raises(OodometerError, match=r"train=Train\(bank\), found Validation"):
        tune.tune("knn", val, val, ood_val=sources)
    with pytest.raises(OodometerError, match=r"ood_val=Validation\(bank\), found Bank"):
        tune.tune("knn", train, val, ood_val=[sources[0].bank])
    with pytest.raises(OodometerError, match="training rows"):
        tune.tune("knn", train, Validation(train.bank), ood_val=sources)
    with pytest.raises(OodometerError, match="the val bank has none"):
        tune.tune("knn", train, Validation(val.bank.rows([])), ood_val=sources)


def test_rules_that_do_not_fit_their_rows_are_explained(
    train: Train, val: Validation, sources: list[Validation]
) -> None:
    with pytest.raises(OodometerError, match="choose rule='augrc'"):
        tune.tune("knn", train, val)
    with pytest.raises(OodometerError, match="drop ood_val="):
        tune.tune("knn", train, val, ood_val=sources, rule="augrc")
    with pytest.raises(OodometerError, match="'auroc' or 'augrc'"):
        tune.tune("knn", train, val, ood_val=sources, rule="best")
    for some in (sources[:1], [sources[0], sources[0]], [sources[0], Validation(sources[1].bank)]):
        with pytest.raises(OodometerError, match="at least two"):
            leave_one_source_out("knn", train, val, ood_val=some)


def test_a_choice_is_plain_data(train: Train, val: Validation, sources: list[Validation]) -> None:
    import dataclasses
    import json

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice = tune.tune("knn", train, val, ood_val=sources, grid=GRID)
    facts = json.loads(json.dumps(dataclasses.asdict(choice)))
    assert Choice(**{**facts, "curve": choice.curve, "sources": tuple(facts["sources"]), "shared": ()}) == choice


def test_a_choice_looks_only_at_the_rows_it_is_made_on(
    train: Train, val: Validation, sources: list[Validation]
) -> None:
    broken = np.array(sources[1].bank.features)
    broken[3, 0] = np.inf
    bad = Validation(Bank(features=broken, head=sources[1].bank.head), source="bad")
    found = tune.search("knn", train, val, ood_val=[sources[0], bad], grid=GRID)
    alone = tune.tune("knn", train, val, ood_val=sources[0], grid=GRID)
    assert found.by_auroc(["far4"]).curve == alone.curve
    assert found.by_augrc().curve == tune.tune("knn", train, val, rule="augrc", grid=GRID).curve
    with pytest.raises(OodometerError, match=r"none of the 4 grid points can be used(.|\n)*infinity in row 3"):
        found.by_auroc(["bad"])

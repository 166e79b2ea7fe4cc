"""A study against the same work done by hand: folds, validation rows, scores, parameters, tables."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conformance.conftest import make_bank

import oodometer
from oodometer import Bank, cli, create, derived, metrics, trainers, tune
from oodometer.errors import OodometerError, OodometerWarning
from oodometer.results import Results
from oodometer.splits import DualKFold, Folds, HierarchicalDualKFold, RepeatedHoldout, select_ood_classes
from oodometer.study import Study, cost, preview, run
from oodometer.study.plan import Plan
from oodometer.study.rows import joined
from oodometer.tune import Train, Validation

METRICS = ["auroc", "tpr5"]


def inside(rows: int = 300) -> Bank:
    return make_bank(1, rows).select(["features", "labels"])


def outside(seed: int, rows: int = 160) -> Bank:
    labels = np.random.default_rng(seed).integers(0, 8, rows)
    return make_bank(seed, rows, far=True).select(["features"]).with_columns(labels=labels)


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return {"id": inside(), "ood": {"a": outside(5), "b": {"bank": outside(6), "group": "near"}}}


def make(data: dict[str, Any], *detectors: Any, **settings: Any) -> Study:
    return Study(data=data, detectors=list(detectors), **{"metrics": METRICS, "split": {"folds": 3}, **settings})


def by_hand(plan: Plan, place: int) -> tuple[Bank, Bank, Bank]:
    """Training, validation and test rows of a fold as plain banks, in row order."""
    rows, bank = plan.rows[place], plan.data.id.bank
    parts = (np.sort(joined(pieces)) for pieces in (rows.train, rows.val, rows.test))
    train, val, test = (bank.rows(index) for index in parts)
    return train, val, test


# ---------------------------------------------------------------------------------------------- the specification


def test_python_toml_and_settings_say_the_same(tmp_path: Path) -> None:
    make_bank(1, 100).save(tmp_path / "id")
    make_bank(5, 90, far=True).save(tmp_path / "far")
    (tmp_path / "study.toml").write_text(
        """
        name = "one"
        detectors = ["msp", {name = "knn", k = 3}, {name = "gen", tune = true}]
        trainer = "probe"
        exposure = ["without", "with"]
        [data.id]
        bank = "id"
        [data.ood.far]
        bank = "far"
        group = "x"
        [split]
        folds = 4
        [tune]
        rule = "nested"
        """
    )
    here = str(tmp_path.resolve())
    spoken = Study(
        name="one",
        data={"id": f"{here}/id", "ood": {"far": {"bank": f"{here}/far", "group": "x"}}},
        detectors=["msp", {"name": "knn", "k": 3}, {"name": "gen", "tune": True}],
        trainer={"name": "probe"},
        exposure=["without", "with"],
        split={"folds": 4},
        tune={"rule": "nested"},
    )
    assert Study.from_toml(tmp_path / "study.toml").spec == spoken.spec
    changed = Study.from_toml(tmp_path / "study.toml", ["split.folds=2", "name=two", "tune.rule='augrc'"]).spec
    assert (changed.split.folds, changed.name, changed.tune.rule) == (2, "two", "augrc")
    deeper = ["trainer.hidden=8", "data.id.name=photos"]
    (tmp_path / "short.toml").write_text(
        """
        detectors = "msp"
        trainer = "probe"
        data = {id = "id", ood = {far = "far"}}
        """
    )
    for changes in (deeper, ["trainer=probe", "data.id=id", *deeper]):
        short = Study.from_toml(tmp_path / "short.toml", changes).spec
        assert (short.trainer.name, short.trainer.params) == ("probe", {"hidden": 8})
        assert (short.data.id.bank, short.data.id.name) == (f"{here}/id", "photos")
    with pytest.raises(OodometerError, match="'name' is no table of the study"):
        Study.from_toml(tmp_path / "study.toml", ["name.first=x"])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"detector": ["msp"]}, r"unknown key 'detector' at the top; did you mean 'detectors'\?"),
        ({"split": {"fold": 3}}, r"unknown key 'fold' in \[split\]; did you mean 'folds'\?"),
        ({"data": {"id": {"bank": "x", "label": "y"}, "ood": {}}}, r"'label' in \[data.id\]; did you mean 'labels'\?"),
        ({"data": {"id": "x", "ood": {"a": {"bank": "y", "grup": ""}}}}, r"\[data.ood.a\]; did you mean 'group'\?"),
        ({"detectors": ["kn"]}, r"detector: unknown name 'kn'; did you mean 'knn'\?"),
        ({"detectors": [{"name": "knn", "kk": 3}]}, r"knn: unknown name 'kk'; did you mean 'k'\?"),
        ({"detectors": [{"name": "knn", "grid": {"q": [1]}}]}, "unknown name 'q'"),
        ({"detectors": [{"name": "knn", "k": 0}]}, "k must be an integer ≥ 1"),
        ({"detectors": [{"name": "msp", "tune": True}]}, "no published grid left to tune"),
        ({"detectors": [{"name": "knn", "k": 1, "grid": {"k": [1]}}]}, "both fixed and in its grid"),
        ({"detectors": []}, "detectors are needed"),
        ({"metrics": ["aurok"]}, r"metrics: unknown 'aurok'; did you mean 'auroc'\?"),
        ({"trainer": "prob"}, r"did you mean 'probe'\?"),
        ({"trainer": {"name": "probe", "hiden": 1}}, r"did you mean 'hidden'\?"),
        ({"split": {"folds": "three"}}, "split.folds: a whole number is needed; found 'three'"),
        ({"split": {"folds": 1}}, "folds ≥ 2"),
        ({"split": {"validation": 0}}, "above 0 and below 1"),
        ({"tune": {"rule": "best"}}, "one of 'augrc', 'auroc', 'nested', 'leave-one-out' is needed; found 'best'"),
        ({"exposure": "with"}, "trainer 'frozen' keeps the bank's own"),
        ({"exposure": "with", "trainer": "probe", "split": {"ood": "plain"}}, "needs split.ood = 'group'"),
        ({"tune": {"rule": "auroc"}, "detectors": [{"name": "gen", "tune": True}]}, "needs OOD validation banks"),
        ({"split": {"kind": "holdout"}}, "needs data.id.test"),
        ({"data": {"id": "x"}}, "OOD data are needed"),
        ({"detectors": ["msp", "msp"]}, "'msp' is there more than once"),
    ],
)
def test_mistakes_in_a_study_are_named(settings: dict[str, Any], told: str) -> None:
    plain = {"data": {"id": "x", "ood": {"a": "y"}}, "detectors": ["msp"]}
    with pytest.raises(OodometerError, match=told):
        Study(**{**plain, **settings})


def test_entries_of_one_detector_are_told_apart() -> None:
    study = Study(
        data={"id": "x", "ood": {"a": "y"}},
        detectors=[
            "knn",
            {"name": "knn", "k": 5},
            {"name": "knn", "grid": {"k": [1, 2]}, "tune": False},
            {"name": "gen", "grid": {"m": [2, 3]}},
            {"name": "vim", "dim": 3, "variant": "small"},
        ],
    )
    labels = [chosen.label for chosen in study.spec.detectors]
    assert labels == ["knn", "knn:k=5", "knn:k=1", "knn:k=2", "gen", "vim:small"]
    assert [chosen.tune for chosen in study.spec.detectors] == [False] * 4 + [True, False]


# ---------------------------------------------------------------------------------------------- rows


def test_folds_are_those_of_the_splitter_with_seed_plus_repeat(data: dict[str, Any], tmp_path: Path) -> None:
    run(make(data, "msp", split={"folds": 3, "repeats": 2}, seed=4), tmp_path)
    for repeat in range(2):
        for name, bank in (("a", outside(5)), ("b", outside(6))):
            wanted = DualKFold(3, seed=4 + repeat).split(inside().labels, bank.labels)
            assert Folds.load(tmp_path / "folds" / f"{repeat}.{name}.json").digest == wanted.digest


def test_validation_rows_are_a_stratified_share_and_pieces_are_shared(data: dict[str, Any]) -> None:
    plan = make(data, "msp", split={"folds": 4, "validation": 0.2}).plan()
    labels = inside().labels
    for rows in plan.rows:
        train, val, test = (joined(getattr(rows, role)) for role in ("train", "val", "test"))
        assert sorted([*train, *val, *test]) == list(range(300))
        share = np.bincount(labels[val]) / np.bincount(labels[np.concatenate([train, val])])
        assert share == pytest.approx(0.2, abs=0.04)
    core = {piece for rows in plan.rows for piece in rows.train}
    assert len(core) == 4, "the training rows of all folds are joined from four pieces"
    assert all(len(rows.train) == 3 for rows in plan.rows)


def test_a_class_of_few_rows_keeps_them_for_training() -> None:
    labels = np.repeat([0, 1, 2], [100, 100, 4])
    bank = inside(204).with_columns(labels=labels)
    study = make({"id": bank, "ood": {"a": outside(5)}}, "msp", split={"folds": 4, "validation": 0.9})
    with pytest.warns(OodometerWarning, match="1 ID classes have too few rows to give any for validation: 2"):
        plan = study.plan()
    for rows in plan.rows:
        assert set(labels[joined(rows.train)]) == {0, 1, 2}


def test_subjects_stay_together_in_folds_and_validation() -> None:
    subjects = np.random.default_rng(0).integers(0, 40, 300)
    bank = inside().with_columns(patient=subjects)
    plan = make({"id": {"bank": bank, "subjects": "patient"}, "ood": {"a": outside(5)}}, "msp").plan()
    for rows in plan.rows:
        train, val, test = (set(subjects[joined(getattr(rows, role))]) for role in ("train", "val", "test"))
        assert not train & val
        assert not train & test
        assert not val & test
        assert val


def test_sample_ids_make_the_rows_independent_of_their_order() -> None:
    order = np.random.default_rng(3).permutation(300)
    plain = inside().with_columns(sample=1000 + np.arange(300))
    found = []
    for bank in (plain, plain.rows(order).with_columns()):
        plan = make({"id": {"bank": bank, "ids": "sample"}, "ood": {"a": outside(5)}}, "msp").plan()
        found.append([sorted(plan.val_ids(rows)) for rows in plan.rows])
    assert found[0] == found[1]


# ---------------------------------------------------------------------------------------------- scores


def test_scores_and_metrics_are_those_of_the_work_done_by_hand(data: dict[str, Any], tmp_path: Path) -> None:
    study = make(data, "energy", {"name": "knn", "k": 7}, "mds", "vim")
    results = run(study, tmp_path)
    plan, table = study.plan(), results.to_pandas()
    assert len(table) == 3 * 4 * 2 * len(METRICS)
    for place in range(3):
        train, val, test = by_hand(plan, place)
        for name, params in (("energy", {}), ("knn", {"k": 7}), ("mds", {}), ("vim", {})):
            detector = create(name, **params).fit(train, val=val)
            far = outside(6).select(["features"]).rows(plan.rows[place].ood_test["b"])
            kept = results.scores(name, ood="b", fold=place)
            assert kept.id == pytest.approx(detector.score(test), rel=1e-9)
            assert kept.ood == pytest.approx(detector.score(far), rel=1e-9)
            assert kept.calibration == pytest.approx(detector.score(val), rel=1e-9)
            assert kept.id_names.tolist() == plan.folds[0]["b"][place].id_test.tolist()
            rows = table[(table["detector"] == name) & (table["ood"] == "b") & (table["fold"] == place)]
            told = dict(zip(rows["metric"], rows["value"], strict=True))
            assert told["auroc"] == metrics.auroc(kept.id, kept.ood)
            assert told["tpr5"] == metrics.tpr_at_fpr(kept.id, kept.ood, fpr=0.05)
            assert set(rows["group"]) == {"near"}
        accuracy = results.classifiers.query("fold == @place and ood == 'a'")["accuracy"].item()
        assert accuracy == pytest.approx(derived.correct(test).mean())
    assert results.facts["test_to_train"] == pytest.approx(1 / 2)
    assert results.failed == []


@pytest.mark.parametrize("rule", ["nested", "leave-one-out", "auroc", "augrc"])
def test_parameters_are_those_of_tune_called_by_hand(data: dict[str, Any], rule: str, tmp_path: Path) -> None:
    every = {**data, "ood_val": {"v": {"bank": outside(9), "source": "b"}}} if rule == "auroc" else data
    noisy = np.asarray(inside().features) + 2 * np.random.default_rng(1).standard_normal((300, 24))
    every = {**every, "id": inside().with_columns(features=noisy)}
    study = make(every, {"name": "knn", "grid": {"k": [1, 5, 25]}}, tune={"rule": rule})
    results = run(study, tmp_path)
    plan, curves = study.plan(), results.tuning
    for place, rows in enumerate(plan.rows):
        train, val, _ = by_hand(plan, place)
        choose_on = {"nested": "b", "leave-one-out": "a"}.get(rule)
        if choose_on:
            bank = plan.data.ood[choose_on].bank.rows(rows.ood_train[choose_on])
        else:
            bank = outside(9).select(["features"])
        ood_val = () if rule == "augrc" else Validation(bank, choose_on or "v")
        by = "augrc" if rule == "augrc" else "auroc"
        wanted = tune.tune("knn", Train(train), Validation(val), rule=by, ood_val=ood_val, grid={"k": [1, 5, 25]})
        found = curves[(curves["fold"] == place) & (curves["ood"] == "b")]
        assert found["value"].tolist() == pytest.approx([trial.value for trial in wanted.curve], rel=1e-12)
        assert json.loads(found.loc[found["chosen"] == 1, "params"].item()) == wanted.params
        table = results.to_pandas().query("fold == @place and ood == 'b'")
        assert {json.loads(text)["k"] for text in table["params"]} == {wanted.params["k"]}
        assert set(found["shared"]) == ({"b"} if rule in ("nested", "auroc") else {""})
    assert results.best_params().groupby("ood")["times"].sum().tolist() == [3, 3]


def test_exposure_stands_beside_its_absence(data: dict[str, Any], tmp_path: Path) -> None:
    probe = {"name": "probe", "tol": 1e-8}
    study = make(data, "energy", trainer=probe, exposure=["without", "with"])
    results = run(study, tmp_path)
    plan = study.plan()
    for place, rows in enumerate(plan.rows):
        train, val, test = by_hand(plan, place)
        seed = plan.seed(rows)
        plain = trainers.create(**probe).fit(train, val, seed=seed)
        shown = plan.data.ood["a"].bank.rows(rows.ood_train["a"])
        exposed = plain.expose(shown, train, val, seed=seed)
        far = plan.data.ood["a"].bank.rows(rows.ood_test["a"])
        for exposure, classifier in (("without", plain), ("with", exposed)):
            kept = results.scores("energy", ood="a", fold=place, exposure=exposure)
            # Rows are summed in another order by hand; the probe stops at a gradient of 1e-8.
            assert kept.id == pytest.approx(create("energy").score(classifier.apply(test)), abs=5e-3)
            assert kept.ood == pytest.approx(create("energy").score(classifier.apply(far)), abs=5e-3)
    means = results.summary().query("metric == 'auroc'").set_index(["exposure", "ood"])["mean"]
    assert (means["with"] > means["without"]).all()
    assert len(results.classifiers) == 3 * 2 * 2


def test_one_study_in_two_folders_by_the_same_workers(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker processes outlive a run: they must neither write to its folder again nor start from its place."""
    study = make(data, "energy")
    tables = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        tables.append(run(study, "out", n_jobs=2).to_pandas())
        assert (tmp_path / name / "out" / "results.csv").exists()
    assert tables[0].equals(tables[1])


def test_work_is_shared_by_folds(data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments are taken once a piece; every pair of pieces is searched for neighbours once."""
    taken, searched = [], []
    moments, search = derived._part_moments, derived._searched
    monkeypatch.setattr(derived, "_part_moments", lambda *args: (taken.append(args[1:]), moments(*args))[1])
    monkeypatch.setattr(derived, "_searched", lambda *args: (searched.append(args[2]), search(*args))[1])
    detectors = ["mds", "rmds", "vim", "residual", *({"name": "knn", "k": k} for k in (2, 9, 5))]
    run(make(data, *detectors, split={"folds": 4}), tmp_path)
    per_kind = {kind: taken.count(kind) for kind in taken}
    assert set(per_kind.values()) == {4}, "once a piece, not once a fold and detector"
    # 4 folds × 3 training pieces × (test, validation, two OOD sets), each at the largest k only.
    assert searched == [9] * (4 * 3 * 4)


# ---------------------------------------------------------------------------------------------- other splits


def test_classes_drawn_from_one_bank_with_a_hierarchy(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    fine = np.repeat(np.arange(12), 30)
    features = rng.standard_normal((360, 8)) + 3 * rng.standard_normal((12, 8))[fine]
    bank = Bank(features=features, fine=fine, coarse=fine // 4)
    levels = ["coarse", "fine"]
    study = make(
        {"id": {"bank": bank, "labels": "fine", "levels": levels, "name": "all"}, "draw": {"fraction": 0.5}},
        "energy",
        {"name": "knn", "k": 3},
        trainer="probe",
        split={"kind": "hierarchical", "folds": 3},
        seed=2,
    )
    results = run(study, tmp_path)
    hierarchy = {"coarse": fine // 4, "fine": fine}
    chosen = select_ood_classes(hierarchy, level="fine", fraction=0.5, seed=2)
    wanted = HierarchicalDualKFold(3, level="fine", seed=2).split(
        chosen.id_hierarchy, chosen.ood_hierarchy, id_names=chosen.id_rows, ood_names=chosen.ood_rows
    )
    assert Folds.load(tmp_path / "folds" / "0.all-ood.json").digest == wanted.digest
    plan = study.plan()
    assert len(plan.data.id.bank) == len(chosen.id_rows)
    numbered = np.unique(fine[chosen.id_rows], return_inverse=True)[1]
    assert plan.data.id.bank.labels.tolist() == numbered.tolist()
    assert np.array_equal(plan.data.ood["all-ood"].bank.features, features[chosen.ood_rows])
    assert "labels" not in plan.data.ood["all-ood"].bank.columns
    assert results.to_pandas()["ood"].unique().tolist() == ["all-ood"]


def test_levels_may_be_written_into_the_study(tmp_path: Path) -> None:
    fine = np.repeat(np.arange(6), 20)
    bank = Bank(features=np.random.default_rng(0).standard_normal((120, 4)) + fine[:, None], labels=fine)
    level = {"name": "kind", "of": "labels", "classes": {"animal": [0, 1, 2], "vehicle": [3, 4, 5]}}
    source = {"bank": bank, "levels": [level, "labels"]}
    settings: dict[str, Any] = {"trainer": "probe", "split": {"kind": "hierarchical", "folds": 2}}
    plan = make({"id": source, "draw": {"fraction": 0.34}}, "energy", **settings).plan()
    assert np.unique(plan.data.id.levels["kind"]).tolist() == ["animal", "vehicle"]
    assert [len(np.unique(plan.data.ood["id-ood"].levels[name])) for name in ("kind", "labels")] == [2, 2]
    level["classes"] = {"animal": [0, 1, 2], "vehicle": [3, 4]}
    with pytest.raises(OodometerError, match=r"level 'kind' has no class for 'labels' = \[5\]"):
        make({"id": source, "draw": {"fraction": 0.34}}, "energy", **settings).plan()


def test_the_frozen_classifier_must_not_know_drawn_classes(data: dict[str, Any]) -> None:
    with pytest.raises(OodometerError, match="choose a trainer"):
        make({"id": inside(), "draw": {"fraction": 0.4}}, "msp").plan()


def test_repeated_holdout_is_the_splitters(data: dict[str, Any], tmp_path: Path) -> None:
    results = run(make(data, "energy", split={"kind": "repeated-holdout", "repeats": 6}, seed=1), tmp_path)
    wanted = RepeatedHoldout(6, seed=1).split(inside().labels, outside(5).labels)
    assert Folds.load(tmp_path / "folds" / "0.a.json").digest == wanted.digest
    assert results.to_pandas()["fold"].unique().tolist() == list(range(6))
    assert results.facts["test_to_train"] == pytest.approx(60 / 240)


def test_holdout_tests_the_test_bank(tmp_path: Path) -> None:
    test = make_bank(3, 120).select(["features", "labels"])
    study = make(
        {"id": {"bank": inside(), "test": test}, "ood": {"a": outside(5).select(["features"])}},
        {"name": "knn", "k": 4},
        split={"kind": "holdout"},
    )
    results = run(study, tmp_path)
    train, val, tested = by_hand(study.plan(), 0)
    assert np.array_equal(tested.features, test.features)
    assert len(train) + len(val) == 300
    detector = create("knn", k=4).fit(train, val=val)
    kept = results.scores("knn", ood="a")
    assert kept.id == pytest.approx(detector.score(test), rel=1e-9)
    assert kept.ood == pytest.approx(detector.score(outside(5)), rel=1e-9)


def test_outliers_without_classes_can_be_dealt_row_by_row(tmp_path: Path) -> None:
    bare = outside(5).select(["features"])
    with pytest.raises(OodometerError, match=r"data.ood.a: folds of OOD classes need the column 'labels'"):
        make({"id": inside(), "ood": {"a": bare}}, "msp").plan()
    plan = make({"id": inside(), "ood": {"a": bare}}, "msp", split={"folds": 3, "ood": "plain"}).plan()
    assert sorted(np.concatenate([rows.ood_test["a"] for rows in plan.rows])) == list(range(160))


def test_tuning_on_reserved_outliers_needs_some(data: dict[str, Any]) -> None:
    split = {"kind": "repeated-holdout", "repeats": 2, "ood_test": 1.0}
    tuned = {"name": "gen", "tune": True}
    with pytest.raises(OodometerError, match="needs OOD rows to train or tune on"):
        make(data, tuned, split=split, tune={"rule": "nested"}).plan()
    assert make(data, tuned, split=split).plan()


# ---------------------------------------------------------------------------------------------- failures and resuming


def test_a_detector_that_fails_is_recorded_and_the_rest_goes_on(data: dict[str, Any], tmp_path: Path) -> None:
    results = run(make(data, "energy", {"name": "knn", "k": 5000}), tmp_path)
    assert results.to_pandas()["detector"].unique().tolist() == ["energy"]
    assert len(results.failed) == 3 * (1 + 2), "ID rows and two OOD sets in three folds"
    first = results.failed[0]
    assert {key: first[key] for key in ("repeat", "fold", "ood", "exposure", "detector")} == {
        "repeat": 0,
        "fold": 0,
        "ood": "",
        "exposure": "without",
        "detector": "knn",
    }
    assert "k=5000 neighbours" in first["error"]


def test_a_search_without_a_usable_point_is_recorded(data: dict[str, Any], tmp_path: Path) -> None:
    study = make(data, "energy", {"name": "knn", "grid": {"k": [5000, 6000]}}, tune={"rule": "nested"})
    results = run(study, tmp_path)
    assert {one["error"].split(":")[0] for one in results.failed} == {"knn"}
    assert len(results.failed) == 3 * 2
    assert results.to_pandas()["detector"].unique().tolist() == ["energy"]


def test_a_classifier_that_cannot_be_trained_is_recorded(tmp_path: Path) -> None:
    features = np.array(inside().features)
    features[3, 2] = np.nan
    bank = inside().with_columns(features=features)
    results = run(make({"id": bank, "ood": {"a": outside(5)}}, "energy", trainer="probe"), tmp_path)
    assert [one["detector"] for one in results.failed] == ["classifier"] * 3
    assert "NaN or infinity" in results.failed[0]["error"]


def test_only_what_is_new_is_computed(data: dict[str, Any], tmp_path: Path) -> None:
    run(make(data, "energy"), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").glob("*.json")}
    results = run(make(data, "energy", "msp", metrics=["auroc", "autc", "aupr_ood"]), tmp_path)
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").glob("*.json")}
    assert all(after[path] == then for path, then in before.items())
    assert len(after) - len(before) == 3 * 3
    assert results.to_pandas()["metric"].unique().tolist() == ["auroc", "autc", "aupr_ood"]
    other = {**data, "id": inside().with_columns(features=np.asarray(inside().features) * 2)}
    run(make(other, "energy"), tmp_path)
    assert len(list((tmp_path / "cells").glob("*.json"))) == len(after) + 3 * 4, "other data are other cells"


def test_a_dry_run_computes_and_writes_nothing(data: dict[str, Any], tmp_path: Path) -> None:
    from oodometer.results import Store

    study = make(data, "energy", {"name": "gen", "tune": True}, tune={"rule": "nested"})
    plan = study.plan()
    before = preview(plan, Store(tmp_path / "cells"))
    assert [(line.method, line.cells, line.finished) for line in before] == [
        ("classifier (frozen)", 3, 0),
        ("energy", 9, 0),
        ("gen", 3 * (2 + 2 + 1), 0),
    ]
    assert all(line.seconds > 0 for line in before)
    assert not list(tmp_path.iterdir())
    run(study, tmp_path)
    after = preview(plan, Store(tmp_path / "cells"))
    assert [(line.finished, line.seconds) for line in after] == [(line.cells, 0) for line in after]


@pytest.mark.parametrize("exposure", [["without"], ["with"], ["without", "with"]])
def test_the_work_of_probes_is_foreseen(data: dict[str, Any], exposure: list[str]) -> None:
    plans = {
        hidden: make(data, "knn", trainer={"name": "probe", "hidden": hidden}, exposure=exposure).plan()
        for hidden in (0, 8)
    }
    width, classes = data["id"].features.shape[1], data["id"].classes
    weights = {0: width * classes, 8: cost.SHARE_OF_RATE * 8 * (width + classes)}
    scoring = {}
    for hidden, plan in plans.items():
        rows, units = plan.rows[0], list(plan.units(plan.rows[0]))
        fit, expose = cost.PASSES["hidden" if hidden else "linear"]
        passes = fit + expose * 2 * ("with" in exposure)  # one classifier an OOD set
        work = sum(cost.training_work(plan, unit) - cost.OVERHEAD for unit in units)
        assert work == pytest.approx(4 * sum(map(len, rows.train)) * weights[hidden] * passes)
        knn = plan.spec.detectors[0]
        scoring[hidden] = cost.score_work(plan, units[0], knn, ["a"]) - 2 * cost.OVERHEAD
    # Neighbours are searched among the hidden layer's activations.
    assert scoring[8] / scoring[0] == pytest.approx(8 / width)


def test_progress_goes_from_nothing_to_one(data: dict[str, Any], tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    study = make(data, "energy", {"name": "knn", "grid": {"k": [1, 3]}}, tune={"rule": "nested"})
    run(study, tmp_path, progress=lambda what, share: told.append((what, share)))
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.5
    assert shares[-1] == 1.0
    assert {"energy", "knn", "knn, grid", "done"} <= {what for what, _ in told}


def test_results_answer(data: dict[str, Any], tmp_path: Path) -> None:
    results = oodometer.run(make(data, "energy", "msp", "mds", name="answers"), out=tmp_path)
    assert isinstance(results, Results)
    summary = results.summary().query("metric == 'auroc' and ood == 'a'").set_index("detector")
    values = results.to_pandas().query("metric == 'auroc' and ood == 'a' and detector == 'mds'")["value"]
    assert summary.loc["mds", "mean"] == pytest.approx(values.mean())
    assert summary.loc["mds", "std"] == pytest.approx(values.std())
    spread = values.std() * np.sqrt(1 / 3 + 1 / 2)
    assert summary.loc["mds", "high"] == pytest.approx(values.mean() + 4.302652729911275 * spread)
    facts = results.facts
    assert (facts["study"], facts["seeds"]) == ("answers", {"study": 0, "repeats": [0]})
    assert facts["fingerprints"] == {
        "id": inside().fingerprint,
        "a": outside(5).fingerprint,
        "b": outside(6).fingerprint,
    }
    assert results.to_csv(tmp_path / "x.csv").read_bytes() == (tmp_path / "results.csv").read_bytes()


# ---------------------------------------------------------------------------------------------- the commands


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_bank(1, 200).save(tmp_path / "id")
    outside(5).with_head(make_bank(1, 9).head).save(tmp_path / "far")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_from_init_to_results(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "mine.toml", "--id", "id", "--ood", "far"]) == 0
    assert cli.main(["init", "mine.toml"]) == 2
    assert "mine.toml exists" in capsys.readouterr().err
    assert cli.main(["run", "mine.toml", "--dry-run"]) == 0
    assert "50 of 50" not in capsys.readouterr().out
    assert not (folder / "runs").exists()
    assert cli.main(["run", "mine.toml", "--out", "out", "--set", "split.folds=2"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].split() == ["auroc", "far"]
    assert [line.split()[0] for line in shown.splitlines()[1:4]] == ["msp", "energy", "knn"]
    assert len(Results.open(folder / "out").to_pandas()) == 2 * 3 * 10
    assert cli.main(["run", "mine.toml", "--out", "out", "--set", "split.folds=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": "out", "failed": [], "warnings": []}


def test_init_writes_paths_from_the_files_folder_and_the_trainer_that_the_banks_allow(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Bank.open(folder / "id").select(["features", "labels"]).with_head(None).save(folder / "plain")
    assert cli.main(["init", "studies/mine.toml", "--id", "plain", "--ood", "far"]) == 0
    spec = Study.from_toml(folder / "studies" / "mine.toml").spec
    assert (spec.name, spec.trainer.name, spec.split.repeats) == ("mine", "probe", None)
    assert Path(spec.data.id.bank).resolve() == folder / "plain"
    assert Path(spec.data.ood["far"].bank).resolve() == folder / "far"
    assert cli.main(["init", "own.toml", "--id", "id", "--ood", str(folder / "far")]) == 0
    assert not capsys.readouterr().err
    spec = Study.from_toml(folder / "own.toml").spec
    assert (spec.trainer.name, spec.data.ood["far"].bank) == ("frozen", str(folder / "far"))
    assert cli.main(["init", "later.toml", "--id", "idd"]) == 0
    assert "note: idd: no such file or folder; did you mean 'id'?" in capsys.readouterr().err


def test_a_holdout_of_a_file_from_init_has_100_repetitions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["init", "mine.toml", "--id", "id", "--ood", "far"])
    assert cli.main(["run", "mine.toml", "--dry-run", "--n-jobs", "-1", "--set", "split.kind=repeated-holdout"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    # A classifier, and 3 detectors on the ID rows and on the OOD set.
    assert "100 folds × 1 OOD sets, without exposure: 700 of 700 cells to compute" in told
    assert told.endswith("(rough)")


def test_a_wide_summary_is_cut_to_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    far = Bank.open(folder / "far")
    for place in range(6):
        far.with_columns(features=far.features + np.float32(place)).save(folder / f"a-rather-far-set-{place}")
    sets = [f"a-rather-far-set-{place}" for place in range(6)]
    cli.main(["init", "mine.toml", "--id", "id", "--ood", *sets])
    told = ["trainer=probe", 'exposure=["without","with"]', 'metrics=["tpr5"]', 'detectors=["msp"]', "split.folds=2"]
    capsys.readouterr()
    assert cli.main(["run", "mine.toml", "--out", "out", "--set", *told]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    parts = [place for place, line in enumerate(lines) if line.startswith("tpr5")]
    assert lines[0] == "without exposure"
    assert [lines[place].split()[1:] for place in parts] == 2 * [sets[:3], sets[3:]]
    means = Results.open(folder / "out").summary().set_index(["exposure", "ood"])["mean"]
    shown = [float(text) for place in parts for text in lines[place + 1].split()[1::3]]
    assert shown == [round(means[exposure, name], 4) for exposure in ("without", "with") for name in sets]


def test_what_a_run_cost_goes_on_with_it(data: dict[str, Any], tmp_path: Path) -> None:
    def timings(repeats: int, **options: Any) -> dict[str, float]:
        study = make(data, "msp", "mds", trainer="probe", split={"folds": 3, "repeats": repeats})
        return run(study, tmp_path / "out", **options).facts["timings"]

    start = time.process_time()
    first = timings(1)
    assert 0 < first["cpu"] < time.process_time() - start
    # Every fold: a classifier, and 2 detectors on the ID rows and 2 OOD sets.
    assert (first["computed"], first["kept"]) == (21, 21)
    again = timings(1)
    assert (again["computed"], again["kept"]) == (21, 21)
    assert first["cpu"] <= again["cpu"] < 1.5 * first["cpu"]
    more = timings(2, n_jobs=2)
    assert (more["computed"], more["kept"]) == (42, 42)
    assert more["cpu"] > again["cpu"]
    (tmp_path / "out" / "run.json").unlink()  # as after a kill: what was spent before is not known
    assert (timings(2)["computed"], timings(2)["kept"]) == (0, 42)


def test_failed_cells_end_with_1_and_mistakes_with_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["init", "mine.toml", "--id", "id", "--ood", "far"])
    assert cli.main(["run", "mine.toml", "--out", "out", "--set", 'detectors=["msp", {name="knn", k=900}]']) == 1
    told = capsys.readouterr()
    assert "failed: knn" in told.err
    assert "k=900" in told.err
    assert "msp" in told.out
    assert cli.main(["run", "mine.toml", "--set", "split.fold=2"]) == 2
    assert "did you mean 'folds'?" in capsys.readouterr().err
    assert cli.main(["run", "other.toml"]) == 2
    assert "oodometer init other.toml" in capsys.readouterr().err


def test_split_writes_and_prints_folds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "birds.csv").write_text(
        "order,species,file\n" + "".join(f"o{i % 3},s{i % 3}{i % 15},f{i}.png\n" for i in range(150))
    )
    more = ["--levels", "order", "species", "--labels", "species", "--ids", "file", "--kind", "hierarchical"]
    assert cli.main(["split", "--id", "birds.csv", "--draw", "0.4", *more, "--folds", "3", "--out", "folds"]) == 0
    shown = capsys.readouterr().out
    folds = Folds.load(folder / "folds" / "0.birds-ood.json")
    assert "HierarchicalDualKFold(n_splits=3" in shown
    assert (len(folds), len(folds.id_names), len(folds.ood_names)) == (3, 90, 60)
    assert folds[0].names("id_test")[0].endswith(".png")
    assert cli.main(["split", "--id", "id", "--ood", "x=far", "--folds", "4", "--seed", "7", "--out", "plain"]) == 0
    wanted = DualKFold(4, seed=7).split(make_bank(1, 200).labels, outside(5).labels)
    assert Folds.load(folder / "plain" / "0.x.json").digest == wanted.digest
    assert cli.main(["split", "--id", "id", "--ood", "x=far", "--folds", "4", "--out", "plain"]) == 2
    assert "exists" in capsys.readouterr().err
    cli.main(["init", "mine.toml", "--id", "id", "--ood", "far"])
    assert cli.main(["split", "mine.toml", "--out", "study"]) == 0
    assert len(Folds.load(folder / "study" / "0.far.json")) == 5

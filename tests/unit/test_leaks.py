"""No test row reaches a fit, a choice of parameters, or a scale or threshold: planted detectors watch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oodometer import Bank, Head, detectors, metrics, results
from oodometer.cells import Setting, Test, fitted, ood_segments
from oodometer.detectors import base
from oodometer.errors import OodometerError
from oodometer.splits import Folds
from oodometer.study import Study, run
from oodometer.tune import Train, Validation

ROWS, OOD_ROWS, OOD_START = 150, 80, 10_000
"""ID rows are numbered from 0, OOD rows from OOD_START; the number is the second feature."""


@pytest.fixture
def spy() -> Iterator[list[tuple[str, frozenset[int]]]]:
    """A detector that notes the numbers of the rows it is fitted on and scores, in order."""
    seen: list[tuple[str, frozenset[int]]] = []

    @detectors.detector("spy", needs={"features"}, grid={"scale": (1.0, 2.0)})
    class Spy(detectors.Detector):
        """Notes the rows it sees; scores the first feature."""

        rowwise = False
        scale: float = 1.0

        def _fit_on(self, train: Bank, val: Bank | None) -> None:
            seen.append(("fit", numbers(train) | (numbers(val) if val is not None else frozenset())))
            self.center_ = train.features[:, 0].mean()

        def _score(self, bank: Bank, xp: Any) -> Any:
            seen.append(("score", numbers(bank)))
            return self.scale * (bank.features[:, 0] - self.center_)

    yield seen
    del base._REGISTRY["spy"]


def numbers(bank: Bank) -> frozenset[int]:
    return frozenset(np.asarray(bank.features)[:, 1].astype(int).tolist())


def inside() -> Bank:
    rng = np.random.default_rng(0)
    labels = np.arange(ROWS) % 3
    features = np.stack([rng.standard_normal(ROWS), np.arange(ROWS), labels], axis=1)
    return Bank(features=features, labels=labels, head=Head(np.eye(3)[:, [0, 2, 1]] * 0.01, np.zeros(3)))


def outside(seed: int) -> Bank:
    rng = np.random.default_rng(seed)
    number = OOD_START * seed + np.arange(OOD_ROWS)
    features = np.stack([2 + rng.standard_normal(OOD_ROWS), number, np.zeros(OOD_ROWS)], axis=1)
    return Bank(features=features, labels=np.arange(OOD_ROWS) % 8, head=inside().head)


def folds_of(folder: Path, ood: str) -> Folds:
    return Folds.load(folder / "folds" / f"0.{ood}.json")


STUDIES: dict[str, dict[str, Any]] = {
    "augrc": {"tune": {"rule": "augrc"}},
    "nested": {"tune": {"rule": "nested"}},
    "leave-one-out": {"tune": {"rule": "leave-one-out"}},
    "auroc": {"tune": {"rule": "auroc"}},
    "repeated holdout": {"tune": {"rule": "nested"}, "split": {"kind": "repeated-holdout", "repeats": 3}},
    "probe": {"tune": {"rule": "augrc"}, "trainer": "probe", "exposure": ["without", "with"]},
}


@pytest.mark.parametrize("settings", STUDIES.values(), ids=STUDIES)
def test_nothing_but_scoring_sees_test_rows(spy: list[Any], settings: dict[str, Any], tmp_path: Path) -> None:
    data: dict[str, Any] = {"id": inside(), "ood": {"a": outside(1), "b": outside(2)}}
    if settings["tune"]["rule"] == "auroc":
        data["ood_val"] = {"v": outside(3)}
    split = settings.get("split", {"folds": 3})
    run(Study(data=data, detectors=[{"name": "spy", "tune": True}], **{**settings, "split": split}), tmp_path)
    by_set = {"a": folds_of(tmp_path, "a"), "b": folds_of(tmp_path, "b")}
    start = {"a": OOD_START, "b": 2 * OOD_START}
    fold = {
        place: {
            "test": {int(row) for row in rows.id_test}
            | {start[name] + int(row) for name, folds in by_set.items() for row in folds[place].ood_test},
            "train": {int(row) for row in rows.id_train},
        }
        for place, rows in enumerate(by_set["a"])
    }
    place, fits = -1, 0
    for what, rows in spy:
        if what == "fit":
            fits += 1
            # The ID rows of a fit name its fold: all its training rows, validation rows included.
            place = next(p for p, one in fold.items() if rows == one["train"])
        assert what == "score" or not rows & fold[place]["test"]
    assert fits >= 3 * 3  # two grid points and the chosen one, on three folds
    tested = {
        name: {start[name] + int(row) for fold in folds for row in fold.ood_test} for name, folds in by_set.items()
    }
    scored = set().union(*(rows for what, rows in spy if what == "score"))
    assert tested["a"] | tested["b"] <= scored


@pytest.mark.parametrize("rule", ["augrc", "nested", "leave-one-out", "auroc"])
def test_parameters_are_chosen_on_validation_rows(
    spy: list[Any], rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is scored between the first fit and the first choice is what the choice saw."""
    from oodometer import tune

    marks: list[int] = []
    choose = tune.choose
    monkeypatch.setattr(tune, "choose", lambda *args, **kw: (marks.append(len(spy)), choose(*args, **kw))[1])
    data: dict[str, Any] = {"id": inside(), "ood": {"a": outside(1), "b": outside(2)}}
    if rule == "auroc":
        data["ood_val"] = {"v": outside(3)}
    run(Study(data=data, detectors=[{"name": "spy", "tune": True}], split={"folds": 3}, tune={"rule": rule}), tmp_path)
    validation = json.loads((tmp_path / "folds" / "0.validation.json").read_text())["id"]
    by_set = {"a": folds_of(tmp_path, "a"), "b": folds_of(tmp_path, "b")}
    start = {"a": OOD_START, "b": 2 * OOD_START}
    per_fold = len(marks) // 3
    begin = 0
    for place in range(3):
        seen = set().union(*(rows for what, rows in spy[begin : marks[place * per_fold]] if what == "score"))
        allowed = set(validation[place])
        if rule in ("nested", "leave-one-out"):
            allowed |= {start[n] + int(row) for n, folds in by_set.items() for row in folds[place].ood_train}
        if rule == "auroc":
            allowed |= {3 * OOD_START + row for row in range(OOD_ROWS)}
        assert seen == allowed
        following = [at for at in range(marks[place * per_fold], len(spy)) if spy[at][0] == "fit"]
        # The chosen point is fitted anew for every OOD set with its own choice; then comes the next fold's grid.
        train = spy[begin][1]
        begin = next((at for at in following if spy[at][1] != train), len(spy))


def test_scales_and_thresholds_come_from_validation_rows(
    spy: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrations: list[np.ndarray] = []

    def autc(id_scores: Any, ood_scores: Any, *, calibration: Any) -> float:
        calibrations.append(np.asarray(calibration))
        return 0.5

    def threshold(calibration: Any) -> float:
        calibrations.append(np.asarray(calibration))
        return 0.0

    monkeypatch.setattr(metrics, "autc", autc)
    monkeypatch.setattr(results.metrics, "threshold_at_tnr", threshold)
    study = Study(
        data={"id": inside(), "ood": {"a": outside(1)}},
        detectors=["spy"],
        split={"folds": 3},
        metrics=["autc", "fpr@95tnr"],
    )
    found = run(study, tmp_path)
    assert len(calibrations) == 6
    bank = inside()
    validation = json.loads((tmp_path / "folds" / "0.validation.json").read_text())["id"]
    folds = folds_of(tmp_path, "a")
    for place in range(3):
        assert not set(validation[place]) & {int(row) for row in folds[place].id_test}
        core = sorted({int(row) for row in folds[place].id_train} - set(validation[place]))
        first = np.asarray(bank.features)[:, 0]
        expected = first[validation[place]] - first[core].mean()
        for one in calibrations[2 * place : 2 * place + 2]:
            assert one == pytest.approx(expected, abs=1e-12)
        assert found.scores("spy", ood="a", fold=place).calibration_names.tolist() == validation[place]


def test_rows_without_the_right_role_are_refused() -> None:
    bank = inside()
    test = Test(bank, np.arange(ROWS))
    setting = Setting("msp", {})
    with pytest.raises(OodometerError, match="Train rows are needed here; found Test"):
        fitted(setting, test, Validation(bank))  # type: ignore[arg-type]
    with pytest.raises(OodometerError, match="Validation rows are needed here; found Test"):
        fitted(setting, Train(bank), test)  # type: ignore[arg-type]
    with pytest.raises(OodometerError, match="Test rows are needed here; found Validation"):
        ood_segments(fitted(setting, Train(bank), Validation(bank)), Validation(bank))  # type: ignore[arg-type]


def test_one_bank_cannot_stand_on_two_sides(tmp_path: Path) -> None:
    far = outside(1)
    for data in (
        {"id": inside(), "ood": {"a": inside()}},
        {"id": inside(), "ood": {"a": far}, "ood_val": {"v": far}},
        {"id": inside(), "ood": {"a": far, "b": far}},
    ):
        study = Study(data=data, detectors=["msp"])
        with pytest.raises(OodometerError, match="hold the same bank"):
            run(study, tmp_path)
    same = {"id": {"bank": inside(), "test": inside()}, "ood": {"a": far}}
    with pytest.raises(OodometerError, match="hold the same bank"):
        run(Study(data=same, detectors=["msp"], split={"kind": "holdout"}), tmp_path)

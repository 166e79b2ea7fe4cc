"""The trainer `finetune` in whole studies: a network a fold, with and without outliers, on images."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from oodometer import Bank, trainers
from oodometer.errors import OodometerError
from oodometer.study import Study

torch = pytest.importorskip("torch")

from oodometer.models.train import Architecture, create, fit  # noqa: E402

pytestmark = pytest.mark.torch
SETTINGS: dict[str, Any] = {"epochs": 8, "rate": 0.05, "batch": 32, "augment": "none"}


def digits() -> tuple[Bank, Bank]:
    """Six digits to tell apart, and four that are outliers."""
    x, y = load_digits(return_X_y=True)
    bank = Bank(images=(x.reshape(-1, 8, 8) * 15).astype(np.uint8), labels=y)
    return bank.rows(np.flatnonzero(y < 6)[:400]), bank.rows(np.flatnonzero(y >= 6)[:160])


def study(**more: Any) -> Study:
    inside, outside = digits()
    return Study(
        data={"id": {"bank": inside, "name": "digits"}, "ood": {"others": outside}},
        detectors=["msp", "knn", "mds"],
        trainer={"name": "finetune", "arch_options": {"width": 4}, "settings": SETTINGS, **more},
        exposure=["without", "with"],
        split={"folds": 2},
        metrics=["auroc"],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finetune")
    study().run(out)
    return out


def test_it_is_a_trainer_and_its_parameters_are_checked() -> None:
    assert "finetune" in trainers.names()
    with pytest.raises(OodometerError, match="did you mean 'settings'"):
        trainers.create("finetune", setings={})
    with pytest.raises(OodometerError, match="did you mean 'rate'"):
        study(settings={"rat": 1})
    with pytest.raises(OodometerError, match=re.escape("exposure_epochs needs a whole number from 1")):
        trainers.create("finetune", exposure_epochs=0)
    with pytest.raises(OodometerError, match="did you mean 'devries'"):
        trainers.create("finetune", recipe="devris")


def test_a_study_trains_one_network_a_fold_and_one_more_with_outliers(folder: Path) -> None:
    results = study().run(folder)
    assert results.failed == []
    assert len(list(folder.glob("training/*/network.safetensors"))) == 2 * 2
    assert not list(folder.glob("training/*/checkpoint.safetensors"))
    table = results.to_pandas()
    assert len(table) == 3 * 2 * 2
    by = table.groupby(["detector", "exposure"])["value"].mean()
    assert by["msp", "with"] != by["msp", "without"]
    accuracy = results.classifiers.query("exposure == 'without'")["accuracy"]
    assert accuracy.min() > 0.8


def test_a_fold_is_what_training_by_hand_gives(folder: Path) -> None:
    """The same rows, recipe and seed outside of the study, scored by the logits' own formula."""
    made = study()
    results = made.run(folder)
    plan = made.plan()
    rows = plan.rows[0]
    inside, _ = digits()
    labels = np.unique(inside.labels, return_inverse=True)[1]
    bank = Bank(images=inside["images"], labels=labels)
    train, val = (bank.rows(np.concatenate([piece.rows for piece in pieces])) for pieces in (rows.train, rows.val))
    torch.set_num_threads(1)
    network = fit(
        create("crossentropy", **SETTINGS), Architecture("cnn", {"width": 4}), train, val, seed=plan.seed(rows)
    )
    test = np.sort(np.concatenate([piece.rows for piece in rows.test]))
    z = np.asarray(network.apply(bank.rows(test)).logits, np.float64)
    told = results.classifiers.query("fold == 0 and exposure == 'without'")["accuracy"].iloc[0]
    assert told == (z.argmax(1) == labels[test]).mean()
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    found = results.scores("msp", fold=0, ood="others", exposure="without").id
    assert np.allclose(found, -p.max(1), atol=1e-6)


def test_workers_give_the_bytes_of_one_process(folder: Path, tmp_path: Path) -> None:
    study().run(tmp_path, n_jobs=2)
    names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    for name in names:
        if name.name not in ("run.json", ".lock"):
            assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name


def test_more_detectors_open_the_networks_instead_of_training_them(folder: Path, tmp_path: Path) -> None:
    study().run(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("training/*/*")}
    inside, outside = digits()
    more = Study(
        data={"id": {"bank": inside, "name": "digits"}, "ood": {"others": outside}},
        detectors=["msp", "energy"],
        trainer={"name": "finetune", "arch_options": {"width": 4}, "settings": SETTINGS},
        exposure=["without", "with"],
        split={"folds": 2},
        metrics=["auroc"],
    )
    assert more.run(tmp_path).failed == []
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("training/*/*")} == before


def test_learned_confidence_is_scored_in_a_study(tmp_path: Path) -> None:
    inside, outside = digits()
    settings = {**SETTINGS, "pretraining": 1, "dropout": 0.2}
    made = Study(
        data={"id": {"bank": inside, "name": "digits"}, "ood": {"others": outside}},
        detectors=["deepgamblers", "deepgamblers_waic", "msp", "vim"],
        trainer={
            "name": "finetune",
            "recipe": "deepgamblers",
            "arch_options": {"width": 4},
            "settings": settings,
            "passes": 3,
        },
        split={"folds": 2},
        metrics=["auroc", "augrc:misclassification"],
    )
    results = made.run(tmp_path)
    assert results.failed == []
    errors = 1 - results.classifiers["accuracy"].mean()
    found = results.to_pandas().query("metric == 'augrc:misclassification'").groupby("detector")["value"].mean()
    assert found["deepgamblers"] < 0.8 * errors / 2, "scores that know nothing have half the error rate"


def test_a_bank_without_images_says_what_is_missing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    banks = [Bank(features=rng.random((60, 4)), labels=np.arange(60) % 3) for _ in range(2)]
    made = Study(
        data={"id": {"bank": banks[0], "name": "a"}, "ood": {"b": banks[1]}},
        detectors=["msp"],
        trainer="finetune",
        split={"folds": 2},
    )
    results = made.run(tmp_path)
    assert "training needs images; the train bank has" in results.failed[0]["error"]

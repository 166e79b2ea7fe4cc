"""What a stranger stumbles over who knows the README and the help pages only; each stumble was one once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oodometer
from oodometer import Bank, Head, metrics
from oodometer.cli import main
from oodometer.errors import OodometerError

CLASSES, WIDTH = 4, 8


def columns(seed: int, rows: int, shift: float = 0.0, *, head: bool = True, far: bool = False) -> dict[str, Any]:
    """Arrays of a small classifier's features, as a user would save them."""
    rng = np.random.default_rng(seed)
    weight = 2 * np.random.default_rng(7).standard_normal((CLASSES, WIDTH))
    labels = np.arange(rows) % CLASSES
    features = (1 - shift) * weight[labels] + rng.standard_normal((rows, WIDTH)) * (2 if far else 1)
    found = {"features": features.astype(np.float32), "labels": labels}
    return found | ({"W": weight, "b": -0.5 * (weight**2).sum(1)} if head else {})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a blank and an umlaut in its name, banks in it; the shell stands there."""
    folder = tmp_path / "a päper"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    np.savez("id.npz", **columns(1, 300))
    np.savez("train.npz", **columns(2, 400))
    np.savez("val.npz", **columns(3, 200))
    np.savez("new.npz", **columns(4, 200))
    np.savez("svhn.npz", **columns(5, 120, 0.8, head=False))
    np.savez("dtd.npz", **columns(6, 80, 0.5, head=False, far=True))
    return folder


@pytest.fixture
def run(here: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """(exit code, stdout, stderr) of a command."""

    def call(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def study(here: Path, text: str = "", ood: str = '[data.ood.svhn]\nbank = "svhn.npz"') -> Path:
    """A study file of two detectors."""
    path = here / "study.toml"
    path.write_text(
        f'detectors = ["msp", "energy"]\nmetrics = ["auroc"]\n{text}\n[data.id]\nbank = "id.npz"\n{ood}\n'
        "[split]\nfolds = 2\n",
        encoding="utf-8",
    )
    return path


# --- banks without a head ---------------------------------------------------------------------------------------


def test_ood_features_take_the_head_of_the_id_bank_in_a_study_as_in_score(run: Any, here: Path) -> None:
    code, _, err = run("run", study(here), "--out", "run")
    assert code == 0, err
    results = oodometer.Results.open("run")
    scores = results.scores("energy", ood="svhn", exposure="without", fold=0)
    with np.load("id.npz") as inside, np.load("svhn.npz") as outside:
        head = Head(inside["W"], inside["b"])
        of_id, of_ood = (Bank(features=one["features"], head=head) for one in (inside, outside))
    energy = oodometer.create("energy")
    np.testing.assert_allclose(scores.id, energy.score(of_id)[scores.id_names], rtol=1e-5)
    np.testing.assert_allclose(scores.ood, energy.score(of_ood)[scores.ood_names], rtol=1e-5)
    rows = results.to_pandas()
    value = rows.query("detector == 'energy' and fold == 0 and metric == 'auroc'")["value"].item()
    assert value == metrics.auroc(scores.id, scores.ood)


def test_ood_features_of_another_width_are_refused_before_any_work(run: Any, here: Path) -> None:
    np.savez("svhn.npz", features=np.ones((20, WIDTH + 1)), labels=np.arange(20) % 5)
    code, out, err = run("run", study(here), "--out", "run")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "data 'svhn': rows of 'features' have shape (9,), the head of the ID bank reads 8" in err


def test_a_detector_that_borrows_the_head_names_the_wrong_width() -> None:
    arrays = columns(0, 40)
    train = Bank(features=arrays["features"], labels=arrays["labels"], head=Head(arrays["W"], arrays["b"]))
    with pytest.raises(OodometerError, match=r"energy: rows of 'features' have shape \(3,\), the training bank's head"):
        oodometer.create("energy").fit(train).score(Bank(features=np.ones((5, 3))))

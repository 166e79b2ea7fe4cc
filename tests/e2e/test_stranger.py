"""What a stranger stumbles over who knows the README and the help pages only; each stumble was one once."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oodometer
from oodometer import Bank, Head, metrics
from oodometer.cli import COMMANDS, main
from oodometer.errors import OodometerError
from oodometer.readers import read_bank

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


# --- names, help, output ----------------------------------------------------------------------------------------


def test_help_of_a_command_has_two_spellings(run: Any) -> None:
    assert run("help", "score") == run("score", "--help")
    assert run("help", "guard", "fit") == run("guard", "fit", "--help")
    assert run("help")[1].startswith("usage: oodometer COMMAND")


PAGES = [(name,) for name in COMMANDS if name != "guard"] + [("guard", action) for action in ("fit", "check", "apply")]


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_help_speaks_of_what_can_be_typed(run: Any, words: tuple[str, ...]) -> None:
    code, out, err = run(*words, "--help")
    assert (code, err) == (0, "")
    for wrong in ("None}", "(default: )", "(default: None)", "(default: False)", "STR"):
        assert wrong not in out
    if re.search(r"^\W+(-o \w+, )?--out [A-Z]", out, re.M):
        assert re.search(r"^\W+-o [A-Z]\S+, --out [A-Z]", out, re.M)
    if words[-1] not in ("init", "demo", "report"):
        assert ("--json" in out) == (words[-1] != "split")


def test_no_number_is_cut_off_on_a_narrow_terminal(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run("score", "--train", "train.npz", "--id", "id.npz", "--ood", "svhn.npz", "--detector", "msp", "knn", "-o", "s")
    wide = run("metrics", "s/scores.csv")[1]
    for columns_ in ("30", "60"):
        monkeypatch.setenv("COLUMNS", columns_)
        narrow = run("metrics", "s/scores.csv")[1]
        assert narrow.split() == wide.split()
        assert "…" not in run("list", "vim")[1].replace("score … --detector", "")


def test_two_banks_of_one_name_are_refused_everywhere(run: Any) -> None:
    twice = ("--ood", "svhn.npz", "./svhn.npz")
    run("guard", "fit", "--detector", "msp", "--train", "train.npz", "--calibration", "val.npz", "--out", "g")
    for words in (
        ("init", "x.toml", "--id", "id.npz", *twice),
        ("split", "--id", "id.npz", *twice, "--out", "x"),
        ("guard", "check", "g", "--id", "id.npz", *twice),
        ("score", "--id", "id.npz", *twice, "--detector", "msp", "--out", "x"),
    ):
        code, out, err = run(*words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "are named 'svhn': give each a name of its own" in err
    assert not Path("x.toml").exists()


def test_a_study_file_for_features_without_a_head_keeps_the_classifier_of_the_id_bank(run: Any) -> None:
    Path("deep/er").mkdir(parents=True)
    np.savez("ö ä.npz", **columns(8, 60, 0.6, head=False))
    code, out, _ = run("init", "deep/er/s.toml", "--id", "id.npz", "--ood", "svhn.npz", "far=dtd.npz", "ö ä.npz")
    assert (code, out) == (0, "deep/er/s.toml\n")
    text = Path(out.strip()).read_text()
    made = tomllib.loads(text)
    assert made["trainer"]["name"] == "frozen"
    banks = {name: one["bank"] for name, one in made["data"]["ood"].items()}
    assert banks == {"svhn": "../../svhn.npz", "far": "../../dtd.npz", "ö ä": "../../ö ä.npz"}
    assert "[data.ood.svhn]" in text and '[data.ood."ö ä"]' in text
    code, out, err = run("run", "deep/er/s.toml", "--set", "split.folds=2", "metrics=['auroc']", "-o", "r")
    assert code == 0, err
    assert "Mean ± standard deviation of 2 values (folds × repeats), as fractions." in out


# --- score ------------------------------------------------------------------------------------------------------


def test_score_lends_the_id_head_without_training_rows(run: Any) -> None:
    code, out, _ = run("score", "--id", "id.npz", "--ood", "svhn.npz", "--detector", "energy", "-o", "s", "--json")
    assert code == 0
    assert json.loads(out) == {"table": "s/scores.csv", "detectors": ["energy"], "failed": {}}
    with np.load("id.npz") as inside, np.load("svhn.npz") as outside:
        bank = Bank(features=outside["features"], head=Head(inside["W"], inside["b"]))
    assert np.load("s/energy/svhn.npy").tobytes() == oodometer.create("energy").score(bank).tobytes()


def test_score_names_the_bank_that_fails(run: Any) -> None:
    bad = columns(9, 50)
    bad["features"][7, 1] = np.nan
    np.savez("bad.npz", **bad)
    arguments = ("--train", "train.npz", "--id", "id.npz", "--ood", "svhn.npz", "bad.npz", "-o", "s")
    code, out, err = run("score", *arguments, "--detector", "knn:k=5", "--json")
    assert code == 1
    failed = json.loads(out)["failed"]
    assert failed["knn:k=5"].startswith("test bank 'bad': knn: column 'features'")
    assert "in row 7" in err
    np.savez("narrow.npz", features=np.ones((5, 3)))
    code, _, err = run("score", "--id", "id.npz", "--ood", "narrow.npz", "--detector", "msp", "-o", "s2")
    assert code == 2
    assert "test bank 'narrow': rows of 'features' have shape (3,), the head of the other banks reads 8" in err


def test_bytes_that_are_no_archive_are_not_called_a_pickle(run: Any) -> None:
    Path("noise.npz").write_bytes(bytes(range(256)) * 50)
    code, _, err = run("score", "--id", "noise.npz", "--detector", "msp", "-o", "s")
    assert code == 2
    assert "noise.npz is truncated or no .npz file" in err and "pickle" not in err


# --- run --------------------------------------------------------------------------------------------------------


def test_one_reason_for_many_failed_cells_is_told_once(run: Any, here: Path) -> None:
    path = study(here)
    path.write_text(path.read_text().replace('"energy"', '{name = "vim", dim = 99}'))
    code, out, err = run("run", path, "-o", "r")
    assert code == 1
    assert err.count("failed:") == 1
    more = len(oodometer.Results.open("r").failed) - 1
    assert more > 1
    assert err.startswith(f'failed: vim {{"dim": 99}}, fold 0, without exposure, and {more} more cells: vim: dim=99')
    assert "msp" in out
    path.write_text(path.read_text().replace('"msp", ', ""))
    code, out, err = run("run", path, "-o", "r2")
    assert (code, out) == (1, "")
    assert "r2: every cell failed; run.json has the errors" in err


WRONG = {
    "split.folds=x": "split.folds: a whole number is needed; found 'x'",
    "split.repeats=1.5": "split.repeats: a whole number is needed; found 1.5",
    "split.kind=twice": "split.kind: one of 'dual', 'hierarchical', 'repeated-holdout', 'holdout' is needed; found 'tw",
    "exposure=['with', 'often']": "exposure[1]: one of 'without', 'with' is needed; found 'often'",
    "data.id=5": "data.id: a table is needed; found 5",
    "name=3": "name: text is needed; found 3",
    "metrics=3": "metrics: a list is needed; found 3",
    "data.ood.svhn.grup=near": "unknown key 'grup' in [data.ood.svhn]; did you mean 'group'?",
    "split.folds=1": "split.folds ≥ 2 is needed; found 1",
    "split.repeats=0": "split.repeats ≥ 1 is needed; found 0",
    "folds=3": "unknown key 'folds' at the top; known: data, detectors",
}


@pytest.mark.parametrize("setting", WRONG)
def test_a_wrong_setting_names_its_place_what_is_needed_and_what_was_found(run: Any, here: Path, setting: str) -> None:
    code, out, err = run("run", study(here), "--set", setting, "-o", "r")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"oodometer: study: {WRONG[setting]}" in err
    assert not Path("r").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "study: data is missing (`oodometer init` writes a study with every setting)"),
        ("detectors = ['msp']\n[data.id]\nname = 'x'", "study: data.id.bank is missing"),
        ("detectors = [1,\n b", "s.toml: no TOML file (Invalid value (at line 2, column 2))"),
    ],
)
def test_a_study_file_that_lacks_something_says_what(run: Any, here: Path, text: str, message: str) -> None:
    Path("s.toml").write_text(text)
    code, out, err = run("run", "s.toml")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"oodometer: {message}")


def test_the_command_of_a_run_can_be_pasted(run: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["oodometer", "run", str(study(here)), "--out", "my run"]
    monkeypatch.setattr("sys.argv", words)
    assert run(*words[1:])[0] == 0
    assert shlex.split(oodometer.Results.open("my run").facts["command"]) == words


# --- guard ------------------------------------------------------------------------------------------------------


def test_a_guard_speaks_json_for_a_program(run: Any) -> None:
    fit = ("guard", "fit", "--detector", "vim:dim=4", "--train", "train.npz", "--calibration", "val.npz", "-o", "g")
    code, out, err = run(*fit, "--json")
    assert (code, err) == (0, "")
    made = json.loads(out)
    guard = oodometer.Guard.load("g")
    assert (made["guard"], made["threshold"]) == ("g", guard.threshold)
    assert made["promised"] == guard.calibration.rate
    code, out, _ = run("guard", "apply", "g", "svhn.npz", "-o", "d.csv", "--json")
    told = json.loads(out)
    with np.load("svhn.npz") as arrays:
        decision = guard(features=arrays["features"]).decision
    assert (code, told["decisions"], told["rows"], told["alarms"]) == (0, "d.csv", 120, int(decision.sum()))
    assert told["shifted"] is (told["shifted_at"] is not None)


def test_a_probability_of_nothing_is_not_called_zero(run: Any) -> None:
    fit = ("guard", "fit", "--detector", "knn:k=5", "--train", "train.npz", "--calibration", "val.npz", "-o", "g")
    run(*fit)
    np.savez("noise.npz", features=9 * np.random.default_rng(0).standard_normal((4000, WIDTH)))
    code, out, _ = run("guard", "check", "g", "--id", "noise.npz")
    assert code == 1
    assert "BREAKS the promise" in out and "(p < 0.0001)" in out
    assert out.splitlines()[0].endswith("95 % interval")
    assert "(p < 0.0001)" in run("guard", "apply", "g", "noise.npz", "-o", "d.csv")[1]


def test_a_file_in_place_of_the_demos_folder(run: Any) -> None:
    code, out, err = run("demo", "-o", "id.npz")
    assert (code, out, err) == (2, "", "oodometer: --out id.npz is a file: give a folder\n")


# --- the examples of every help page ----------------------------------------------------------------------------

SHORTER = {"split.kind=repeated-holdout": "split.kind=repeated-holdout split.repeats=12", "split.repeats=10": ""}
"""A truth of 100 repetitions takes long, and shows no more here."""
ELSEWHERE = {
    "demo": "tests/e2e/test_demo.py",
    "guard": "tests/e2e/test_guard_cli.py",
    "train": "tests/e2e/test_train.py",
    "extract": "tests/e2e/test_stranger.py, below: it needs PyTorch",
}
"""Whose examples are run where."""


def examples(run: Any, name: str) -> list[list[str]]:
    """The commands of a help page, as words; what follows a pipe is left out."""
    page = re.split(r"\n\W*(?:positional arguments|options)\b", run(name, "--help")[1])[0]
    page = re.sub(r"\\\s*\n", " ", page.split("example:")[1])
    lines = [line.strip().split(" | ")[0] for line in page.splitlines() if line.strip()]
    assert all(line.startswith("oodometer ") for line in lines)
    for long, short in SHORTER.items():
        lines = [line.replace(long, short) for line in lines]
    return [shlex.split(line)[1:] for line in lines]


@pytest.fixture
def wares(here: Path, run: Any) -> Path:
    """Tiny files under the names that the help pages use."""
    rng = np.random.default_rng(0)
    width, classes = 80, 5
    weight = rng.standard_normal((classes, width))
    head = {"W": weight / 20, "b": np.zeros(classes)}  # small logits: probabilities that round to 1 have no scale

    def bank(rows: int, share: float) -> dict[str, Any]:
        labels = np.arange(rows) % classes
        return {"features": share * weight[labels] + rng.standard_normal((rows, width)), "labels": labels, **head}

    Path("banks").mkdir()
    sets = {"train": 1.0, "test": 1.0, "cifar10": 1.0, "banks/id": 1.0, "svhn": 0.2, "textures": 0.4, "banks/ood": 0.3}
    for name, share in sets.items():
        np.savez(f"{name}.npz", **bank(150, share))
    for name in ("id", "ood"):
        read_bank(f"banks/{name}.npz").save(f"banks/{name}")
    classed = ["class", *(f"c{row % 5}" for row in range(40))]
    for name in ("cifar10", "svhn"):
        Path(f"{name}.csv").write_text("\n".join(classed))
    birds = [f"order{row % 2},species{row % 30}" for row in range(120)]
    Path("birds.csv").write_text("\n".join(["order,species", *birds]))
    lines = ["score,dataset"]
    for shift, name in enumerate(("cifar10", "cifar10-val", "cifar100", "tin", "svhn")):
        lines += [f"{rng.normal(shift):.4f},{name}" for _ in range(60)]
    Path("table.csv").write_text("\n".join(lines))
    golden = Path(__file__).parents[1] / "golden" / "dcv_rood"
    shutil.copy(golden / "table05_pvalues_tpr5.csv", "table05.csv")
    shutil.copy(golden / "table06_counts_tpr5_05.csv", "table06.csv")
    return here


def prepare(run: Any, name: str) -> None:
    """What the examples of a command take for granted."""
    if name in ("compare", "report", "fidelity", "split"):
        run("init", "study.toml", "--id", "cifar10.npz", "--ood", "svhn.npz", "textures.npz")
    if name in ("compare", "report"):
        assert run("run", "study.toml", "--out", "runs/a", "--set", "split.folds=2")[0] == 0
        for copy in ("b", "before", "after"):
            shutil.copytree("runs/a", f"runs/{copy}")
    if name == "metrics":
        arguments = ("--id", "test.npz", "--ood", "svhn.npz", "--detector", "msp", "--out", "scores")
        assert run("score", *arguments)[0] == 0


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ELSEWHERE])
def test_the_examples_of_help_work(run: Any, wares: Path, name: str) -> None:
    prepare(run, name)
    commands = examples(run, name)
    assert commands
    for words in commands:
        code, out, err = run(*words)
        assert code == 0, (words, err)
        assert out
        if "--json" in words:
            json.loads(out, parse_constant=pytest.fail)


def test_extracts_examples_work(run: Any, here: Path) -> None:
    torch = pytest.importorskip("torch")
    from oodometer.models import zoo

    torch.manual_seed(0)
    weights = {name: value.numpy() for name, value in zoo.resnet20().state_dict().items()}
    np.savez("resnet20.npz", **weights)
    images = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3)).astype(np.uint8)
    np.savez("cifar10_test.npz", x=images, y=np.arange(12) % 10)
    first, _, doctor = examples(run, "extract")  # the one between needs torchvision and the network
    code, out, err = run(*first)
    assert code == 0, err
    assert out
    assert len(Bank.open("banks/test")) == 12
    code, out, _ = run(*doctor)
    assert "12 rows" in out

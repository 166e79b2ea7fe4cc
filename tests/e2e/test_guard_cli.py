"""`oodometer guard` as its user meets it: fit, check, apply; output, mistakes, exit codes."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from oodometer import Bank, Guard, create, metrics
from oodometer.cli import main
from oodometer.readers import read_bank

LONG = 80


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """(exit code, stdout, stderr) of a command, on a terminal of 80 columns, in a folder with banks."""
    monkeypatch.setenv("COLUMNS", str(LONG))
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        capsys.readouterr()
        code = main(["guard", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    sets = {"train": (300, 0), "val": (200, 0), "test": (400, 0), "svhn": (150, 0.7), "textures": (90, 0.9)}
    for seed, (name, (rows, shift)) in enumerate(sets.items()):
        np.savez(f"{name}.npz", **columns(rows, shift, seed))
    past, shifted = columns(9000, 0, 7), columns(1000, 0.5, 8)
    new = {name: np.concatenate([past[name], shifted[name]]) for name in ("features", "labels")}
    np.savez("new.npz", **new)
    return call


def columns(rows, shift, seed):
    rng = np.random.default_rng(seed)
    weight, bias = np.random.default_rng(9).standard_normal((4, 16)), np.zeros(4)
    classes = rng.integers(0, 4, rows)
    features = 2 * weight[classes] * (1 - shift) + rng.standard_normal((rows, 16))
    return {"features": features.astype(np.float32), "labels": classes, "W": weight, "b": bias}


FIT = ("--detector", "vim:dim=8", "--train", "train.npz", "--calibration", "val.npz")


def test_fit_writes_the_guard_that_python_would(run):
    code, out, err = run("fit", *FIT, "--alpha", 0.1, "--out", "guard")
    assert (code, out) == (0, "guard\n")
    here = Guard.fit(create("vim", dim=8), read_bank("train.npz"), read_bank("val.npz"), alpha=0.1)
    found = Guard.load("guard")
    assert err == f"{here!r}\n"
    assert found.threshold == here.threshold
    assert found(read_bank("svhn.npz")).score.tobytes() == here(read_bank("svhn.npz")).score.tobytes()
    code, out, err = run("fit", *FIT, "--out", "guard")
    assert (code, out) == (2, "")
    assert "guard exists: choose another --out, or pass --overwrite" in err
    assert run("fit", *FIT, "--out", "guard", "--overwrite")[0] == 0
    assert Guard.load("guard").facts["alpha"] == 0.05


def test_a_saved_bank_and_other_rules(run):
    Bank(features=read_bank("train.npz").features, labels=read_bank("train.npz").labels).save("bank")
    knn = ("--detector", "knn:k=5", "--train", "bank", "--calibration", "val.npz")
    assert run("fit", *knn, "--rule", "tnr", "--tnr", 0.9, "--out", "a")[0] == 0
    assert run("fit", *knn, "--rule", "val", "--ood-validation", "svhn.npz", "--out", "b")[0] == 0
    assert "@90TNR" in run("check", "a", "--id", "test.npz")[1]
    code, out, _ = run("check", "b", "--id", "test.npz", "--ood", "svhn.npz", "other=textures.npz")
    assert code == 0
    rules = {line.split()[0]: line.split()[1] for line in out.splitlines()[2:4]}
    assert rules == {"svhn": "@test", "other": "@val"}
    assert "no FPR was promised" in out


def test_check_measures_the_promise(run):
    run("fit", *FIT, "--out", "guard")
    code, out, err = run("check", "guard", "--id", "test.npz", "--ood", "svhn.npz", "dtd=textures.npz")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= LONG
    guard = Guard.load("guard")
    for name, path, wrong in (("in", "test", True), ("svhn", "svhn", False), ("dtd", "textures", False)):
        decision = guard(read_bank(f"{path}.npz")).decision
        share = metrics.wilson(int((decision == wrong).sum()), len(decision))
        line = next(line for line in out.splitlines() if line.startswith(name))
        assert re.findall(r"\d+\.\d+", line)[-3:] == [f"{100 * v:.2f}" for v in (share.value, share.low, share.high)]
    code, out, _ = run("check", "guard", "--id", "test.npz", "--ood", "svhn.npz", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["fpr"]["share"]["value"] == guard(read_bank("test.npz")).decision.mean()
    assert found["fnr"]["svhn"]["rows"] == 150
    assert found["kept"] is True
    code, out, _ = run("check", "guard", "--id", "svhn.npz")
    assert code == 1
    assert "BREAKS the promise of at most 4.975 %" in out


def test_apply_decides_on_every_row_and_on_the_stream(run):
    run("fit", *FIT, "--out", "guard")
    code, out, _ = run("apply", "guard", "new.npz", "--out", "decisions.csv")
    assert code == 0
    verdict, path = out.splitlines()
    assert path == "decisions.csv"
    guard, bank = Guard.load("guard"), read_bank("new.npz")
    found = guard(bank)
    with Path("decisions.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [int(row["row"]) for row in rows] == list(range(10_000))
    assert np.array([float(row["p_value"]) for row in rows]).tobytes() == found.p_value.tobytes()
    np.testing.assert_allclose([float(row["score"]) for row in rows], found.score, rtol=1e-5)
    assert [row["decision"] == "1" for row in rows] == found.decision.tolist()
    assert verdict.startswith(f"10,000 rows: alarm rate {100 * found.decision.mean():.2f} %, expected at most 4.98 %")
    noticed = int(re.search(r"SHIFTED, noticed at row ([\d,]+)", verdict)[1].replace(",", ""))
    assert 9000 < noticed < 9500
    code, out, _ = run("apply", "guard", "test.npz", "--out", "d.csv")
    assert (code, "no evidence of a shift" in out) == (0, True)
    assert run("apply", "guard", "test.npz", "--out", "d.csv")[0] == 2
    assert run("apply", "guard", "test.npz", "--out", "d.csv", "--overwrite")[0] == 0


def test_a_bad_row_is_located_and_leaves_no_file(run):
    run("fit", *FIT, "--out", "guard")
    bad = dict(np.load("new.npz"))
    bad["features"][8500, 3] = np.nan
    np.savez("bad.npz", **bad)
    code, out, err = run("apply", "guard", "bad.npz", "--out", "decisions.csv")
    assert (code, out) == (2, "")
    assert "counting rows from row 8192 of the bank: vim: column 'features'" in err
    assert "in row 308: " in err
    assert not [path for path in Path().iterdir() if "decisions" in path.name or "partial" in path.name]


MISTAKES = {
    (): "guard: fit, check or apply was needed, none was given",
    ("fits",): "guard: fit, check or apply was needed, found 'fits'",
    ("fit", *FIT[:4], "--calibration", "few.npz", "--out", "g"): "needs at least 19 calibration scores, 10 were found",
    ("fit", *FIT, "--rule", "best", "--out", "g"): "rule must be 'conformal', 'tnr' or 'val'; found 'best'",
    ("fit", *FIT, "--rule", "val", "--out", "g"): "pass ood_validation",
    ("fit", *FIT, "--alpha", "5", "--out", "g"): "alpha must be a fraction",
    ("fit", "--detector", "vmi", *FIT[2:], "--out", "g"): "did you mean 'vim'?",
    ("check", "absent", "--id", "test.npz"): "absent is not a saved guard",
    ("check", "guard", "--id", "tst.npz"): "did you mean 'test.npz'?",
    ("check", "guard", "--id", "test.npz", "--ood", "x=svhn.npz", "x=val.npz"): "two OOD banks are named 'x'",
    ("apply", "guard", "narrow.npz", "--out", "d.csv"): "rows of 'features' have shape (15,)",
    ("apply", "guard", "test.npz", "--delta", "2", "--out", "d.csv"): "delta must be a probability",
}


@pytest.mark.parametrize("arguments", MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_one_line_and_code_2(run, arguments):
    run("fit", *FIT, "--out", "guard")
    np.savez("few.npz", **columns(10, 0, 3))
    np.savez("narrow.npz", features=np.zeros((5, 15)))
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert MISTAKES[arguments] in err
    assert err.count("\n") == 1
    assert not Path("g").exists()
    assert not Path("d.csv").exists()


def test_an_interruption_leaves_nothing_half_written(run, monkeypatch):
    run("fit", *FIT, "--out", "guard")
    before = sorted(path.name for path in Path().iterdir())

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("oodometer.guard.stream.Evidence.extend", interrupted)
    code, out, err = run("apply", "guard", "new.npz", "--out", "d.csv")
    assert (code, out, err) == (130, "", "oodometer: interrupted; nothing half-written was left behind\n")
    monkeypatch.setattr("safetensors.numpy.save_file", interrupted)
    assert run("fit", *FIT, "--out", "guard", "--overwrite")[0] == 130
    assert sorted(path.name for path in Path().iterdir()) == before
    assert Guard.load("guard").calibration.rows == 200


@pytest.mark.parametrize("action", [(), ("fit",), ("check",), ("apply",)], ids=["guard", "fit", "check", "apply"])
def test_help_fits_and_its_examples_work(run, action):
    code, out, _ = run(*action, "--help")
    assert code == 0
    usage, about = out.split("╭")[0].split("\n\n", 1)
    assert usage.startswith("usage: oodometer guard")
    assert max(map(len, out.splitlines()[1:])) <= LONG + 2  # the parser indents the examples
    text = about.split("example:")[1].replace("\\\n", " ")
    examples = [shlex.split(line.strip()) for line in text.splitlines() if line.strip().startswith("oodometer")]
    assert examples
    if action not in ((), ("fit",)):
        run("fit", *FIT, "--out", "guard")
    for words in examples:
        assert words[:2] == ["oodometer", "guard"]
        code, out, err = run(*(word.replace("dim=64", "dim=8") for word in words[2:]))
        assert code == 0, err
        assert out

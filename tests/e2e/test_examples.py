"""The examples run as their first lines say, and print what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from oodometer.stats import fidelity

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"


def run(name, *arguments):
    """What an example prints; it must end well and warn of nothing."""
    command = [sys.executable, "-W", "error::UserWarning", ROOT / "examples" / name, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def test_every_example_is_run_here():
    names = {path.name for path in (ROOT / "examples").glob("*.py")}
    text = Path(__file__).read_text()
    assert names and all(f'run("{name}"' in text for name in names)


def test_arrays_only():
    rows = re.findall(r"^(\w+) +(0\.\d{4}) +(0\.\d{4})$", run("arrays_only.py"), re.M)
    assert [name for name, _, _ in rows] == ["msp", "energy", "gen", "knn", "mds", "vim"]
    assert all(float(auroc) > 0.9 and float(fpr) < 0.3 for _, auroc, fpr in rows)


def test_hierarchical_split():
    out = run("hierarchical_split.py")
    # ⌊N/5⌋ characters of every alphabet.
    assert re.findall(r"^([A-Z][A-Za-z ]+?) +(\d+) +(\d+)$", out, re.M) == [
        ("Balinese", "24", "4"),
        ("Early Aramaic", "22", "4"),
        ("Greek", "24", "4"),
        ("Korean", "40", "8"),
        ("Latin", "26", "5"),
        ("Tagalog", "17", "3"),
    ]
    assert "2500 ID rows, 560 OOD rows" in out and out.endswith("by fold: 0 0 0 0 0\n")


def test_hierarchical_split_of_a_file(tmp_path):
    names = [f"{alphabet}/{number}" for alphabet in "AB" for number in range(15)]
    np.savez(tmp_path / "characters.npz", names=np.array(names), y=np.repeat(np.arange(30), 6))
    assert "144 ID rows, 36 OOD rows" in run("hierarchical_split.py", "--data", tmp_path / "characters.npz")


def images(seed, rows, classes, *, shift):
    """Faint squares whose place tells the class, on noise."""
    rng = np.random.default_rng(seed)
    y = np.arange(rows) % classes
    x = rng.integers(0, 180, (rows, 28, 28))
    for row, label in enumerate(y):
        x[row, 7 * (label % 4) : 7 * (label % 4) + 7, 7 * (label // 4) : 7 * (label // 4) + 7] += 70
    return {"x": np.roll(x, shift, axis=(1, 2)).astype(np.uint8), "y": y}


def test_fashion_vs_letters_on_made_up_images(tmp_path):
    for seed, (name, classes) in enumerate({"fashion_mnist": 10, "mnist": 10, "letters": 16}.items()):
        made = images(seed, 480, classes, shift=3 * seed)
        names = made if name == "letters" else {"x_test": made["x"], "y_test": made["y"]}
        np.savez(tmp_path / f"{name}.npz", **names)
    out = run("fashion_vs_letters.py", "--data", tmp_path, "--out", tmp_path / "run", "--rows", 480)
    rows = re.findall(r"^(\w+)" + r" +(\d\.\d+)" * 4 + "$", out, re.M)
    assert {name for name, *_ in rows} == {"msp", "energy", "klm", "knn", "mds", "vim", "gen"}
    table = pd.read_csv(tmp_path / "run" / "results.csv").query("metric == 'auroc'")
    means = table.groupby(["detector", "exposure", "ood"])["value"].mean()
    for name, *printed in rows:
        told = [means[name, how, ood] for how in ("without", "with") for ood in ("mnist", "letters")]
        assert [float(value) for value in printed] == [pytest.approx(value, abs=6e-5) for value in told]
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def test_fashion_vs_letters_without_data_says_what_is_missing(tmp_path):
    assert run("fashion_vs_letters.py", "--data", tmp_path) == (
        f"skipped: {tmp_path} has no fashion_mnist.npz, no mnist.npz, no letters.npz or chars74k_fnt_28.npz\n"
    )


@pytest.mark.skipif(not (SHARED / "fashion_mnist.npz").exists(), reason="the real images are not on this machine")
def test_fashion_vs_letters_on_real_images():
    out = run("fashion_vs_letters.py", "--data", SHARED, "--rows", 1200)
    rows = re.findall(r"^(\w+) +(\d\.\d+) +(\d\.\d+) +(\d\.\d+) +(\d\.\d+)$", out, re.M)
    scores = {name: [float(value) for value in values] for name, *values in rows}
    assert len(scores) == 7
    # Exposure to other classes of the same sets makes the softmax notice them.
    assert all(scores["msp"][exposed] > scores["msp"][exposed - 2] + 0.05 for exposed in (2, 3))
    assert min(scores["msp"][2:]) > 0.9


def test_dcv_rood_fidelity_on_made_up_images(tmp_path):
    for seed, (name, classes) in enumerate(
        {"fashion_mnist": 10, "mnist": 10, "kmnist_test": 10, "chars74k_fnt_28": 16, "omniglot_small_28": 16}.items()
    ):
        made = images(seed, 640, classes, shift=3 * seed)
        part = {"fashion_mnist": "_train", "mnist": "_test", "kmnist_test": "_test"}.get(name, "")
        np.savez(tmp_path / f"{name}.npz", **{f"{key}{part}": value for key, value in made.items()})
    check_fidelity(run("dcv_rood_fidelity.py", "--data", tmp_path, "--out", tmp_path / "runs", "--quick"), tmp_path)
    letters = pd.read_csv(tmp_path / "runs" / "cv" / "classifiers.csv").query("ood == 'letters'")
    assert len(letters) == 2 * 5 * 2


def test_dcv_rood_fidelity_without_data_says_what_is_missing(tmp_path):
    np.savez(tmp_path / "mnist.npz", x_test=np.zeros(1))
    assert run("dcv_rood_fidelity.py", "--data", tmp_path) == (
        f"skipped: {tmp_path} has no fashion_mnist.npz, no kmnist_test.npz, no chars74k_fnt_28.npz, no "
        "omniglot_small_28.npz\n"
    )


@pytest.mark.skipif(not (SHARED / "omniglot_small_28.npz").exists(), reason="the real images are not on this machine")
def test_dcv_rood_fidelity_on_real_images(tmp_path):
    check_fidelity(run("dcv_rood_fidelity.py", "--data", SHARED, "--out", tmp_path / "runs", "--quick"), tmp_path)
    truth = pd.read_csv(tmp_path / "runs" / "truth" / "results.csv").query("metric == 'auroc'")
    means = truth.groupby(["exposure", "detector"])["value"].mean()
    # Exposure to other classes of the same sets makes the logits notice them.
    assert means["with", "energy"] > means["without", "energy"] + 0.1


def check_fidelity(out, folder):
    """The printed rates are those of the two runs' tables; both runs have all methods and rows."""
    metrics = ["tpr5", "auroc", "aupr_id", "f1_max_id", "acc90"]
    tables = {name: pd.read_csv(folder / "runs" / name / "results.csv") for name in ("truth", "cv")}
    for table, draws in ((tables["truth"], 3), (tables["cv"], 10)):
        assert table["detector"].nunique() == 8
        assert len(table) == draws * 8 * 8 * len(metrics)
        assert not table["value"].isna().any()
    parts = {
        name: table.pivot_table(
            index=["ood", "exposure"], columns=["metric", *repeat, "detector"], values="value", sort=False
        )
        for name, table, repeat in (("truth", tables["truth"], []), ("cv", tables["cv"], ["repeat"]))
    }
    lines = [line.split() for line in out.splitlines() if line.split(" ")[0] in metrics]
    shown = iter([line for line in lines if len(line) == 7])
    for alpha in (0.05, 0.1):
        for metric in metrics:
            runs = [parts["cv"][metric][repeat] for repeat in (0, 1)]
            rates = fidelity(parts["truth"][metric], runs, alpha=alpha).rates
            told = ["–" if np.isnan(rate) else f"{rate:.4f}" for rate in (rates.hit, rates.error)]
            assert next(shown)[:6] == [metric, *told, str(rates.n_different), str(rates.n_alike), "3"]
    assert "2 runs, 8 methods, 8 blocks." in out

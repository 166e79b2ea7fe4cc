"""From one study file to the fidelity of cross-validation: two runs, and the command that compares them."""

from __future__ import annotations

import json
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from scipy.stats import wilcoxon

from oodometer.cli import main
from tests.conformance.conftest import make_bank

DETECTORS = ["msp", "knn", "mds"]
SETS = ["a", "b", "c", "d"]
SETTINGS = [
    f"detectors={json.dumps(DETECTORS)}",
    'exposure=["without","with"]',
    'metrics=["auroc","tpr5"]',
    "split.folds=2",
    "trainer.hidden=16",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A truth of 12 repetitions and 3 cross-validations, both of the file that `init` writes."""
    place = tmp_path_factory.mktemp("fidelity")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        make_bank(1, 240).select(["features", "labels"]).with_head(None).save(place / "id")
        for number, name in enumerate(SETS):
            bank = make_bank(10 + number, 120, far=True).select(["features"])
            noise = np.random.default_rng(number).standard_normal(bank.features.shape).astype(np.float32)
            far = np.asarray(bank.features) / (2 + number) + noise
            bank.with_columns(features=far, labels=np.arange(120) % 6).save(place / name)
        assert main(["init", "study.toml", "--id", "id", "--ood", *SETS]) == 0
        truth = ["split.kind=repeated-holdout", "split.repeats=12"]
        assert main(["run", "study.toml", "--out", "runs/truth", "--set", *SETTINGS, *truth]) == 0
        assert main(["run", "study.toml", "--out", "runs/cv", "--set", *SETTINGS, "split.repeats=3"]) == 0
    return place


@pytest.fixture
def fidelity(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)

    def call(*arguments):
        code = main(["fidelity", "runs/truth", "runs/cv", *arguments])
        told = capsys.readouterr()
        return code, told.out, told.err

    return call


def blocks(path, metric, repeat=None):
    """Means over draws as (ood, exposure) × detectors, straight from the table."""
    rows = pd.read_csv(path / "results.csv").query("metric == @metric")
    rows = rows if repeat is None else rows[rows["repeat"] == repeat]
    return rows.pivot_table(index=["ood", "exposure"], columns="detector", values="value", aggfunc="mean")


def pvalues(table):
    return {pair: wilcoxon(table[pair[0]], table[pair[1]]).pvalue for pair in combinations(DETECTORS, 2)}


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_rates_and_pairs_are_those_of_scipy_on_the_tables(folder, fidelity, alpha):
    code, out, err = fidelity("--json", "--alpha", str(alpha))
    assert (code, err) == (0, "")
    for found in json.loads(out):
        truth = pvalues(blocks(folder / "runs" / "truth", found["metric"]))
        runs = [pvalues(blocks(folder / "runs" / "cv", found["metric"], repeat)) for repeat in range(3)]
        times = {pair: sum(run[pair] <= alpha for run in runs) for pair in truth}
        hits = [times[pair] for pair in truth if truth[pair] <= alpha]
        errors = [times[pair] for pair in truth if truth[pair] > alpha]
        assert found["hit_rate"] == (pytest.approx(np.mean(hits)) if hits else None)
        assert found["error_rate"] == (pytest.approx(np.mean(errors)) if errors else None)
        assert {(p["a"], p["b"]): p["truth_pvalue"] for p in found["pairs"]} == pytest.approx(truth)
        assert {(p["a"], p["b"]): p["runs"] for p in found["pairs"]} == times
        draws = pd.read_csv(folder / "runs" / "truth" / "results.csv").query("metric == @found['metric']")
        spread = draws.groupby(["ood", "exposure", "detector"])["value"].std() / np.sqrt(12)
        assert found["truth_standard_error"] == pytest.approx(spread.max())


def test_the_cost_is_that_of_run_json(folder, fidelity):
    spent = {name: json.loads((folder / "runs" / name / "run.json").read_text())["timings"] for name in ("truth", "cv")}
    _, out, _ = fidelity("--json", "--metric", "auroc")
    (found,) = json.loads(out)
    assert found["truth_cpu_seconds"] == spent["truth"]["cpu"]
    assert found["run_cpu_seconds"] == spent["cv"]["cpu"] / 3
    _, out, _ = fidelity("--metric", "auroc")
    told = " ".join(out.split())
    ratio = 3 * spent["truth"]["cpu"] / spent["cv"]["cpu"]
    assert f"a run {spent['cv']['cpu'] / 3:.3g} CPU-s, 1/{ratio:.1f} of it." in told


@pytest.mark.parametrize("facts", [None, "{", '{"timings": {"cpu": 1, "computed": 3, "kept": 4}}', '{"timings": {}}'])
def test_a_cost_that_is_not_known_in_full_is_not_told(folder, fidelity, facts):
    path = folder / "runs" / "cv" / "run.json"
    before = path.read_text()
    try:
        path.unlink() if facts is None else path.write_text(facts)
        code, out, err = fidelity()
        assert (code, err) == (0, "")
        assert "cost" not in out
        assert json.loads(fidelity("--json")[1])[0]["run_cpu_seconds"] is None
    finally:
        path.write_text(before)


def test_the_text_fits_a_terminal_and_lists_every_pair(fidelity):
    code, out, err = fidelity("--pairs", "--alpha", "0.2")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    for found in json.loads(fidelity("--json", "--alpha", "0.2")[1]):
        start = next(place for place, line in enumerate(out.splitlines()) if line.startswith(f"{found['metric']}: a"))
        rows = [line.split() for line in out.splitlines()[start + 1 : start + 1 + len(found["pairs"])]]
        wanted = sorted(found["pairs"], key=lambda pair: pair["truth_pvalue"])
        assert [(*row[:2], row[2], row[3]) for row in rows] == [
            (pair["a"], pair["b"], f"{pair['truth_pvalue']:.4f}", str(pair["runs"])) for pair in wanted
        ]
        for row, pair in zip(rows, wanted, strict=True):
            missed = 3 - pair["runs"] if pair["truth_pvalue"] <= 0.2 else 0
            wrong = pair["runs"] if pair["truth_pvalue"] > 0.2 else 0
            expected = [str(missed), "missed"] if missed else [str(wrong), "in", "error"] if wrong else []
            assert row[4:] == expected


def test_how_far_the_running_means_still_moved(folder, fidelity):
    _, out, _ = fidelity("--metric", "tpr5", "--tol", "1e-9")
    rows = pd.read_csv(folder / "runs" / "truth" / "results.csv").query("metric == 'tpr5'")
    wide = rows.pivot_table(index="fold", columns=["ood", "exposure", "detector"], values="value").to_numpy()
    running = [wide[:n].mean(axis=0) for n in range(2, 13)]
    moved = max(np.abs(mean - running[-1]).max() for mean in running[:-1])
    assert f"1e-09; over the last 10 repetitions its means still moved by {moved:.2g}." in " ".join(out.split())

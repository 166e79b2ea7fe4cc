"""Tables 7 and 8 of DCV-ROOD, recomputed from its printed p-values and counts."""

from __future__ import annotations

import csv
from pathlib import Path

import pandas as pd
import pytest

from oodometer import stats
from oodometer.cli import main

TABLES = Path(__file__).parent / "dcv_rood"
PVALUES = {
    "tpr5": "table05_pvalues_tpr5",
    "auroc": "table11_pvalues_auroc",
    "aupr": "table15_pvalues_aupr",
    "f1": "table19_pvalues_f1",
    "acc90": "table23_pvalues_acc90",
}
RATES = [  # metric, α, counts; pairs, hit and error rate as printed
    ("tpr5", 0.10, "table26_counts_tpr5_10", 21, 9.8571, 1.0000),
    ("auroc", 0.10, "table12_counts_auroc_10", 23, 8.9130, 1.6000),
    ("aupr", 0.10, "table16_counts_aupr_10", 22, 8.8636, 0.5000),
    ("acc90", 0.10, "table24_counts_acc90_10", 23, 8.6087, 1.6000),
    ("tpr5", 0.05, "table06_counts_tpr5_05", 19, 9.8421, 2.0000),
    ("auroc", 0.05, "table13_counts_auroc_05", 21, 9.2381, 0.8571),
    ("aupr", 0.05, "table17_counts_aupr_05", 18, 9.2778, 1.7000),
    ("f1", 0.05, "table21_counts_f1_05", 17, 9.1176, 2.0909),  # printed 2.0910; 23/11 = 2.0909
    ("acc90", 0.05, "table25_counts_acc90_05", 21, 8.0000, 1.2857),
]


def matrix(name):
    return pd.read_csv(TABLES / f"{name}.csv", index_col=0)


def signs(counts, method):
    """Which pairs of a method differ in the truth by the paper's mark: a minus sign says no."""
    return {(method, other): counts.loc[method, other] > 0 for other in counts.columns if other != method}


@pytest.mark.parametrize(("metric", "alpha", "counts", "pairs", "hit", "error"), RATES)
def test_the_18_reproducible_rates_of_tables_7_and_8(metric, alpha, counts, pairs, hit, error):
    times = matrix(counts)
    pvalues = matrix(PVALUES[metric]).reindex(index=times.index, columns=times.columns)
    # Table 11 has no column of relation, whose pairs are therefore read from the signs of the counts.
    known = signs(times, "relation") if metric == "auroc" else None
    found = stats.fidelity_rates(pvalues, times, n_runs=10, alpha=alpha, known=known)
    assert (found.n_different, found.n_alike) == (pairs, 28 - pairs)
    assert round(found.hit, 4) == hit
    assert round(found.error, 4) == error


def test_the_f1_rates_at_10_percent_need_the_papers_reading_of_one_pair():
    """Table 20 marks gen and relation as alike although Table 19 prints .0002."""
    times, pvalues = matrix("table20_counts_f1_10"), matrix(PVALUES["f1"])
    plain = stats.fidelity_rates(pvalues, times, n_runs=10, alpha=0.1)
    assert (round(plain.hit, 4), round(plain.error, 4)) == (8.8095, 0.8571)
    read = stats.fidelity_rates(pvalues, times, n_runs=10, alpha=0.1, known={("gen", "relation"): False})
    assert (round(read.hit, 4), round(read.error, 4)) == (8.9500, 1.5000)


@pytest.mark.parametrize(("metric", "alpha", "counts", "pairs", "hit", "error"), [r for r in RATES if r[0] != "auroc"])
def test_the_command_prints_the_rates(capsys, metric, alpha, counts, pairs, hit, error):
    tables = [str(TABLES / f"{name}.csv") for name in (PVALUES[metric], counts)]
    assert main(["fidelity", "--pvalues", tables[0], "--counts", tables[1], "--alpha", str(alpha)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"hit rate {hit:.4f} of 10 over {pairs} pairs, error rate {error:.4f} over {28 - pairs} pairs" in text


# --- The command on results ------------------------------------------------------------------------------------


def write_results(path, draws):
    """A results.csv of Table 4 (rows: blocks), repeated with the given shifts of single methods."""
    with (TABLES / "table04_truth_tpr5.csv").open() as file:
        rows = list(csv.DictReader(file))
    lines = ["study,repeat,fold,id,ood,group,exposure,detector,params,variant,metric,value"]
    for repeat, fold, shift in draws:
        for row in rows:
            block = f"{row['id']},{row['ood']},,{row['exposure']}"
            for method in list(row)[3:]:
                value = float(row[method]) + shift.get(method, 0.0)
                lines.append(f"s,{repeat},{fold},{block},{method},{{}},,tpr5,{value:.6f}")
    path.mkdir()
    (path / "results.csv").write_text("\n".join(lines) + "\n")


def test_the_command_compares_results(tmp_path, capsys):
    write_results(tmp_path / "truth", [(0, fold, {}) for fold in range(12)])
    # Two folds whose shifts cancel in run 0; in run 1 mds is far from its truth.
    runs = [(0, 0, {"ebo": 0.01}), (0, 1, {"ebo": -0.01}), (1, 0, {"mds": -0.3}), (1, 1, {"mds": -0.3})]
    write_results(tmp_path / "cv", runs)
    assert main(["fidelity", str(tmp_path / "truth"), str(tmp_path / "cv"), "--json"]) == 0
    import json

    (found,) = json.loads(capsys.readouterr().out)
    assert found["metric"] == "tpr5"
    assert (found["runs"], found["blocks"], found["truth_repetitions"]) == (2, 22, 12)
    assert found["truth_converged_at"] == 11
    assert found["truth_standard_error"] < 1e-15
    assert [(c["run"], c["method"]) for c in found["changes"]] == [("1", "mds")]
    expected = truth_and_two_runs()
    assert found["hit_rate"] == pytest.approx(expected.rates.hit, abs=1e-12)
    assert found["error_rate"] == pytest.approx(expected.rates.error, abs=1e-12)
    assert main(["fidelity", str(tmp_path / "truth"), str(tmp_path / "cv")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "tpr5: methods that differ from their truth, by run: 1 (mds, p = 0.0000)." in text
    assert "Wilcoxon signed-rank (paired), p ≤ 0.05, adjustment: none" in text


def truth_and_two_runs():
    table = pd.read_csv(TABLES / "table04_truth_tpr5.csv").set_index(["id", "ood", "exposure"])
    return stats.fidelity(table, [table, table.assign(mds=table["mds"] - 0.3)])


def test_a_truth_that_is_its_own_run_has_full_hits_and_no_errors():
    table = pd.read_csv(TABLES / "table04_truth_tpr5.csv").set_index(["exposure", "id", "ood"])
    found = stats.fidelity(table, [table, table.iloc[::-1, ::-1]])
    assert (found.rates.hit, found.rates.error) == (2.0, 0.0)
    assert found.changes() == []
    different = {(pair["a"], pair["b"]) for pair in found.pairs() if pair["runs"] == 2}
    by_hand = {
        (a, b)
        for i, a in enumerate(table)
        for b in list(table)[i + 1 :]
        if stats.wilcoxon(table[a], table[b]).pvalue <= 0.05
    }
    assert different == by_hand
    assert found.to_pandas().loc["ebo", "klm"] == 2

"""Published numbers: the worked study of six blocks, and the p-values of DCV-ROOD from its printed tables."""

from __future__ import annotations

import csv
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from oodometer import stats
from oodometer.stats.paired import normal_signed_rank_pvalue, signed_rank_pvalue

TABLES = Path(__file__).parent / "dcv_rood"

# Six blocks, five methods, higher is better; values by scipy 1.17.1, scikit-posthocs 0.17.1 and networkx 3.6.1.
STUDY = [
    [0.91, 0.89, 0.93, 0.85, 0.80],
    [0.72, 0.72, 0.75, 0.70, 0.65],
    [0.88, 0.90, 0.91, 0.84, 0.86],
    [0.60, 0.58, 0.64, 0.58, 0.50],
    [0.95, 0.94, 0.94, 0.90, 0.91],
    [0.81, 0.79, 0.84, 0.77, 0.70],
]
PAIRS = {  # Conover, Conover-Holm, Nemenyi, Siegel-Holm
    (0, 1): (9.4722081137e-02, 1.8944416227e-01, 0.9495099579, 1.0),
    (0, 2): (4.0328088671e-02, 1.2098426601e-01, 0.8920827298, 1.0),
    (0, 3): (1.4040541451e-05, 9.8283790160e-05, 0.1225773003, 0.1233546367),
    (0, 4): (1.3106997037e-06, 1.0485597629e-05, 0.0375372413, 0.0372500580),
    (1, 2): (7.9676741973e-04, 3.9838370986e-03, 0.4696442923, 0.5017412323),
    (1, 3): (7.9676741973e-04, 3.9838370986e-03, 0.4696442923, 0.5017412323),
    (1, 4): (6.2254841314e-05, 3.7352904789e-04, 0.2201212281, 0.2145825995),
    (2, 3): (1.4328598436e-07, 1.2895738593e-06, 0.0089873652, 0.0091350085),
    (2, 4): (1.8373674534e-08, 1.8373674534e-07, 0.0017054053, 0.0018200222),
    (3, 4): (2.8596363318e-01, 2.8596363318e-01, 0.9910710111, 1.0),
}


def column_table(name):
    """A printed table: the rows as dictionaries, an empty cell as NaN."""
    with (TABLES / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def values(rows, method):
    return np.array([float(row[method] or "nan") for row in rows])


def printed_pvalues(name):
    rows = column_table(name)
    names = [row["method"] for row in rows]
    return {(a, b): float(rows[i][b]) for i, a in enumerate(names) for b in names[i + 1 :]}


# --- The study of six blocks -----------------------------------------------------------------------------------


def test_omnibus_of_the_study():
    found = stats.friedman(STUDY, higher_is_better=True)
    np.testing.assert_allclose(found.average_ranks, [2.0833333333, 2.75, 1.25, 4.25, 4.6666666667], atol=5e-11)
    assert found.uncorrected == pytest.approx(19.9333333333, abs=5e-11)
    assert found.tie_factor == pytest.approx(0.975, abs=1e-15)
    assert found.statistic == pytest.approx(20.4444444444, abs=5e-11)
    assert found.pvalue == pytest.approx(4.0796617855e-04, rel=1e-10)
    assert found.f_statistic == pytest.approx(28.75, abs=1e-12)
    assert found.f_df == (4, 20)
    assert found.f_pvalue == pytest.approx(4.8476541814e-08, rel=1e-10)
    assert found.kendall_w == pytest.approx(0.8518518519, abs=5e-11)
    assert found.omnibus_test == "Iman–Davenport"
    assert found.omnibus_pvalue == found.f_pvalue


@pytest.mark.parametrize(
    ("column", "test"),
    [
        (0, lambda: stats.conover(STUDY, higher_is_better=True, adjust="none")),
        (1, lambda: stats.conover(STUDY, higher_is_better=True)),
        (2, lambda: stats.nemenyi(STUDY, higher_is_better=True)),
        (3, lambda: stats.siegel(STUDY, higher_is_better=True)),
    ],
    ids=["conover", "conover-holm", "nemenyi", "siegel-holm"],
)
def test_pairs_of_the_study(column, test):
    found = test()
    for pair, expected in PAIRS.items():
        digits = {"abs": 5e-11} if column >= 2 else {"rel": 1e-10}
        assert found[pair] == pytest.approx(expected[column], **digits), pair
        assert found[pair[::-1]] == found[pair]


def test_common_standard_error_and_critical_difference_of_the_study():
    found = stats.conover(STUDY, higher_is_better=True, adjust="none")
    rank_sums = 6 * found.average_ranks
    standard_error = abs(rank_sums[0] - rank_sums[4]) / found.statistics[0, 4]
    assert standard_error == pytest.approx(2.2803508502, abs=5e-11)
    cd = stats.critical_difference(5, 6)
    assert cd == pytest.approx(2.4901059245, abs=5e-11)
    assert cd / np.sqrt(5 * 6 / (6 * 6)) == pytest.approx(2.7277743709, abs=5e-11)


@pytest.mark.parametrize(
    ("adjust", "cliques", "layers", "unlayered"),
    [
        ("none", [{2}, {0, 1}, {3, 4}], [{2}, {0, 1}, {3, 4}], ()),
        ("holm", [{0, 2}, {0, 1}, {3, 4}], [{0, 2}, {3, 4}], (1,)),
    ],
)
def test_cliques_of_the_study(adjust, cliques, layers, unlayered):
    found = stats.cliques(stats.conover(STUDY, higher_is_better=True, adjust=adjust))
    assert [set(clique) for clique in found] == cliques
    assert [set(clique) for clique in found.layers] == layers
    assert found.unlayered == unlayered
    assert found.top.best_rank == 1.25
    if adjust == "holm":
        assert found.top.members == (2, 0)
        assert found.top.mean_rank == pytest.approx(1.6666666667, abs=5e-11)


# --- DCV-ROOD, Table 4 -----------------------------------------------------------------------------------------


def table_4():
    rows = column_table("table04_truth_tpr5")
    names = list(rows[0])[3:]
    return np.stack([values(rows, name) for name in names], axis=1), names


def test_omnibus_of_table_4():
    table, names = table_4()
    found = stats.friedman(table, higher_is_better=True, names=names)
    assert found.statistic == pytest.approx(55.148, abs=5e-11)
    assert found.pvalue == pytest.approx(1.393551e-09, rel=5e-7)
    assert found.f_statistic == pytest.approx(11.7155747987, abs=5e-11)
    assert found.f_pvalue == pytest.approx(8.503220e-12, rel=5e-7)
    expected = {
        "ebo": 4.3863636364,
        "fdbd": 4.8636363636,
        "gen": 3.3636363636,
        "klm": 7.6818181818,
        "knn": 4.1363636364,
        "mds": 3.0227272727,
        "nnguide": 3.9090909091,
        "relation": 4.6363636364,
    }
    assert dict(zip(names, found.average_ranks, strict=True)) == pytest.approx(expected, abs=5e-11)


def test_top_cliques_of_table_4():
    table, names = table_4()
    top = {
        adjust: set(stats.cliques(stats.conover(table, higher_is_better=True, names=names, adjust=adjust)).top)
        for adjust in ("none", "holm")
    }
    assert top["none"] == {"gen", "knn", "mds", "nnguide"}
    assert top["holm"] == {"ebo", "gen", "knn", "mds", "nnguide", "relation"}


# --- Which test printed the p-values of DCV-ROOD ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        (("ebo", "fdbd"), 0.8233),
        (("ebo", "gen"), 0.6218),
        (("gen", "knn"), 0.8417),
        (("knn", "nnguide"), 0.9157),
        (("mds", "relation"), 0.3910),
    ],
)
def test_mann_whitney_gives_other_pvalues_than_table_5(pair, expected):
    rows = column_table("table04_truth_tpr5")
    found = stats.mann_whitney(*(values(rows, name) for name in pair)).pvalue
    assert found == pytest.approx(expected, abs=5e-5)
    assert found > 1.3 * printed_pvalues("table05_pvalues_tpr5")[pair]


def check(truth, pair, printed):
    rows = column_table(truth)
    x, y = (values(rows, name) for name in pair)
    there = np.isfinite(x) & np.isfinite(y)
    return stats.explain_printed(x[there], y[there], printed)


def test_all_28_pvalues_of_table_5_are_signed_rank_tests_of_table_4():
    printed = printed_pvalues("table05_pvalues_tpr5")
    assert len(printed) == 28
    found = {pair: check("table04_truth_tpr5", pair, p) for pair, p in printed.items()}
    assert all(one.explained for one in found.values())
    assert all(abs(one.pvalue - printed[pair]) <= 5e-5 for pair, one in found.items())
    fallback = [pair for pair, one in found.items() if one.how != "exact"]
    assert fallback == [("fdbd", "nnguide")]
    one = found["fdbd", "nnguide"]
    assert (one.statistic, one.how) == (46, "one zero difference, normal approximation")
    assert one.pvalue == pytest.approx(0.015707, abs=5e-7)


@pytest.mark.parametrize(
    ("pair", "statistic", "pvalue", "reachable"),
    [
        (("ebo", "fdbd"), 60, 0.0301175117, (59, 61)),
        (("ebo", "gen"), 79, 0.1288800240, (73, 82)),
        (("gen", "knn"), 111, 0.6327285767, (107, 111)),
        (("knn", "nnguide"), 87, 0.2099275589, (84, 87)),
        (("mds", "relation"), 50, 0.0114727020, (49, 50)),
    ],
)
def test_reachable_statistics_of_table_4(pair, statistic, pvalue, reachable):
    found = check("table04_truth_tpr5", pair, printed_pvalues("table05_pvalues_tpr5")[pair])
    assert found.statistic == statistic
    assert found.pvalue == pytest.approx(pvalue, abs=5e-11)
    assert found.reachable == reachable


@pytest.mark.parametrize(
    ("truth", "pair", "statistic", "pvalue"),
    [
        ("table04_truth_tpr5", ("ebo", "klm"), 22, 2.555847e-04),
        ("table04_truth_tpr5", ("ebo", "mds"), 17, 9.87053e-05),
        ("table04_truth_tpr5", ("klm", "knn"), 12, 3.33786e-05),
        ("table04_truth_tpr5", ("klm", "mds"), 2, 1.4305e-06),
        ("table04_truth_tpr5", ("fdbd", "klm"), 0, 4.768e-07),
        ("table04_truth_tpr5", ("gen", "klm"), 0, 4.768e-07),
        ("table04_truth_tpr5", ("klm", "nnguide"), 0, 4.768e-07),
        ("table04_truth_tpr5", ("klm", "relation"), 0, 4.768e-07),
        ("table18_truth_f1", ("ebo", "klm"), 34, 0.0016727448),
        ("table18_truth_f1", ("fdbd", "mds"), 45, 0.0066494942),
        ("table18_truth_f1", ("klm", "mds"), 20, 0.0001769066),
        ("table18_truth_f1", ("mds", "nnguide"), 69, 0.0634193420),
        ("table14_truth_aupr", ("ebo", "klm"), 24, 0.0003619194),
    ],
)
def test_pairs_that_rounding_cannot_touch(truth, pair, statistic, pvalue):
    rows = column_table(truth)
    x, y = (values(rows, name) for name in pair)
    assert stats.reachable_statistics(x, y) == (statistic, statistic)
    assert stats.wilcoxon(x, y).statistic == statistic
    assert signed_rank_pvalue(statistic, 22) == pytest.approx(pvalue, rel=1e-4)


def test_f1_and_aupr_tables_match_where_their_columns_are_the_tested_ones():
    f1, aupr = printed_pvalues("table19_pvalues_f1"), printed_pvalues("table15_pvalues_aupr")
    impossible = {
        truth: {pair for pair, p in printed.items() if not check(truth, pair, p).explained}
        for truth, printed in (("table18_truth_f1", f1), ("table14_truth_aupr", aupr))
    }
    # The relation columns of Tables 14 and 18 are not what was tested.
    relation = {(name, "relation") for name in ("fdbd", "gen", "knn", "mds", "nnguide")}
    assert impossible["table18_truth_f1"] == relation
    mds = {("ebo", "mds"), ("gen", "mds"), ("knn", "mds"), ("mds", "nnguide")}
    assert impossible["table14_truth_aupr"] == relation | {("ebo", "relation")} | mds


def test_one_misprint_explains_the_mds_column_of_table_14():
    rows = column_table("table14_truth_aupr")
    row = next(r for r in rows if (r["exposure"], r["id"], r["ood"]) == ("with", "cifar100", "dtd"))
    assert row["mds"] == "0.9971"
    row["mds"] = "0.9995"
    printed = printed_pvalues("table15_pvalues_aupr")
    others = ("ebo", "fdbd", "gen", "klm", "knn", "nnguide")
    for other in others:
        p = printed.get((other, "mds"), printed.get(("mds", other)))
        assert stats.explain_printed(values(rows, other), values(rows, "mds"), p).explained, other


def test_first_six_columns_of_the_accuracy_table():
    printed = printed_pvalues("table23_pvalues_acc90")
    pairs = list(combinations(("ebo", "fdbd", "gen", "klm", "knn", "mds"), 2))
    assert [check("table22_truth_acc90", pair, printed[pair]).how for pair in pairs] == ["exact"] * 15


def test_the_lost_row_of_the_auroc_table():
    """Table 10 prints 21 of 22 rows; with a plausible one for the lost row all 21 pairs match."""
    rows = column_table("table10_truth_auroc")
    names = ("ebo", "fdbd", "gen", "klm", "knn", "mds", "nnguide")
    lost = dict(zip(names, (0.9710, 0.9990, 0.9995, 0.9930, 0.9950, 0.9975, 0.9996), strict=True))
    columns = {name: np.append(values(rows, name), lost[name]) for name in names}
    printed = printed_pvalues("table11_pvalues_auroc")
    assert len(printed) == 21
    assert all(stats.explain_printed(columns[a], columns[b], p).explained for (a, b), p in printed.items())


def test_two_anchors_beyond_exact_enumeration():
    """The fallback of one zero difference, as printed in Tables 5 and 23."""
    assert normal_signed_rank_pvalue(60, 21) == pytest.approx(0.0537247083, abs=5e-11)
    assert signed_rank_pvalue(53, 22) == pytest.approx(0.0156, abs=5e-5)

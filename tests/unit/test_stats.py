"""Statistics: forms of input, edge rules of the tests, and the messages of bad input."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from oodometer import stats
from oodometer.errors import OodometerError, OodometerWarning

RNG = np.random.default_rng(0)
STUDY = np.round(RNG.random((9, 4)) + np.array([0.6, 0.5, 0.3, 0.0]), 2)
NAMES = list("abcd")
TABLE = pd.DataFrame(STUDY, columns=NAMES)


# --- The forms of a table ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "table",
    [
        TABLE,
        STUDY.tolist(),
        STUDY.astype(object),
        TABLE.astype("Float64"),
        (100 * TABLE).round().astype("Int64"),
        stats.block_table(STUDY),
    ],
    ids=["frame", "list", "objects", "Float64", "Int64", "block table"],
)
def test_every_form_of_a_table_gives_the_same_test(table):
    found = stats.conover(table, higher_is_better=True)
    np.testing.assert_array_equal(found.pvalues, stats.conover(STUDY, higher_is_better=True).pvalues)
    assert (found.test, found.adjust, found.n_blocks) == ("Conover", "holm", 9)
    assert str(found) == "Conover, adjustment: holm; 4 methods, 9 blocks"


def test_a_tensor_is_a_table():
    torch = pytest.importorskip("torch")
    found = stats.friedman(torch.from_numpy(STUDY), higher_is_better=True)
    assert found.statistic == stats.friedman(STUDY, higher_is_better=True).statistic


@pytest.mark.parametrize("dtype", ["float64", "Float64", object])
def test_a_missing_cell_is_an_error_or_drops_its_block(dtype):
    gap = TABLE.astype(dtype)
    gap.iloc[2, 1] = pd.NA if dtype == "Float64" else np.nan
    with pytest.raises(OodometerError, match=r"block 2 lacks \['b'\] \(1 such blocks\).*missing=\"drop\""):
        stats.friedman(gap, higher_is_better=True)
    with pytest.warns(OodometerWarning, match=r"1 blocks with missing values left out: \[2\]"):
        found = stats.friedman(gap, higher_is_better=True, missing="drop")
    assert found.dropped == (2,)
    assert found.statistic == stats.friedman(TABLE.drop(index=2), higher_is_better=True).statistic


@pytest.mark.filterwarnings("ignore::oodometer.errors.OodometerWarning")
def test_too_few_blocks_after_dropping_say_so():
    gap = np.array([[1.0, np.nan], [np.nan, 2.0], [1.0, 2.0]])
    with pytest.raises(OodometerError, match="2 and 1 were found after 2 blocks with missing values were dropped"):
        stats.friedman(gap, higher_is_better=True, missing="drop")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (STUDY[:, :1], r"at least 2 methods \(columns\) and 2 blocks \(rows\) were needed, 1 and 9 were found"),
        (STUDY[:1], "4 and 1 were found"),
        (STUDY[:0], "4 and 0 were found"),
        (STUDY[0], r"two dimensions \(blocks × methods\) were needed, shape \(4,\)"),
        (STUDY + 1j, "complex numbers have no order"),
        (np.where(STUDY > 1.0, np.inf, STUDY), "finite values were needed, inf is in row"),
        ([["a", "b"]] * 3, "could not convert string to float"),
        ([[1, 2], [3]], "inhomogeneous"),
        ({"a": [1, 2]}, r"numbers \(blocks × methods\) were needed"),
        (None, r"shape \(\) was found"),
        (pd.DataFrame(STUDY, columns=list("aabc")), r"every method needs its own name, \['a', 'a', 'b', 'c'\]"),
    ],
)
def test_bad_tables(table, message):
    with pytest.raises(OodometerError, match=message):
        stats.friedman(table, higher_is_better=True)


@pytest.mark.parametrize("direction", [None, "max", 1, 0.0])
def test_the_direction_is_declared(direction):
    with pytest.raises(OodometerError, match=r"higher_is_better: True \(as for AUROC\) or False"):
        stats.friedman(STUDY, higher_is_better=direction)


def test_bad_names_and_options():
    with pytest.raises(OodometerError, match=r"names: one for each method \(4\) was needed, 3 were found"):
        stats.friedman(STUDY, higher_is_better=True, names=list("abc"))
    with pytest.raises(OodometerError, match="missing: one of 'error', 'drop' was needed, 'mean'"):
        stats.friedman(STUDY, higher_is_better=True, missing="mean")
    for adjust in ("bh", None):
        with pytest.raises(OodometerError, match="adjust: 'holm', 'bonferroni' or 'none' was needed"):
            stats.conover(STUDY, higher_is_better=True, adjust=adjust)
    with pytest.raises(OodometerError, match="test: one of 'wilcoxon', 'mannwhitney', 't', 'route', 'dcv-rood'"):
        stats.pairwise(STUDY, higher_is_better=True, test="u")
    with pytest.raises(OodometerError, match=r"two of \['a', 'b', 'c', 'd'\] were needed"):
        stats.conover(TABLE, higher_is_better=True)["a", "z"]


# --- Blocks that are not independent -----------------------------------------------------------------------------


def with_index(index):
    return pd.DataFrame(STUDY[: len(index)], columns=NAMES, index=index)


@pytest.mark.parametrize(
    "index",
    [
        pd.Index(["textures", "mnist", "textures"]),
        pd.MultiIndex.from_product([["r0", "r1"], ["aurc", "augrc"]], names=["run", "metric"]),
        pd.MultiIndex.from_product([["aurc", "augrc"], ["r0", "r1"]], names=["metric", "run"]),
        pd.Index(["aurc", "augrc"], name="metric"),
    ],
    ids=["a label twice", "run and metric", "metric and run", "metrics only"],
)
def test_correlated_blocks_are_refused(index):
    with pytest.raises(OodometerError, match="independent blocks were needed, 2 blocks measure the same data"):
        stats.friedman(with_index(index), higher_is_better=True)


def test_correlated_blocks_become_one_by_their_mean_ranks():
    index = pd.MultiIndex.from_product([["r0", "r1", "r2"], ["aurc", "augrc"]], names=["run", "metric"])
    frame = with_index(index)
    with pytest.warns(OodometerWarning, match="6 correlated blocks became 3, one for each data set"):
        table = stats.block_table(frame, correlated="mean-rank", higher_is_better=False)
    assert table.blocks == ("r0", "r1", "r2")
    expected = frame.rank(axis=1).groupby(level="run").mean().to_numpy()
    np.testing.assert_allclose(table.values, expected)
    with pytest.raises(OodometerError, match="say higher_is_better=True or False"):
        stats.block_table(frame, correlated="mean-rank")


def test_the_same_numbers_twice_are_suspected():
    with pytest.warns(OodometerWarning, match="blocks 0 and 9 hold the same numbers"):
        stats.friedman(np.vstack([STUDY, STUDY[:1]]), higher_is_better=True)


def test_few_blocks_and_hopeless_adjustments_warn():
    with pytest.warns(OodometerWarning, match="only 4 blocks"):
        stats.friedman(STUDY[:4], higher_is_better=True)
    with pytest.warns(OodometerWarning, match=r"6 blocks and 4 methods: no pair can reach p ≤ .05 .*: 0.19\)"):
        found = stats.pairwise(STUDY[:6], higher_is_better=True)
    assert found.pvalues[np.triu_indices(4, 1)].min() >= 6 * 2.0**-5


# --- Ties and agreement without end ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::oodometer.errors.OodometerWarning")
@pytest.mark.parametrize("k", [2, 3])
def test_blocks_that_are_one_tie_have_no_difference(k):
    table = np.ones((6, k))
    found = stats.friedman(table, higher_is_better=True)
    assert (found.statistic, found.pvalue, found.f_statistic, found.f_pvalue, found.tie_factor) == (0, 1, 0, 1, 0)
    assert (found.kendall_w, found.omnibus_pvalue) == (0, 1)
    for test in (stats.conover, stats.nemenyi, stats.siegel, stats.pairwise):
        np.testing.assert_array_equal(test(table, higher_is_better=True).pvalues, np.ones((k, k)))
    assert len(stats.cliques(stats.conover(table, higher_is_better=True))) == 1


def test_blocks_that_are_one_tie_warn():
    with pytest.warns(OodometerWarning, match="all methods tie in every block: p = 1"):
        stats.friedman(np.ones((6, 3)), higher_is_better=True)


@pytest.mark.filterwarnings("ignore::oodometer.errors.OodometerWarning")
def test_perfect_agreement_has_an_infinite_f():
    found = stats.friedman(np.tile([1.0, 2.0, 3.0], (6, 1)), higher_is_better=True)
    assert (found.statistic, found.kendall_w) == (12, 1)
    assert (found.f_statistic, found.f_pvalue) == (np.inf, 0)
    assert found.average_ranks.tolist() == [3, 2, 1]


def test_two_methods_are_decided_by_wilcoxon():
    with pytest.warns(OodometerWarning, match="Wilcoxon's signed-rank test decides"):
        found = stats.friedman(STUDY[:, :2], higher_is_better=True)
    assert found.omnibus_test == "Wilcoxon signed-rank"
    assert found.omnibus_pvalue == stats.wilcoxon(STUDY[:, 0], STUDY[:, 1]).pvalue


# --- Cliques from any matrix -------------------------------------------------------------------------------------

PAIRS = stats.conover(TABLE, higher_is_better=True)
RANKS = PAIRS.average_ranks
MATRIX = PAIRS.to_pandas()


@pytest.mark.parametrize(
    ("pvalues", "ranks"),
    [
        (MATRIX, RANKS),
        (MATRIX, RANKS.tolist()),
        (MATRIX, pd.Series(RANKS)),
        (MATRIX, pd.Series(RANKS, index=NAMES).sort_values()),
        (MATRIX, dict(zip(NAMES, RANKS, strict=True))),
        (MATRIX, stats.friedman(TABLE, higher_is_better=True)),
        (MATRIX, stats.friedman(STUDY, higher_is_better=True)),
        (MATRIX.iloc[::-1, ::-1], pd.Series(RANKS, index=NAMES)),
        (PAIRS.pvalues, pd.Series(RANKS, index=NAMES)),
        (PAIRS.pvalues, dict(zip(NAMES, RANKS, strict=True))),
        (PAIRS.pvalues, stats.friedman(TABLE, higher_is_better=True)),
        (PAIRS.pvalues, stats.friedman(TABLE, higher_is_better=True).to_pandas()),
        (PAIRS, None),
        (PAIRS, RANKS),
    ],
)
def test_matrix_and_ranks_in_every_form(pvalues, ranks):
    found = stats.cliques(pvalues, alpha=0.05, ranks=ranks)
    assert [c.members for c in found] == [c.members for c in stats.cliques(PAIRS)]
    assert found.top.best_rank == RANKS.min()
    assert len(found) > 1


@pytest.mark.parametrize("ranks", [RANKS, RANKS.tolist(), pd.Series(RANKS), pd.Series(RANKS)[[3, 1, 0, 2]]])
def test_without_names_methods_are_numbered(ranks):
    found = stats.cliques(PAIRS.pvalues, alpha=0.05, ranks=ranks)
    expected = [tuple(NAMES.index(name) for name in clique) for clique in stats.cliques(PAIRS)]
    assert [c.members for c in found] == expected


def test_an_omnibus_test_that_does_not_reject_leaves_one_clique():
    found = stats.cliques(MATRIX, alpha=0.05, ranks=RANKS, omnibus=0.2)
    assert not found.drawn
    assert [set(c) for c in found] == [set(NAMES)]
    assert str(found) == "no difference between the methods (omnibus p = 0.2): one clique of all"
    assert stats.cliques(MATRIX, ranks=RANKS, omnibus=0.04).drawn
    assert stats.cliques(MATRIX, ranks=RANKS).omnibus_pvalue is None


def test_missing_pvalues_separate_and_alpha_itself_joins():
    matrix = np.array([[np.nan, 0.05, np.nan], [0.05, np.nan, 0.0499], [np.nan, 0.0499, np.nan]])
    found = stats.cliques(matrix, alpha=0.05, ranks=[1, 2, 3])
    assert [c.members for c in found] == [(0, 1), (2,)]


def test_rounding_in_the_last_bits_is_forgiven():
    matrix = np.array([[1.0, 0.05 * (1 + 1e-12), 1 + 1e-12], [0.05, 1.0, 0.2], [1.0, 0.2, 1.0]])
    assert [c.members for c in stats.cliques(matrix, ranks=[1, 2, 3])] == [(0, 1, 2)]


@pytest.mark.parametrize(
    ("pvalues", "ranks", "message"),
    [
        (PAIRS.pvalues, None, "ranks: average ranks .* are needed"),
        (PAIRS.pvalues, RANKS[:3], "ranks: 4 finite average ranks were needed"),
        (PAIRS.pvalues, [1, 2, 3, np.nan], "ranks: 4 finite average ranks were needed"),
        (PAIRS.pvalues, NAMES, "ranks: numbers were needed"),
        (PAIRS.pvalues, RANKS[:, None], r"shape \(4, 1\) was found"),
        (PAIRS.pvalues, pd.Series(RANKS, index=list("aabc")), "names: 4 different names were needed"),
        (MATRIX, dict(zip("abcx", RANKS, strict=True)), r"\['d'\] have none"),
        (MATRIX.iloc[::-1], RANKS, "rows and columns with the same names in the same order"),
        (PAIRS.pvalues[:3], RANKS, r"a square matrix .* \(3, 4\) was found"),
        (np.triu(PAIRS.pvalues), RANKS, "a symmetric matrix of numbers from 0 to 1"),
        (PAIRS.pvalues + 0.5, RANKS, "a symmetric matrix of numbers from 0 to 1"),
        ([["a"]], [1], "pvalues: numbers were needed"),
    ],
)
def test_bad_matrices_and_ranks(pvalues, ranks, message):
    with pytest.raises(OodometerError, match=message):
        stats.cliques(pvalues, alpha=0.05, ranks=ranks)


@pytest.mark.parametrize("alpha", [0, 1, -0.1, float("nan"), "0.05", None])
def test_bad_levels(alpha):
    with pytest.raises(OodometerError, match="alpha: a level between 0 and 1 was needed"):
        stats.cliques(PAIRS, alpha=alpha)
    with pytest.raises(OodometerError, match="alpha: a level between 0 and 1 was needed"):
        stats.fidelity_rates(np.eye(2), np.zeros((2, 2)), n_runs=1, alpha=alpha)


def test_cliques_print_their_layers():
    pvalues = [[1, 0.3, 0.01], [0.3, 1, 0.3], [0.01, 0.3, 1]]
    found = stats.cliques(pvalues, ranks={"msp": 1.5, "knn": 2.0, "vim": 2.5})
    assert str(found) == "layers at α = 0.05: 0: {msp, knn}; unlayered: vim"
    table = found.to_pandas().set_index("method")
    assert table["layer"].tolist() == [0, 0, pd.NA]
    assert table["cliques"].tolist() == [[0], [0, 1], [1]]


# --- Two samples -------------------------------------------------------------------------------------------------


def test_wilcoxon_by_hand():
    """d = 1, 2, 3, −4: W⁻ = 4; of 16 signs 7 have a rank sum up to 4, so p = 2 · 7/16."""
    found = stats.wilcoxon([2, 4, 6, 1], [1, 2, 3, 5])
    assert (found.statistic, found.pvalue, found.n, found.n_zero) == (4, 0.875, 4, 0)
    assert found.rank_biserial == pytest.approx(0.2)
    assert found.method == "exact, zeros: wilcox"


def test_wilcoxon_with_ties_and_zeros_by_hand():
    """|d| = 1, 1, 2 without the zero, ranks 1.5, 1.5, 3, all positive: only one of 8 signs has W⁻ = 0."""
    found = stats.wilcoxon([1, 1, 2, 0], [0, 0, 0, 0])
    assert (found.statistic, found.pvalue, found.n, found.n_zero) == (0, 0.25, 3, 1)
    # pratt: the zero has rank 1, the others 2.5, 2.5, 4
    assert stats.wilcoxon([1, 1, -2, 0], [0, 0, 0, 0], zero_method="pratt").statistic == 4


def test_one_zero_among_many_pairs_means_the_normal_approximation():
    """As in DCV-ROOD's Table 5: with 22 rows and one zero the exact distribution is not used."""
    d = np.arange(22.0)
    d[1:10] *= -1  # ranks 1 … 9 of 21
    found = stats.wilcoxon(d, np.zeros(22))
    assert (found.statistic, found.n, found.method) == (45, 21, "normal approximation, zeros: wilcox")
    z = (45 - 21 * 22 / 4) / math.sqrt(21 * 22 * 43 / 24)
    assert found.pvalue == pytest.approx(math.erfc(-z / math.sqrt(2)), rel=1e-12)


@pytest.mark.parametrize("test", [stats.wilcoxon, stats.mann_whitney, stats.paired_t])
def test_equal_samples_have_p_1(test):
    found = test([1.0, 2.0, 2.0], [1.0, 2.0, 2.0])
    assert found.pvalue == 1
    assert (found.mean_difference, found.rank_biserial, found.cliffs_delta) == (0, 0, 0)


def test_constant_differences_of_the_t_test():
    assert stats.paired_t([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]).pvalue == 0
    assert stats.paired_t([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]).statistic == -np.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stats.wilcoxon([1, 2], [1]), "equal lengths were needed, 2 and 1 were found"),
        (lambda: stats.wilcoxon([], []), r"at least one finite number in one dimension was needed, shape \(0,\)"),
        (lambda: stats.wilcoxon([1, np.nan], [1, 2]), "NaN or infinity was found"),
        (lambda: stats.wilcoxon(["a"], [1]), "first sample: numbers were needed"),
        (lambda: stats.wilcoxon([1], [2], zero_method="drop"), "zero_method: one of 'wilcox', 'pratt', 'zsplit'"),
        (lambda: stats.wilcoxon([1], [2], method="approx"), "method: one of 'auto', 'exact', 'normal'"),
        (lambda: stats.mann_whitney([1, 1], [1, 2], method="exact"), "needs values without ties"),
        (lambda: stats.paired_t([1], [2]), "at least 2 pairs were needed, 1 was found"),
        (lambda: stats.holm([0.1, np.nan]), "NaN has no place"),
        (lambda: stats.holm([0.1, 1.1]), "numbers from 0 to 1"),
        (lambda: stats.bayesian_signed_rank([1], [2], rope=-1, seed=0), "rope ≥ 0, prior > 0 and draws ≥ 1"),
        (lambda: stats.variance_split([[1, 2]]), r"at least 2 of each were needed, shape \(1, 2\)"),
        (lambda: stats.variance_split("ab"), "variance_split: numbers were needed"),
        (lambda: stats.benchmark_truth([[1], [2, 3]]), "benchmark_truth: numbers were needed"),
        (lambda: stats.critical_difference(1, 5), "at least 2 methods, 1 block"),
        (lambda: stats.bootstrap_ranks(STUDY, higher_is_better=True, seed=0, n=0), "n ≥ 1 were needed"),
        (lambda: stats.fidelity_rates([["a"]], [[1]], n_runs=1), "pvalues: numbers were needed"),
    ],
)
def test_bad_samples(call, message):
    with pytest.raises(OodometerError, match=message):
        call()


def test_the_route_of_dcv_rood_names_what_it_did():
    normal = scipy.stats.norm.ppf((np.arange(30) + 0.5) / 30)
    found = stats.normality_route(normal, normal[::-1] / 2 + 0.1)
    assert found.test == "paired t"
    assert found.method.endswith("both samples normal by Shapiro–Wilk at 0.05")
    skewed = np.exp(3 * normal)
    assert stats.normality_route(skewed, normal).test == "Wilcoxon signed-rank"


def test_equal_seeds_give_equal_draws():
    one, other, third = (
        stats.bayesian_signed_rank(STUDY[:, 0], STUDY[:, 1], rope=0.01, seed=s, draws=500) for s in (0, 0, 1)
    )
    assert one == other != third
    ranks = [stats.bootstrap_ranks(STUDY, higher_is_better=True, seed=s, n=200) for s in (0, 0)]
    np.testing.assert_array_equal(ranks[0].low, ranks[1].low)


def test_an_ordinary_study_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stats.conover(STUDY, higher_is_better=True)

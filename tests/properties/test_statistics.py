"""Statistics on random studies with ties, against SciPy, scikit-posthocs, networkx and definitions written as loops."""

from __future__ import annotations

import math
from itertools import combinations, permutations, product

import networkx
import numpy as np
import pandas as pd
import pytest
import scikit_posthocs
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from oodometer import stats
from oodometer.stats.cliques import bron_kerbosch, contiguous_runs, maximal_cliques, neighbourhoods_contiguous

pytestmark = pytest.mark.filterwarnings("ignore::oodometer.errors.OodometerWarning")


def random_study(seed):
    """Blocks × methods on a grid so coarse that most blocks hold ties; methods differ more in some studies."""
    rng = np.random.default_rng(seed)
    b, k = int(rng.integers(2, 25)), int(rng.integers(3, 9))
    levels = int(rng.integers(2, 12))
    shift = rng.integers(0, levels, k) * rng.integers(0, 2)
    return (rng.integers(0, levels, (b, k)) + shift) / 8


STUDIES = [random_study(seed) for seed in range(200)]


def test_the_studies_are_worth_comparing():
    ties = [any(len(set(row)) < len(row) for row in study) for study in STUDIES]
    rejected = [stats.friedman(study, higher_is_better=True).rejects() for study in STUDIES]
    assert sum(ties) > 190
    assert 60 < sum(rejected) < 140


# --- Ranks and the omnibus test ----------------------------------------------------------------------------------


def test_average_ranks_equal_scipys_in_both_directions():
    for study in STUDIES:
        up = stats.friedman(study, higher_is_better=False).average_ranks
        down = stats.friedman(study, higher_is_better=True).average_ranks
        np.testing.assert_allclose(up, scipy.stats.rankdata(study, axis=1).mean(axis=0), rtol=1e-14)
        np.testing.assert_allclose(down, scipy.stats.rankdata(-study, axis=1).mean(axis=0), rtol=1e-14)


def test_friedman_equals_scipys():
    for study in STUDIES:
        found = stats.friedman(study, higher_is_better=True)
        expected = scipy.stats.friedmanchisquare(*study.T)
        assert found.statistic == pytest.approx(expected.statistic, rel=1e-11, abs=1e-11)
        assert found.pvalue == pytest.approx(expected.pvalue, rel=1e-11)


def test_iman_davenport_kendall_and_the_tie_factor_equal_their_definitions():
    for study in STUDIES:
        found = stats.friedman(study, higher_is_better=True)
        b, k = study.shape
        ties = sum(t**3 - t for row in study for t in np.unique(row, return_counts=True)[1])
        assert found.tie_factor == pytest.approx(1 - ties / (b * k * (k * k - 1)), abs=1e-14)
        sums = b * found.average_ranks
        plain = 12 / (b * k * (k + 1)) * (sums**2).sum() - 3 * b * (k + 1)
        assert found.uncorrected == pytest.approx(plain, abs=1e-10)
        assert found.kendall_w == pytest.approx(plain / found.tie_factor / (b * (k - 1)), abs=1e-12)
        f = (b - 1) * found.statistic / (b * (k - 1) - found.statistic) if found.kendall_w < 1 - 1e-12 else math.inf
        assert found.f_statistic == pytest.approx(f, rel=1e-8, abs=1e-10)
        assert found.f_pvalue == pytest.approx(scipy.stats.f.sf(f, k - 1, (k - 1) * (b - 1)), rel=1e-8)


# --- Pairs -------------------------------------------------------------------------------------------------------

POSTHOCS = {
    "conover": (stats.conover, scikit_posthocs.posthoc_conover_friedman),
    "siegel": (stats.siegel, scikit_posthocs.posthoc_siegel_friedman),
}


@pytest.mark.parametrize("adjust", ["none", "holm", "bonferroni"])
@pytest.mark.parametrize("name", POSTHOCS)
def test_rank_tests_equal_scikit_posthocs(name, adjust):
    ours, theirs = POSTHOCS[name]
    for study in STUDIES if adjust == "none" else STUDIES[:30]:  # its adjusted form takes a quarter of a second
        expected = theirs(pd.DataFrame(study), p_adjust=None if adjust == "none" else adjust).to_numpy()
        assert np.isfinite(expected).all()
        found = ours(study, higher_is_better=True, adjust=adjust)
        np.testing.assert_allclose(found.pvalues, expected, rtol=1e-9, atol=1e-15)
        assert found.adjust == adjust


def test_nemenyi_equals_scikit_posthocs():
    for study in STUDIES:
        expected = scikit_posthocs.posthoc_nemenyi_friedman(pd.DataFrame(study)).to_numpy()
        found = stats.nemenyi(study, higher_is_better=True)
        np.testing.assert_allclose(found.pvalues, expected, rtol=1e-9, atol=1e-13)


def test_the_critical_difference_is_where_nemenyi_reaches_alpha():
    """Two methods exactly CD apart have p = α: the studentized range at √2·CD/SE."""
    for k, b, alpha in product((2, 3, 10), (5, 22), (0.01, 0.05)):
        q = stats.critical_difference(k, b, alpha=alpha) / math.sqrt(k * (k + 1) / (6 * b)) * math.sqrt(2)
        assert scipy.stats.studentized_range.sf(q, k, np.inf) == pytest.approx(alpha, rel=1e-6)
    # Demšar 2006, Table 5(a): q.05 for 2 … 10 classifiers, some of them not rounded in the last digit
    published = [1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164]
    found = [stats.critical_difference(k, 6) / math.sqrt(k * (k + 1) / 36) for k in range(2, 11)]
    np.testing.assert_allclose(found, published, rtol=0, atol=8e-4)


def test_conover_equals_its_formula_written_as_loops():
    for study in STUDIES[:60]:
        b, k = study.shape
        ranks = scipy.stats.rankdata(-study, axis=1)
        sums, squares = ranks.sum(axis=0), (ranks**2).sum()
        error = math.sqrt(max(2 * (b * squares - (sums**2).sum()) / ((b - 1) * (k - 1)), 0))
        if error < 1e-6:
            continue
        found = stats.conover(study, higher_is_better=True, adjust="none")
        for i, j in combinations(range(k), 2):
            t = abs(sums[i] - sums[j]) / error
            assert found[i, j] == pytest.approx(2 * scipy.stats.t.sf(t, (b - 1) * (k - 1)), rel=1e-9)


def test_blocks_that_all_agree_separate_beyond_doubt():
    for k in range(2, 6):
        for row in product(range(k), repeat=k):
            found = stats.conover(np.tile(np.array(row, float), (6, 1)), higher_is_better=True)
            expected = [[float(a == b) for b in row] for a in row]
            np.testing.assert_array_equal(found.pvalues, expected)


def naive_holm(pvalues):
    """Take the smallest, multiply by how many are left, never fall below the last one."""
    left, adjusted, last = list(range(len(pvalues))), [0.0] * len(pvalues), 0.0
    while left:
        smallest = min(left, key=lambda i: pvalues[i])
        last = max(last, min(1.0, len(left) * pvalues[smallest]))
        adjusted[smallest] = last
        left.remove(smallest)
    return adjusted


@given(st.lists(st.one_of(st.sampled_from([0.0, 0.01, 0.02, 0.5, 1.0]), st.floats(0, 1)), min_size=1, max_size=30))
def test_adjustments_equal_their_loops(pvalues):
    np.testing.assert_allclose(stats.holm(pvalues), naive_holm(pvalues), rtol=1e-15)
    np.testing.assert_allclose(stats.bonferroni(pvalues), [min(1, len(pvalues) * p) for p in pvalues], rtol=1e-15)


@pytest.mark.parametrize("test", ["wilcoxon", "mannwhitney", "t"])
def test_pairwise_tests_are_their_pairs_adjusted_together(test):
    one = {"wilcoxon": stats.wilcoxon, "mannwhitney": stats.mann_whitney, "t": stats.paired_t}[test]
    for study in STUDIES[:40]:
        pairs = list(combinations(range(study.shape[1]), 2))
        found = stats.pairwise(study, higher_is_better=True, test=test)
        raw = [one(study[:, i], study[:, j]).pvalue for i, j in pairs]
        np.testing.assert_allclose([found.unadjusted[pair] for pair in pairs], raw, rtol=1e-14)
        np.testing.assert_allclose([found[pair] for pair in pairs], naive_holm(raw), rtol=1e-14)


# --- Two samples -------------------------------------------------------------------------------------------------

SAMPLES = [(study[:, 0], study[:, 1]) for study in STUDIES]


@pytest.mark.parametrize("zero_method", ["wilcox", "pratt", "zsplit"])
def test_wilcoxon_equals_scipys(zero_method):
    for x, y in SAMPLES:
        found = stats.wilcoxon(x, y, zero_method=zero_method)
        if (x == y).all():
            assert found.pvalue == 1
            continue
        # From 11 to 13 pairs SciPy enumerates thousands of signs: the next test has some of these.
        if not 10 < len(x) <= 13:
            expected = scipy.stats.wilcoxon(x, y, zero_method=zero_method)
            assert found.statistic == expected.statistic
            assert found.pvalue == pytest.approx(expected.pvalue, rel=1e-12)
        normal = stats.wilcoxon(x, y, zero_method=zero_method, method="normal").pvalue
        approximate = scipy.stats.wilcoxon(x, y, zero_method=zero_method, method="asymptotic").pvalue
        assert normal == pytest.approx(approximate, rel=1e-12)


@pytest.mark.parametrize("n", [1, 2, 5, 13, 14, 30, 50, 51, 80])
def test_wilcoxon_without_ties_and_with_one_zero_equals_scipys(n):
    """Up to 50 differences are counted exactly; one zero difference turns that off beyond 13."""
    for seed in range(2):
        rng = np.random.default_rng(seed)
        x, y = rng.random(n), rng.random(n)
        zero = np.where(np.arange(n) == 0, x, y)
        for other in (y, zero) if n > 1 else (y,):
            found = stats.wilcoxon(x, other)
            assert found.pvalue == pytest.approx(scipy.stats.wilcoxon(x, other).pvalue, rel=1e-12)
            assert found.method.startswith("exact") == (n <= (13 if other is zero else 50))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-4, 4), min_size=1, max_size=9),
    st.sampled_from(["wilcox", "pratt", "zsplit"]),
)
def test_the_exact_signed_rank_test_counts_all_signs(differences, zero_method):
    d = np.array(differences, float)
    kept = d[d != 0] if zero_method == "wilcox" else d
    ranks = scipy.stats.rankdata(np.abs(kept))[kept != 0]
    total = ranks.sum()
    observed = min(ranks[kept[kept != 0] > 0].sum(), ranks[kept[kept != 0] < 0].sum())
    sums = [ranks[np.array(signs, bool)].sum() for signs in product((0, 1), repeat=len(ranks))]
    as_extreme = np.mean([min(s, total - s) <= observed + 1e-9 for s in sums])
    found = stats.wilcoxon(d, np.zeros(len(d)), zero_method=zero_method, method="exact")
    assert found.pvalue == pytest.approx(min(1.0, as_extreme), rel=1e-12)


def test_mann_whitney_equals_scipys():
    rng = np.random.default_rng(0)
    for x, y in SAMPLES:
        m = int(rng.integers(1, len(y) + 1))
        for other in (y[:m], y[:m] + rng.random(m) / 1000):
            if len(set(x) | set(other)) == 1:
                assert stats.mann_whitney(x, other).pvalue == 1
                continue
            expected = scipy.stats.mannwhitneyu(x, other)
            found = stats.mann_whitney(x, other)
            assert found.statistic == expected.statistic
            assert found.pvalue == pytest.approx(expected.pvalue, rel=1e-11)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 4), (2, 3), (3, 3), (4, 3), (9, 9), (8, 30)])
def test_the_exact_u_test_equals_scipys(n, m):
    for seed in range(5):
        values = np.random.default_rng(seed).permutation(n + m).astype(float)
        x, y = values[:n], values[n:]
        expected = scipy.stats.mannwhitneyu(x, y, method="exact").pvalue
        assert stats.mann_whitney(x, y, method="exact").pvalue == pytest.approx(expected, rel=1e-12)


def test_paired_t_equals_scipys():
    for x, y in SAMPLES:
        if np.ptp(x - y) == 0:
            assert stats.paired_t(x, y).pvalue == float(x[0] == y[0])
            continue
        expected = scipy.stats.ttest_rel(x, y)
        found = stats.paired_t(x, y)
        assert found.statistic == pytest.approx(expected.statistic, rel=1e-11, abs=1e-12)
        assert found.pvalue == pytest.approx(expected.pvalue, rel=1e-10)


def test_effect_sizes_equal_their_definitions():
    for x, y in SAMPLES:
        signs = np.sign(x[:, None] - y[None, :])
        assert stats.cliffs_delta(x, y) == pytest.approx(signs.mean(), abs=1e-14)
        d = (x - y)[x != y]
        ranks = scipy.stats.rankdata(np.abs(d))
        expected = (ranks * np.sign(d)).sum() / ranks.sum() if len(d) else 0.0
        found = stats.wilcoxon(x, y)
        assert found.rank_biserial == pytest.approx(expected, abs=1e-14)
        assert found.mean_difference == pytest.approx((x - y).mean(), abs=1e-14)
        assert found.cliffs_delta == stats.cliffs_delta(x, y)


# --- Cliques -----------------------------------------------------------------------------------------------------


def naive_cliques(pvalues, alpha, ranks):
    """Every set of methods of which no pair differs and that no other such set contains, best first."""
    k = len(ranks)

    def alike(members):
        return all(pvalues[i, j] >= alpha for i, j in combinations(members, 2))

    groups = [set(m) for size in range(1, k + 1) for m in combinations(range(k), size) if alike(m)]
    largest = [group for group in groups if not any(group < other for other in groups)]
    key = {id(g): (min(ranks[i] for i in g), math.fsum(ranks[i] for i in g) / len(g)) for g in largest}
    return sorted(largest, key=lambda g: (*key[id(g)], -len(g), sorted(map(str, g))))


def naive_layers(ordered):
    layers, left = [], list(ordered)
    while left:
        layers.append(left[0])
        left = [group for group in left if not group & set().union(*layers)]
    return layers


def check_cliques(pvalues, ranks, alpha=0.05):
    found = stats.cliques(pvalues, alpha=alpha, ranks=ranks)
    expected = naive_cliques(pvalues, alpha, ranks)
    assert [set(clique) for clique in found] == expected
    assert [set(layer) for layer in found.layers] == naive_layers(expected)
    assert set(found.unlayered) == set(range(len(ranks))) - set().union(*map(set, found.layers))
    return found


def as_sets(groups):
    return {frozenset(group) for group in groups}


@pytest.mark.parametrize("adjust", ["none", "holm"])
@pytest.mark.parametrize("test", ["conover", "nemenyi", "wilcoxon"])
def test_cliques_of_the_studies_equal_networkx_and_naive_layers(test, adjust):
    for study in STUDIES[::4] if test == "nemenyi" else STUDIES:
        if test == "wilcoxon":
            pairs = stats.pairwise(study, higher_is_better=True, adjust=adjust)
        elif test == "nemenyi":
            pairs = stats.nemenyi(study, higher_is_better=True)
        else:
            pairs = stats.conover(study, higher_is_better=True, adjust=adjust)
        found = check_cliques(pairs.pvalues, pairs.average_ranks)
        graph = networkx.from_numpy_array((pairs.pvalues >= 0.05) & ~np.eye(len(pairs.names), dtype=bool))
        assert as_sets(found) == as_sets(networkx.find_cliques(graph))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 11), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_cliques_of_random_matrices_equal_networkx(k, density, seed):
    """No order in the p-values, some of them missing: Bron and Kerbosch's search, mostly."""
    rng = np.random.default_rng(seed)
    joined = rng.choice([0.05, 0.051, 0.6, 1.0], (k, k))
    upper = np.triu(np.where(rng.random((k, k)) < density, joined, rng.choice([0.0, 0.0499, np.nan], (k, k))), 1)
    pvalues = upper + upper.T
    ranks = rng.integers(2, 2 * k + 1, k) / 2
    found = check_cliques(pvalues, ranks) if k <= 8 else stats.cliques(pvalues, alpha=0.05, ranks=ranks)
    graph = networkx.from_numpy_array(pvalues >= 0.05)
    graph.remove_edges_from(networkx.selfloop_edges(graph))
    assert as_sets(found) == as_sets(networkx.find_cliques(graph))


def test_the_scan_of_runs_equals_the_search_on_every_small_graph():
    """All graphs of up to six methods; where the scan applies, both find the same cliques."""
    scanned = 0
    for n in range(1, 7):
        pairs = list(combinations(range(n), 2))
        for edges in product((False, True), repeat=len(pairs)):
            graph = np.eye(n, dtype=bool)
            for (i, j), edge in zip(pairs, edges, strict=True):
                graph[i, j] = graph[j, i] = edge
            if neighbourhoods_contiguous(graph):
                scanned += 1
                assert as_sets(contiguous_runs(graph)) == as_sets(bron_kerbosch(graph))
    assert scanned == sum(math.comb(2 * n, n) // (n + 1) for n in range(1, 7))  # Catalan: indifference graphs


@pytest.mark.parametrize("test", [stats.conover, stats.siegel, stats.nemenyi])
def test_tests_with_one_standard_error_always_take_the_scan(test):
    for study in STUDIES[:50]:
        found = test(study, higher_is_better=True)
        order = np.argsort(found.average_ranks, kind="stable")
        for alpha in (0.01, 0.05, 0.3):
            assert neighbourhoods_contiguous((found.pvalues >= alpha)[np.ix_(order, order)])


def test_forty_methods_without_any_difference_or_agreement():
    """The number of cliques grows to 3^(k/3) in the worst case; an ordinary study of forty methods is instant."""
    alike, apart = np.ones((40, 40), bool), np.eye(40, dtype=bool)
    assert maximal_cliques(alike, np.arange(40.0)) == [tuple(range(40))]
    assert maximal_cliques(apart, np.arange(40.0)) == [(i,) for i in range(40)]
    threes = np.kron(np.eye(4, dtype=int), np.ones((3, 3), dtype=int)) == 0
    assert as_sets(bron_kerbosch(threes)) == as_sets(product(*(range(3 * i, 3 * i + 3) for i in range(4))))


# --- Invariance --------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 199), st.randoms(use_true_random=False))
def test_the_order_of_blocks_and_methods_does_not_matter(place, random):
    study = STUDIES[place]
    b, k = study.shape
    rows, columns = random.sample(range(b), b), random.sample(range(k), k)
    names = [f"m{j}" for j in range(k)]
    table = pd.DataFrame(study, columns=names)
    moved = table.iloc[rows, columns]
    for test in (stats.conover, stats.siegel, stats.pairwise):
        one, other = test(table, higher_is_better=True), test(moved, higher_is_better=True)
        assert other.omnibus.statistic == one.omnibus.statistic
        for pair in combinations(names, 2):
            assert other[pair] == pytest.approx(one[pair], rel=1e-12)
        here, there = stats.cliques(one), stats.cliques(other)
        assert [set(c) for c in here] == [set(c) for c in there]
        assert [set(c) for c in here.layers] == [set(c) for c in there.layers]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 199))
def test_rank_tests_see_the_order_only(place):
    """Turning the values and the direction, or any increasing map of a block, changes nothing."""
    study = STUDIES[place]
    one = stats.conover(study, higher_is_better=True)
    stretched = np.exp(study) + np.arange(len(study))[:, None]
    for other in (stats.conover(-study, higher_is_better=False), stats.conover(stretched, higher_is_better=True)):
        np.testing.assert_array_equal(other.pvalues, one.pvalues)
        np.testing.assert_array_equal(other.average_ranks, one.average_ranks)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 199))
def test_swapping_two_samples_turns_the_effects_only(place):
    x, y = SAMPLES[place]
    for test in (stats.wilcoxon, stats.mann_whitney, stats.paired_t):
        one, other = test(x, y), test(y, x)
        assert one.pvalue == pytest.approx(other.pvalue, rel=1e-12)
        assert one.mean_difference == pytest.approx(-other.mean_difference, abs=1e-15)
        assert one.rank_biserial == pytest.approx(-other.rank_biserial, abs=1e-15)
        assert one.cliffs_delta == pytest.approx(-other.cliffs_delta, abs=1e-15)


# --- Extras ------------------------------------------------------------------------------------------------------


def naive_bayes(x, y, rope, weights):
    """Σ_ij w_i w_j [z_i + z_j above 2·rope | within | below], for one draw of the weights."""
    z = [0.0, *(x - y)]
    mass = [0.0, 0.0, 0.0]
    for i, j in product(range(len(z)), repeat=2):
        region = 0 if z[i] + z[j] > 2 * rope else 2 if z[i] + z[j] < -2 * rope else 1
        mass[region] += weights[i] * weights[j]
    return mass


@pytest.mark.parametrize("rope", [0.0, 0.1, 0.5])
def test_the_bayesian_test_equals_its_loop_and_its_expectation(rope):
    rng = np.random.default_rng(3)
    x, y = rng.random(6), rng.random(6)
    found = stats.bayesian_signed_rank(x, y, rope=rope, seed=1, draws=4000)
    weights = np.random.default_rng(2).dirichlet([0.6, *np.ones(6)], size=4000)
    masses = np.array([naive_bayes(x, y, rope, w) for w in weights])
    wins = np.bincount(masses.argmax(axis=1), minlength=3) / 4000
    np.testing.assert_allclose([found.first, found.equivalent, found.second], wins, atol=0.03)
    np.testing.assert_allclose(found.expected, masses.mean(axis=0), atol=0.01)
    assert sum(found.expected) == pytest.approx(1, abs=1e-12)
    turned = stats.bayesian_signed_rank(y, x, rope=rope, seed=1, draws=4000)
    np.testing.assert_allclose(turned.expected, found.expected[::-1], atol=1e-12)
    assert stats.bayesian_signed_rank(x, y, rope=rope, seed=1, draws=4000) == found


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 7), st.integers(2, 7), st.floats(0, 3), st.floats(0, 3), st.integers(0, 2**32 - 1))
def test_the_variance_split_solves_the_expected_mean_squares(m, n, seed_sd, sample_sd, seed):
    """E[MS_seed] = σ² + n σ²_seed, E[MS_sample] = σ² + m σ²_sample, by the sums of squares of a two-way table."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, seed_sd, (m, 1)) + rng.normal(0, sample_sd, (1, n)) + rng.normal(0, 1, (m, n))
    grand, by_seed, by_sample = x.mean(), x.mean(axis=1), x.mean(axis=0)
    ms_seed = n * sum((a - grand) ** 2 for a in by_seed) / (m - 1)
    ms_sample = m * sum((b - grand) ** 2 for b in by_sample) / (n - 1)
    rest = sum((x[i, j] - by_seed[i] - by_sample[j] + grand) ** 2 for i in range(m) for j in range(n))
    ms_rest = rest / ((m - 1) * (n - 1))
    found = stats.variance_split(x)
    assert found.residual == pytest.approx(ms_rest, rel=1e-10)
    assert found.seed == pytest.approx(max(0, (ms_seed - ms_rest) / n), rel=1e-9, abs=1e-12)
    assert found.sampling == pytest.approx(max(0, (ms_sample - ms_rest) / m), rel=1e-9, abs=1e-12)


def test_seed_and_sampling_variance_of_exact_effects():
    seeds, samples = np.array([0.0, 3.0, 6.0]), np.array([1.0, 2.0, 3.0, 4.0])
    split = stats.variance_split(seeds[:, None] + samples[None, :])
    assert (split.seed, split.residual) == (pytest.approx(9.0), pytest.approx(0, abs=1e-28))
    assert split.sampling == pytest.approx(np.var(samples, ddof=1))
    assert split.standard_error == pytest.approx(math.sqrt(9 / 3 + np.var(samples, ddof=1) / 4))


def test_bootstrapped_ranks_enumerate_small_studies():
    """Three blocks have 27 equally likely draws; the share in which a method is best is known exactly."""
    table = np.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [1.0, 3.0, 2.0]])
    ranks = scipy.stats.rankdata(-table, axis=1)
    best = np.zeros(3)
    for rows in product(range(3), repeat=3):
        totals = ranks[list(rows)].sum(axis=0)
        winners = totals == totals.min()
        best += winners / winners.sum() / 27
    found = stats.bootstrap_ranks(table, higher_is_better=True, seed=0, n=40_000)
    np.testing.assert_allclose(found.best, best, atol=0.01)
    np.testing.assert_allclose(found.average_ranks, ranks.mean(axis=0))
    assert (found.low <= found.average_ranks).all()
    assert (found.high >= found.average_ranks).all()


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 12), st.integers(0, 2**32 - 1))
def test_the_true_statistic_is_among_those_that_rounding_allows(n, seed):
    rng = np.random.default_rng(seed)
    x = rng.random(n)
    y = np.clip(x + rng.normal(0, 0.02, n), 0, 1)
    low, high = stats.reachable_statistics(np.round(x, 2), np.round(y, 2), digits=2)
    assert low <= stats.wilcoxon(x, y).statistic <= high
    printed = round(stats.wilcoxon(x, y, method="exact").pvalue, 4)
    assert stats.explain_printed(np.round(x, 4), np.round(y, 4), printed).explained


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_hit_and_error_rate_equal_their_loops(k, n_runs, seed):
    rng = np.random.default_rng(seed)
    pvalues, counts = np.ones((k, k)), np.zeros((k, k), int)
    hits, errors = [], []
    for i, j in combinations(range(k), 2):
        pvalues[i, j] = pvalues[j, i] = rng.choice([0.0, 0.04, 0.05, 0.06, 0.9])
        counts[i, j] = counts[j, i] = rng.integers(0, n_runs + 1)
        (hits if pvalues[i, j] <= 0.05 else errors).append(counts[i, j])
    found = stats.fidelity_rates(pvalues, counts * rng.choice([-1, 1]), n_runs=n_runs)
    assert found.hit == (pytest.approx(np.mean(hits)) if hits else pytest.approx(math.nan, nan_ok=True))
    assert found.error == (pytest.approx(np.mean(errors)) if errors else pytest.approx(math.nan, nan_ok=True))
    assert (found.n_different, found.n_alike) == (len(hits), len(errors))


def test_every_order_of_three_methods_has_the_same_layers():
    pvalues = {frozenset("ab"): 0.5, frozenset("bc"): 0.5, frozenset("ac"): 0.001}
    ranks = {"a": 1.0, "b": 2.0, "c": 3.0}
    for order in permutations("abc"):
        matrix = pd.DataFrame(
            [[pvalues.get(frozenset((i, j)), 1.0) for j in order] for i in order], index=order, columns=order
        )
        found = stats.cliques(matrix, alpha=0.05, ranks=ranks)
        assert [clique.members for clique in found] == [("a", "b"), ("b", "c")]
        assert [layer.members for layer in found.layers] == [("a", "b")]
        assert found.unlayered == ("c",)

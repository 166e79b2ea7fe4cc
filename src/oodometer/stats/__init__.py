"""Compare methods over data sets, seeds and folds: rank tests, paired tests, cliques, and fidelity to a truth."""

from __future__ import annotations

from oodometer.stats.bayes import BayesianSignedRank, bayesian_signed_rank
from oodometer.stats.blocks import BlockTable, block_table, pivot
from oodometer.stats.cliques import Clique, Cliques, cliques
from oodometer.stats.fidelity import Change, Fidelity, Rates, fidelity, fidelity_rates
from oodometer.stats.paired import PairedTest, cliffs_delta, mann_whitney, normality_route, paired_t, wilcoxon
from oodometer.stats.posthoc import (
    Pairwise,
    bonferroni,
    conover,
    critical_difference,
    holm,
    nemenyi,
    pairwise,
    siegel,
)
from oodometer.stats.ranks import Friedman, RankBootstrap, bootstrap_ranks, friedman
from oodometer.stats.rounded import RoundedCheck, explain_printed, reachable_statistics
from oodometer.stats.truth import BenchmarkTruth, benchmark_truth
from oodometer.stats.variance import VarianceSplit, variance_split

__all__ = [
    "BayesianSignedRank",
    "BenchmarkTruth",
    "BlockTable",
    "Change",
    "Clique",
    "Cliques",
    "Fidelity",
    "Friedman",
    "PairedTest",
    "Pairwise",
    "RankBootstrap",
    "Rates",
    "RoundedCheck",
    "VarianceSplit",
    "bayesian_signed_rank",
    "benchmark_truth",
    "block_table",
    "bonferroni",
    "bootstrap_ranks",
    "cliffs_delta",
    "cliques",
    "conover",
    "critical_difference",
    "explain_printed",
    "fidelity",
    "fidelity_rates",
    "friedman",
    "holm",
    "mann_whitney",
    "nemenyi",
    "normality_route",
    "paired_t",
    "pairwise",
    "pivot",
    "reachable_statistics",
    "siegel",
    "variance_split",
    "wilcoxon",
]

"""What the figures draw equals what is computed another way."""

from __future__ import annotations

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from sklearn.metrics import auc, precision_recall_curve, roc_curve

from oodometer import metrics, stats
from oodometer.errors import OodometerError
from oodometer.metrics.risk import augrc, aurc
from oodometer.report import plots

matplotlib.use("agg")

ID = np.array([0.05, 0.10, 0.20, 0.20, 0.30, 0.35, 0.40, 0.60, 0.70, 0.90])
OOD = np.array([0.20, 0.45, 0.50, 0.60, 0.65, 0.80, 0.90, 0.95])
"""Toy A of the metrics: ties across the classes at .20, .60, .90."""


@pytest.fixture
def ax():
    return Figure().subplots()


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def lines(ax):
    return {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def shaded_area(collection):
    """Of a polygon, by the shoelace formula."""
    x, y = collection.get_paths()[0].vertices.T
    return abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2


# ------------------------------------------------------------------------------------------------ scores, thresholds


def test_histograms_are_densities_over_shared_bins(ax, rng):
    sets = {"far": rng.normal(4, 1, 300), "near": rng.normal(1, 1, 200)}
    inside = rng.normal(0, 1, 500)
    assert plots.score_histograms(inside, sets, bins=20, ax=ax) is ax
    edges = np.histogram_bin_edges(np.concatenate([inside, *sets.values()]), 20)
    bars = [patch.get_height() for patch in ax.patches[:20]]
    np.testing.assert_allclose(bars, np.histogram(inside, edges, density=True)[0])
    outline = ax.patches[20].get_xy()
    np.testing.assert_allclose(outline[1:-1:2, 1], np.histogram(sets["far"], edges, density=True)[0])
    assert {"ID (n = 500)", "far (n = 300)", "near (n = 200)"} <= set(legend(ax))


def test_histograms_mark_global_thresholds_and_those_of_each_set(ax):
    plots.score_histograms(ID, {"a": OOD, "b": OOD + 1}, thresholds={"@95TNR": 0.9}, at_test=True, ax=ax)
    drawn = {label.split(":")[0]: line.get_xdata()[0] for label, line in lines(ax).items()}
    assert drawn["@95TNR"] == 0.9
    assert drawn["@test a"] == metrics.threshold_equal_error(ID, OOD)
    assert drawn["@test b"] == metrics.threshold_equal_error(ID, OOD + 1)


def test_the_shaded_areas_are_aufpr_and_aufnr(ax):
    plots.threshold_errors(ID, OOD, scale=metrics.Scale(0.0, 1.0), ax=ax)
    areas = [shaded_area(collection) for collection in ax.collections]
    np.testing.assert_allclose(areas, [0.38, 0.36875], atol=1e-12)  # the golden numbers of toy A
    assert ax.get_title() == "AUTC = 0.374"


def test_the_error_curves_count_rows_above_and_not_above_the_threshold(ax, rng):
    inside, outside = rng.normal(0, 1, 200), rng.normal(1, 1, 150)
    scale = metrics.fixed_scale(rng.normal(0, 1, 400))
    plots.threshold_errors(inside, outside, scale=scale, ax=ax)
    fpr, fnr, cross = ax.lines
    inside, outside = scale.apply(inside), scale.apply(outside)
    for t in rng.random(20):
        at = np.searchsorted(fpr.get_xdata(), t, side="right") - 1
        assert fpr.get_ydata()[at] == pytest.approx((inside > t).mean())
        assert fnr.get_ydata()[at] == pytest.approx((outside <= t).mean())
    t = cross.get_xdata()[0]
    assert cross.get_ydata()[0] == pytest.approx(max((inside > t).mean(), (outside <= t).mean()))


def test_threshold_errors_need_a_scale_fixed_beforehand():
    with pytest.raises(OodometerError, match="calibration="):
        plots.threshold_errors(ID, OOD)


# ------------------------------------------------------------------------------------------------ ROC, PR, risk


def test_roc_is_scikit_learns(ax):
    plots.roc(ID, {"svhn": OOD}, ax=ax)
    x, y = lines(ax)["svhn (n = 8): AUROC 0.762"].get_data()
    truth = np.repeat([0, 1], [len(ID), len(OOD)])
    fpr, tpr, _ = roc_curve(truth, np.concatenate([ID, OOD]), drop_intermediate=False)
    np.testing.assert_allclose(x, fpr)
    np.testing.assert_allclose(y, tpr)


def test_precision_recall_is_scikit_learns(ax):
    plots.precision_recall(ID, {"svhn": OOD}, ax=ax)
    x, y = lines(ax)["svhn (n = 8): AUPR 0.709"].get_data()
    precision, recall, _ = precision_recall_curve(np.repeat([0, 1], [10, 8]), np.concatenate([ID, OOD]))
    shared = slice(None, len(recall))
    np.testing.assert_allclose(x[shared], recall[::-1])
    np.testing.assert_allclose(y[shared], precision[::-1])
    assert auc(x, y) == pytest.approx(0.7086538461538461)


def test_bands_hold_the_curve_and_repeat_with_the_seed(rng):
    inside, outside = rng.normal(0, 1, 300), rng.normal(1, 1, 300)
    bands = []
    for _ in range(2):
        ax = plots.roc(inside, outside, n_bootstrap=80, seed=3, ax=Figure().subplots())
        bands.append(ax.collections[0].get_paths()[0].vertices)
    np.testing.assert_array_equal(*bands)
    grid = np.linspace(0, 1, 201)
    low, high = bands[0][1:202, 1], bands[0][203:404, 1][::-1]
    x, y = ax.lines[0].get_data()
    inside_band = (low - 1e-9 <= np.interp(grid, x, y)) & (np.interp(grid, x, y) <= high + 1e-9)
    assert inside_band.mean() > 0.9
    assert ax.get_legend().get_title().get_text() == "bands: 95%, 80 bootstrap draws"


@pytest.mark.parametrize(("generalised", "area", "name"), [(False, aurc, "AURC"), (True, augrc, "AUGRC")])
def test_the_area_under_the_risk_curve_is_its_metric(ax, rng, generalised, area, name):
    scores, failed = rng.integers(0, 30, 200) / 30, rng.random(200) < 0.3
    plots.risk_coverage({"msp": (scores, failed)}, generalised=generalised, ax=ax)
    x, y = ax.lines[0].get_data()
    assert np.trapezoid(y, x) == pytest.approx(area(scores, failed), abs=1e-12)
    assert legend(ax) == [f"msp (n = 200): {name} {area(scores, failed):.4f}"]


# ------------------------------------------------------------------------------------------------ comparisons


@pytest.fixture
def golden():
    """Golden A of the statistics."""
    rows = [
        [0.91, 0.89, 0.93, 0.85, 0.80],
        [0.72, 0.72, 0.75, 0.70, 0.65],
        [0.88, 0.90, 0.91, 0.84, 0.86],
        [0.60, 0.58, 0.64, 0.58, 0.50],
        [0.95, 0.94, 0.94, 0.90, 0.91],
        [0.81, 0.79, 0.84, 0.77, 0.70],
    ]
    return stats.conover(pd.DataFrame(rows, columns=list("abcde")), higher_is_better=True)


def test_a_bar_spans_the_ranks_of_each_clique_of_several(ax, golden):
    plots.critical_difference(golden, stats.cliques(golden), ax=ax)
    bars = {label: line.get_xdata() for label, line in lines(ax).items()}
    assert list(bars) == ["{c, a}", "{a, b}", "{d, e}"]
    np.testing.assert_allclose(bars["{c, a}"], [1.25, 2.0833333333])
    np.testing.assert_allclose(bars["{d, e}"], [4.25, 4.6666666667])
    shown = {text.get_text().strip() for text in ax.texts}
    assert shown == {"c  1.25", "a  2.08", "b  2.75", "4.25  d", "4.67  e"}
    assert "6 blocks; Conover, holm, α = 0.05" in ax.get_xlabel()


def test_without_a_rejected_omnibus_the_diagram_says_so(ax, rng):
    noise = stats.conover(rng.normal(size=(6, 4)), higher_is_better=True)
    plots.critical_difference(noise, stats.cliques(noise), ax=ax)
    assert len(lines(ax)) == 1
    assert "no difference shown" in ax.get_xlabel()


def test_the_clique_chart_joins_winners_and_shades_those_that_return(ax):
    regimes = {"near": ["knn", "vim"], "mid": ["vim", "msp"], "far": ["vim"], "id": ["msp"]}
    plots.clique_chart(regimes, ax=ax)
    rows = [label.get_text() for label in ax.get_yticklabels()]
    assert rows == ["vim  (3)", "msp  (2)", "knn  (1)"]
    columns = [line.get_data() for line in ax.lines if line.get_marker() == "o"]
    assert [(list(x), list(y)) for x, y in columns] == [([0, 0], [0, 2]), ([1, 1], [0, 1]), ([2], [0]), ([3], [1])]
    assert [patch.get_label() for patch in ax.patches] == ["vim", "msp"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["near\n2", "mid\n2", "far\n1", "id\n1"]


def test_the_clique_chart_needs_a_row_for_every_winner():
    with pytest.raises(OodometerError, match="knn"):
        plots.clique_chart({"near": ["knn"]}, methods=["msp"])


@pytest.mark.parametrize(("higher", "best"), [(True, {"0.900", "0.800"}), (False, {"0.100", "0.200"})])
def test_the_heat_map_prints_values_and_the_best_of_a_column_bold(ax, higher, best):
    table = pd.DataFrame({"svhn": [0.9, 0.1, np.nan], "dtd": [0.2, 0.8, 0.5]}, index=["knn", "msp", "vim"])
    plots.heat_map(table, metric="AUROC", higher_is_better=higher, ax=ax)
    np.testing.assert_array_equal(ax.images[0].get_array().filled(np.nan), table.to_numpy())
    cells = {text.get_position(): text for text in ax.texts}
    assert cells[(1, 2)].get_text() == "0.500"
    assert (0, 2) not in cells
    assert {text.get_text() for text in ax.texts if text.get_weight() == "bold"} == best


def test_fold_stability_draws_medians_and_every_fold(ax, rng):
    values = pd.DataFrame(rng.random((5, 3)), columns=["a", "b", "c"])
    values.loc[4, "b"] = np.nan
    plots.fold_stability(values, metric="AUROC", ax=ax)
    dots = [line.get_xdata() for line in ax.lines if line.get_marker() == "o"]
    for drawn, name in zip(dots, values, strict=True):
        np.testing.assert_array_equal(drawn, values[name].dropna())
    medians = [line.get_xdata()[0] for line in ax.lines if line.get_color() == plots.PALETTE[1]]
    np.testing.assert_allclose(medians, values.median())
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a (n = 5)", "b (n = 4)", "c (n = 5)"]


def test_the_tuning_curve_rings_the_choice(ax):
    points = pd.DataFrame({"k": [1, 5, 10] * 2, "norm": ["y"] * 3 + ["n"] * 3, "auroc": [0.5, 0.7, 0.6, 0.4, 0.9, 0.8]})
    plots.tuning_curve(points, parameter="k", criterion="auroc", chosen=5, ax=ax)
    drawn = lines(ax)
    assert list(drawn["norm=y"].get_ydata()) == [0.5, 0.7, 0.6]
    assert list(drawn["norm=n"].get_xdata()) == [0, 1, 2]
    assert drawn["chosen"].get_xydata().tolist() == [[1.0, 0.9]]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "5", "10"]


# ------------------------------------------------------------------------------------------------ maps


def test_the_proximity_map_places_each_set_under_its_group(ax):
    table = pd.DataFrame(
        {"distance": [1.0, 2.0, 5.0], "AUROC": [0.7, 0.8, 0.99], "group": ["near", "near", "far"]},
        index=["cifar100", "tin", "svhn"],
    )
    plots.proximity_map(table, x="distance", y="AUROC", ax=ax)
    drawn = lines(ax)
    assert drawn["near (n = 2)"].get_xydata().tolist() == [[1.0, 0.7], [2.0, 0.8]]
    assert drawn["far (n = 1)"].get_xydata().tolist() == [[5.0, 0.99]]
    assert [text.get_text() for text in ax.texts] == ["cifar100", "tin", "svhn"]


def test_the_feature_map_is_the_principal_plane_of_the_id_rows(ax, rng):
    inside, outside = rng.normal(size=(60, 5)) * [5, 3, 1, 1, 1], rng.normal(size=(20, 5)) + 3
    labels = np.arange(60) % 3
    plots.feature_map(inside, {"svhn": outside}, id_labels=labels, ax=ax)
    _, _, axes = np.linalg.svd(inside - inside.mean(axis=0))
    grey = lines(ax)["svhn (n = 20)"]
    assert grey.get_color() == "0.6"
    np.testing.assert_allclose(np.abs(grey.get_xdata()), np.abs((outside - inside.mean(axis=0)) @ axes[0]))
    np.testing.assert_allclose(
        np.abs(lines(ax)["ID 1 (n = 20)"].get_ydata()), np.abs((inside[labels == 1] - inside.mean(axis=0)) @ axes[1])
    )


def test_tsne_on_request_and_nothing_else(ax, rng):
    plots.feature_map(rng.normal(size=(40, 4)), rng.normal(size=(10, 4)), method="tsne", ax=ax)
    assert ax.get_xlabel() == "t-SNE 1"
    assert sum(len(line.get_xdata()) for line in ax.lines) == 50
    with pytest.raises(OodometerError, match="umap"):
        plots.feature_map(ID[:, None], OOD[:, None], method="umap")


def test_a_figure_of_its_own_when_no_axes_are_given():
    import matplotlib.pyplot as plt

    try:
        assert plots.roc(ID, OOD).figure is plt.gcf()
    finally:
        plt.close("all")

"""The report's words and numbers equal what is computed another way, and no name of a study can break the page."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import time
import warnings
import zlib

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats
from tests.report_fixture import LONG, QUOTED, SCRIPT, UNICODE, make_run

from oodometer import detectors, metrics
from oodometer.errors import OodometerError
from oodometer.report import citations, explorer, html, verdict
from oodometer.report.layout import LABELS, Layout, label_of
from oodometer.results import METRICS, Results


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def awkward(tmp_path_factory):
    folder = tmp_path_factory.mktemp("awkward")
    return make_run(folder, awkward=True, failed=True, nan=True, exposures=("without", "with"))


def data_of(page):
    """The data inside a page, unpacked without the page's script."""
    packed = re.search(r'<script id="data"[^>]*>([^<]*)</script>', page)[1]
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def entry_of(page, key):
    entry = data_of(page)["explorer"]["entries"][key]
    return {**entry, "t": np.cumsum(entry["t"]), "f": np.cumsum(entry["f"])}


# ------------------------------------------------------------------------------------------------ verdict


def test_the_best_group_is_the_top_clique_of_the_statistics(run):
    layout = Layout.of(run)
    reading = verdict.read(layout, "auroc")
    assert reading.top == run.cliques("auroc").top.members
    assert reading.friedman.omnibus_pvalue == run.ranks("auroc").omnibus_pvalue
    means = run.blocks("auroc").mean()
    assert reading.means == pytest.approx(means.to_dict(), abs=1e-15)


def test_the_verdict_tells_who_by_how_much_how_sure_and_on_what(run):
    layout = Layout.of(run)
    reading = verdict.read(layout, "auroc")
    best, second = reading.order[0], reading.runner_up
    for name in reading.top:
        assert name in verdict.headline(reading)
    means = run.blocks("auroc").mean()
    text = verdict.by_how_much(reading)
    assert f"{100 * means[best]:.2f}" in text
    assert f"{100 * means[second]:.2f}" in text
    assert f"{100 * (means[second] - means[best]):.2f}".replace("-", "−") in text
    assert "5 OOD sets" in verdict.how_sure(reading, 0.05)
    assert "5 OOD sets × 3 folds" in verdict.on_what(reading, layout)


def test_where_lower_is_better_the_lowest_mean_leads(run):
    reading = verdict.read(Layout.of(run), "fpr95_ood")
    ranks = run.ranks("fpr95_ood")
    assert reading.order[0] == ranks.names[int(ranks.average_ranks.argmin())]


def test_without_a_difference_nobody_is_called_better(tmp_path):
    results = make_run(tmp_path, detectors=3, sets=4, seed=3)
    reading = verdict.read(Layout.of(results), "auroc", alpha=1e-9)
    assert not reading.drawn
    assert verdict.headline(reading) == "No detector is shown to be better than another."
    assert 'class="mark"' not in html.render(results, alpha=1e-9)


def test_one_ood_set_is_compared_over_its_folds(tmp_path):
    results = make_run(tmp_path, sets=1, folds=4, detectors=4)
    layout = Layout.of(results)
    reading = verdict.read(layout, "auroc")
    assert reading.basis == "folds"
    table = results.to_pandas().query("metric == 'auroc'").pivot_table(index="fold", columns="detector", values="value")
    best = table.mean().idxmax()
    others = [name for name in reading.order if name != best]
    raw = []
    for name in others:
        d = table[best] - table[name]
        t = d.mean() / np.sqrt(d.var(ddof=1) * (1 / 4 + results.facts["test_to_train"]))
        raw.append(2 * scipy_stats.t.sf(abs(t), 3))
    order = np.argsort(raw)
    adjusted = np.maximum.accumulate([(3 - i) * raw[k] for i, k in enumerate(order)])
    expected = {others[k]: min(1, p) for k, p in zip(order, adjusted, strict=True)}
    assert reading.pvalues == pytest.approx(expected, rel=1e-9)
    assert reading.top == (best, *(name for name in others if expected[name] >= 0.05))


@pytest.mark.parametrize("folds", [1, 4])
def test_a_single_detector_is_compared_with_nobody_and_its_interval_told(tmp_path, folds):
    results = make_run(tmp_path, detectors=1, sets=1, folds=max(folds, 2), seed=2)
    layout = Layout.of(results)
    if folds == 1:
        layout = dataclasses.replace(layout, frame=layout.frame[layout.frame["fold"] == 0], draws=((0, 0),))
    reading = verdict.read(layout, "auroc")
    values = layout.frame.query("metric == 'auroc'")["value"]
    assert reading.basis == "alone"
    mean = f"{100 * values.mean():.2f}\u00a0%"
    expected = f"knn has a mean AUROC of {mean}; no other detector is here to compare."
    assert verdict.headline(reading) == expected
    if folds == 1:
        assert verdict.how_sure(reading, 0.05).startswith("Not known: a single fold")
        return
    row = results.summary().query("metric == 'auroc'").iloc[0]
    half = (row["high"] - row["low"]) / 2
    assert verdict.how_sure(reading, 0.05).startswith(f"95\u00a0% interval: ± {100 * half:.2f} points, over 4 folds")
    page = html.render(results)
    assert "Other metrics and groups" in page
    assert "One detector: there is nothing to compare it with." in page
    assert "<dt>only set</dt>" in page
    for wrong in ("Best group", "Does the answer depend", "no test is possible", "hardest set", 'class="mark"'):
        assert wrong not in page.split("<script")[0], wrong


def test_a_single_detector_on_several_sets_tells_the_easiest_and_the_hardest(tmp_path):
    results = make_run(tmp_path, detectors=1, sets=3, folds=3)
    reading = verdict.read(Layout.of(results), "auroc")
    means = results.blocks("auroc").iloc[:, 0].sort_values()
    text = verdict.by_how_much(reading)
    (hardest, low), (easiest, high) = [(at[1], means[at]) for at in means.index[[0, 2]]]
    assert f"easiest of 3 OOD sets: {easiest} {100 * high:.2f}" in text
    assert f"the hardest: {hardest} {100 * low:.2f}" in text


def test_the_corrected_test_knows_equal_and_constantly_different_folds():
    assert verdict.corrected_t(np.zeros(5), 0.25) == 1.0
    assert verdict.corrected_t(np.full(5, 0.1), 0.25) == 0.0


def test_a_detector_with_a_missing_value_is_left_out_and_named(awkward):
    reading = verdict.read(Layout.of(awkward), "auroc")
    assert reading.left_out == ("vim",)
    assert "vim" not in reading.order
    page = html.render(awkward)
    assert "Left out of the verdict, because a value is missing somewhere: vim." in page


def test_no_complete_detector_is_an_error_that_says_so(tmp_path):
    results = make_run(tmp_path, detectors=2, failed=True)
    layout = Layout.of(results)
    layout.frame["value"] = np.nan
    with pytest.raises(OodometerError, match="no detector has a value on every OOD set"):
        verdict.read(layout, "auroc")


# ------------------------------------------------------------------------------------------------ threshold explorer


@pytest.mark.parametrize("step", [0, 500, 810, 950, 999, 1000])
def test_counts_at_a_step_are_those_of_the_metrics(run, step):
    page = html.render(run)
    scores = run.scores("knn", ood="svhn", fold=1)
    at = explorer.STEPS.index(step)
    threshold = metrics.threshold_at_tnr(scores.calibration, tnr=step / 1000) if step else -np.inf
    found = metrics.at_one_threshold(scores.id, {"svhn": scores.ood}, threshold)
    entry = entry_of(page, "0,0,1,2")
    n, m = entry["n"]
    assert (n, m) == (found.n_id, found.n_ood["svhn"])
    assert (n - entry["t"][at]) / n == found.fpr
    assert entry["f"][at] / m == found.fnr["svhn"]


def test_named_thresholds_are_those_of_the_metrics(run):
    page = html.render(run)
    scores, other = run.scores("knn", ood="svhn", fold=2), run.scores("knn", ood="mnist", fold=2)
    named = entry_of(page, "0,0,2,2")["x"]
    expected = [
        metrics.threshold_conformal(scores.calibration, alpha=0.05),
        metrics.threshold_conformal(scores.calibration, alpha=0.1),
        metrics.threshold_equal_error(scores.id, scores.ood),
        metrics.threshold_equal_error(scores.calibration, other.ood),
    ]
    assert named[0] is None  # α = .01 needs 99 calibration rows, there are 60
    assert named[1:5] == [[int((scores.id <= t).sum()), int((scores.ood <= t).sum())] for t in expected]


def test_a_set_lends_its_threshold_only_where_all_sets_share_a_detector(awkward):
    data = data_of(html.render(awkward))
    entries, vim = data["explorer"]["entries"], [m["name"] for m in data["methods"]].index("vim")
    lent = {key: [value is not None for value in entry["x"][-5:]] for key, entry in entries.items()}
    assert not any(any(row) for key, row in lent.items() if key.startswith("1,"))  # with exposure: a detector a set
    failed = [row for key, row in lent.items() if key.startswith(f"0,{vim},0,")]
    assert failed == [[False, True, True, True, True]] * 4
    assert all(all(row) for key, row in lent.items() if key.startswith("0,") and not key.startswith(f"0,{vim},0,"))


def test_histograms_hold_every_row(run):
    for entry in data_of(html.render(run))["explorer"]["entries"].values():
        assert [sum(bars) for bars in entry["h"]] == entry["n"]


def test_constant_scores_have_counts_but_no_picture():
    inside = explorer.Inside.of(np.zeros(20), np.zeros(10))
    counts = explorer.counts_of(inside, np.ones(5), [])
    assert counts["histogram"] is None
    assert counts["tn"][0] == 0  # at step 0 every row is flagged
    assert (counts["tn"][1:] == 20).all()
    assert (counts["fn"] == 0).all()


def test_many_folds_are_added_up(run, monkeypatch):
    single = data_of(html.render(run))["explorer"]["entries"]
    monkeypatch.setattr(explorer, "MOST_CURVES", 10)
    pooled = data_of(html.render(run))["explorer"]
    assert pooled["pooled"]
    folds = [single[f"0,3,{draw},1"] for draw in range(3)]
    entry = pooled["entries"]["0,3,0,1"]
    for name in ("n", "t", "f"):
        assert entry[name] == np.sum([fold[name] for fold in folds], axis=0).tolist()
    assert entry["h"] == np.sum([fold["h"] for fold in folds], axis=0).tolist()


# ------------------------------------------------------------------------------------------------ page


def test_the_table_holds_means_and_intervals_of_the_summary(run):
    data = data_of(html.render(run))
    summary = run.summary().set_index(["detector", "ood", "metric"])
    names, sets = [m["name"] for m in data["methods"]], [s["name"] for s in data["sets"]]
    for metric in ("auroc", "autc", "fpr95_ood"):
        for m, name in enumerate(names):
            for s, ood in enumerate(sets):
                row = summary.loc[(name, ood, metric)]
                at = m * len(sets) + s
                assert data["means"][metric]["mean"][at] == pytest.approx(row["mean"], abs=1e-15)
                assert data["means"][metric]["half"][at] == pytest.approx((row["high"] - row["low"]) / 2, abs=1e-12)


def test_every_fold_value_is_in_the_page(run):
    data = data_of(html.render(run))
    frame = run.to_pandas().query("metric == 'auroc' and detector == 'mds' and ood == 'textures'")
    at = (2 * 5 + 3) * 3
    assert data["folds"]["auroc"][at : at + 3] == frame.sort_values("fold")["value"].tolist()


@pytest.mark.parametrize("name", [SCRIPT, QUOTED, LONG, UNICODE])
def test_names_are_escaped(awkward, name):
    page = html.render(awkward)
    body = re.sub(r'<script id="data".*', "", page, flags=re.S)
    assert SCRIPT not in body
    if name == SCRIPT:
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in body
    assert name in [s["name"] for s in data_of(page)["sets"]]


def test_the_page_asks_for_nothing_outside_itself(run):
    page = html.render(run)
    assert not re.findall(r'(?:src|href)="(?!#|data:)', page)
    assert "url(" not in page
    assert "@import" not in page


def test_failures_warnings_and_provenance_are_told(awkward):
    page = html.render(awkward)
    assert "2 cells failed (vim)" in page
    assert "k = 500 needs 500 rows, 120 were found" in page
    assert "the head is rank-deficient" in page
    assert "AUTC: 30 values missing." in page
    assert "Blocks with and without outlier exposure share their OOD sets and are not independent" in page
    assert "Parameters of knn were chosen on rows of a source that is also tested (mnist)" in page
    assert "Fewer than 100 test rows in a fold" in page
    assert awkward.facts["fingerprints"]["digits"] in page
    assert "oodometer run study.toml" in page


def test_the_accuracy_counts_every_classifier_once(awkward):
    table = awkward.classifiers
    without = table[table["exposure"] == "without"].drop_duplicates("fold")["accuracy"]
    exposed = table[table["exposure"] == "with"]["accuracy"]
    page = html.render(awkward)
    assert f"without exposure {100 * without.mean():.2f} %" in page
    assert "3 classifiers" in page
    assert f"with exposure {100 * exposed.mean():.2f} %" in page
    assert "15 classifiers" in page


def test_chosen_parameters_and_the_card_are_shown(run):
    page = html.render(run)
    section = page.split('id="detector-0"')[1].split("</details>")[0]
    assert detectors.get("knn").card.title in section
    assert "k=10 (2×)" in section
    assert "k=50 (1×)" in section
    tuning = {one["params"]: one for one in data_of(page)["tuning"]["knn"]}
    assert tuning["k=10"]["chosen"] == 2
    assert tuning["k=50"]["values"] == pytest.approx([(0.88 * 2 + 0.9) / 3, 0.88, 0.9])
    assert tuning["k=5000"]["status"] == "invalid"
    assert tuning["k=5000"]["values"] == [None, None, None]


def test_a_search_for_every_ood_set_counts_for_every_ood_set(tmp_path):
    make_run(tmp_path, sets=3, folds=2)
    table = tmp_path / "tuning.csv"
    tuning = pd.read_csv(table, keep_default_na=False, na_values={"value": ["nan", ""]})
    shift = tuning["ood"].map({name: 0.001 * at for at, name in enumerate(tuning["ood"].unique())})
    tuning["value"] += shift  # as a nested search has it: each set has a curve of its own
    tuning.to_csv(table, index=False)
    page = html.render(Results.open(tmp_path))
    chosen = {one["params"]: one["chosen"] for one in data_of(page)["tuning"]["knn"] if one["chosen"]}
    assert chosen == {"k=10": 3, "k=50": 3}
    section = page.split('id="detector-0"')[1].split("</details>")[0]
    assert "k=10 (3×)" in section and "k=50 (3×)" in section


def test_facts_have_units_and_few_digits(run):
    facts = html.render(run).split('id="provenance"')[1]
    assert re.search(r"<dt>fit</dt><dd>\s*1\.2 s", facts)
    assert re.search(r"<dt>test rows per training row</dt><dd>\s*0\.5\b", facts)


def test_write_replaces_the_file_whole(run, tmp_path):
    target = tmp_path / "deep" / "report.html"
    assert run.report(target) == target
    assert target.read_text().endswith("</html>\n")
    assert [path.name for path in target.parent.iterdir()] == ["report.html"]


def test_equal_runs_give_equal_bytes(run):
    assert html.render(run) == html.render(Results.open(run.folder))


def test_bad_options_are_named(run, tmp_path):
    with pytest.raises(OodometerError, match=r"metric: one of auroc, .* was needed, 'accuracy' was found"):
        html.render(run, metric="accuracy")
    with pytest.raises(OodometerError, match="alpha: a level between 0 and 1 was needed, 5 was found"):
        html.write(run, tmp_path / "x.html", alpha=5)


def test_another_metric_decides_when_asked(run):
    assert "Average rank in AUTC ↓" in html.render(run, metric="autc")


@pytest.mark.parametrize(
    "changes",
    [
        {"sets": 1, "folds": 2},
        {"sets": 2, "detectors": 2},
        {"detectors": 1},
        {"tuned": False, "predictions": False},
        {"repeats": 2, "sets": 2},
    ],
)
def test_small_and_plain_runs_have_a_report(tmp_path, changes):
    results = make_run(tmp_path, **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page = html.render(results)
    assert "</html>" in page
    data = data_of(page)
    assert len(data["draws"]) == results.to_pandas().groupby(["repeat", "fold"]).ngroups


def test_an_empty_run_says_what_is_missing(tmp_path):
    results = make_run(tmp_path, detectors=0)
    with pytest.raises(OodometerError, match=r"a report needs results, and results.csv holds none"):
        html.render(results)


def test_a_run_of_unknown_metrics_says_so(tmp_path):
    results = make_run(tmp_path)
    table = results.folder / "results.csv"
    table.write_text(re.sub(r",[^,]+,([^,\n]*)$", r",secret,\1", table.read_text(), flags=re.M))
    header, rest = table.read_text().split("\n", 1)
    table.write_text(header.replace("secret", "metric") + "\n" + rest)
    with pytest.raises(OodometerError, match="a metric of this version was needed, secret was found"):
        html.render(Results.open(results.folder))


def test_a_damaged_cell_is_named(tmp_path):
    results = make_run(tmp_path)
    cell = next((results.folder / "cells").glob("*.npy"))
    cell.write_bytes(cell.read_bytes()[:-4])
    with pytest.raises(OodometerError, match=r"is damaged .*run the study again"):
        html.render(results)


def test_a_large_study_is_fast_and_small(tmp_path):
    results = make_run(tmp_path, detectors=40, sets=12, folds=5, rows=2000, ood_rows=1500)
    start = time.perf_counter()
    path = results.report(tmp_path / "report.html")
    assert time.perf_counter() - start < 20
    assert path.stat().st_size < 3e6


# ------------------------------------------------------------------------------------------------ references


@pytest.mark.parametrize("name", detectors.names())
def test_every_card_cites_a_known_entry(name):
    key = detectors.get(name).card.cite
    assert not key or key in citations.references(), f"{name}: add {key} to references.bib"


def test_metrics_statistics_and_data_cite_known_entries():
    wanted = {key for keys in citations.METRIC_KEYS.values() for key in keys}
    wanted |= {*citations.STATISTICS_KEYS, *citations.DATA_KEYS.values()}
    assert wanted <= citations.references().keys()


def test_entries_are_complete():
    for key, entry in citations.references().items():
        assert entry.count("{") == entry.count("}"), key
        assert {"author", "title", "year"} <= set(re.findall(r"^  (\w+) +=", entry, re.M)), key


def test_a_study_cites_what_it_used(run):
    text = citations.of(run)
    found = re.findall(r"^@\w+\{([^,]+),", text, re.M)
    assert found[:3] == ["sun2022knn", "wang2022vim", "lee2018mahalanobis"]
    assert {"traub2024overcoming", "holm1979simple", "netzer2011svhn", "lecun1998gradient"} <= set(found)
    assert len(found) == len(set(found))
    assert "hendrycks2019oe" not in found


def test_names_lead_to_their_data_sets():
    assert citations.data_key("Tiny_ImageNet-200") == "le2015tiny"
    assert citations.data_key("KMNIST test") == "clanuwat2018kmnist"
    assert citations.data_key("my own rows") == ""


def test_every_metric_has_a_label():
    assert set(LABELS) <= set(METRICS)
    assert label_of("augrc:keep_all") == "AUGRC (keep all)"
    assert all(label_of(name) != name for name in METRICS)
    assert all(name.partition(":")[0] in {*citations.METRIC_KEYS, "f1_max_ood", "f1_max_id"} for name in METRICS)

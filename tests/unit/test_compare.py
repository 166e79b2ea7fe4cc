"""Comparing two runs: what changed is found, and what matters is told from chance by independent computations."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from scipy import stats as scipy_stats
from tests.report_fixture import make_run

from oodometer import stats
from oodometer.cli import main
from oodometer.compare import compare, corrected_t
from oodometer.errors import OodometerError
from oodometer.results import RESULT_COLUMNS, Results, write_json, write_table


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), folds=4)


def changed(run, folder, *, values=None, facts=None):
    """A copy of a run with other values or other facts."""
    shutil.copytree(run.folder, folder)
    if values is not None:
        frame = values(run.to_pandas())
        write_table(folder / "results.csv", RESULT_COLUMNS, frame[list(RESULT_COLUMNS)].itertuples(index=False))
    if facts is not None:
        write_json(folder / "run.json", facts(json.loads((folder / "run.json").read_text())))
    return Results.open(folder)


def shifted(detector, by):
    """Add `by(fold)` to one detector's AUROC."""

    def values(frame):
        rows = (frame["detector"] == detector) & (frame["metric"] == "auroc")
        frame.loc[rows, "value"] = frame.loc[rows, "value"] + frame.loc[rows, "fold"].map(by)
        return frame

    return values


def test_a_run_compared_with_itself_has_not_changed(run):
    found = compare(run, run)
    assert found.headline == "Nothing changed: every common value of auroc is identical (6 methods)."
    assert found.facts == found.parameters == ()
    assert found.same_folds
    assert all(one.says(0.05) == "identical" and np.isnan(one.pvalue) for one in found.differences)


def test_a_paired_difference_is_tested_over_folds(run, tmp_path):
    moves = np.array([0.011, 0.009, 0.010, 0.012])
    other = changed(run, tmp_path / "b", values=shifted("vim", dict(enumerate(moves))))
    found = {one.method: one for one in compare(run, other).differences}
    t = moves.mean() / np.sqrt(moves.var(ddof=1) * (1 / 4 + run.facts["test_to_train"]))
    assert found["vim"].pvalue == pytest.approx(2 * scipy_stats.t.sf(t, 3), rel=1e-9)
    assert found["vim"].difference == pytest.approx(moves.mean(), abs=1e-12)
    assert found["vim"].says(0.05) == "better"
    assert found["knn"].says(0.05) == "identical"
    assert "1 of 6 methods differs beyond chance" in compare(run, other).headline


def test_a_difference_that_changes_sign_is_within_chance(run, tmp_path):
    other = changed(run, tmp_path / "b", values=shifted("vim", {0: 0.01, 1: -0.01, 2: 0.012, 3: -0.011}))
    found = {one.method: one for one in compare(run, other).differences}
    assert found["vim"].says(0.05) == "within chance"
    assert compare(run, other).headline.startswith("Values changed, by no more than chance.")


def test_where_lower_is_better_an_increase_is_worse(run, tmp_path):
    def values(frame):
        rows = (frame["detector"] == "vim") & (frame["metric"] == "autc")
        frame.loc[rows, "value"] += 0.1 + 0.001 * frame.loc[rows, "fold"]
        return frame

    found = compare(run, changed(run, tmp_path / "b", values=values), metric="autc")
    assert [one.says(0.05) for one in found.differences if one.method == "vim"] == ["worse"]


def test_p_values_are_adjusted_over_the_methods_that_changed(run, tmp_path):
    moves = {"vim": [0.011, 0.009, 0.010, 0.013], "mds": [0.02, 0.01, 0.04, 0.03]}

    def values(frame):
        for name, by in moves.items():
            frame = shifted(name, dict(enumerate(by)))(frame)
        return frame

    found = {one.method: one.pvalue for one in compare(run, changed(run, tmp_path / "b", values=values)).differences}
    ratio = run.facts["test_to_train"]
    raw = {
        name: 2 * scipy_stats.t.sf(np.mean(by) / np.sqrt(np.var(by, ddof=1) * (1 / 4 + ratio)), 3)
        for name, by in moves.items()
    }
    assert found["vim"] == pytest.approx(2 * raw["vim"], rel=1e-9)
    assert found["mds"] == pytest.approx(max(2 * raw["vim"], raw["mds"]), rel=1e-9)


def test_other_folds_are_two_samples(run, tmp_path):
    other = make_run(tmp_path, folds=3, seed=1)
    found = compare(run, other)
    assert not found.same_folds
    keys = ["repeat", "fold", "ood", "detector"]
    both = run.to_pandas().query("metric == 'auroc'").merge(other.to_pandas().query("metric == 'auroc'"), on=keys)
    folds = both.groupby(["detector", "fold"], sort=False)[["value_x", "value_y"]].mean()
    raw = [
        welch(part["value_x"].to_numpy(), part["value_y"].to_numpy(), other.facts["test_to_train"])
        for _, part in folds.groupby("detector", sort=False)
    ]
    assert [one.n_values for one in found.differences] == [15] * 6
    assert [one.pvalue for one in found.differences] == pytest.approx(stats.holm(raw), rel=1e-9)


def welch(a, b, ratio):
    parts = [x.var(ddof=1) * (1 / len(x) + ratio) for x in (a, b)]
    df = sum(parts) ** 2 / sum(part**2 / (len(x) - 1) for part, x in zip(parts, (a, b), strict=True))
    return 2 * scipy_stats.t.sf(abs(a.mean() - b.mean()) / np.sqrt(sum(parts)), df)


def test_without_overlap_two_samples_are_welchs_test():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, 1, 7), rng.normal(1, 3, 5)
    expected = scipy_stats.ttest_ind(a, b, equal_var=False).pvalue
    assert corrected_t([a, b], b.mean() - a.mean(), 0.0) == pytest.approx(expected, rel=1e-12)
    assert corrected_t([a, b], b.mean() - a.mean(), 0.25) == pytest.approx(welch(a, b, 0.25), rel=1e-12)
    assert corrected_t([np.full(4, 0.1)], 0.1, 0.25) == 0.0
    assert corrected_t([np.zeros(4)], 0.0, 0.25) == 1.0


def test_changed_conclusions_are_told(run, tmp_path):
    best = run.cliques().top.members
    other = changed(run, tmp_path / "b", values=shifted("mls", dict.fromkeys(range(4), 0.2)))
    found = compare(run, other)
    assert found.top_a == tuple(sorted(best))
    assert found.top_b is not None and "mls" in found.top_b
    assert found.headline.startswith(f"The conclusion changed: the best group was {', '.join(sorted(best))} and is ")


def test_changes_in_the_making_are_found(run, tmp_path):
    def facts(found):
        found["versions"]["numpy"] = "1.0"
        found["seeds"] = {"study": 7}
        del found["fingerprints"]["svhn"]
        found["timings"] = {"fit": 99}
        found["spec"] = {"split": {"folds": 4, "kind": "dual"}}
        return found

    found = compare(run, changed(run, tmp_path / "b", facts=facts))
    told = {one.name: (one.a, one.b) for one in found.facts}
    assert told["versions.numpy"] == (np.__version__, "1.0")
    assert told["seeds.study"] == (0, 7)
    assert told["fingerprints.svhn"] == (run.facts["fingerprints"]["svhn"], None)
    assert told["spec"] == (None, "present")
    assert len(told) == 4


def test_a_setting_may_be_empty_or_gain_parts(run, tmp_path):
    first = [{"name": "knn", "params": {}, "grid": None}]
    second = [{"name": "knn", "params": {"k": 5}, "grid": {"k": [1, 5]}}, {"name": "knn", "variant": "other"}]
    a = changed(run, tmp_path / "a", facts=lambda found: {**found, "spec": {"detectors": first}})
    b = changed(run, tmp_path / "b", facts=lambda found: {**found, "spec": {"detectors": second}})
    assert [(one.name, one.a, one.b) for one in compare(a, b).facts] == [
        ("spec.detectors.knn.params", None, "present"),
        ("spec.detectors.knn.grid", None, "present"),
        ("spec.detectors.knn other", None, "present"),
    ]


def test_what_only_one_run_has_is_named_and_left_out(run, tmp_path):
    def values(frame):
        return frame[(frame["detector"] != "mls") & (frame["ood"] != "svhn")]

    found = compare(run, changed(run, tmp_path / "b", values=values))
    assert found.only_a == {"detectors": ("mls",), "OOD sets": ("svhn",)}
    assert found.only_b == {}
    assert [one.method for one in found.differences] == ["knn", "vim", "mds", "energy", "msp"]
    assert {one.n_values for one in found.differences} == {16}


def test_other_parameters_are_found(run, tmp_path):
    def values(frame):
        frame.loc[frame["detector"] == "vim", "params"] = '{"dim": 7}'
        return frame

    found = compare(run, changed(run, tmp_path / "b", values=values))
    assert [(one.name, one.a, one.b) for one in found.parameters] == [("vim", "{}", '{"dim": 7}')]


def test_one_fold_has_no_test(run, tmp_path):
    a = changed(run, tmp_path / "a", values=lambda frame: frame[frame["fold"] == 0])
    b = changed(a, tmp_path / "b", values=shifted("vim", {0: 0.01}))
    assert [one.says(0.05) for one in compare(a, b).differences if one.method == "vim"] == ["one fold: no test"]


def test_runs_without_anything_in_common_are_refused(run, tmp_path):
    other = changed(run, tmp_path / "b", values=lambda frame: frame.assign(ood="other " + frame["ood"]))
    with pytest.raises(OodometerError, match="nothing to compare"):
        compare(run, other)
    with pytest.raises(OodometerError, match="metric: accuracy in both runs was needed; both have: auroc"):
        compare(run, run, metric="accuracy")
    with pytest.raises(OodometerError, match="alpha: a level between 0 and 1 was needed"):
        compare(run, run, alpha=0)


# ------------------------------------------------------------------------------------------------ commands


def test_the_command_prints_the_comparison(run, tmp_path, capsys):
    other = changed(run, tmp_path / "b", values=shifted("vim", {0: 0.011, 1: 0.009, 2: 0.010, 3: 0.012}))
    assert main(["compare", str(run.folder), str(other.folder)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 of 6 methods differs beyond chance.")
    row = next(line.split() for line in out.splitlines() if line.startswith("vim"))
    assert row[3] == "+0.0105"
    assert row[-1] == "better"


def test_the_command_prints_json(run, capsys):
    assert main(["compare", str(run.folder), str(run.folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["headline"].startswith("Nothing changed")
    assert [one["says"] for one in found["differences"]] == ["identical"] * 6


@pytest.mark.parametrize(
    ("name", "start"), [("r.html", "<!doctype html>"), ("t.tex", "% needs"), ("t.md", "**AUROC"), ("c.csv", "study,")]
)
def test_the_ending_chooses_what_the_report_command_writes(run, tmp_path, capsys, name, start):
    assert main(["report", str(run.folder), "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_text().startswith(start)
    assert str(tmp_path / name) in capsys.readouterr().out.replace("\n", "")


def test_the_report_command_writes_beside_the_run_and_what_to_cite(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text().endswith("</html>\n")
    assert main(["report", str(folder), "-o", str(tmp_path / "cite.bib")]) == 0
    assert (tmp_path / "cite.bib").read_text() == run.citations()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "x.doc"], "a file that ends in .html, .tex, .md, .bib, .csv was needed, 'x.doc' was found"),
        (["--metric", "auroc", "autc"], "one metric decides the page, 2 were found"),
        (["--alpha", "2"], "alpha"),
        (["-o", "t.tex", "--exposure", "with"], "exposure: one of without was needed, 'with' was found"),
    ],
)
def test_mistakes_are_explained(run, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run.folder), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "no results of a study" in capsys.readouterr().err

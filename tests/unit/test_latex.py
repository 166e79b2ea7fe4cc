"""Tables for papers hold the numbers of the summary, bold where they are best, and compile."""

from __future__ import annotations

import re
import shutil
import subprocess

import numpy as np
import pytest
from tests.report_fixture import SCRIPT, make_run

from oodometer.errors import OodometerError
from oodometer.report import latex


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def awkward(tmp_path_factory):
    folder = tmp_path_factory.mktemp("awkward")
    return make_run(folder, awkward=True, failed=True, nan=True, exposures=("without", "with"))


def rows_of(text):
    """{detector: [cells]} of the lines of a LaTeX table's only block."""
    body = text.split("\\midrule")[1].split("\\bottomrule")[0].splitlines()[2:]
    found = {}
    for line in body:
        name, *cells = line.removesuffix(r" \\").split(" & ")
        found[name.replace(r"$^\dagger$", "")] = cells
    return found


def expected(run, metric):
    frame = run.summary().query(f"metric == '{metric}'").set_index(["detector", "ood"])
    return frame["mean"], (frame["high"] - frame["low"]) / 2


def test_groups_have_means_intervals_and_averages(run):
    text = run.to_latex()
    mean, half = expected(run, "auroc")
    near, far = ["mnist", "kmnist", "omniglot"], ["svhn", "textures"]
    assert "Detector & mnist & kmnist & omniglot & Avg & svhn & textures & Avg & All" in text
    assert r"\multicolumn{4}{c}{near} & \multicolumn{3}{c}{far}" in text
    assert r"\cmidrule(lr){2-5}" in text
    assert r"\cmidrule(lr){6-8}" in text
    for name, cells in rows_of(text).items():
        one = [f"{100 * mean[name, s]:.2f} {{\\scriptsize$\\pm${100 * half[name, s]:.2f}}}" for s in near]
        two = [f"{100 * mean[name, s]:.2f} {{\\scriptsize$\\pm${100 * half[name, s]:.2f}}}" for s in far]
        averages = [100 * np.mean([mean[name, s] for s in sets]) for sets in (near, far, near + far)]
        wanted = [*one, f"{averages[0]:.2f}", *two, f"{averages[1]:.2f}", f"{averages[2]:.2f}"]
        assert [re.sub(r"\\textbf\{([\d.]+)\}", r"\1", cell) for cell in cells] == wanted


@pytest.mark.parametrize("metric", ["auroc", "fpr95_ood"])
def test_exactly_the_best_of_each_column_is_bold(run, metric):
    rows = rows_of(run.to_latex(metrics=metric, interval=False))
    mean, _ = expected(run, metric)
    for column, ood in {0: "mnist", 4: "svhn"}.items():
        own = mean.xs(ood, level="ood")
        best = own.idxmax() if metric == "auroc" else own.idxmin()
        assert [name for name, cells in rows.items() if cells[column].startswith(r"\textbf")] == [best]


def test_members_of_the_best_clique_are_marked(run):
    text = run.to_latex()
    marked = {name for name in run.blocks("auroc") if re.search(rf"^{name}\$\^\\dagger\$ &", text, re.M)}
    assert marked == set(run.cliques("auroc").top.members)


def test_nothing_is_marked_where_no_difference_was_found(run):
    assert r"$^\dagger$ &" not in run.to_latex(alpha=1e-9)


def test_each_metric_is_a_block(run):
    text = run.to_latex(metrics=["auroc", "autc"], caption="A & B", label="tab:x")
    assert text.index(r"\textbf{AUROC $\uparrow$}") < text.index(r"\textbf{AUTC $\downarrow$}")
    assert r"\caption{A \& B}" in text
    assert r"\label{tab:x}" in text


def test_pairs_have_a_line_for_each_exposure_and_pair(awkward):
    table = latex.build(awkward, style="pairs", metrics="auroc")
    (title, lines), *rest = table.blocks
    assert not rest
    assert title == "AUROC ↑"
    assert [line.labels[0] for line in lines] == ["without"] * 5 + ["with"] * 5
    summary = awkward.summary().query("metric == 'auroc'").set_index(["detector", "ood", "exposure"])
    for line in lines:
        for name, cell in zip(table.titles[3:], line.cells, strict=True):
            row = summary.loc[(name, line.labels[2], line.labels[0])]
            if row["n"] < 3:
                assert np.isnan(cell.mean)  # a fold is missing
            else:
                assert cell.mean == pytest.approx(row["mean"], abs=1e-15)


def test_a_missing_value_is_a_dash_and_so_is_its_average(awkward):
    rows = rows_of(awkward.to_latex(metrics="auroc", exposure="without"))
    assert rows["vim"][0] == "--"
    assert rows["vim"][3] == "--"  # the average of its group
    assert rows["vim"][-1] == "--"
    assert "--" not in rows["knn"]


def test_names_are_escaped_for_latex(awkward):
    text = awkward.to_latex(exposure="without")
    assert SCRIPT not in text
    assert r"\textless{}script\textgreater{}alert(1)" in text
    assert r"naïve \& ''quoted''" in text


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("a_b", r"a\_b"),
        ("50%", r"50\%"),
        ("\\x{y}", r"\textbackslash{}x\{y\}"),
        ("a^~", r"a\textasciicircum{}\textasciitilde{}"),
        ("two\nlines\x00", "two lines "),
        ("$#&", r"\$\#\&"),
    ],
)
def test_every_special_sign_is_escaped(text, printed):
    assert latex.tex(text) == printed


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_it_compiles(run, tmp_path):
    names = latex.tex("".join(chr(sign) for sign in range(32, 127)))
    text = run.to_latex(metrics=["auroc", "autc"], caption="50 % of a_b & <c>")
    source = f"\\documentclass{{article}}\\usepackage{{booktabs}}\\begin{{document}}{text}{names}\\end{{document}}"
    (tmp_path / "x.tex").write_text(source)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "x.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_markdown_has_the_same_numbers(run):
    text = run.to_markdown(interval=False)
    lines = [line for line in text.splitlines() if line.startswith("| knn")]
    mean, _ = expected(run, "auroc")
    assert len(lines) == 1
    cells = [cell.strip(" *") for cell in lines[0].split("|")[2:-1]]
    assert cells[:3] == [f"{100 * mean['knn', ood]:.2f}" for ood in ("mnist", "kmnist", "omniglot")]
    assert "near: mnist" in text
    assert "† |" in text


def test_markdown_names_cannot_break_the_table(awkward):
    text = awkward.to_markdown(style="pairs")
    assert r"\<script\>alert(1)\</script\>" in text
    widths = {line.count(" | ") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_one_set_needs_no_average(tmp_path):
    results = make_run(tmp_path, sets=1)
    assert "Avg" not in results.to_latex()
    assert "All" not in results.to_latex()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"style": "wide"}, 'style: "groups" or "pairs" was needed'),
        ({"style": "pairs", "metrics": ["auroc", "autc"]}, "shows one metric, 2 were found"),
        ({"exposure": "with"}, "exposure: one of without was needed"),
        ({"metrics": "nothing"}, "metric: one of auroc"),
    ],
)
def test_bad_options_are_named(run, options, message):
    with pytest.raises(OodometerError, match=message):
        run.to_latex(**options)

"""The report in a real browser: it renders without complaint, and what it shows is what Python computes."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from oodometer import metrics
from oodometer.report import html
from oodometer.report.explorer import STEPS
from tests.chromium import BINARY, browser
from tests.report_fixture import LONG, QUOTED, SCRIPT, UNICODE, make_run

pytestmark = pytest.mark.skipif(BINARY is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def page():
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    results = make_run(folder)
    results.report(folder / "report.html")
    return results


@pytest.fixture(scope="module")
def awkward(tmp_path_factory):
    folder = tmp_path_factory.mktemp("awkward")
    results = make_run(folder, awkward=True, failed=True, nan=True, exposures=("without", "with"))
    results.report(folder / "report.html")
    return results


@pytest.fixture
def opened(page, run):
    page.complaints.clear()
    page.open(run.folder / "report.html")
    yield page
    assert page.complaints == []


def put(page, name, value):
    """Set a control as its user would, and tell the page."""
    page.run(f"""(() => {{
        const control = document.getElementById({name!r});
        control.value = {value!r};
        control.dispatchEvent(new Event("input", {{bubbles: true}}));
        control.dispatchEvent(new Event("change", {{bubbles: true}}));
    }})()""")


def click(page, selector):
    page.run(f"document.querySelector({selector!r}).click()")


def texts(page, selector):
    return page.run(f"[...document.querySelectorAll({selector!r})].map(node => node.textContent.trim())")


def outcomes(page):
    """{set: {quantity: value}} of the explorer's table, in full precision."""
    return page.run("""Object.fromEntries([...document.querySelectorAll("#explorer-table tbody tr")].map(row => [
        row.querySelector(".name").textContent,
        Object.fromEntries([...row.querySelectorAll("td")].map(cell => [cell.dataset.key, Number(cell.dataset.value)])),
    ]))""")


def recomputed(scores, threshold):
    """The same from the scores, with the library's metrics."""
    found = metrics.at_one_threshold(scores.id, {"ood": scores.ood}, threshold)
    counts = metrics.confusion_at(scores.id, scores.ood, threshold=threshold)
    f1 = metrics.f1_at(scores.id, scores.ood, threshold=threshold) if counts.tp else 0.0
    kept = (counts.tn + counts.fn) / (scores.id.size + scores.ood.size)
    cost = 0.5 * found.fpr * 1 + 0.5 * found.fnr["ood"] * 1
    return {"fpr": found.fpr, "fnr": found.fnr["ood"], "f1": f1, "coverage": kept, "cost": cost}


# ------------------------------------------------------------------------------------------------ explorer


def test_the_first_view_is_95_tnr_of_the_best_detector_over_all_folds(opened, run):
    shown = outcomes(opened)
    best = html.verdict.read(html.Layout.of(run), "auroc").order[0]
    assert opened.run("document.getElementById('detector').selectedOptions[0].textContent") == best
    for ood, row in shown.items():
        folds = [run.scores(best, ood=ood, fold=fold) for fold in range(3)]
        thresholds = [metrics.threshold_at_tnr(s.calibration) for s in folds]
        flagged = sum(int((s.id > t).sum()) for s, t in zip(folds, thresholds, strict=True))
        missed = sum(int((s.ood <= t).sum()) for s, t in zip(folds, thresholds, strict=True))
        assert row["fpr"] == flagged / sum(s.id.size for s in folds)
        assert row["fnr"] == missed / sum(s.ood.size for s in folds)


@pytest.mark.parametrize("step", [0, 300, 810, 901, 977, 1000])
def test_the_slider_shows_what_python_recomputes(opened, run, step):
    names = opened.run("[...document.getElementById('detector').options].map(one => one.textContent)")
    put(opened, "detector", opened.run("document.getElementById('detector').options[2].value"))
    put(opened, "draw", "1")
    put(opened, "step", str(STEPS.index(step)))
    assert texts(opened, "#keep") == [f"{step / 10:.1f}\u00a0%"]
    shown = outcomes(opened)
    assert set(shown) == set(run.to_pandas()["ood"])
    for ood, row in shown.items():
        scores = run.scores(names[2], ood=ood, fold=1)
        threshold = metrics.threshold_at_tnr(scores.calibration, tnr=step / 1000) if step else -np.inf
        assert row == pytest.approx(recomputed(scores, threshold), rel=1e-15)


def test_tiles_are_means_over_the_sets(opened):
    put(opened, "step", str(STEPS.index(900)))
    rows = outcomes(opened).values()
    fnr = [row["fnr"] for row in rows]
    assert texts(opened, "#tile-fnr") == [f"{100 * sum(fnr) / 5:.2f}\u00a0%"]
    assert texts(opened, "#tile-spread") == [f"{100 * (max(fnr) - min(fnr)):.2f} points"]
    assert texts(opened, "#tile-cost") == [f"{sum(row['cost'] for row in rows) / 5:.4f}"]


def test_costs_and_the_ood_share_move_the_expected_cost(opened):
    put(opened, "cost-fp", "2")
    put(opened, "cost-fn", "30")
    put(opened, "share", "10")
    for row in outcomes(opened).values():
        assert row["cost"] == pytest.approx(0.9 * row["fpr"] * 2 + 0.1 * row["fnr"] * 30, rel=1e-14)


@pytest.mark.parametrize(
    ("button", "rule"),
    [
        ("#at-95tnr", lambda s: metrics.threshold_at_tnr(s.calibration)),
        ("#alpha-1", lambda s: metrics.threshold_conformal(s.calibration, alpha=0.05)),
        ("#alpha-2", lambda s: metrics.threshold_conformal(s.calibration, alpha=0.1)),
        ("#at-test", lambda s: metrics.threshold_equal_error(s.id, s.ood)),
    ],
)
def test_buttons_choose_the_thresholds_of_the_library(opened, run, button, rule):
    name = opened.run("document.getElementById('detector').selectedOptions[0].textContent")
    put(opened, "draw", "2")
    click(opened, button)
    assert opened.run(f"document.querySelector({button!r}).getAttribute('aria-pressed')") == "true"
    for ood, row in outcomes(opened).items():
        scores = run.scores(name, ood=ood, fold=2)
        assert row == pytest.approx(recomputed(scores, rule(scores)), rel=1e-15)


def test_a_validation_set_gives_one_threshold_to_all_and_leaves_the_averages(opened, run):
    name = opened.run("document.getElementById('detector').selectedOptions[0].textContent")
    put(opened, "draw", "0")
    put(opened, "val-set", "1")
    chosen_on = html.Layout.of(run).sets[1]
    other = run.scores(name, ood=chosen_on, fold=0)
    threshold = metrics.threshold_equal_error(other.calibration, other.ood)
    shown = outcomes(opened)
    for ood, row in shown.items():
        assert row == pytest.approx(recomputed(run.scores(name, ood=ood, fold=0), threshold), rel=1e-15)
    rest = [row["fnr"] for ood, row in shown.items() if ood != chosen_on]
    assert texts(opened, "#tile-fnr") == [f"{100 * sum(rest) / 4:.2f}\u00a0%"]


def test_a_level_with_too_few_calibration_rows_is_disabled_with_its_reason(opened):
    assert opened.run("document.getElementById('alpha-0').disabled")
    assert "Too few calibration rows" in opened.run("document.getElementById('alpha-0').title")


def test_the_slider_answers_the_keyboard(opened):
    before = outcomes(opened)
    opened.run("document.getElementById('step').focus()")
    opened.press("ArrowLeft", 37)
    assert texts(opened, "#keep") == ["94.9\u00a0%"]
    opened.press("Home", 36)
    assert texts(opened, "#keep") == ["0.0\u00a0%"]
    assert all(row["fpr"] == 1.0 and row["fnr"] == 0.0 for row in outcomes(opened).values())
    assert outcomes(opened) != before


def test_the_line_in_the_picture_can_be_dragged(opened):
    opened.run("document.getElementById('explorer-chart').scrollIntoView({block: 'center', behavior: 'instant'})")
    x, y, width = opened.run("""(() => {
        const box = document.querySelector("#explorer-chart svg").getBoundingClientRect();
        return [box.left, box.top + 60, box.width];
    })()""")
    opened.mouse("mousePressed", x + 0.5 * width, y)
    middle = texts(opened, "#keep")
    opened.mouse("mouseMoved", x + 0.25 * width, y)
    opened.mouse("mouseReleased", x + 0.25 * width, y)
    share = [float(text[0].split("\u00a0")[0]) for text in (middle, texts(opened, "#keep"))]
    assert share[0] > share[1] > 0


# ------------------------------------------------------------------------------------------------ table


def shown_rows(page):
    return texts(page, "#results-table tbody .name")


def test_the_table_shows_the_means_in_per_cent(opened, run):
    summary = run.summary().query("metric == 'auroc'").set_index(["detector", "ood"])["mean"]
    sets = html.Layout.of(run).by_group()
    ordered = [name for names in sets.values() for name in names]
    cells = opened.run("""[...document.querySelectorAll("#results-table tbody tr")].map(row =>
        [row.querySelector(".name").textContent, [...row.querySelectorAll("td")].map(cell => cell.textContent)])""")
    for name, found in cells:
        near, far = ([summary[name, ood] for ood in sets[group]] for group in ("near", "far"))
        expected = [np.mean(near + far), *near, np.mean(near), *far, np.mean(far)]
        assert found == [f"{100 * value:.2f}" for value in expected], (name, ordered)


def test_headings_sort_both_ways(opened, run):
    means = run.summary().query("metric == 'auroc' and ood == 'svhn'").set_index("detector")["mean"]
    down = means.sort_values(ascending=False).index.tolist()
    heading = "#results-table thead button[title='svhn']"
    click(opened, heading)
    assert shown_rows(opened) == down
    assert opened.run("document.querySelector('#results-table [aria-sort]').getAttribute('aria-sort')") == "descending"
    click(opened, heading)
    assert shown_rows(opened) == down[::-1]
    click(opened, "#results-table thead button[title='Detector']")
    assert shown_rows(opened) == sorted(means.index)


def test_the_best_of_a_column_is_bold_also_where_lower_is_better(opened, run):
    put(opened, "metric", "1")
    assert "FPR@95" in opened.run("document.getElementById('metric').selectedOptions[0].textContent")
    means = run.summary().query("metric == 'fpr95_ood' and ood == 'mnist'").set_index("detector")["mean"]
    bold = opened.run("""[...document.querySelectorAll("#results-table tbody tr")]
        .filter(row => row.querySelectorAll("td")[1].querySelector("b"))
        .map(row => row.querySelector(".name").textContent)""")
    assert bold == [means.idxmin()]


def test_rows_filter_by_name_by_group_and_by_the_best(opened, run):
    put(opened, "filter", "m")
    assert sorted(shown_rows(opened)) == ["mds", "mls", "msp", "vim"]
    assert texts(opened, "#results-note")[0].startswith("4 of 6 detectors")
    put(opened, "filter", "")
    click(opened, "#only-best")
    assert sorted(shown_rows(opened)) == sorted(run.cliques().top.members)
    put(opened, "group", "1")
    assert "svhn" in " ".join(texts(opened, "#results-table thead th"))
    assert "mnist" not in " ".join(texts(opened, "#results-table thead th"))


def test_intervals_appear_when_asked(opened, run):
    click(opened, "#intervals")
    row = run.summary().query("metric == 'auroc' and ood == 'mnist' and detector == 'knn'").iloc[0]
    half = opened.run("document.querySelector('#results-table tr[data-method=\"0\"] small').textContent")
    assert half == f"± {50 * (row['high'] - row['low']):.2f}"


# ------------------------------------------------------------------------------------------------ further parts


def test_two_detectors_are_compared_by_the_pairwise_test(opened, run):
    from oodometer import stats

    pairs = stats.conover(run.blocks("auroc"), higher_is_better=True)
    first, second = (
        opened.run(f"document.getElementById('{k}').selectedOptions[0].textContent") for k in ("pair-a", "pair-b")
    )
    text = texts(opened, "#pair-result")[0]
    assert text.startswith(f"{first} ranks before {second}")
    assert f"p = {pairs[first, second]:.4f} adjusted" in text


def test_a_dot_for_every_fold_of_every_detector(opened):
    assert opened.run("document.querySelectorAll('#folds-chart circle').length") == 6 * 3
    put(opened, "folds-set", "2")
    assert opened.run("document.querySelectorAll('#folds-chart circle').length") == 6 * 3


def test_a_detector_opens_with_its_search_curve(opened):
    click(opened, "#results-table tbody a")
    opened.wait("document.querySelector('details.detector[open] .tuning svg') !== null")
    assert opened.run("location.hash").startswith("#detector-")
    assert "k=10" in " ".join(texts(opened, "details.detector[open] .tuning svg text"))


def test_every_control_is_reached_by_the_keyboard(opened):
    seen = set()
    for _ in range(120):
        opened.press("Tab", 9)
        seen.add(opened.run("document.activeElement.id || document.activeElement.textContent.slice(0, 20)"))
    assert {
        "metric",
        "filter",
        "only-best",
        "intervals",
        "detector",
        "step",
        "at-95tnr",
        "cost-fp",
        "folds-set",
        "pair-a",
    } <= seen


def test_every_control_has_a_name(opened):
    nameless = opened.run("""[...document.querySelectorAll("input, select, button")].filter(one =>
        !one.closest("label") && !document.querySelector(`label[for="${one.id}"]`) &&
        !one.getAttribute("aria-label") && !one.textContent.trim()).map(one => one.outerHTML)""")
    assert nameless == []


# ------------------------------------------------------------------------------------------------ looks


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [380, 1024, 1920])
def test_it_renders_at_every_width_without_a_complaint(page, awkward, tmp_path, width, dark):
    page.complaints.clear()
    page.open(awkward.folder / "report.html", width=width, dark=dark)
    assert page.run("document.documentElement.scrollWidth") <= width
    image = Image.open(io.BytesIO(page.screenshot(tmp_path / "page.png"))).convert("L")
    assert image.width == width
    paper = np.bincount(np.asarray(image).ravel()).argmax()
    assert paper < 64 if dark else paper > 192
    assert page.complaints == []


def test_awkward_names_are_shown_as_they_are(page, awkward):
    page.complaints.clear()
    page.open(awkward.folder / "report.html")
    titles = page.run("[...document.querySelectorAll('#results-table thead button')].map(one => one.title)")
    assert {SCRIPT, QUOTED, LONG, UNICODE} <= set(titles)
    assert page.run("document.querySelectorAll('script').length") == 2
    put(page, "exposure", "1")
    put(page, "explorer-exposure", "1")
    assert page.run("document.getElementById('at-val').disabled")
    assert len(outcomes(page)) == 5
    assert page.complaints == []


def test_text_contrasts_with_its_ground_in_both_schemes(page, run):
    """WCAG 2.1 AA: 4.5 to 1 for the text colours."""
    for dark in (False, True):
        page.open(run.folder / "report.html", dark=dark)
        for name in ("--ink", "--soft", "--accent", "--warn"):
            ground = "--warn-wash" if name == "--warn" else "--paper"
            assert page.run(CONTRAST % (name, ground)) >= 4.5, (name, dark)


CONTRAST = """(() => {
    const light = (name) => {
        const probe = document.createElement("i");
        probe.style.color = `var(${name})`;
        document.body.append(probe);
        const parts = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
            .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        probe.remove();
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
    };
    const [a, b] = [light("%s"), light("%s")];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
})()"""


def test_it_prints(opened):
    assert opened.pdf().startswith(b"%PDF")


def test_nothing_is_fetched(page, run):
    page.requests.clear()
    page.open(run.folder / "report.html")
    assert {url for url in page.requests if not url.startswith("data:")} == {(run.folder / "report.html").as_uri()}

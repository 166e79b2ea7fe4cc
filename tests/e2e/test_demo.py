"""The demo as its user meets it: it prints what its files hold, can be repeated, and keeps files of others."""

from __future__ import annotations

import re

import numpy as np
import pytest
from sklearn.datasets import load_digits, load_sample_image

from oodometer import Bank, data, demo, metrics
from oodometer.cli import main
from oodometer.errors import OodometerError
from oodometer.results import Results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a demo that has run."""
    place = tmp_path_factory.mktemp("demo")
    demo.run(place)
    return place


@pytest.fixture
def shown(folder, capsys, monkeypatch):
    """(exit code, stdout, stderr) of the command, on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    code = main(["demo", "--out", str(folder)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_every_number_of_the_table_is_the_mean_of_its_folds(folder, shown):
    code, out, err = shown
    assert code == 0 and err == "running the demo study: some ten seconds\n"
    values = Results.open(folder / "results").to_pandas().query("metric == 'auroc'")
    lines = re.findall(r"^(\w+)(?: \(tuned\))?((?: +\d+\.\d ± +\d+\.\d){4})$", out, re.M)
    assert sorted(name for name, _ in lines) == sorted(values["detector"].unique()) and len(lines) >= 10
    averages = []
    for name, cells in lines:
        printed = [float(mean) for mean in re.findall(r"(\d+\.\d) ±", cells)]
        own = values[values["detector"] == name]
        pairs = [(ood, how) for ood in ("other digits", "photograph") for how in ("without", "with")]
        told = [100 * own.query("ood == @ood and exposure == @how")["value"].mean() for ood, how in pairs]
        assert printed == [pytest.approx(mean, abs=0.0501) for mean in told]
        averages.append(np.mean(told))
    assert averages == sorted(averages, reverse=True)
    assert f"Best on average: {lines[0][0]}, {averages[0]:.1f} %." in out


def test_the_output_fits_80_columns_and_names_files_that_are_there(folder, shown):
    _, out, _ = shown
    place = str(folder)
    assert max(len(line.replace(place, "oodometer-demo")) for line in out.splitlines()) <= 80
    written = re.findall(rf"^  {re.escape(place)}/(\S+)", out, re.M)
    assert written == ["report.html", "results/results.csv", "study.toml"]
    assert all((folder / name).stat().st_size > 500 for name in written)


def test_the_commands_it_proposes_work(folder, shown, capsys):
    _, out, _ = shown
    proposed = [line.split()[1:] for line in out.splitlines() if line.startswith("  oodometer ")]
    assert len(proposed) == 3
    for arguments in proposed[:2]:
        assert main(arguments) == 0
    # The third is the long one: its plan is enough.
    assert main([*proposed[2], "--dry-run"]) == 0
    assert "15 folds" in capsys.readouterr().out


def test_the_digits_it_calls_unknown_are_the_ones_no_classifier_saw(folder, shown):
    _, out, _ = shown
    results = Results.open(folder / "results")
    known = demo.known_digits(results)
    assert len(known) == 5 and f"digits {' '.join(map(str, known))};" in out
    labels = load_digits().target
    for fold in range(5):
        scores = results.scores("msp", ood="other digits", fold=fold)
        assert set(labels[scores.id_names]) == set(known)
        assert not set(labels[scores.ood_names]) & set(known)
        values = results.to_pandas().query(
            "detector == 'msp' and ood == 'other digits' and exposure == 'without' and metric == 'auroc'"
        )
        assert metrics.auroc(scores.id, scores.ood) == values.set_index("fold")["value"][fold]


def test_exposure_teaches_the_softmax_on_classes_it_was_not_shown(folder):
    """The lesson of the demo, with a margin: without exposure the softmax trusts a photograph more than digits."""
    means = Results.open(folder / "results").blocks("auroc")["msp"]
    without, exposed = (means.xs(how, level="exposure") for how in ("without", "with"))
    assert (exposed > without + 0.02).all()


def test_a_second_run_computes_nothing_anew(folder):
    before = (folder / "results" / "results.csv").read_bytes()
    stamps = {path: path.stat().st_mtime_ns for path in (folder / "results" / "cells").glob("*.npy")}
    demo.run(folder)
    assert (folder / "results" / "results.csv").read_bytes() == before
    assert stamps == {path: path.stat().st_mtime_ns for path in (folder / "results" / "cells").glob("*.npy")}


def test_a_study_or_bank_that_was_changed_is_kept(tmp_path, capsys):
    study = demo.prepare(tmp_path)
    study.write_text(demo.STUDY.replace("folds = 5", "folds = 2"))
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "is not the demo's study any more" in capsys.readouterr().err
    assert "folds = 2" in study.read_text()
    study.write_text(demo.STUDY)
    Bank(features=np.zeros((2, 2))).save(tmp_path / "banks" / "digits", overwrite=True)
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "is not the demo's bank" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- data


def test_digits_are_scikit_learns_and_every_digit_has_one_kind():
    bank = data.digits()
    pixels, labels = load_digits(return_X_y=True)
    np.testing.assert_array_equal(bank.features * 16, pixels)
    np.testing.assert_array_equal(bank.labels, labels)
    kinds = list(data.KINDS)
    for digit, kind in enumerate(["round", "straight", "mixed", "round", "straight", "mixed", "round", "straight"]):
        assert {kinds[place] for place in bank["kind"][labels == digit]} == {kind}


@pytest.mark.parametrize("name", ["china", "flower"])
def test_patches_are_means_of_squares_of_a_photograph(name):
    bank = data.photograph_patches(name)
    image = load_sample_image(f"{name}.jpg").mean(axis=2) / 255
    rows, columns = image.shape[0] // 24, image.shape[1] // 24
    assert len(bank) == rows * columns
    for row, column, strip in ((0, 0, 0), (1, 2, 0), (rows - 1, columns - 1, 4)):
        square = image[24 * row : 24 * row + 24, 24 * column : 24 * column + 24]
        told = [square[3 * i : 3 * i + 3, 3 * j : 3 * j + 3].mean() for i in range(8) for j in range(8)]
        np.testing.assert_allclose(bank.features[row * columns + column], told, atol=1e-6)
        assert bank.labels[row * columns + column] == {"china": 10, "flower": 15}[name] + strip
    assert 0 <= bank.features.min() < bank.features.max() <= 1


def test_the_sets_share_levels_and_no_class():
    sets = [data.digits(), *map(data.photograph_patches, data.PHOTOGRAPHS)]
    assert {bank.columns for bank in sets} == {("features", "labels", "kind")}
    for level in ("labels", "kind"):
        classes = [np.unique(bank[level]) for bank in sets]
        assert len(np.unique(np.concatenate(classes))) == sum(map(len, classes))
    with pytest.raises(OodometerError, match="one of china, flower was needed; found 'moon'"):
        data.photograph_patches("moon")

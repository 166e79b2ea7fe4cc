"""The command as its user meets it: score, list, metrics, doctor; their output, their mistakes, their exit codes."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from oodometer import metrics
from oodometer.cli import COMMANDS, main
from oodometer.cli.doctor import EXTRAS
from oodometer.detectors import names

LONG = 80


@pytest.fixture
def run(capsys, monkeypatch):
    """(exit code, stdout, stderr) of a command, on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", str(LONG))

    def call(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def command(*arguments, stdin=b"", **environment):
    """The same in a process of its own, with bytes."""
    settings = {**os.environ, "COLUMNS": str(LONG), "PYTHONWARNINGS": "", **environment}
    return subprocess.run(
        [sys.executable, "-m", "oodometer", *map(str, arguments)],
        capture_output=True,
        input=stdin,
        env=settings,
        check=False,
    )


def rng_bank(rows, shift=0.0, seed=0, labels=True):
    rng = np.random.default_rng(seed)
    weight, bias = np.random.default_rng(9).standard_normal((4, 16)), np.zeros(4)
    classes = rng.integers(0, 4, rows)
    features = 2 * weight[classes] * (1 - shift) + rng.standard_normal((rows, 16))
    columns = {"features": features.astype(np.float32), "W": weight, "b": bias}
    return columns | ({"labels": classes} if labels else {})


@pytest.fixture
def banks(tmp_path):
    made = {"train": rng_bank(300), "test": rng_bank(200, seed=1), "svhn": rng_bank(150, 0.7, 2, labels=False)}
    for name, columns in made.items():
        np.savez(tmp_path / f"{name}.npz", **columns)
    return tmp_path


def scores_of(seed=0, detectors=("",), labels=True):
    """A table with one ID and two OOD sets, as text and as arrays."""
    rng = np.random.default_rng(seed)
    lines, arrays = ["detector,dataset,score,is_ood,label,prediction"], {}
    for place, detector in enumerate(detectors):
        for dataset, rows, shift in (("cifar", 200, 0), ("svhn", 150, 2), ("dtd", 120, 1)):
            values = rng.standard_normal(rows) + shift * (1 + place)
            label, guess = rng.integers(0, 3, rows), rng.integers(0, 3, rows)
            arrays[detector, dataset] = values, label == guess
            for value, y, p in zip(values.tolist(), label.tolist(), guess.tolist(), strict=True):
                known = f"{y},{p}" if dataset == "cifar" and labels else ","
                lines.append(f"{detector},{dataset},{value!r},{int(dataset != 'cifar')},{known}")
    return "\n".join(lines) + "\n", arrays


@pytest.fixture
def table(tmp_path):
    text, arrays = scores_of()
    path = tmp_path / "scores.csv"
    path.write_text(text)
    return path, arrays


# --- metrics ----------------------------------------------------------------------------------------------------


def test_metrics_prints_a_readable_table(run, table):
    path, arrays = table
    code, out, err = run("metrics", path)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= LONG
    assert "200 rows of cifar (in distribution)" in out
    (a, correct), (o, _) = arrays["", "cifar"], arrays["", "svhn"]
    known = metrics.delong(a, o)
    failures = metrics.failures(a, correct, o)
    expected = [
        *("svhn", "150", f"{100 * known.value:.2f}", f"{100 * known.low:.1f}–{100 * known.high:.1f}"),
        *(f"{100 * metrics.fpr_at_tpr(a, o, positive=p):.2f}" for p in ("ood", "id")),
        *(f"{100 * metrics.aupr(a, o, positive=p):.2f}" for p in ("ood", "id")),
        f"{1000 * metrics.augrc(*failures):.2f}",
    ]
    assert next(line for line in out.splitlines() if line.startswith("svhn")).split() == expected
    assert out.splitlines()[1].split() == ["AUROC", *["95", "%", "CI"], "FPR95", "FPR95", "AUPR", "AUPR", "AUGRC"]
    assert re.findall(r"OOD\+ %|ID\+ %|×1000", out.splitlines()[2]) == ["OOD+ %", "ID+ %"] * 2 + ["×1000"]


def test_detectors_are_ranked_within_each_data_set(run, tmp_path):
    (tmp_path / "s.csv").write_text(scores_of(detectors=("weak", "strong"))[0])
    code, out, _ = run("metrics", tmp_path / "s.csv", "--groups", "far=svhn,dtd")
    assert code == 0
    blocks = [block.splitlines() for block in out.split("\n\n")[:-1]]
    assert [block[0].split(":")[0] for block in blocks] == ["svhn", "dtd", "far"]
    for block in blocks:
        assert [line.split()[0] for line in block[3:]] == ["strong", "weak"]


def test_json_and_csv_hold_every_digit(run, table):
    path, arrays = table
    code, out, _ = run("metrics", path, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["id"], found["unit"], found["level"]) == ("cifar", "fraction", 0.95)
    rows = {row["dataset"]: row for row in found["rows"]}
    a, o = arrays["", "cifar"][0], arrays["", "dtd"][0]
    assert {name: rows["dtd"][name] for name in metrics.ranking(a, o)} == metrics.ranking(a, o)
    assert rows["all"]["n_ood"] is None
    code, out, _ = run("metrics", path, "--csv")
    listed = {row["dataset"]: row for row in csv.DictReader(io.StringIO(out))}
    assert {name: float(listed["dtd"][name]) for name in metrics.ranking(a, o)} == metrics.ranking(a, o)


def test_calibration_rows_fix_one_threshold_and_are_not_evaluated(run, table):
    path, arrays = table
    code, out, _ = run("metrics", path, "--calibration", "dtd", "--json")
    (row,) = json.loads(out)["rows"]
    assert code == 0
    a, o, cal = (arrays["", name][0] for name in ("cifar", "svhn", "dtd"))
    assert row["threshold@95tnr"] == metrics.threshold_at_tnr(cal)
    assert row["fpr@95tnr"] == (a > row["threshold@95tnr"]).mean()
    assert row["autc"] == metrics.autc(a, o, calibration=cal)
    code, out, _ = run("metrics", path, "--calibration", "dtd", "--show", "fnr@95tnr", "threshold@95tnr")
    line = next(line for line in out.splitlines() if line.startswith("svhn")).split()
    assert line == ["svhn", "150", f"{100 * (o <= row['threshold@95tnr']).mean():.2f}", f"{row['threshold@95tnr']:.4g}"]


def test_is_ood_alone_is_enough_and_standard_input_too():
    text = "score,is_ood\n1,0\n2,0\n2,1\n4,1\n"
    done = command("metrics", "-", "--json", stdin=text.encode())
    assert done.returncode == 0
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["dataset"], row["auroc"]) == ("ood", 0.875)
    assert b"few rows" in done.stderr  # notes are no data
    assert "augrc:scod" not in row


def test_in_distribution_rows_under_another_name_are_said_to_be_scored_as_ood(run, tmp_path):
    path = tmp_path / "s.csv"
    path.write_text("score,dataset,is_ood\n1,id,0\n2,id,0\n3,corrupted,0\n4,corrupted,0\n5,far,1\n6,far,1\n")
    code, _, err = run("metrics", path)
    assert code == 2
    assert "which dataset is in distribution? Pass --id NAME" in err
    code, _, err = run("metrics", path, "--id", "id")
    assert code == 0
    assert "'corrupted' with is_ood = 0 evaluated as out of distribution" in err


def test_no_colour_off_a_terminal_nor_with_no_color(table):
    for settings in ({}, {"NO_COLOR": "1"}, {"FORCE_COLOR": "1", "NO_COLOR": "1"}):
        done = command("metrics", table[0], **settings)
        assert done.returncode == 0
        assert b"\x1b[" not in done.stdout
        assert done.stderr == b""


MISTAKES = {
    "score, dataset\n": "has a header and no rows",
    "": "is empty; columns needed: score,dataset or score,is_ood",
    "scores,dataset\n1,id\n": "Rename scores → score",
    "score;dataset\n1;id\n": "separated by ';': commas are needed",
    "score,dataset\n1,id\n2,id\n": "only the dataset 'id' was found",
    "score,dataset\n1,id\nnan,id\n2,ood\n": "line 3, column score: a number is needed in every row, found 'nan'",
    "score,dataset\n\n1,id\nhigh,ood\n": "line 4, column score: a number is needed in every row, found 'high'",
    "score,dataset\n1,id\n2,\n": "line 3, column dataset: the name is missing",
    "score,is_ood\n1,0\n2,maybe\n": "line 3, column is_ood: 'maybe' is none of 0, 1, false, true",
    "score,dataset\n1,a\n2,b\n": "which dataset is in distribution? Pass --id NAME, one of: 'a', 'b'",
    "score,dataset\n1,id\n2,ood,3\n": "no table with the same columns in every row",
    "detector,score,dataset\nm,1,id\nm,2,ood\nk,1,id\n": "detector 'k' has no rows of 'ood'",
    "score,dataset,label,prediction\n1,id,0,0\n2,id,1,\n3,ood,,\n": "line 3, column label, prediction",
}


@pytest.mark.parametrize("text", MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_in_the_table_is_one_line_that_says_where(run, tmp_path, text):
    path = tmp_path / "scores.csv"
    path.write_text(text)
    code, out, err = run("metrics", path)
    assert (code, out) == (2, "")
    assert err.startswith(f"oodometer: {path}")
    assert err.count("\n") == 1
    assert MISTAKES[text] in err


def test_what_is_no_table_at_all(run, tmp_path):
    garbage = tmp_path / "garbage.csv"
    garbage.write_bytes(bytes(range(256)) * 40)
    for path, message in (
        (garbage, "is not UTF-8 text"),
        (tmp_path / "absent.csv", "absent.csv: No such file"),
        (tmp_path, "Is a directory"),
    ):
        code, out, err = run("metrics", path)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--id", "cifra"], "no dataset 'cifra'; did you mean 'cifar'?"),
        (["--calibration", "val"], "--calibration 'val': no such data set"),
        (["--groups", "near"], "write GROUP=DATASET,DATASET"),
        (["--groups", "near=cifar100"], "'near' names 'cifar100'; the OOD sets are svhn, dtd"),
        (["--show", "auc"], "--show 'auc': no such metric of this table; known: auroc, fpr95_ood"),
        (["--level", "95"], "95 % is .95"),
        (["--json", "--csv"], "Choose one"),
        (["--calibration", "svhn", "--validation", "dtd"], "no out-of-distribution data set is left"),
    ],
)
def test_a_mistake_in_the_arguments(run, table, arguments, message):
    code, out, err = run("metrics", table[0], *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


# --- score and list ---------------------------------------------------------------------------------------------


def test_scores_go_into_a_table_that_metrics_reads(run, banks):
    arguments = ["--train", banks / "train.npz", "--id", banks / "test.npz", "--ood", banks / "svhn.npz"]
    out = banks / "scores"
    code, printed, err = run("score", *arguments, "--detector", "msp", "knn:k=5", "--out", out)
    assert (code, printed) == (0, f"{out / 'scores.csv'}\n")
    assert len([line for line in err.splitlines() if "scored 350 rows" in line]) == 2
    code, printed, _ = run("metrics", out / "scores.csv", "--json")
    assert code == 0
    rows = {(row["detector"], row["dataset"]): row for row in json.loads(printed)["rows"]}
    files = [np.load(out / "knn_k=5" / f"{name}.npy") for name in ("test", "svhn")]
    assert rows["knn:k=5", "svhn"]["auroc"] == metrics.auroc(*files)
    assert rows["knn:k=5", "svhn"]["auroc"] > 0.9
    assert "augrc:discard_id_errors" in rows["msp", "svhn"]
    code, _, err = run("score", *arguments, "--detector", "msp", "--out", out)
    assert code == 2
    assert "exists: choose another --out, or pass --overwrite" in err


def test_a_detector_that_fails_leaves_the_others_complete(run, banks):
    (banks / "broken.npz").write_bytes((banks / "test.npz").read_bytes()[:600])
    code, _, err = run("score", "--id", banks / "broken.npz", "--detector", "msp", "--out", banks / "o")
    assert code == 2
    assert "broken.npz is truncated" in err
    logits = np.random.default_rng(0).standard_normal((20, 4))
    np.savez(banks / "logits.npz", logits=logits)
    test = ["--test", f"id={banks / 'logits.npz'}", f"x={banks / 'logits.npz'}"]
    code, printed, err = run(
        "score", "--train", banks / "train.npz", *test, "--detector", "knn", "msp", "--out", banks / "o"
    )
    assert code == 1
    assert "knn failed" in err
    assert "1 of 2 detectors failed" in err
    with Path(printed.strip()).open() as stream:
        assert {row["detector"] for row in csv.DictReader(stream)} == {"msp"}


def test_list_shows_every_detector_and_one_card_in_full(run):
    code, out, _ = run("list")
    assert code == 0
    assert {line.split()[0] for line in out.splitlines() if line[:1].isalnum()} >= set(names())
    code, out, _ = run("list", "knn", "--json")
    (card,) = json.loads(out)
    assert (card["name"], card["needs"]) == ("knn", ["features"])
    code, _, err = run("list", "knnn")
    assert code == 2
    assert "did you mean" in err


# --- doctor -----------------------------------------------------------------------------------------------------


def test_doctor_knows_the_machine(run):
    code, out, _ = run("doctor", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["versions"]["numpy"] == np.__version__
    assert found["threads"]["cores"] == len(os.sched_getaffinity(0))
    assert found["extras"]["vision"]["install"] == "pip install 'oodometer[vision]'"
    code, out, _ = run("doctor")
    assert code == 0
    assert max(map(len, out.splitlines())) <= LONG
    for name, extra in found["extras"].items():
        line = next(line for line in out.split("\nextras\n")[1].splitlines() if line.startswith(f"{name} "))
        assert ("installed" in line) == extra["installed"]


def test_doctor_lists_the_extras_that_can_be_installed():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    offered = set(project["optional-dependencies"]) - {"dev", "docs"}
    assert set(EXTRAS) == offered


def findings(run, *paths):
    code, out, _ = run("doctor", *paths, "--json")
    return code, {Path(path).name: listed for path, listed in json.loads(out)["banks"].items()}


def texts(listed, level):
    return [one["text"] for one in listed if one["level"] == level]


def test_doctor_finds_a_sound_bank_sound(run, banks):
    code, found = findings(run, banks / "train.npz", banks / "test.npz", banks / "svhn.npz")
    assert code == 0
    assert not [one for listed in found.values() for one in listed if one["level"] == "problem"]
    good = texts(found["train.npz"], "ok")
    columns = rng_bank(300)
    counts = np.bincount(columns["labels"])
    assert f"4 classes with {counts.min()} to {counts.max()} rows" in good
    right = ((columns["features"] @ columns["W"].T).argmax(1) == columns["labels"]).mean()
    assert f"accuracy {100 * right:.2f} %" in good
    assert "the head has full rank 4" in good
    assert any(re.fullmatch(r"\d+ of \d+ detectors can be fitted", text) for text in good)
    assert any(re.match(r"\d+ more with columns that `oodometer extract` writes: adascale, ", text) for text in good)


def test_doctor_names_what_is_wrong(run, banks):
    columns = rng_bank(12)
    columns["features"][:, [3, 5]] = 1.5
    columns["features"][4] = 0
    columns["features"][7, 0] = np.nan
    columns["features"][4, [3, 5]] = 1.5
    columns["labels"] = np.where(columns["labels"] == 2, 1, columns["labels"])
    columns["labels"][1] = 9
    columns["W"] = columns["W"] - columns["W"].mean(0)
    np.savez(banks / "bad.npz", **columns)
    code, found = findings(run, banks / "train.npz", banks / "bad.npz")
    assert code == 1
    problems, notes = texts(found["bad.npz"], "problem"), texts(found["bad.npz"], "note")
    assert problems[0] == "column 'features' holds NaN or infinity in row 7: drop such rows"
    assert problems[1].startswith("row 1 has label 9, outside 0 … 3: drop such rows")
    assert problems[2].startswith(f"its head is not that of {banks / 'train.npz'}")
    assert notes[0].startswith("2 of 16 features are constant (3, 5)")
    assert notes[1].startswith("12 rows for 16 features: covariances are singular")
    assert notes[2].startswith("the head has rank 3 of 4")
    code, out, _ = run("doctor", banks / "bad.npz")
    assert code == 1
    assert max(map(len, out.splitlines())) <= LONG


def test_doctor_sees_empty_classes_zero_rows_chance_and_strangers(run, banks):
    columns = rng_bank(300)
    columns["labels"] = (columns["labels"] + 1) % 4  # classes in another order
    columns["features"][[0, 9]] = 0
    np.savez(banks / "shuffled.npz", **columns)
    few = {**rng_bank(300), "labels": np.zeros(300, int)}
    np.savez(banks / "few.npz", **few)
    outside = {**rng_bank(50), "labels": -np.ones(50, int)}
    np.savez(banks / "ood.npz", **outside)
    np.savez(banks / "other.npz", features=np.ones((30, 8)), labels=np.zeros(30, int))
    paths = [banks / name for name in ("shuffled.npz", "few.npz", "ood.npz", "other.npz")]
    code, found = findings(run, *paths)
    assert code == 1
    assert re.match(r"accuracy \d+\.\d+ % is chance", texts(found["shuffled.npz"], "problem")[0])
    assert "2 rows of features are all zero" in texts(found["shuffled.npz"], "note")[0]
    assert "3 of 4 classes have no row (1, 2, 3)" in texts(found["few.npz"], "note")[0]
    assert texts(found["ood.npz"], "problem") == []
    assert texts(found["ood.npz"], "note")[0].startswith("no label is in 0 … 3: right for an OOD bank")
    assert "rows of 'features' have shape (8,)" in texts(found["other.npz"], "problem")[0]
    assert re.match(r"\d+ more with a head \(W and b\): ash, ", texts(found["other.npz"], "note")[-1])


def test_doctor_goes_on_after_a_damaged_bank_and_refuses_an_absent_one(run, banks):
    (banks / "cut.npz").write_bytes((banks / "train.npz").read_bytes()[:900])
    code, found = findings(run, banks / "cut.npz", banks / "test.npz")
    assert code == 1
    assert "truncated" in found["cut.npz"][0]["text"]
    assert found["test.npz"][0]["level"] == "ok"
    code, out, err = run("doctor", banks / "absent.npz")
    assert (code, out) == (2, "")
    assert err == f"oodometer: {banks / 'absent.npz'}: no such file or folder\n"


# --- every command ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_and_has_an_example(run, name):
    code, out, _ = run(name, "--help")
    assert code == 0
    assert max(map(len, out.splitlines()[1:])) <= LONG + 2  # the parser indents the examples, and breaks no usage line
    assert "example:" in out
    assert f"oodometer {name}" in out.split("example:")[1]


def test_unknown_commands_and_options_are_misuse(run):
    code, out, err = run("metric")
    assert (code, out) == (2, "")
    assert "did you mean 'metrics'?" in err
    assert run("metrics")[0] == 2
    assert run("metrics", "x.csv", "--colour")[0] == 2
    assert run()[0] == 2
    assert {"score", "list", "metrics", "doctor"} <= set(COMMANDS)


def test_a_traceback_only_with_debug(tmp_path):
    (tmp_path / "s.csv").write_text("score\n1\n")
    plain, debug = command("metrics", tmp_path / "s.csv"), command("metrics", tmp_path / "s.csv", "--debug")
    assert (plain.returncode, debug.returncode) == (2, 2)
    assert b"Traceback" not in plain.stderr
    assert b"Traceback" in debug.stderr
    assert plain.stdout == debug.stdout == b""


def test_an_interruption_ends_with_130(run, monkeypatch, table):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("oodometer.cli.metrics.summaries", interrupted)
    code, out, err = run("metrics", table[0])
    assert (code, out) == (130, "")
    assert err == "oodometer: interrupted; nothing half-written was left behind\n"


def test_a_reader_that_stops_early_is_no_error(table):
    process = subprocess.Popen(
        [sys.executable, "-m", "oodometer", "metrics", str(table[0])], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate()
    assert (process.returncode, err) == (0, b"")


def test_an_ascii_terminal_gets_question_marks_and_no_error(table):
    done = command("metrics", table[0], PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.isascii()

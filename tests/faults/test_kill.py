"""A study that is killed, interrupted, damaged or run twice at once ends with the bytes of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from oodometer.study import Study, run
from tests.conformance.conftest import make_bank

STUDY = """
name = "faults"
detectors = ["msp", "energy", {name = "knn", k = 5}, {name = "gen", tune = true}, "mds", "vim", "nnguide"]
metrics = ["auroc", "autc"]
[data.id]
bank = "id"
[data.ood.a]
bank = "a"
[data.ood.b]
bank = "b"
[split]
folds = 3
repeats = 2
[tune]
rule = "nested"
"""
KILLS = 10


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with banks and a study file."""
    folder = tmp_path_factory.mktemp("study")
    make_bank(1, 300).save(folder / "id")
    for seed, name in enumerate("ab", 5):
        labels = np.random.default_rng(seed).integers(0, 6, 200)
        make_bank(seed, 200, far=True).with_columns(labels=labels).save(folder / name)
    (folder / "study.toml").write_text(STUDY)
    return folder


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> dict[str, bytes]:
    """The files of a run that nothing happened to."""
    run(place / "study.toml", place / "undisturbed")
    return files(place / "undisturbed")


def files(folder: Path) -> dict[str, bytes]:
    """Every file but the facts of the run (times, command) and the lock."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: content for name, content in found.items() if name not in ("run.json", ".lock")}


def start(place: Path, out: str, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "oodometer", "run", str(place / "study.toml"), "--out", str(place / out), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def wait_for_cells(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Until so many cells are there, or the run has ended."""
    deadline = time.monotonic() + 30
    while len(list(folder.glob("cells/*.json"))) < count and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)


def test_kill_9_at_ten_random_moments_leaves_no_trace(place: Path, undisturbed: dict[str, bytes]) -> None:
    chance = random.Random(0)
    total = sum(name.startswith("cells/") and name.endswith(".json") for name in undisturbed)
    moments = sorted(chance.randrange(total) for _ in range(KILLS))
    killed = 0
    for moment in moments:
        process = start(place, "killed")
        wait_for_cells(place / "killed", moment, process)
        time.sleep(chance.random() * 0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
    assert killed >= KILLS - 2, "the moments lie within the run"
    results = run(place / "study.toml", place / "killed")
    assert files(place / "killed") == undisturbed
    assert results.failed == []


def test_an_interrupted_run_says_how_to_go_on_and_does(place: Path, undisturbed: dict[str, bytes]) -> None:
    process = start(place, "interrupted")
    wait_for_cells(place / "interrupted", 20, process)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted; what is finished is kept in" in said
    assert "Traceback" not in said
    assert not (place / "interrupted" / "results.csv").exists()
    kept = set(files(place / "interrupted"))
    # A cell is finished when its facts are there; its values alone are computed again.
    values = {name for name in kept if name.endswith(".npy") and name.replace(".npy", ".json") in kept}
    finished = {name: (place / "interrupted" / name).stat().st_mtime_ns for name in values}
    process = start(place, "interrupted")
    out, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "auroc" in out
    assert files(place / "interrupted") == undisturbed
    # What was finished was not computed again.
    assert finished
    assert all((place / "interrupted" / name).stat().st_mtime_ns == then for name, then in finished.items())


def test_interrupted_workers_leave_no_process_and_no_trace(place: Path, undisturbed: dict[str, bytes]) -> None:
    process = start(place, "workers", "--n-jobs", "2")
    wait_for_cells(place / "workers", 5, process)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert_no_process_left(process.pid)
    run(place / "study.toml", place / "workers")
    assert files(place / "workers") == undisturbed


def test_orphaned_workers_end_and_cannot_harm_the_next_run(place: Path, undisturbed: dict[str, bytes]) -> None:
    process = start(place, "orphans", "--n-jobs", "2")
    wait_for_cells(place / "orphans", 5, process)
    os.kill(process.pid, signal.SIGKILL)  # the parent alone
    process.wait()
    run(place / "study.toml", place / "orphans")
    assert_no_process_left(process.pid)
    assert files(place / "orphans") == undisturbed


def assert_no_process_left(group: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("workers outlive their run")


def test_a_second_run_of_the_same_folder_is_refused(place: Path, undisturbed: dict[str, bytes]) -> None:
    first = start(place, "twice")
    wait_for_cells(place / "twice", 3, first)
    assert first.poll() is None, "the first run still goes"
    os.killpg(first.pid, signal.SIGSTOP)  # it holds the lock for as long as this test likes
    try:
        second = start(place, "twice")
        _, said = second.communicate(timeout=30)
        assert second.returncode == 2
        assert f"being written by another run (process {first.pid} on" in said
    finally:
        os.killpg(first.pid, signal.SIGCONT)
    first.communicate(timeout=60)
    assert first.returncode == 0
    assert files(place / "twice") == undisturbed


@pytest.mark.parametrize("damage", ["truncated values", "one bit", "missing values", "truncated facts", "edited facts"])
def test_damaged_cells_are_named_and_computed_again(
    place: Path, undisturbed: dict[str, bytes], damage: str, tmp_path: Path
) -> None:
    run(place / "study.toml", tmp_path)
    index = (tmp_path / "cells" / "index.csv").read_text().splitlines()[7].split(",")
    key = index[-2]
    values, facts = tmp_path / "cells" / f"{key}.npy", tmp_path / "cells" / f"{key}.json"
    harm(values, facts, damage)
    with pytest.warns(UserWarning, match=key):
        results = run(place / "study.toml", tmp_path)
    assert files(tmp_path) == undisturbed
    assert any(key in warning and "computed anew" in warning for warning in results.facts["warnings"])


def harm(values: Path, facts: Path, damage: str) -> None:
    content = values.read_bytes()
    if damage == "truncated values":
        values.write_bytes(content[:-9])
    elif damage == "one bit":
        values.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "missing values":
        values.unlink()
    elif damage == "truncated facts":
        facts.write_text(facts.read_text()[:-40])
    else:
        told = json.loads(facts.read_text())
        facts.write_text(json.dumps({**told, "segments": {"test": 1}}))


@pytest.mark.parametrize("kept", [0, 1])
def test_no_cell_depends_on_which_others_are_missing(
    place: Path, undisturbed: dict[str, bytes], kept: int, tmp_path: Path
) -> None:
    """Half of the cells are taken away, then the other half: searches for one OOD set among them."""
    for name, content in undisturbed.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    searches = [path for path in sorted((tmp_path / "cells").glob("*.json")) if '"search"' in path.read_text()]
    assert len(searches) == 3 * 2 * 2
    by_ood = {path: json.loads(path.read_text())["tested"][0] for path in searches}
    for path in (tmp_path / "cells").glob("*.json"):
        if by_ood.get(path, "ab"[int(path.stem, 16) % 2]) == "ab"[kept]:
            path.unlink()
    run(place / "study.toml", tmp_path)
    assert files(tmp_path) == undisturbed


def test_workers_give_the_bytes_of_one_process(place: Path, undisturbed: dict[str, bytes]) -> None:
    run(place / "study.toml", place / "two", n_jobs=2)
    assert files(place / "two") == undisturbed


def test_partly_finished_detectors_do_not_change_a_byte(place: Path, undisturbed: dict[str, bytes]) -> None:
    """A smaller neighbour search, done first, must not show in what a larger study computes later."""
    for detectors in (["msp", {"name": "knn", "k": 5}], [{"name": "gen", "tune": True}], ["vim"]):
        smaller = Study(
            name="faults",
            data={"id": str(place / "id"), "ood": {"a": str(place / "a"), "b": str(place / "b")}},
            detectors=detectors,
            metrics=["auroc", "autc"],
            split={"folds": 3, "repeats": 2},
            tune={"rule": "nested"},
        )
        run(smaller, place / "grown")
    run(place / "study.toml", place / "grown")
    assert files(place / "grown") == undisturbed

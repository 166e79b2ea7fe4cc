"""Training that is killed, or whose files are damaged, ends with the bytes of an undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from oodometer import Bank
from oodometer.errors import OodometerError, OodometerWarning
from oodometer.study import run

torch = pytest.importorskip("torch")

from oodometer.models.train import Architecture, Trained, checkpoints, create, fit  # noqa: E402

pytestmark = pytest.mark.torch
STUDY = """
name = "trained"
detectors = ["msp", "knn"]
exposure = ["without", "with"]
metrics = ["auroc"]
[trainer]
name = "finetune"
arch_options = { width = 4 }
settings = { epochs = 6, rate = 0.05, batch = 16, patience = 6 }
[data.id]
bank = "id"
[data.ood.others]
bank = "others"
[split]
folds = 2
"""
KILLS = 3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    x, y = load_digits(return_X_y=True)
    bank = Bank(images=(x.reshape(-1, 8, 8) * 15).astype(np.uint8), labels=y)
    bank.rows(np.flatnonzero(y < 6)[:400]).with_columns().save(folder / "id")
    bank.rows(np.flatnonzero(y >= 6)[:160]).with_columns().save(folder / "others")
    (folder / "study.toml").write_text(STUDY)
    return folder


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> dict[str, bytes]:
    run(place / "study.toml", place / "undisturbed")
    return files(place / "undisturbed")


def files(folder: Path) -> dict[str, bytes]:
    """Every file but the facts of the run (times, command) and the lock."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: content for name, content in found.items() if name not in ("run.json", ".lock")}


def start(place: Path, out: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "oodometer", "run", str(place / "study.toml"), "--out", str(place / out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def epochs_written(folder: Path) -> int:
    """Checkpoints are replaced: a new inode is a new epoch."""
    return sum(path.stat().st_ino for path in folder.glob("training/*/checkpoint.safetensors"))


def test_a_study_killed_in_the_midst_of_training_leaves_no_trace(place: Path, undisturbed: dict[str, bytes]) -> None:
    chance = random.Random(0)
    killed = resumed = 0
    for _ in range(KILLS):
        process = start(place, "killed")
        deadline, seen, wanted = time.monotonic() + 60, set(), chance.randrange(2, 6)
        while process.poll() is None and len(seen) < wanted and time.monotonic() < deadline:
            try:
                seen.add(epochs_written(place / "killed"))
            except FileNotFoundError:
                continue
            time.sleep(0.0005)
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        resumed += bool(list((place / "killed").glob("training/*/checkpoint.safetensors")))
    assert killed >= 2, "the kills lie within the run"
    assert resumed >= 1, "and within a training"
    results = run(place / "study.toml", place / "killed")
    assert results.failed == []
    assert files(place / "killed") == undisturbed


class StopError(Exception):
    """Ends a training from within."""


def trained(folder: Path | None, *, stop_after: int = 0, **settings: Any) -> Trained:
    """A training that ends early, after so many epochs, if asked to."""
    x, y = load_digits(return_X_y=True)
    bank = Bank(images=(x.reshape(-1, 8, 8) * 15).astype(np.uint8), labels=y)
    epochs: list[str] = []

    def tell(what: str, share: float) -> None:
        epochs.append(what)
        if len(epochs) == stop_after + 1 and stop_after:
            raise StopError

    recipe = create("crossentropy", **{"epochs": 4, "batch": 32, "patience": 4, **settings})
    architecture = Architecture("cnn", {"width": 4})
    train, val = bank.rows(slice(0, 200)), bank.rows(slice(200, 300))
    return fit(recipe, architecture, train, val, seed=0, checkpoints=folder, tell=tell)


def content(network: torch.nn.Module) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in network.state_dict().items()}


@pytest.mark.parametrize("file", ["checkpoint", "network"])
@pytest.mark.parametrize("damage", ["truncated", "one bit", "empty", "no safetensors"])
def test_damaged_files_are_named_and_trained_anew(file: str, damage: str, tmp_path: Path) -> None:
    whole = trained(None)
    if file == "checkpoint":
        with pytest.raises(StopError):
            trained(tmp_path, stop_after=2)
    else:
        trained(tmp_path)
    path = tmp_path / f"{file}.safetensors"
    bytes_ = path.read_bytes()
    harmed = {
        "truncated": bytes_[:-100],
        "one bit": bytes_[:-50] + bytes([bytes_[-50] ^ 4]) + bytes_[-49:],
        "empty": b"",
        "no safetensors": b"not a checkpoint" * 99,
    }
    path.write_bytes(harmed[damage])
    with pytest.warns(OodometerWarning, match=rf"{file}\.safetensors .*(damaged|checksum|no checkpoint).*trained anew"):
        again = trained(tmp_path)
    assert content(again.network) == content(whole.network)
    assert again.facts == whole.facts


def test_another_training_in_the_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StopError):
        trained(tmp_path, stop_after=1)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    with pytest.raises(OodometerError, match=r"belongs to another training .*choose another folder"):
        trained(tmp_path, rate=0.2)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before


def test_what_a_killed_write_left_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint.safetensors.7.partial").write_bytes(b"half")
    trained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["network.safetensors"]


def test_a_failed_write_keeps_the_file_from_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    checkpoints.write(path, {"x": torch.arange(3)}, {"n": 1})

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.write(path, {"x": torch.arange(4)}, {"n": 2})
    tensors, facts = checkpoints.read(path)
    assert tensors["x"].tolist() == [0, 1, 2]
    assert facts["n"] == 1
    assert [one.name for one in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_resumed_training_warns_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(StopError):
        trained(tmp_path, stop_after=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(tmp_path)

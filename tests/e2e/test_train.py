"""`oodometer train` from images to scores, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from oodometer import Bank, create
from oodometer.cli import main

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch
SMALL = ["--set", "epochs=3", "rate=0.05", "batch=32", "augment=none", "--arch-set", "width=4", "--device", "cpu"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 8, 8) * 15).astype(np.uint8)
    np.savez(folder / "digits.npz", x_train=x[:400], y_train=y[:400], x_test=x[400:600], y_test=y[400:600])
    np.savez(folder / "far.npz", x=255 - x[:100])
    return folder


def train(place: Path, out: str, *more: str) -> int:
    return main(["train", "--data", f"{place}/digits.npz:train", "--out", str(place / out), *SMALL, *more])


def test_from_images_to_scores(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["pretraining=1", "dropout=0.2"]
    banks = ["--bank", f"test={place}/digits.npz:test", f"far={place}/far.npz", "--passes", "3"]
    assert train(place, "gamblers", "--recipe", "deepgamblers", "--set", *more, *banks) == 0
    said = capsys.readouterr().out
    assert "classifier       3" in said
    assert "validation accuracy" in said
    facts = json.loads((place / "gamblers" / "facts.json").read_text())
    assert facts["settings"]["pretraining"] == 1
    folder = place / "gamblers" / "banks"
    assert len(Bank.open(folder / "train")) == 360, "a tenth of every class validates"
    command = ["score", "--train", folder / "train", "--test", f"id={folder / 'test'}", f"far={folder / 'far'}"]
    assert (
        main([*map(str, command), "--detector", "deepgamblers", "msp", "knn:k=5", "--out", str(place / "scores")]) == 0
    )
    bank = Bank.open(folder / "test")
    z = np.asarray(bank["logits.deepgamblers"], np.float64)
    p = np.exp(z - z.max(1, keepdims=True))
    assert np.allclose(create("deepgamblers").score(bank), p[:, -1] / p.sum(1), rtol=1e-9)


def test_extract_reads_the_weights(place: Path) -> None:
    """The same features by the trained network and by the command extract from its published files."""
    assert train(place, "plain", "--bank", f"test={place}/digits.npz:test") == 0
    folder = place / "plain"
    arguments = [
        "extract",
        *("--model", "oodometer.models.zoo:cnn:channels=1,width=4"),
        *("--weights", folder / "weights.safetensors", "--preprocess", folder / "preprocessing.json"),
        *("--data", place / "digits.npz", "--part", "test", "--layers", "none", "--device", "cpu"),
        *("--out", place / "extracted"),
    ]
    assert main(list(map(str, arguments))) == 0
    one, other = Bank.open(place / "extracted"), Bank.open(folder / "banks" / "test")
    assert np.allclose(one.features, other.features, atol=1e-5)
    assert np.allclose(one.logits, other.logits, atol=1e-5)


def test_the_same_command_opens_what_it_trained(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(place, "twice") == 0
    network = place / "twice" / "network.safetensors"
    before, first = network.stat().st_mtime_ns, capsys.readouterr().out
    assert train(place, "twice") == 0
    assert network.stat().st_mtime_ns == before
    assert capsys.readouterr().out == first
    assert train(place, "twice", "--seed", "1") == 2
    assert "belongs to another training" in capsys.readouterr().err


def test_a_saved_network_opens(place: Path) -> None:
    from oodometer.models.train import opened, read_images

    assert train(place, "opened", "--recipe", "confidnet", "--set", "branch_epochs=2", "tuning_epochs=1") == 0
    bank = opened(place / "opened").apply(read_images(f"{place}/digits.npz:test"))
    assert {"features", "labels", "logits.confidnet"} == set(bank.columns)
    with pytest.raises(ValueError, match="no trained network here"):
        opened(place)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--recipe", "deepgambler"], "did you mean 'deepgamblers'"),
        (["--set", "epoch=3"], "did you mean 'epochs'"),
        (["--set", "epochs"], "write KEY=VALUE"),
        (["--arch", "resnet21"], "unknown architecture 'resnet21'"),
        (["--bank", "train=x.npz"], "'train' is taken"),
        (["--bank", "x=nowhere.npz"], "nowhere.npz"),
        (["--val-share", "1.5"], "validation share must be above 0 and below 1"),
        (["--device", "cuda:99"], "device 'cuda:99'"),
    ],
)
def test_mistakes_end_with_one_sentence(
    place: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(place, f"mistake{abs(hash(message))}", *more) == 2
    said = capsys.readouterr().err
    assert message in said
    assert not (place / f"mistake{abs(hash(message))}" / "network.safetensors").exists(), "nothing was trained for it"
    assert "Traceback" not in said


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    said = capsys.readouterr().out
    assert "oodometer train --recipe deepgamblers" in said

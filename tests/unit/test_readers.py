"""Banks from single files: usual names are found, everything else is explained."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from oodometer import Bank
from oodometer.errors import OodometerError, OodometerWarning
from oodometer.readers import read_bank

RNG = np.random.default_rng(0)
FEATURES = RNG.standard_normal((8, 3)).astype(np.float32)
W, B = RNG.standard_normal((2, 3)).astype(np.float32), np.zeros(2, np.float32)


def npz(folder: Path, **arrays: np.ndarray) -> Path:
    np.savez(folder / "bank.npz", **arrays)
    return folder / "bank.npz"


@pytest.mark.parametrize("names", [("W", "b"), ("head.weight", "head.bias")])
def test_columns_and_head_under_usual_names(tmp_path: Path, names: tuple[str, str]) -> None:
    made = read_bank(npz(tmp_path, features=FEATURES, labels=np.arange(8) % 2, **dict(zip(names, (W, B), strict=True))))
    assert made.columns == ("features", "labels")
    np.testing.assert_allclose(made.logits, FEATURES @ W.T, rtol=1e-6)


def test_safetensors(tmp_path: Path) -> None:
    save_file({"features": FEATURES, "layers.1": FEATURES * 2}, tmp_path / "bank.safetensors")
    np.testing.assert_array_equal(read_bank(tmp_path / "bank.safetensors")["layers.1"], FEATURES * 2)


def test_a_folder_is_a_saved_bank(tmp_path: Path) -> None:
    Bank(features=FEATURES).save(tmp_path / "bank")
    np.testing.assert_array_equal(read_bank(tmp_path / "bank").features, FEATURES)


def test_arrays_that_are_no_columns_are_named_and_left_out(tmp_path: Path) -> None:
    path = npz(tmp_path, features=FEATURES, epoch=np.array(3), names=np.array(["a", "b"]))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert read_bank(path).columns == ("features",)
    text = " ".join(str(one.message) for one in said if issubclass(one.category, OodometerWarning))
    assert "epoch" in text
    assert "names" in text


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"feature": FEATURES}, "none of the columns features, logits"),
        ({"features": FEATURES, "W": W}, "'W' without 'b'"),
        ({"features": FEATURES, "labels": np.arange(7)}, "features: 8, labels: 7"),
        ({"features": FEATURES, "W": W.T, "b": B}, "pass weight.T"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(OodometerError, match=message):
        read_bank(npz(tmp_path, **arrays))


def test_other_files_are_explained(tmp_path: Path) -> None:
    path = npz(tmp_path, features=FEATURES)
    with pytest.raises(OodometerError, match=r"did you mean '.*bank\.npz'"):
        read_bank(tmp_path / "bnk.npz")
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(OodometerError, match=r"truncated or no \.npz file"):
        read_bank(path)
    (tmp_path / "bank.csv").write_text("1,2")
    with pytest.raises(OodometerError, match="a bank is a folder written by Bank"):
        read_bank(tmp_path / "bank.csv")
    (tmp_path / "bank.safetensors").write_bytes(b"no header")
    with pytest.raises(OodometerError, match=r"truncated or no \.safetensors"):
        read_bank(tmp_path / "bank.safetensors")


def test_pickled_arrays_are_never_opened(tmp_path: Path) -> None:
    np.savez(tmp_path / "bank.npz", features=np.array([{"a": 1}], dtype=object))
    with pytest.raises(OodometerError, match="without unpickling"):
        read_bank(tmp_path / "bank.npz")

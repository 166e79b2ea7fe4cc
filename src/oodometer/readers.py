"""Banks from a folder or from one file (`.npz`, `.safetensors`) that holds columns and a head under usual names."""

from __future__ import annotations

import difflib
import os
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oodometer.bank import Bank, Head
from oodometer.errors import OodometerError, OodometerWarning

Arrays = dict[str, npt.NDArray[Any]]

HEAD_KEYS = (("head.weight", "head.bias"), ("W", "b"))
COLUMNS = ("features", "logits", "labels")
COLUMN_FAMILIES = ("features.", "logits.", "layers.", "views.", "mdsens")


def read_bank(path: str | os.PathLike[str]) -> Bank:
    """A saved bank folder, or a file with `features`, `logits`, `labels`, … and `head.weight`, `head.bias` (or W, b).

    >>> read_bank("train.npz")
    """
    path = Path(path)
    if not path.exists():
        raise OodometerError(f"{path}: no such file or folder{_neighbour(path)}")
    if path.is_dir():
        return Bank.open(path)
    if path.suffix.lower() not in READERS:
        raise OodometerError(
            f"{path}: a bank is a folder written by Bank.save, a .npz or a .safetensors file. Convert arrays with "
            "numpy.savez('bank.npz', features=…, logits=…, labels=…, W=…, b=…)"
        )
    arrays = READERS[path.suffix.lower()](path)
    head = _take_head(arrays, path)
    columns = _columns(arrays, path)
    try:
        return Bank(columns, head=Head(*head) if head else None)
    except OodometerError as error:
        raise OodometerError(f"{path}: {error}") from None


def _neighbour(path: Path) -> str:
    folder = path.parent
    siblings = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return f"; did you mean {str(folder / near[0])!r}?" if near else ""


def _read_npz(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise OodometerError(f"{path} holds one array without a name: save it with numpy.savez(path, logits=…)")
            return {key: file[key] for key in file.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as error:
        raise OodometerError(f"{path} is truncated or no .npz file ({error}): copy or write it again") from None
    except ValueError as error:
        if isinstance(error, OodometerError):
            raise
        if not zipfile.is_zipfile(path):  # NumPy takes whatever it does not know for a pickle
            raise OodometerError(f"{path} is truncated or no .npz file (no archive): copy or write it again") from None
        raise OodometerError(
            f"{path} cannot be read without unpickling ({error}). Pickles can run code and are never opened: "
            "save plain numeric arrays"
        ) from None


def _read_safetensors(path: Path) -> Arrays:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise OodometerError(f"{path} is truncated or no .safetensors file ({error}): write it again") from None
    except KeyError as error:
        raise OodometerError(
            f"{path} has a tensor of type {error}, which NumPy lacks: save it as float32 or float16"
        ) from None


READERS = {".npz": _read_npz, ".safetensors": _read_safetensors}


def _take_head(arrays: Arrays, path: Path) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
    for weight, bias in HEAD_KEYS:
        if weight in arrays and bias in arrays:
            return arrays.pop(weight), arrays.pop(bias)
        if weight in arrays or bias in arrays:
            found, missing = (weight, bias) if weight in arrays else (bias, weight)
            raise OodometerError(
                f"{path} has {found!r} without {missing!r}; a head needs both (zeros for a layer without bias). "
                f"Keys found: {_listed(arrays)}"
            )
    return None


def _columns(arrays: Arrays, path: Path) -> Arrays:
    """The known columns, and other numeric arrays with one entry a row; what remains is named in a warning."""
    known = {key: value for key, value in arrays.items() if _is_known(key)}
    if not set(known) - {"labels"}:
        raise OodometerError(
            f"{path} has none of the columns features, logits, layers.*; keys found: {_listed(arrays)}{_advice(arrays)}"
        )
    rows = next(iter(known.values())).shape[:1]
    spare = {key: value for key, value in arrays.items() if key not in known}
    extra = {key: value for key, value in spare.items() if value.shape[:1] == rows and value.dtype.kind in "fiub"}
    ignored = [key for key in spare if key not in extra]
    if ignored:
        warnings.warn(
            f"{path}: ignored {', '.join(ignored)} (not numeric, or not one entry a row)",
            OodometerWarning,
            stacklevel=3,
        )
    return known | extra


def _is_known(key: str) -> bool:
    return key in COLUMNS or key.startswith(COLUMN_FAMILIES)


def _advice(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    near = {key: difflib.get_close_matches(key.lower(), COLUMNS, n=1, cutoff=0.5) for key in arrays}
    renames = [f"{key} → {match[0]}" for key, match in near.items() if match]
    return f". Rename ({', '.join(renames)})" if renames else ""


def _listed(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    return ", ".join(f"{key}{list(value.shape)}" for key, value in arrays.items()) or "none"

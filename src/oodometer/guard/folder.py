"""A guard on disk: guard.json and arrays.safetensors, each with a checksum; read without running anything in them."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from oodometer.errors import OodometerError
from oodometer.guard.state import DTYPES, Arrays, Fitted

SCHEMA = 1
"""Version of the two files; another one is not read."""
FACTS, ARRAYS = "guard.json", "arrays.safetensors"


class Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What guard.json holds, beside its own digest."""

    schema: int
    version: str
    facts: dict[str, Any]
    threshold: float
    tail: int
    detector: Fitted
    bytes: int
    sha256: str


def write(folder: Path, saved: Saved, arrays: Arrays, *, overwrite: bool) -> None:
    """Both files or none; only a guard is ever replaced."""
    if folder.exists() and not overwrite:
        raise OodometerError(f"{folder} exists: choose another folder, or pass overwrite=True")
    if folder.exists() and not (folder / FACTS).exists():
        raise OodometerError(f"{folder} holds no {FACTS}, so it is no guard and is not replaced: choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir()
    try:
        _write_files(partial, saved, arrays)
        retired = None
        if folder.exists():
            retired = folder.rename(folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.old"))
        partial.rename(folder)
        if retired is not None:
            shutil.rmtree(retired)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_files(folder: Path, saved: Saved, arrays: Arrays) -> None:
    from safetensors.numpy import save_file

    path = folder / ARRAYS
    save_file({name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}, path)
    saved = msgspec.structs.replace(saved, bytes=path.stat().st_size, sha256=_sha256(path))
    plain = msgspec.to_builtins(saved)
    text = json.dumps({**plain, "digest": _digest(plain)}, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / FACTS).write_text(text + "\n", encoding="utf-8")
    path.chmod((folder / FACTS).stat().st_mode)  # the library lets its own user alone read the file


def read(folder: Path, *, verify: bool = True) -> tuple[Saved, Arrays]:
    """Both files, checked. Arrays are mapped, not read: what is large comes from the disk when it is used."""
    saved = _read_facts(folder / FACTS)
    path = folder / ARRAYS
    if not path.is_file():
        raise OodometerError(f"{path} is missing: copy the folder again, or save the guard again")
    if path.stat().st_size != saved.bytes:
        raise _damaged(path, f"it has {path.stat().st_size} bytes, {FACTS} says {saved.bytes}: a truncated copy?")
    if verify and _sha256(path) != saved.sha256:
        raise _damaged(path, "it does not match its checksum")
    try:
        return saved, _mapped(path)
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"no safetensors file: {error}") from None


def _read_facts(path: Path) -> Saved:
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(plain, dict) or plain.pop("digest", None) != _digest(plain):
            raise ValueError("it was edited, or not written to its end")
    except (FileNotFoundError, NotADirectoryError):
        raise OodometerError(
            f"{path.parent} is not a saved guard: it has no {FACTS} (write one with guard.save)"
        ) from None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    if plain.get("schema") != SCHEMA:
        raise OodometerError(
            f"{path.parent} has guard schema {plain.get('schema')!r}, this version reads {SCHEMA}: "
            "load it with the version that wrote it, or fit it again"
        )
    try:
        return msgspec.convert(plain, Saved)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _damaged(path, str(error)) from None


def _mapped(path: Path) -> Arrays:
    """The arrays of a safetensors file where they lie on the disk: 8 bytes of length, a JSON header, the data."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    start = 8 + length
    data = np.asarray(np.memmap(path, np.uint8, "r"))[start:]
    return {name: _array(data, entry) for name, entry in header.items() if name != "__metadata__"}


def _array(data: npt.NDArray[np.uint8], entry: dict[str, Any]) -> npt.NDArray[Any]:
    first, last = entry["data_offsets"]
    return data[first:last].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _digest(plain: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _damaged(path: Path, reason: str) -> OodometerError:
    return OodometerError(f"{path} is damaged ({reason}): copy the folder again, or fit the guard again")

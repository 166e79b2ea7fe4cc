"""Rows from arrays: NPZ and NPY files, IDX files (MNIST's format), and arrays in memory."""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oodometer.arrays import Ints, to_numpy
from oodometer.data.sources import LABELS, Kind, Sample
from oodometer.errors import OodometerError
from oodometer.readers import READERS

IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_IDX_NAME = re.compile(r"idx\d+-ubyte|\.idx\d?|ubyte", re.IGNORECASE)
_IMAGES = re.compile(r"(?:x|images?|data|inputs?|imgs?)(?:[_-](?P<part>\w+))?|(?P<first>\w+?)[_-](?:x|images?|data)")
_LABEL_KEYS = ("y", "labels", "label", "targets", "target")


@dataclass(frozen=True, eq=False)
class ArraySource:
    """One row an entry of the first axis: 8-bit pixels are images, floating point is network input as it stands."""

    values: NDArray[Any]
    labels: Mapping[str, Ints]
    kind: Kind
    where: str

    @property
    def shape(self) -> tuple[int, ...] | None:
        return tuple(self.values.shape[1:])

    def __len__(self) -> int:
        return len(self.values)

    def read(self, row: int) -> Sample:
        return Sample(self.values[row], {name: int(column[row]) for name, column in self.labels.items()})

    def name(self, row: int) -> str:
        return f"row {row} of {self.where}"

    def identity(self) -> dict[str, Any]:
        found = hashlib.sha256(f"{self.values.dtype.str}{self.values.shape}".encode())
        for start in range(0, len(self.values), 4096):
            found.update(np.ascontiguousarray(self.values[start : start + 4096]).data)
        for name in sorted(self.labels):
            found.update(name.encode())
            found.update(np.ascontiguousarray(self.labels[name], dtype="<i8").data)
        return {"arrays": len(self.values), "sha256": found.hexdigest()}


# ---------------------------------------------------------------------------------------------- in memory


def is_arrays(data: Any) -> bool:
    """Whether data is an array, or a pair (x, y) of arrays."""
    pair = isinstance(data, tuple | list) and len(data) == 2 and all(map(_is_array, data))
    return _is_array(data) or pair


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (hasattr(value, "detach") and hasattr(value, "shape"))


def in_memory(data: Any) -> ArraySource:
    """A source of x, or of (x, y)."""
    x, y = data if isinstance(data, tuple | list) else (data, None)
    return array_source(to_numpy(x), {} if y is None else {LABELS: to_numpy(y)}, "the array")


def array_source(values: NDArray[Any], labels: Mapping[str, Any], where: str) -> ArraySource:
    """Values checked and, if they are images, with channels last."""
    if values.ndim < 2:
        raise OodometerError(f"{where}: rows × … are needed; found shape {values.shape}")
    if values.dtype.kind not in "fiu" or values.dtype in (np.int16, np.uint16):
        kinds = "8-bit pixels (uint8) or floating-point network input"
        raise OodometerError(f"{where}: {kinds} are needed; found dtype {values.dtype}")
    checked = {name: _labels(column, len(values), where) for name, column in labels.items()}
    if values.dtype != np.uint8:
        return ArraySource(values, checked, "tensor", where)
    return ArraySource(_channels_last(values, where), checked, "image", where)


def _labels(column: Any, rows: int, where: str) -> Ints:
    column = np.asarray(column)
    if column.shape == (rows, 1):
        column = column[:, 0]
    if column.shape != (rows,) or column.dtype.kind not in "iub":
        raise OodometerError(
            f"{where}: labels must be one whole number a row, {rows} of them; found shape {column.shape}, "
            f"dtype {column.dtype}"
        )
    whole: Ints = column.astype(np.int64)
    return whole


def _channels_last(pixels: NDArray[np.uint8], where: str) -> NDArray[np.uint8]:
    if pixels.ndim == 3 or (pixels.ndim == 4 and pixels.shape[3] in (1, 3, 4)):
        return pixels
    if pixels.ndim == 4 and pixels.shape[1] in (1, 3, 4):
        return pixels.transpose(0, 2, 3, 1)
    raise OodometerError(
        f"{where}: 8-bit images must be rows × height × width, with 1, 3 or 4 channels last or second; found shape "
        f"{pixels.shape}. Convert other data to float32 network input"
    )


# ---------------------------------------------------------------------------------------------- files


def is_array_file(path: Path) -> bool:
    """Whether the name or the first bytes are those of an NPZ, NPY or IDX file."""
    if path.suffix.lower() in (".npz", ".npy"):
        return True
    return bool(_IDX_NAME.search(path.name))


def read_array_file(path: Path, part: str | None) -> ArraySource:
    """Images and labels of an NPZ, NPY or IDX file."""
    if path.suffix.lower() == ".npz":
        return _from_npz(path, part)
    if path.suffix.lower() == ".npy":
        try:
            return array_source(np.load(path, mmap_mode="r", allow_pickle=False), {}, str(path))
        except (ValueError, EOFError) as error:
            if isinstance(error, OodometerError):
                raise
            raise OodometerError(f"{path} is no readable .npy file ({error}): write it again") from None
    values = read_idx(path)
    sibling = _idx_labels(path)
    return array_source(values, {} if sibling is None else {LABELS: read_idx(sibling)}, str(path))


def _from_npz(path: Path, part: str | None) -> ArraySource:
    arrays = READERS[".npz"](path)
    parts: dict[str, str] = {}
    for key in arrays:
        match = _IMAGES.fullmatch(key.lower())
        if match and arrays[key].ndim >= 2:
            parts.setdefault(match["part"] or match["first"] or "", key)
    if not parts:
        raise OodometerError(f"{path}: no array of images (x, images, data, x_test, …); keys found: {_keys(arrays)}")
    if part is None and len(parts) > 1:
        raise OodometerError(f"{path} has several parts, {_quoted(parts)}: choose one with part=… (--part)")
    chosen = next(iter(parts)) if part is None else part
    if chosen not in parts:
        raise OodometerError(f"{path} has no part {chosen!r}; it has {_quoted(parts)}")
    key = parts[chosen]
    labels = next((name for name in arrays if name.lower() in _label_names(chosen)), None)
    return array_source(arrays[key], {} if labels is None else {LABELS: arrays[labels]}, f"{path} ({key})")


def _label_names(part: str) -> set[str]:
    if not part:
        return set(_LABEL_KEYS)
    return {f"{key}_{part}" for key in _LABEL_KEYS} | {f"{part}_{key}" for key in _LABEL_KEYS}


def _keys(arrays: Mapping[str, NDArray[Any]]) -> str:
    return ", ".join(f"{key}{list(value.shape)}" for key, value in arrays.items()) or "none"


def _quoted(parts: Mapping[str, str]) -> str:
    return ", ".join(repr(part) for part in parts)


# ---------------------------------------------------------------------------------------------- IDX


def read_idx(path: Path) -> NDArray[Any]:
    """An IDX array (LeCun's format: two zeros, a type, the number of axes, sizes, values; big-endian)."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix.lower() == ".gz" else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise OodometerError(f"{path} is truncated or damaged ({error}): copy it again") from None
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in IDX_TYPES:
        raise OodometerError(f"{path} is no IDX file: it starts with {content[:4]!r}")
    axes = content[3]
    start = 4 + 4 * axes
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], ">i4")) if len(content) >= start else ()
    dtype = np.dtype(IDX_TYPES[content[2]])
    needed = start + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if len(shape) != axes or len(content) != needed:
        raise OodometerError(f"{path} has {len(content)} bytes; its header asks for {needed}: truncated copy?")
    values = np.frombuffer(content, dtype, offset=start).reshape(shape)
    return values.astype(dtype.newbyteorder("="), copy=False)


def _idx_labels(path: Path) -> Path | None:
    """`train-labels-idx1-ubyte` beside `train-images-idx3-ubyte`."""
    name = re.sub(r"images([-.])idx\d", r"labels\1idx1", path.name)
    sibling = path.with_name(name)
    return sibling if name != path.name and sibling.is_file() else None

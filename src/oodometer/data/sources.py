"""Where rows come from: one interface over image folders and lists, arrays, IDX, NPZ, NIfTI and PyTorch data sets.

A source knows how many rows it has, their names and labels where files tell them, and reads one row at a time.
`open_source` finds the right one for whatever the user passes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from oodometer.arrays import Ints
from oodometer.errors import OodometerError

Kind = Literal["image", "volume", "tensor", "dataset"]
"""What `read` gives: pixels to preprocess, voxels to preprocess, finished network input, or whatever a data set has."""

LABELS = "labels"


@dataclass(frozen=True)
class Sample:
    """One row: a PIL image, pixels, voxels or network input, and its labels by column."""

    value: Any
    labels: Mapping[str, int] = field(default_factory=dict)


class Source(Protocol):
    """Rows to extract from."""

    @property
    def kind(self) -> Kind:
        """What reading a row gives."""

    @property
    def labels(self) -> Mapping[str, Ints]:
        """Label columns that are known without reading rows."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of one row, if known without reading it."""

    def __len__(self) -> int: ...

    def read(self, row: int) -> Sample:
        """The row, decoded once."""

    def name(self, row: int) -> str:
        """What an error calls the row: a file, or its place in an array."""

    def identity(self) -> dict[str, Any]:
        """Plain JSON values that tell this list of rows from any other, the same on every machine."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a source, e.g. the first thousand."""

    source: Source
    index: range

    @property
    def kind(self) -> Kind:
        return self.source.kind

    @property
    def labels(self) -> Mapping[str, Ints]:
        chosen = slice(self.index.start, self.index.stop)
        return {name: column[chosen] for name, column in self.source.labels.items()}

    @property
    def shape(self) -> tuple[int, ...] | None:
        return self.source.shape

    def __len__(self) -> int:
        return len(self.index)

    def read(self, row: int) -> Sample:
        return self.source.read(self.index[row])

    def name(self, row: int) -> str:
        return self.source.name(self.index[row])

    def identity(self) -> dict[str, Any]:
        return {**self.source.identity(), "rows": [self.index.start, self.index.stop]}


def open_source(
    data: Any,
    *,
    root: str | Path | None = None,
    part: str | None = None,
    limit: int | None = None,
) -> Source:
    """Rows of a folder, an image list, a file of arrays, arrays themselves, or a map-style data set.

    `root` is the folder the paths of a list start from (default: the list's own), `part` chooses among several arrays
    of one file (`test` for x_test, y_test), `limit` keeps the first rows only.
    """
    source = _opened(data, None if root is None else Path(root), part)
    if not len(source):
        raise OodometerError(f"{data if isinstance(data, str | Path) else type(data).__name__}: no rows to extract")
    if limit is None or limit >= len(source):
        return source
    if limit < 1:
        raise OodometerError(f"limit must be at least 1; found {limit}")
    return Rows(source, range(limit))


def _opened(data: Any, root: Path | None, part: str | None) -> Source:
    from oodometer.data import arrays, files
    from oodometer.data.datasets import DatasetSource

    if isinstance(data, str | Path):
        path = Path(data)
        if not path.exists():
            raise OodometerError(f"{path}: no such file or folder")
        if path.is_dir():
            return files.read_folder(path)
        if arrays.is_array_file(path):
            return arrays.read_array_file(path, part)
        return files.single_volume(path) if files.is_volume(path) else files.read_list(path, root)
    if arrays.is_arrays(data):
        return arrays.in_memory(data)
    if hasattr(data, "dataset") and hasattr(data, "batch_size"):
        raise OodometerError("data is a DataLoader: pass its .dataset; rows are batched, and kept in order, here")
    if hasattr(data, "read") and hasattr(data, "identity"):
        source: Source = data
        return source
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return DatasetSource(data)
    raise OodometerError(
        "data must be a folder, an image list, a .npz, .npy, IDX or NIfTI file, arrays (x, y) or a data set with "
        f"__len__ and __getitem__; found {type(data).__name__}"
    )


def digest(names: Sequence[str], labels: Mapping[str, Ints]) -> str:
    """SHA-256 of names and labels, in row order."""
    found = hashlib.sha256()
    for name in names:
        found.update(name.encode("utf-8", "surrogateescape") + b"\n")
    for column in sorted(labels):
        found.update(json.dumps(column).encode())
        found.update(np.ascontiguousarray(labels[column], dtype="<i8").data)
    return found.hexdigest()

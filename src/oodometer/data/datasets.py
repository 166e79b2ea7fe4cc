"""Rows from a PyTorch data set: anything with `__len__` and `__getitem__` that gives tensors, images, or (x, label)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oodometer.arrays import Ints, to_numpy
from oodometer.data.sources import LABELS, Kind, Sample
from oodometer.errors import OodometerError

INPUT_KEYS = ("pixel_values", "image", "img", "x", "data", "input", "inputs")
LABEL_KEYS = ("labels", "label", "y", "target", "targets")


@dataclass(frozen=True, eq=False)
class DatasetSource:
    """One row an item: an input alone, (input, label, …), or a mapping with both."""

    dataset: Any
    labels: Mapping[str, Ints] = field(default_factory=dict)
    kind: Kind = "dataset"
    shape: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, row: int) -> Sample:
        item = self.dataset[row]
        if isinstance(item, Mapping):
            value, label = _first(item, INPUT_KEYS), _first(item, LABEL_KEYS)
            if value is None:
                raise OodometerError(f"the data set's items have no input; keys: {', '.join(map(str, item))}")
        elif isinstance(item, tuple | list):
            value, label = item[0], item[1] if len(item) > 1 else None
        else:
            value, label = item, None
        return Sample(value, {} if label is None else {LABELS: _whole(label)})

    def name(self, row: int) -> str:
        return f"row {row} of the data set"

    def identity(self) -> dict[str, Any]:
        """Its class, its length and how it describes its transform: its content cannot be known without reading it."""
        kind = type(self.dataset)
        transform = repr(getattr(self.dataset, "transform", None))
        facts = {"dataset": f"{kind.__module__}.{kind.__qualname__}", "length": len(self.dataset)}
        # A default repr holds an address, which is another one in every run.
        return facts if " at 0x" in transform else facts | {"transform": transform}


def _first(item: Mapping[Any, Any], names: tuple[str, ...]) -> Any:
    return next((item[name] for name in names if name in item), None)


def _whole(label: Any) -> int:
    value = to_numpy(label) if hasattr(label, "shape") else np.asarray(label)
    if value.size != 1 or value.dtype.kind not in "iub":
        raise OodometerError(f"labels must be whole numbers; found {label!r}: return (input, class number)")
    return int(value.reshape(()))

"""Batches in row order: each row decoded once, by worker processes if there are any; a bad row ends the loading."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from oodometer.arrays import to_numpy
from oodometer.data.preprocess import AnyPreprocessing
from oodometer.data.sources import Source
from oodometer.errors import OodometerError

MOST_WORKERS = 8
WORTH_WORKERS = 256
"""Fewer files than these are decoded before worker processes have started."""


@dataclass(frozen=True)
class Batch:
    """Consecutive rows: network input, and labels by column."""

    start: int
    inputs: Tensor
    labels: Mapping[str, NDArray[np.int64]]


@dataclass(frozen=True)
class Failure:
    """What went wrong in a row, said by a worker: its exceptions would arrive as tracebacks."""

    message: str


def batches(
    source: Source,
    preprocessing: AnyPreprocessing | None,
    rows: range,
    size: int,
    *,
    workers: int,
    pin: bool,
) -> Iterator[Batch]:
    """The rows in batches of so many; an error names the row that cannot be read."""
    loader = DataLoader(
        _Rows(source, preprocessing),
        batch_sampler=[list(rows[start : start + size]) for start in range(0, len(rows), size)],
        num_workers=workers,
        collate_fn=_collate,
        pin_memory=pin,
        # A generator of its own: the loader would draw from, and so change, the caller's.
        generator=torch.Generator().manual_seed(0),
    )
    try:
        for batch in loader:
            if isinstance(batch, Failure):
                raise OodometerError(batch.message)
            yield batch
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise OodometerError(
            f"a worker process that decodes images died ({str(error).splitlines()[0]}): pass num_workers=0 "
            "(--num-workers 0), or give it more memory"
        ) from None


def worker_count(wanted: int | str, source: Source) -> int:
    """As many processes as asked for; by default none for arrays in memory and for a few files."""
    if wanted != "auto":
        if isinstance(wanted, str) or wanted < 0:
            raise OodometerError(f"num_workers must be 'auto', 0 or more; found {wanted!r}")
        return wanted
    if source.kind not in ("image", "volume") or source.shape is not None or len(source) < WORTH_WORKERS:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_WORKERS, cores)


@dataclass(frozen=True)
class _Rows(Dataset[Any]):
    source: Source
    preprocessing: AnyPreprocessing | None

    def __getitem__(self, row: int) -> tuple[int, str, Tensor, Mapping[str, int]] | Failure:
        try:
            sample = self.source.read(row)
            return row, self.source.name(row), _input(sample.value, self.preprocessing), sample.labels
        except OodometerError as error:
            name = self.source.name(row)
            text = str(error)
            return Failure(text if name in text else f"{name}: {text}")
        except Exception as error:  # of the user's data set
            return Failure(f"{self.source.name(row)}: {type(error).__name__}: {error}")


def _input(value: Any, preprocessing: AnyPreprocessing | None) -> Tensor:
    """Network input: pixels and voxels preprocessed, floating point as it stands."""
    if isinstance(value, Tensor | np.ndarray):
        array = value if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
        if array.is_floating_point() and not hasattr(preprocessing, "standardise"):
            if preprocessing is not None:
                raise OodometerError("preprocessing is declared, but the data are floating-point network input already")
            return array
        value = to_numpy(array)
        if (
            isinstance(array, Tensor)
            and value.ndim == 3
            and value.shape[0] in (1, 3, 4)
            and value.shape[2] not in (1, 3, 4)
        ):
            value = value.transpose(1, 2, 0)
    if preprocessing is None:
        raise OodometerError(
            f"items are {type(value).__name__}, not network input: pass preprocessing=…, or give the data set a "
            "transform that ends in a float tensor"
        )
    return torch.from_numpy(preprocessing(value))


def _collate(items: list[Any]) -> Batch | Failure:
    failure = next((item for item in items if isinstance(item, Failure)), None)
    if failure is not None:
        return failure
    row, first, shape = items[0][0], items[0][1], tuple(items[0][2].shape)
    for _, name, value, labels in items:
        if tuple(value.shape) != shape:
            return Failure(
                f"{name} gives an input of shape {tuple(value.shape)}, {first} one of {shape}: declare a resize and "
                "crop in the preprocessing"
            )
        if list(labels) != list(items[0][3]):
            return Failure(f"{name} has the labels {list(labels)}, {first} has {list(items[0][3])}")
    columns = {column: np.array([item[3][column] for item in items], np.int64) for column in items[0][3]}
    return Batch(row, torch.stack([item[2] for item in items]), columns)

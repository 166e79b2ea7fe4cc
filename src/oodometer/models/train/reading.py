"""Images to train on, as a bank: from a saved bank, a folder of images, or a file of arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from oodometer.bank import Bank
from oodometer.data.sources import LABELS, Source, open_source
from oodometer.errors import OodometerError
from oodometer.models.train.images import IMAGES


def read_images(text: str) -> Bank:
    """The rows of `PATH` or `PATH:PART` (x_test and y_test of a file with several arrays: `mnist.npz:test`)."""
    path, part = _split(text)
    if (path / "bank.json").is_file():
        return Bank.open(path)
    source = open_source(path, part=part)
    columns: dict[str, Any] = {IMAGES: _pixels(source, text)}
    if LABELS in source.labels:
        columns[LABELS] = source.labels[LABELS]
    return Bank(columns, provenance={"source": source.identity()})


def held_out(bank: Bank, share: float, seed: int) -> tuple[Bank, Bank]:
    """Training rows, and a share of every class for validation."""
    if not 0 < share < 1:
        raise OodometerError(f"the validation share must be above 0 and below 1; found {share:g}")
    if LABELS not in bank.columns:
        raise OodometerError(f"training needs labels; the bank has {', '.join(bank.columns)}")
    order = np.random.default_rng([seed, 2]).permutation(len(bank))
    held = np.zeros(len(bank), bool)
    for label in np.unique(bank.labels):
        rows = order[bank.labels[order] == label]
        # A class keeps at least one row to learn from.
        held[rows[: min(max(round(share * len(rows)), 1), len(rows) - 1)]] = True
    return bank.rows(~held), bank.rows(held)


def _split(text: str) -> tuple[Path, str | None]:
    path = Path(text)
    if path.exists() or ":" not in text:
        return path, None
    before, _, part = text.rpartition(":")
    return Path(before), part


def _pixels(source: Source, where: str) -> Any:
    """All images as one array."""
    values = getattr(source, "values", None)
    if values is not None:
        return values
    if source.kind != "image":
        raise OodometerError(f"{where}: images are needed to train on; found rows of kind {source.kind!r}")
    first = np.asarray(source.read(0).value)
    found = np.empty((len(source), *first.shape), np.uint8)
    for row in range(len(source)):
        pixels = np.asarray(source.read(row).value)
        if pixels.shape != first.shape or pixels.dtype != np.uint8:
            raise OodometerError(
                f"{source.name(row)}: 8-bit images of one size are needed, {first.shape} as the first one; found "
                f"{pixels.shape}, {pixels.dtype}: resize them first"
            )
        found[row] = pixels
    return found

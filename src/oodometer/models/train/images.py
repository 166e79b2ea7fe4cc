"""Rows of images for training: in batches, on the device that trains, cropped and flipped there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from oodometer.arrays import Array, Ints, row_bytes, to_numpy
from oodometer.bank import Bank
from oodometer.errors import OodometerError

Augment = Literal["none", "crop", "crop-flip"]
AUGMENTS: tuple[str, ...] = get_args(Augment)
PADDING = 4
"""Pixels of black on every side that a crop may move into (He et al., CVPR 2016, §4.2)."""
HELD_BYTES = 8 << 30
"""Images up to this size are moved to the device once; of larger banks every batch is read from where it lies."""
IMAGES = "images"


class Images:
    """The images of a bank as channels-first batches on a device; 8-bit pixels stay 8-bit until the network."""

    def __init__(self, bank: Bank, device: torch.device) -> None:
        self.shape = _checked_shape(bank)
        self._bank, self._device = bank, device
        held = len(bank) * row_bytes(sample(bank)) <= HELD_BYTES
        self._held = torch.as_tensor(_plain(bank[IMAGES]), device=device) if held else None

    def __len__(self) -> int:
        return len(self._bank)

    def numbers(self, rows: Tensor) -> Tensor:
        """Row numbers where `at` wants them: one move for a whole epoch, since a move a batch stalls the device."""
        return rows if self._held is None else rows.to(self._held.device)

    def at(self, rows: Tensor) -> Tensor:
        """Rows by number."""
        if self._held is not None:
            return _channels_first(self._held[rows])
        return _channels_first(torch.as_tensor(self._read(rows.numpy())).to(self._device))

    def _read(self, index: Ints) -> NDArray[Any]:
        """Rows gathered part by part, so that nothing but them is read."""
        first = to_numpy(sample(self._bank))
        found, start = np.empty((len(index), *first.shape[1:]), first.dtype), 0
        for part in self._bank.parts:
            inside = np.flatnonzero((index >= start) & (index < start + len(part)))
            if len(inside):
                found[inside] = to_numpy(part.rows(index[inside] - start)[IMAGES])
            start += len(part)
        return found

    def batches(self, rows: int) -> Iterator[tuple[slice, Tensor]]:
        """All rows in order, with their place."""
        for start in range(0, len(self), rows):
            place = slice(start, min(start + rows, len(self)))
            yield place, self.at(self.numbers(torch.arange(place.start, place.stop)))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of every channel, of pixels scaled to 0…1; a constant channel keeps its scale."""
        total, square, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
        for _, batch in self.batches(1024):
            flat = scaled(batch).to("cpu", torch.float64).transpose(0, 1).flatten(1)
            total, square, count = total + flat.sum(1), square + (flat**2).sum(1), count + flat.shape[1]
        mean = total / count
        spread = (square / count - mean**2).clamp(min=0).sqrt()
        return mean.float(), torch.where(spread > 1e-6, spread, 1.0).float()


def sample(bank: Bank) -> Array:
    """No rows of the images: their shape, type and device, without reading any."""
    return bank.rows(slice(0, 0))[IMAGES]


def scaled(pixels: Tensor) -> Tensor:
    """8-bit pixels as 0…1; floating-point input as it stands."""
    return pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels.float()


def _checked_shape(bank: Bank) -> tuple[int, ...]:
    """Channels × height × width (or channels × frames × height × width) of one row."""
    if IMAGES not in bank.columns:
        raise OodometerError(
            f"training needs the images themselves; the bank has {', '.join(bank.columns)}: "
            "make one with Bank(images=pixels, labels=y), pixels 8-bit, rows × height × width (× channels)"
        )
    none = to_numpy(sample(bank))
    whole = none.dtype.kind in "iub" and none.dtype != np.uint8
    if whole or none.ndim not in (3, 4, 5) or 0 in none.shape[1:]:
        raise OodometerError(
            "images must be 8-bit pixels (uint8) or floats, rows × height × width, with channels last or second "
            f"(videos: rows × channels × frames × height × width); found {none.dtype}, rows of {none.shape[1:]}"
        )
    return tuple(_channels_first(torch.zeros(0, *none.shape[1:])).shape[1:])


def _channels_first(x: Tensor) -> Tensor:
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        return x.permute(0, 3, 1, 2)
    return x


def _plain(column: Array) -> Any:
    """A writable copy of read-only or mapped arrays: PyTorch takes no others."""
    return np.array(column) if isinstance(column, np.ndarray) else column


# ---------------------------------------------------------------------------------------------- augmentation


def check_augment(augment: str) -> None:
    """Refuse an unknown way."""
    if augment not in AUGMENTS:
        raise OodometerError(f"augment must be one of {', '.join(AUGMENTS)}; found {augment!r}")


def drawn_crops(rows: int, augment: str, generator: torch.Generator) -> Tensor:
    """For so many rows: where the crop begins (down, right), and whether it is mirrored; the same on every device."""
    moves = torch.randint(0, 2 * PADDING + 1, (2, rows), generator=generator)
    mirrored = torch.rand((1, rows), generator=generator) < (0.5 if augment == "crop-flip" else 0.0)
    return torch.cat([moves, mirrored])


def cropped(images: Tensor, draws: Tensor) -> Tensor:
    """Crops of the padded images as they were drawn."""
    if images.ndim != 4:
        raise OodometerError(f"crops need images; rows of shape {tuple(images.shape[1:])} need augment='none'")
    rows, height, width = len(images), images.shape[2], images.shape[3]
    down, right, mirrored = draws[:, :, None]
    lines = torch.arange(height, device=images.device) + down
    columns = torch.arange(width, device=images.device) + right
    columns = torch.where(mirrored > 0, columns.flip(1), columns)
    padded = functional.pad(images, [PADDING] * 4)
    every = torch.arange(rows, device=images.device)[:, None, None]
    return padded[every, :, lines[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)

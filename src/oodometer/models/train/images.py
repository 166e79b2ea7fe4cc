"""Rows of images for training: in batches, on the device that trains, cropped and flipped there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from oodometer.arrays import Array, Ints, take_rows, to_numpy
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
        self._device = device
        column = bank[IMAGES]
        held = _bytes(column) <= HELD_BYTES
        self._column: Any = torch.as_tensor(_plain(column), device=device) if held else column

    def __len__(self) -> int:
        return int(self._column.shape[0])

    def at(self, index: Ints) -> Tensor:
        """Rows by number."""
        if isinstance(self._column, Tensor):
            found = self._column[torch.as_tensor(index, device=self._column.device)]
        else:
            found = torch.as_tensor(_plain(take_rows(self._column, index)))
        return _channels_first(found.to(self._device))

    def batches(self, rows: int) -> Iterator[tuple[slice, Tensor]]:
        """All rows in order, with their place."""
        for start in range(0, len(self), rows):
            place = slice(start, min(start + rows, len(self)))
            yield place, self.at(np.arange(place.start, place.stop))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of every channel, of pixels scaled to 0…1; a constant channel keeps its scale."""
        total, square, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
        for _, batch in self.batches(1024):
            flat = scaled(batch).to("cpu", torch.float64).transpose(0, 1).flatten(1)
            total, square, count = total + flat.sum(1), square + (flat**2).sum(1), count + flat.shape[1]
        mean = total / count
        spread = (square / count - mean**2).clamp(min=0).sqrt()
        return mean.float(), torch.where(spread > 1e-6, spread, 1.0).float()


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
    sample = to_numpy(bank.rows(slice(0, 1))[IMAGES])
    whole = sample.dtype.kind in "iub" and sample.dtype != np.uint8
    if whole or sample.ndim not in (3, 4, 5) or 0 in sample.shape[1:]:
        raise OodometerError(
            "images must be 8-bit pixels (uint8) or floats, rows × height × width, with channels last or second "
            f"(videos: rows × channels × frames × height × width); found {sample.dtype}, rows of {sample.shape[1:]}"
        )
    return tuple(_channels_first(torch.zeros(0, *sample.shape[1:])).shape[1:])


def _channels_first(x: Tensor) -> Tensor:
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        return x.permute(0, 3, 1, 2)
    return x


def _bytes(column: Array) -> int:
    return int(np.prod(column.shape)) * int(getattr(column, "itemsize", 1))


def _plain(column: Array) -> Any:
    """A writable copy of read-only or mapped arrays: PyTorch takes no others."""
    return np.array(column) if isinstance(column, np.ndarray) else column


# ---------------------------------------------------------------------------------------------- augmentation


def check_augment(augment: str) -> None:
    """Refuse an unknown way."""
    if augment not in AUGMENTS:
        raise OodometerError(f"augment must be one of {', '.join(AUGMENTS)}; found {augment!r}")


def augmented(images: Tensor, augment: str, generator: torch.Generator) -> Tensor:
    """Random crops of the padded images, and mirrored ones; the draws are the same on every device."""
    if augment == "none":
        return images
    if images.ndim != 4:
        raise OodometerError(f"augment={augment!r} crops images; rows of shape {tuple(images.shape[1:])} need 'none'")
    rows, height, width = len(images), images.shape[2], images.shape[3]
    moves = torch.randint(0, 2 * PADDING + 1, (2, rows, 1), generator=generator)
    lines, columns = torch.arange(height) + moves[0], torch.arange(width) + moves[1]
    if augment == "crop-flip":
        mirrored = torch.rand((rows, 1), generator=generator) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
    padded = functional.pad(images, [PADDING] * 4)
    device = images.device
    picked = padded[
        torch.arange(rows, device=device)[:, None, None],
        :,
        lines.to(device, non_blocking=True)[:, :, None],
        columns.to(device, non_blocking=True)[:, None, :],
    ]
    return picked.permute(0, 3, 1, 2)

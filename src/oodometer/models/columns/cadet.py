"""CADet's column: inner products of the features of several views of each input."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from oodometer.errors import OodometerError
from oodometer.models.columns import Pass, column

ATTEMPTS = 10
"""Draws of a crop before the whole image (of the nearest allowed shape) is taken, as in torchvision."""
MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


@dataclass(frozen=True)
class View:
    """A crop, one slice an axis, and whether it is mirrored along the last axis."""

    crop: tuple[slice, ...]
    flip: bool

    def __call__(self, x: Tensor) -> Tensor:
        """The view of every row, resized to the inputs' own size."""
        part = x[(slice(None), slice(None), *self.crop)]
        part = functional.interpolate(part, x.shape[2:], mode=MODES[x.ndim - 2], align_corners=False)
        return part.flip(-1) if self.flip else part


def draw(
    rng: np.random.Generator, sides: tuple[int, ...], scale: tuple[float, float], ratio: tuple[float, float]
) -> View:
    """A random crop of an area (or volume) share in `scale`; of images the aspect ratio is drawn too."""
    shape = _shape(rng, sides, scale, ratio)
    starts = [int(rng.integers(0, side - length + 1)) for side, length in zip(sides, shape, strict=True)]
    crop = tuple(slice(start, start + length) for start, length in zip(starts, shape, strict=True))
    return View(crop, bool(rng.random() < 0.5))


def _shape(
    rng: np.random.Generator, sides: tuple[int, ...], scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, ...]:
    for _ in range(ATTEMPTS):
        share = rng.uniform(*scale)
        if len(sides) != 2:
            return tuple(max(1, round(side * share ** (1 / len(sides)))) for side in sides)
        area, aspect = share * math.prod(sides), math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        height, width = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < height <= sides[0] and 0 < width <= sides[1]:
            return height, width
    height, width = sides
    aspect = min(max(width / height, ratio[0]), ratio[1])
    return min(height, round(width / aspect)), min(width, round(height * aspect))


@column("views.products")
@dataclass(frozen=True, kw_only=True)
class Views:
    """⟨h_i, h_j⟩ of the features of random resized crops with flips (CADet; Guille-Escuret et al., NeurIPS 2023).

    All rows see the same crops: a row's value depends on nothing but the row, and no crop favours one over another.
    More views begin with the same ones.
    """

    views: int = 5
    scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest share of the area."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest width by height."""
    seed: int = 0

    def __post_init__(self) -> None:
        low, high = self.scale
        if self.views < 2 or not 0 < low <= high <= 1 or not 0 < self.ratio[0] <= self.ratio[1]:
            raise OodometerError(
                "views: two views or more, scale=(low, high) with 0 < low ≤ high ≤ 1 and a rising positive ratio are "
                f"needed; found views={self.views}, scale={self.scale}, ratio={self.ratio}"
            )

    def __call__(self, run: Pass) -> Tensor:
        x = run.inputs.detach()
        if x.ndim - 2 not in MODES or not x.is_floating_point():
            raise OodometerError(
                "views need images, volumes or signals (rows × channels × positions …); found inputs of shape "
                f"{tuple(x.shape)}"
            )
        if run.features is None:
            raise OodometerError("views compare penultimate features: name the head with head='…'")
        with torch.no_grad():
            features = [run.network(view(x)).features for view in self.drawn(tuple(x.shape[2:]))]
        h = torch.stack(features, dim=1).double()  # which mixed precision leaves alone
        return h @ h.mT

    def drawn(self, sides: tuple[int, ...]) -> list[View]:
        """The views, each from a stream of its own."""
        streams = [np.random.default_rng((self.seed, place)) for place in range(self.views)]
        return [draw(rng, sides, self.scale, self.ratio) for rng in streams]

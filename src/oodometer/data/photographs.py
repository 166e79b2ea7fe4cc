"""Patches of photographs, shrunk to the size of the digits: data that are far from any digit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oodometer.bank import Bank
from oodometer.errors import OodometerError

STRIPS = 5
"""Patches of one vertical strip of a photograph are one class, so that neighbours stay on one side of a split."""
FIRST_LABEL, FIRST_KIND = 10, 3
_SIDE, _SHRINK = 8, 3
PHOTOGRAPHS, _AUTHORS = ("china", "flower"), ("danielbuechele", "vultilion")


def photograph_patches(name: str) -> Bank:
    """8×8 grey patches (0 … 1) of "china" or "flower" as features, the strip each was cut from as label."""
    from sklearn.datasets import load_sample_image

    if name not in PHOTOGRAPHS:
        raise OodometerError(f"photograph_patches: one of {', '.join(PHOTOGRAPHS)} was needed; found {name!r}")
    place = PHOTOGRAPHS.index(name)
    patches, columns = _patches(load_sample_image(f"{name}.jpg").mean(axis=2) / 255)
    return Bank(
        features=patches.astype(np.float32),
        labels=FIRST_LABEL + place * STRIPS + columns * STRIPS // (int(columns.max()) + 1),
        kind=np.full(len(patches), FIRST_KIND + place),
        provenance={"source": f"scikit-learn load_sample_image({name}.jpg), by {_AUTHORS[place]} (CC BY 2.0)"},
    )


def _patches(grey: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Patches of the image averaged over squares of pixels, row by row, and the column each comes from."""
    step = _SIDE * _SHRINK
    rows, columns = grey.shape[0] // step, grey.shape[1] // step
    whole = grey[: rows * step, : columns * step].reshape(rows * _SIDE, _SHRINK, columns * _SIDE, _SHRINK)
    cut = whole.mean(axis=(1, 3)).reshape(rows, _SIDE, columns, _SIDE).swapaxes(1, 2).reshape(-1, _SIDE * _SIDE)
    return cut, np.tile(np.arange(columns), rows)

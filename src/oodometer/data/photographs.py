"""Patches of two photographs, shrunk to the size of the digits: data that are far from any digit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oodometer.bank import Bank

STRIPS = 5
"""Patches of one vertical strip of a photograph are one class, so that neighbours stay on one side of a split."""
FIRST_LABEL, FIRST_KIND = 10, 3
_SIDE, _SHRINK = 8, 3
_SOURCE = "scikit-learn load_sample_images: china.jpg by danielbuechele, flower.jpg by vultilion (CC BY 2.0)"


def photograph_patches() -> Bank:
    """8×8 grey patches (0 … 1) as features, the strip they were cut from as label, the photograph as `kind`."""
    from sklearn.datasets import load_sample_images

    patches, labels, kinds = [], [], []
    for place, photograph in enumerate(load_sample_images().images):
        cut, columns = _patches(photograph.mean(axis=2) / 255)
        patches.append(cut)
        labels.append(FIRST_LABEL + place * STRIPS + columns * STRIPS // (int(columns.max()) + 1))
        kinds.append(np.full(len(cut), FIRST_KIND + place))
    return Bank(
        features=np.concatenate(patches).astype(np.float32),
        labels=np.concatenate(labels),
        kind=np.concatenate(kinds),
        provenance={"source": _SOURCE},
    )


def _patches(grey: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Patches of the image averaged over squares of pixels, row by row, and the column each comes from."""
    step = _SIDE * _SHRINK
    rows, columns = grey.shape[0] // step, grey.shape[1] // step
    whole = grey[: rows * step, : columns * step].reshape(rows * _SIDE, _SHRINK, columns * _SIDE, _SHRINK)
    cut = whole.mean(axis=(1, 3)).reshape(rows, _SIDE, columns, _SIDE).swapaxes(1, 2).reshape(-1, _SIDE * _SIDE)
    return cut, np.tile(np.arange(columns), rows)

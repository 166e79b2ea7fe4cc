"""1,797 handwritten digits of 8×8 pixels, with the kind of their strokes as the level above the digit."""

from __future__ import annotations

import numpy as np

from oodometer.bank import Bank

KINDS: dict[str, tuple[int, ...]] = {"round": (0, 3, 6, 8, 9), "straight": (1, 4, 7), "mixed": (2, 5)}
"""Digits of curves alone, of straight strokes alone, and of both."""
_SOURCE = "scikit-learn load_digits: UCI Optical Recognition of Handwritten Digits, test set (CC BY 4.0)"


def digits() -> Bank:
    """The pixels (0 … 1) as features, the digit as label, and `kind`, the place of its kind in `KINDS`."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    kind_of = {digit: place for place, members in enumerate(KINDS.values()) for digit in members}
    return Bank(
        features=(pixels / 16).astype(np.float32),
        labels=labels.astype(np.int64),
        kind=np.array([kind_of[digit] for digit in labels.tolist()]),
        provenance={"source": _SOURCE},
    )

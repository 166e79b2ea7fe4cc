"""One small bank with every column a detector can ask for: five classes, ReLU-like features, a trained-like head."""

from __future__ import annotations

import numpy as np
import pytest

from oodometer import Bank, Head

CLASSES, WIDTH = 5, 24


def make_bank(seed: int, rows: int, *, far: bool = False, head: Head | None = None, dtype: str = "float32") -> Bank:
    """Rows of the five classes, or (far) rows that belong to none: small, off the class directions."""
    world = np.random.default_rng(7)
    centers = 3 * np.abs(world.standard_normal((CLASSES, WIDTH))) * (world.random((CLASSES, WIDTH)) < 0.5)
    mixing = world.standard_normal((WIDTH, 8 * 6)) / 5
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, rows)
    labels[:CLASSES] = np.arange(CLASSES)
    spread = np.where(far, 2.0, 0.7)
    middle = centers.mean(0) * 0.2 if far else centers[labels]
    features = np.maximum(middle + spread * rng.standard_normal((rows, WIDTH)), 0)
    head = head or make_head(centers)
    noise = rng.standard_normal((rows, 6, CLASSES)) * (1.5 if far else 0.5)
    logits = features @ np.asarray(head.weight).T + np.asarray(head.bias)
    columns = {
        "features": features.astype(dtype),
        "logits": logits.astype(dtype),
        "labels": labels,
        "layers.0": np.maximum(features @ mixing, 0).reshape(rows, 8, 6).astype(dtype),
        "layers.1": features[:, :12].astype(dtype),
        "logits.mcd": (logits[:, None] + noise).astype(dtype),
    }
    return Bank(columns, head=head)


def make_head(centers: np.ndarray) -> Head:
    weight = (centers - centers.mean(0)) * 0.3
    bias = -0.5 * (weight * (centers + centers.mean(0))).sum(1)
    return Head(weight.astype(np.float32), bias.astype(np.float32))


@pytest.fixture(scope="session")
def banks() -> dict[str, Bank]:
    return {
        "train": make_bank(1, 400),
        "val": make_bank(2, 150),
        "test": make_bank(3, 120),
        "far": make_bank(4, 120, far=True),
    }

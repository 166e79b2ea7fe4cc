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
    network = network_columns(rng, features, logits, far=far)
    columns = {
        "features": features.astype(dtype),
        "logits": logits.astype(dtype),
        "labels": labels,
        "layers.0": np.maximum(features @ mixing, 0).reshape(rows, 8, 6).astype(dtype),
        "layers.1": features[:, :12].astype(dtype),
        "logits.mcd": (logits[:, None] + noise).astype(dtype),
        **{name: column.astype(dtype) for name, column in network.items()},
        **{name: column.astype(dtype) for name, column in confidence_columns(seed, logits).items()},
    }
    return Bank(columns, head=head, provenance={"extraction": {"columns": SETTINGS}})


SETTINGS = [
    {"name": "logits.odin", "temperatures": [1, 10, 100, 1000], "epsilons": [0.0014, 0.0028]},
    {"name": "logits.iodin", "temperatures": [1, 10, 100, 1000], "epsilons": [0.0014, 0.0028]},
    {"name": "mdsens", "epsilons": [0, 0.0025, 0.0014, 0.005, 0.01, 0.02, 0.04, 0.08]},
]


def network_columns(
    rng: np.random.Generator, features: np.ndarray, logits: np.ndarray, *, far: bool
) -> dict[str, np.ndarray]:
    """What moved inputs, changed maps and views could give: settings differ a little, far rows a lot."""
    rows = len(features)

    def moved(shape: tuple[int, ...], size: float) -> np.ndarray:
        return size * rng.standard_normal((rows, *shape))

    views = np.maximum(features[:, None] + moved((5, WIDTH), 0.5), 0) * (0.5 if far else 1.0)
    return {
        "logits.odin": logits[:, None] + moved((8, CLASSES), 0.1),
        "logits.iodin": logits[:, None] + moved((8, CLASSES), 0.1),
        "logits.rankfeat": logits[:, None] + moved((2, CLASSES), 0.1),
        "logits.rankfeat.power": logits[:, None] + moved((2, CLASSES), 0.1),
        "mdsens": (40.0 if far else 10.0) + moved((8, 3), 1.0) ** 2,
        "features.adascale": np.maximum(features + moved((WIDTH,), 0.1), 0),
        "views.products": views @ views.transpose(0, 2, 1),
    }


def confidence_columns(seed: int, logits: np.ndarray) -> dict[str, np.ndarray]:
    """What learned confidences could say: sure where one class stands out; each pass a little different."""
    rng = np.random.default_rng([seed, 1])
    first, second = np.sort(logits, axis=1)[:, ::-1].T[:2]
    reserved = np.concatenate([logits, second[:, None] + 1], axis=1)
    branches = dict.fromkeys(("logits.confidnet", "logits.devries"), first - second - 2)
    columns = {**branches, "logits.deepgamblers": reserved}
    passes = {
        f"{name}.mcd": column[:, None] + 0.3 * rng.standard_normal((len(logits), 6, *column.shape[1:]))
        for name, column in columns.items()
    }
    return columns | passes


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

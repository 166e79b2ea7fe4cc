"""The synthetic banks of the timings: clustered ReLU features, a head that fits them, saved once as .npy files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from oodometer import Bank, Head


@dataclass(frozen=True)
class Size:
    """Rows to fit on, rows to score, features, classes."""

    train: int
    test: int
    features: int
    classes: int


SIZES = {
    "XS": Size(5_000, 2_000, 128, 10),
    "S": Size(50_000, 20_000, 512, 10),
    "L": Size(200_000, 70_000, 768, 1000),
}
"""XS is for a quick look; S and L are what the goals are stated on."""

_BLOCK = 10_000


def subspace(width: int) -> int:
    """The dimension of subspace methods: 256, as peers set it, or half of narrower features."""
    return min(256, width // 2)


def write(size: Size, folder: Path) -> None:
    """Draw a bank in blocks: the same seed gives the same files."""
    rng = np.random.default_rng(0)
    centers = rng.standard_normal((size.classes, size.features), dtype=np.float32)
    weight = (centers - centers.mean(0)) / np.sqrt(size.features)
    bias = (-0.5 * (weight * centers).sum(1)).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "W.npy", weight.astype(np.float32))
    np.save(folder / "b.npy", bias)
    for role, rows in (("train", size.train), ("test", size.test)):
        labels = rng.integers(0, size.classes, rows)
        features = np.empty((rows, size.features), np.float32)
        for start in range(0, rows, _BLOCK):
            part = slice(start, start + _BLOCK)
            noise = rng.standard_normal((len(labels[part]), size.features), dtype=np.float32)
            features[part] = np.maximum(centers[labels[part]] + 1.5 * noise, 0)
        np.save(folder / f"{role}.features.npy", features)
        np.save(folder / f"{role}.logits.npy", features @ weight.T.astype(np.float32) + bias)
        np.save(folder / f"{role}.labels.npy", labels)


@dataclass(frozen=True)
class Arrays:
    """What a peer's function gets: plain arrays of the training and the test rows, and the head."""

    train: np.ndarray
    train_logits: np.ndarray
    labels: np.ndarray
    test: np.ndarray
    test_logits: np.ndarray
    W: np.ndarray
    b: np.ndarray

    @property
    def banks(self) -> tuple[Bank, Bank]:
        """The same arrays as our banks."""
        head = Head(self.W, self.b)
        train = Bank(features=self.train, logits=self.train_logits, labels=self.labels, head=head)
        return train, Bank(features=self.test, logits=self.test_logits, head=head)


def load(folder: Path, test_rows: int | None = None) -> Arrays:
    """The arrays in memory; `test_rows` limits the rows to score."""

    def read(name: str) -> np.ndarray:
        array: np.ndarray = np.load(folder / f"{name}.npy")
        return array

    return Arrays(
        read("train.features"),
        read("train.logits"),
        read("train.labels"),
        read("test.features")[:test_rows],
        read("test.logits")[:test_rows],
        read("W"),
        read("b"),
    )

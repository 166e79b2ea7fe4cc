"""Cosine to the nearest class: to its weight in the head, or to its mean feature."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, like, norms, to_numpy, unit
from oodometer.bank import Bank
from oodometer.detectors.base import Detector, detector, param, warn


def nearest_cosine(h: Array, directions: Array, xp: ModuleType) -> Array:
    """max over unit directions of cos(h, direction), one product for all; a zero vector is at a right angle to all."""
    length = norms(h, xp)
    return xp.max(h @ directions.T, axis=-1) / xp.where(length > 0, length, xp.ones_like(length))


@detector(
    "ctm",
    needs={"features", "head"},
    cite="ngochieu2023cosine",
    equation="−max_c cos(h, w_c)",
    cost="head",
)
class CTM(Detector):
    """Class typical matching: cosine to the nearest class weight (Ngoc-Hieu et al., 2023)."""

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        assert bank.head is not None, "the door has seen to the head"
        h = derived.features(bank)
        return -nearest_cosine(h, unit(like(to_numpy(bank.head.weight), h), xp), xp)


@detector(
    "ctmmean",
    needs={"features", "labels"},
    cite="ngochieu2023cosine",
    equation="−max_c cos(h, μ_c), μ_c the mean training feature of class c",
    cost="classes",
    aliases=("ctm-mean",),
    variants={"oc": {"correct": True}},
)
class CTMMean(Detector):
    """Class typical matching with class means: cosine to the nearest mean feature (Ngoc-Hieu et al., 2023).

    A class without training rows has no mean and is no candidate.
    """

    correct: bool = param(False, "means over correctly classified rows only", choices=(False, True))

    @property
    def needs(self) -> frozenset[str]:
        return self.card.needs | {"logits"} if self.correct else self.card.needs

    def _fit(self, train: Bank, xp: ModuleType) -> None:
        counts, means = derived.class_means(train)
        if self.correct:
            right, means_of_right = derived.class_means(train, by="correct")
            fallen_back = int(((right == 0) & (counts > 0)).sum())
            if fallen_back:
                warn(f"ctmmean: {fallen_back} classes have no correctly classified training rows: using all their rows")
            means = np.where(right[:, None] > 0, means_of_right, means)
        self.directions_ = unit(means[counts > 0], np)

    def _score(self, bank: Bank, xp: ModuleType) -> Array:
        h = derived.features(bank)
        return -nearest_cosine(h, like(self.directions_, h), xp)

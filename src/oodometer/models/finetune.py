"""The trainer `finetune` of studies: a network trained on the images of every fold, with and without outliers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oodometer.bank import Bank
from oodometer.models.train import architectures, recipes
from oodometer.models.train.checkpoints import Shelf
from oodometer.models.train.loop import Tell
from oodometer.models.train.recipes import check_count, check_number
from oodometer.models.train.trained import EXPOSURE_EPOCHS, OUTLIER_WEIGHT, Architecture, Trained, fit


@dataclass(frozen=True)
class Finetune:
    """A network trained on the images of a fold by one of the recipes (`oodometer train` knows the same).

    `arch` names the architecture, `arch_options` its options, `weights` a file to start from (all but the head, which
    is new; `weights_classes` is what those weights told apart). `settings` are the recipe's, on top of its `preset`.
    Exposure trains on for `exposure_epochs` with `outlier_weight`·(cross-entropy to uniform, averaged over outliers)
    added to the loss. `passes` adds Monte-Carlo dropout to the banks, `device` trains elsewhere than the images are.
    """

    arch: str = "cnn"
    recipe: str = "crossentropy"
    preset: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    arch_options: Mapping[str, Any] = field(default_factory=dict)
    weights: str = ""
    weights_classes: int = 1000
    exposure_epochs: int = EXPOSURE_EPOCHS
    exposure_rate: float = recipes.EXPOSURE_RATE
    outlier_weight: float = OUTLIER_WEIGHT
    passes: int = 0
    device: str = ""

    def __post_init__(self) -> None:
        architectures.check_name(self.arch)
        recipes.create(self.recipe, preset=self.preset or None, **self.settings)
        for name, least in (("weights_classes", 2), ("exposure_epochs", 1), ("passes", 0)):
            check_count("trainer finetune", name, getattr(self, name), least)
        for name in ("exposure_rate", "outlier_weight"):
            check_number("trainer finetune", name, getattr(self, name), 0, math.inf, open_low=True)

    def fit(self, train: Bank, val: Bank, *, seed: int) -> FinetuneClassifier:
        """A network that learns from the training rows; validation rows end its training."""
        return Kept(self).fit(train, val, seed=seed)

    def keeping(self, folder: Path, tell: Tell) -> Kept:
        """This trainer with a folder for checkpoints and trained networks, each found again by what decides it."""
        return Kept(self, Shelf(folder), tell)


@dataclass(frozen=True)
class Kept:
    """The trainer with a place for its checkpoints, and somebody to tell how far it is."""

    trainer: Finetune
    shelf: Shelf | None = None
    tell: Tell | None = None

    def fit(self, train: Bank, val: Bank, *, seed: int) -> FinetuneClassifier:
        """Trained, gone on with, or opened if it was trained before."""
        asked = self.trainer
        architecture = Architecture(asked.arch, dict(asked.arch_options), asked.weights, asked.weights_classes)
        recipe = recipes.create(asked.recipe, preset=asked.preset or None, **asked.settings)
        network = fit(
            recipe,
            architecture,
            train,
            val,
            seed=seed,
            device=asked.device,
            checkpoints=self.shelf,
            tell=self.tell,
        )
        return FinetuneClassifier(self, network)


@dataclass(frozen=True)
class FinetuneClassifier:
    """A trained network behind the interface of the study's classifiers."""

    kept: Kept
    network: Trained

    @property
    def facts(self) -> dict[str, Any]:
        """How training went."""
        return self.network.facts

    def apply(self, bank: Bank) -> Bank:
        """The same rows with this network's features and head instead of their images."""
        return self.network.apply(bank, passes=self.kept.trainer.passes)

    def expose(self, outliers: Bank, train: Bank, val: Bank, *, seed: int) -> FinetuneClassifier:
        """This network trained on with outliers, whose labels (if any) are not looked at."""
        asked = self.kept.trainer
        exposed = self.network.expose(
            outliers,
            train,
            val,
            seed=seed,
            epochs=asked.exposure_epochs,
            weight=asked.outlier_weight,
            rate=asked.exposure_rate,
            checkpoints=self.kept.shelf,
            tell=self.kept.tell,
        )
        return FinetuneClassifier(self.kept, exposed)

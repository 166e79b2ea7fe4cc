"""Published recipes: which losses a network learns with, in which stages, at which pace (FD-Shifts' settings)."""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from oodometer.errors import OodometerError
from oodometer.models.train import losses
from oodometer.models.train.images import Augment, check_augment
from oodometer.models.train.loop import Batch, Memory, Pace, Stage
from oodometer.models.train.network import Network, confidence_branch

EXPOSURE_RATE = 1e-3
"""Rate of outlier exposure on a trained network (Hendrycks et al., ICLR 2019, §4.3: fine-tuning, cosine schedule)."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What all recipes share; the defaults of each are those published for CIFAR."""

    name: ClassVar[str]
    optimiser: ClassVar[Literal["sgd", "nesterov"]] = "sgd"

    epochs: int
    rate: float = 0.1
    decay: float = 5e-4
    cosine: bool = True
    milestones: tuple[int, ...] = ()
    drop: float = 0.1
    batch: int = 128
    augment: Augment = "crop-flip"
    dropout: float = 0.0
    """Probability that a penultimate feature is dropped while training (and in Monte-Carlo passes)."""
    class_weights: Literal["none", "inverse"] = "none"
    """inverse: rows of a class weigh n/(C·n_c), so that every class counts the same."""
    bfloat16: bool = False
    """Mixed precision; faster on GPUs, with other digits."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", tuple(self.milestones))
        for name in ("epochs", "batch"):
            check_count(self.name, name, getattr(self, name), 1)
        for name in ("rate", "drop"):
            check_number(self.name, name, getattr(self, name), 0, math.inf, open_low=True)
        check_number(self.name, "decay", self.decay, 0, math.inf)
        if not (_is_number(self.dropout) and 0 <= self.dropout < 1):
            raise OodometerError(f"{self.name}: dropout must be at least 0 and below 1; found {self.dropout!r}")
        check_augment(self.augment)
        if self.class_weights not in ("none", "inverse"):
            raise OodometerError(f"{self.name}: class_weights must be none or inverse; found {self.class_weights!r}")

    @property
    def pace(self) -> Pace:
        """The pace of the classifier's training."""
        return Pace(
            optimiser=self.optimiser,
            rate=self.rate,
            decay=self.decay,
            cosine=self.cosine and not self.milestones,
            milestones=self.milestones,
            drop=self.drop,
        )

    def outputs(self, classes: int) -> int:
        """How many outputs the head has."""
        return classes

    def extend(self, network: Network) -> None:
        """Add what the recipe learns besides the classifier."""

    def stages(self) -> list[Stage]:
        """The stretches of training, in order."""
        raise NotImplementedError

    def loss_of(self, network: Network, batch: Batch, seen: Seen, memory: Memory) -> Tensor:
        """The classifier's loss."""
        return class_loss(network, batch, seen)

    def _loss(self, network: Network, batch: Batch, memory: Memory) -> Tensor:
        return self.loss_of(network, batch, network(batch.pixels), memory)


def exposure_stage(recipe: Recipe, *, epochs: int, weight: float, rate: float) -> Stage:
    """A fixed number of epochs with λ·(cross-entropy to uniform, mean over outliers) added to the recipe's loss.

    Rows and outliers go through the network together, as published: apart, batch normalisation would learn by the
    statistics of each and keep those of neither.
    """

    def loss(network: Network, batch: Batch, memory: Memory) -> Tensor:
        if batch.outliers is None:
            return recipe.loss_of(network, batch, network(batch.pixels), memory)
        features, outputs = network(torch.cat([batch.pixels, batch.outliers]))
        rows = len(batch.pixels)
        found = recipe.loss_of(network, batch, (features[:rows], outputs[:rows]), memory)
        return found + weight * losses.uniform_cross_entropy(network.class_logits(outputs[rows:])).mean()

    first = recipe.stages()[0]
    pace = Pace(optimiser="nesterov", rate=rate, decay=recipe.decay, cosine=True)
    return Stage(name="exposure", epochs=epochs, loss=loss, pace=pace, learning=first.learning, memory=first.memory)


Seen = tuple[Tensor, Tensor]
"""Features and outputs of the rows of a batch."""


def class_loss(network: Network, batch: Batch, seen: Seen) -> Tensor:
    """Cross-entropy of the class logits."""
    return batch.mean(losses.cross_entropy(network.class_logits(seen[1]), batch.labels))


# ---------------------------------------------------------------------------------------------- recipes


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Recipe):
    """Cross-entropy that keeps the best epoch on validation rows (patience 3, DCV-ROOD §4.4), at a constant rate.

    `patience=None` trains all epochs instead; with `cosine=True`, `epochs=250` and `rate=0.1` that is FD-Shifts'
    baseline (preset "fd-shifts").
    """

    name = "crossentropy"

    epochs: int = 100
    rate: float = 0.01
    cosine: bool = False
    patience: int | None = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience is not None:
            check_count(self.name, "patience", self.patience, 1)

    def stages(self) -> list[Stage]:
        return [
            Stage(name="classifier", epochs=self.epochs, loss=self._loss, pace=self.pace, patience=self.patience),
        ]


@dataclass(frozen=True, kw_only=True)
class ConfidNet(Recipe):
    """A branch that regresses the true-class probability of a trained classifier (Corbière et al., NeurIPS 2019).

    Cross-entropy first; then the branch alone, the classifier frozen with its batch statistics and dropout; then the
    branch with a copy of the encoder, so that the classifier stays what it was.
    """

    name = "confidnet"

    epochs: int = 250
    branch_epochs: int = 200
    branch_rate: float = 1e-4
    tuning_epochs: int = 20
    tuning_rate: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.name, "branch_epochs", self.branch_epochs, 1)
        check_count(self.name, "tuning_epochs", self.tuning_epochs, 0)
        for name in ("branch_rate", "tuning_rate"):
            check_number(self.name, name, getattr(self, name), 0, math.inf, open_low=True)

    def extend(self, network: Network) -> None:
        network.confidence = confidence_branch(network.width)

    def stages(self) -> list[Stage]:
        branch = Pace(optimiser="adam", rate=self.branch_rate, decay=0.0, cosine=True)
        tuning = Pace(optimiser="adam", rate=self.tuning_rate, decay=0.0, cosine=False)
        copied = ("confidence_encoder", "confidence")
        stages = [
            Stage(name="classifier", epochs=self.epochs, loss=self._loss, pace=self.pace),
            Stage(name="branch", epochs=self.branch_epochs, loss=_confidence, pace=branch, learning=("confidence",)),
            Stage(
                name="tuning",
                epochs=self.tuning_epochs,
                loss=_confidence,
                pace=tuning,
                learning=copied,
                frozen_statistics=("confidence_encoder",),
                prepare=Network.own_encoder,
            ),
        ]
        return stages if self.tuning_epochs else stages[:2]


def _confidence(network: Network, batch: Batch, memory: Memory) -> Tensor:
    """How far the branch is off the true-class probability; nothing of it reaches the classifier."""
    with torch.no_grad():
        features, outputs = network(batch.pixels)
    found = network.confidence_logit(batch.pixels, features)
    return batch.mean(losses.true_class_error(found, network.class_logits(outputs), batch.labels))


@dataclass(frozen=True, kw_only=True)
class DeVries(Recipe):
    """A confidence unit beside the head that may ask for hints and pays for them (DeVries & Taylor, 2018).

    Half the rows of a batch may ask; the price −log c is held at `budget` by its weight, which starts at `weight`.
    """

    name = "devries"
    optimiser = "nesterov"

    epochs: int = 250
    weight: float = 0.1
    budget: float = 0.3
    asking: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("weight", "budget"):
            check_number(self.name, name, getattr(self, name), 0, math.inf, open_low=True)
        check_number(self.name, "asking", self.asking, 0, 1)

    def extend(self, network: Network) -> None:
        network.confidence = confidence_branch(network.width, hidden=0)

    def stages(self) -> list[Stage]:
        return [
            Stage(
                name="classifier",
                epochs=self.epochs,
                loss=self._loss,
                pace=self.pace,
                learning=("encoder", "head", "confidence"),
                memory=lambda: {"weight": torch.tensor(self.weight)},
            )
        ]

    def loss_of(self, network: Network, batch: Batch, seen: Seen, memory: Memory) -> Tensor:
        features, outputs = seen
        confidence = network.confidence_logit(batch.pixels, features)
        asked = torch.zeros(len(outputs), dtype=torch.bool, device=outputs.device)
        if network.learns("confidence"):
            asked = torch.rand(len(outputs), device=outputs.device) < self.asking
        price = batch.mean(losses.asking(confidence))
        weight = memory["weight"]
        # The weight of this batch was set by the one before.
        memory["weight"] = losses.budgeted(weight, price.detach(), self.budget)
        return batch.mean(losses.hinted(outputs, confidence, batch.labels, asked)) + weight * price


@dataclass(frozen=True, kw_only=True)
class DeepGamblers(Recipe):
    """One more output, on which a gambler keeps the stake instead of betting (Liu et al., NeurIPS 2019).

    The first `pretraining` epochs are cross-entropy of the class logits. A smaller reward keeps more stakes.
    """

    name = "deepgamblers"

    epochs: int = 300
    pretraining: int = 100
    reward: float = 2.2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.name, "pretraining", self.pretraining, 0)
        if self.pretraining >= self.epochs:
            raise OodometerError(
                f"deepgamblers: pretraining must end before the last epoch; found {self.pretraining} of {self.epochs}"
            )
        check_number(self.name, "reward", self.reward, 1, math.inf, open_low=True)

    def outputs(self, classes: int) -> int:
        losses.check_reward(self.reward, classes)
        return classes + 1

    def stages(self) -> list[Stage]:
        return [Stage(name="classifier", epochs=self.epochs, loss=self._loss, pace=self.pace)]

    def loss_of(self, network: Network, batch: Batch, seen: Seen, memory: Memory) -> Tensor:
        return batch.mean(losses.gambler(seen[1], batch.labels, self.reward))

    def _loss(self, network: Network, batch: Batch, memory: Memory) -> Tensor:
        seen = network(batch.pixels)
        if batch.epoch < self.pretraining:
            return class_loss(network, batch, seen)
        return self.loss_of(network, batch, seen, memory)


RECIPES: dict[str, type[Recipe]] = {one.name: one for one in (CrossEntropy, ConfidNet, DeVries, DeepGamblers)}

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "crossentropy": {"fd-shifts": {"epochs": 250, "rate": 0.1, "cosine": True, "patience": None}},
    "confidnet": {"svhn": {"epochs": 100, "rate": 0.01}},
    "devries": {
        "original": {"epochs": 200, "milestones": (60, 120, 160), "drop": 0.2},
        "svhn": {"epochs": 100, "rate": 0.01},
    },
    "deepgamblers": {
        "original": {"milestones": tuple(range(25, 300, 25)), "drop": 0.5},
        "svhn": {"epochs": 150, "pretraining": 50, "rate": 0.01},
    },
}
"""Other published settings than the defaults."""


def create(name: str, *, preset: str | None = None, **settings: Any) -> Recipe:
    """A recipe by name, e.g. `create("deepgamblers", reward=3.0)`; settings go on top of a preset's."""
    _check_known("recipe", name, list(RECIPES))
    kind = RECIPES[name]
    if preset is not None:
        _check_known(f"preset of {name}", preset, list(PRESETS[name]))
        settings = {**PRESETS[name][preset], **settings}
    for key in settings:
        _check_known(f"recipe {name}", key, [field.name for field in dataclasses.fields(kind)])
    return kind(**settings)


def _check_known(owner: str, name: str, known: list[str]) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise OodometerError(f"{owner}: unknown name {name!r}; {hint}known: {', '.join(known) or 'none'}")


def check_count(owner: str, name: str, value: Any, least: int) -> None:
    """Refuse what is no whole number from `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OodometerError(f"{owner}: {name} needs a whole number from {least}; found {value!r}")


def check_number(owner: str, name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    """Refuse what is no finite number between the bounds."""
    inside = (
        _is_number(value) and math.isfinite(value) and (low < value if open_low else low <= value) and value <= high
    )
    if not inside:
        least = f"above {low:g}" if open_low else f"from {low:g}"
        most = "" if math.isinf(high) else f" to {high:g}"
        raise OodometerError(f"{owner}: {name} needs a number {least}{most}; found {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

"""Training a network on a bank of images, and the trained network: banks of it, outlier exposure, its files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oodometer import derived
from oodometer.arrays import Array, Ints, to_numpy
from oodometer.bank import Bank, Head
from oodometer.detectors.mcd import dropout_masks
from oodometer.errors import OodometerError
from oodometer.models.train import architectures, recipes
from oodometer.models.train.checkpoints import FINISHED, Folder, Shelf, read, write
from oodometer.models.train.images import IMAGES, Images, sample
from oodometer.models.train.loop import EVALUATED_ROWS, Data, Stage, Tell, deterministic, initialised, train
from oodometer.models.train.network import Network, restore, state_of
from oodometer.models.train.recipes import Recipe
from oodometer.models.weights import load_weights
from oodometer.temperature import bank_temperature

EXPOSURE_EPOCHS, OUTLIER_WEIGHT = 5, 0.5
"""Epochs of outlier exposure (DCV-ROOD §4.4), and λ of Hendrycks et al. (ICLR 2019) for classification."""


@dataclass(frozen=True)
class Architecture:
    """Which network: a name, options of its factory, and weights to start from (all but the head)."""

    name: str = "cnn"
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: str = ""
    weights_classes: int = 1000
    """How many classes those weights tell apart."""


@dataclass(frozen=True)
class Trained:
    """A trained network; `facts` are plain JSON values, equal for equal seeds."""

    network: Network
    recipe: Recipe
    architecture: Architecture
    facts: dict[str, Any]
    device: torch.device

    def apply(self, bank: Bank, *, passes: int = 0) -> Bank:
        """The same rows with this network's features, head and learned confidence instead of their images.

        `logits.confidnet` and `logits.devries` hold the confidence before its sigmoid, `logits.deepgamblers` the C + 1
        outputs; the head has the C classes alone. `passes` adds `logits.mcd`, and `.mcd` of those columns: dropout on
        the features, one mask a pass for all rows.
        """
        columns = self._columns(bank, passes)
        kept = {name: bank[name] for name in bank.columns if not _is_replaced(name)}
        if not isinstance(sample(bank), np.ndarray):
            moved = {name: torch.as_tensor(value, device=self.device) for name, value in columns.items()}
            return Bank({**kept, **moved}, head=self.head, provenance={"network": self.facts})
        return Bank({**kept, **columns}, head=self.head, provenance={"network": self.facts})

    @property
    def head(self) -> Head:
        """The classifier's last layer, without Deep Gamblers' reservation."""
        classes = self.network.classes
        weight, bias = self.network.head.weight[:classes], self.network.head.bias[:classes]
        return Head(to_numpy(weight.detach().cpu()), to_numpy(bias.detach().cpu()))

    def save(self, folder: Path) -> None:
        """What other programs read: the classifier's weights, its preprocessing, and the facts of its training."""
        network = self.network
        write(folder / "weights.safetensors", network.exported(), {"architecture": self.facts["architecture"]})
        mean, std = network.mean.expand(network.channels), network.std.expand(network.channels)
        mode = "RGB" if network.channels == 3 else "L"
        preprocessing = {"kind": "image", "mode": mode, "mean": mean.tolist(), "std": std.tolist()}
        for name, facts in (("preprocessing.json", preprocessing), ("facts.json", self.facts)):
            (folder / name).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    def _columns(self, bank: Bank, passes: int) -> dict[str, NDArray[Any]]:
        images = Images(bank, self.device)
        masks = self._masks(passes)
        self.network.to(self.device).eval()
        pieces: list[dict[str, Tensor]] = []
        with torch.no_grad(), deterministic():
            for _, pixels in images.batches(EVALUATED_ROWS):
                pieces.append({name: value.cpu() for name, value in self._batch(pixels, masks).items()})
            if not pieces:
                empty = torch.zeros(1, *images.shape, device=self.device)
                pieces = [{name: value[:0].cpu() for name, value in self._batch(empty, masks).items()}]
        return {name: torch.cat([piece[name] for piece in pieces]).numpy() for name in pieces[0]}

    def _masks(self, passes: int) -> Tensor | None:
        if not passes:
            return None
        if not self.recipe.dropout:
            raise OodometerError(
                "dropout passes need a network that was trained with dropout: set the recipe's dropout, e.g. 0.5"
            )
        masks = dropout_masks(self.network.width, passes=passes, p=self.recipe.dropout, seed=0)
        return torch.as_tensor(masks, dtype=torch.float32, device=self.device)

    def _batch(self, pixels: Tensor, masks: Tensor | None) -> dict[str, Tensor]:
        """All columns of some rows."""
        network, name = self.network, f"logits.{self.recipe.name}"
        features, outputs = network(pixels)
        found = {"features": features}
        if masks is not None:
            dropped = features[:, None] * masks
            found["logits.mcd"] = network.class_logits(network.head(dropped).transpose(1, 2)).transpose(1, 2)
        if outputs.shape[1] > network.classes:
            found[name] = outputs
            if masks is not None:
                found[f"{name}.mcd"] = network.head(dropped)
        if network.confidence is not None:
            read = network.confidence_features(pixels, features)
            found[name] = network.confidence(read)[:, 0]
            if masks is not None:
                found[f"{name}.mcd"] = network.confidence(read[:, None] * masks)[:, :, 0]
        return found

    def expose(
        self,
        outliers: Bank,
        train: Bank,
        val: Bank,
        *,
        seed: int,
        epochs: int = EXPOSURE_EPOCHS,
        weight: float = OUTLIER_WEIGHT,
        rate: float = recipes.EXPOSURE_RATE,
        checkpoints: Path | Shelf | None = None,
        tell: Tell | None = None,
    ) -> Trained:
        """This network trained on with outliers, whose labels (if any) are not looked at."""
        if not len(outliers):
            raise OodometerError("exposure needs outliers; the outlier bank has no rows")
        classes = _check_rows(train, val)
        if classes != self.network.classes:
            raise OodometerError(
                f"exposure needs the {self.network.classes} classes the network was trained on; the train bank has "
                f"{classes}"
            )
        stage = recipes.exposure_stage(self.recipe, epochs=epochs, weight=weight, rate=rate)
        told = {"outliers": len(outliers), "outlier_weight": weight, "exposure_epochs": epochs, "exposure_rate": rate}
        facts = {**self.facts, **told, "exposure_seed": seed}
        start = self.network.mean.cpu(), self.network.std.cpu()
        shape = tuple(self.facts["shape"])
        network = initialised(lambda: _made(self.recipe, self.architecture, start, classes, shape), seed=0)
        task = _Task(network, self.recipe, self.architecture, facts, [stage], self.device)
        _prepare_all(network, self.recipe)
        restore(network.to(self.device), state_of(self.network))
        return _carry_out(task, train, val, outliers, seed=seed, checkpoints=checkpoints, tell=tell)


def fit(
    recipe: Recipe,
    architecture: Architecture,
    train: Bank,
    val: Bank,
    *,
    seed: int,
    device: str = "",
    checkpoints: Path | Shelf | None = None,
    tell: Tell | None = None,
) -> Trained:
    """A network trained on the images and labels of a bank; on the images' own device unless another is named.

    With a folder for checkpoints every finished epoch is kept, a stopped training goes on there, and a finished one is
    opened instead of repeated. The network that comes out is the same, to the last byte on one machine's CPU.
    """
    classes = _check_rows(train, val)
    where = device_of(train, device)
    shape = Images(train.rows(slice(0, 1)), torch.device("cpu")).shape
    moments = Images(train, where).moments()
    network = initialised(lambda: _made(recipe, architecture, moments, classes, shape), seed=seed)
    _check_fits(network, shape, architecture.name)
    facts = {
        "recipe": recipe.name,
        "settings": {**dataclasses.asdict(recipe), "milestones": list(recipe.milestones)},
        "architecture": dataclasses.asdict(architecture),
        "classes": classes,
        "shape": list(shape),
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "seed": seed,
    }
    task = _Task(network, recipe, architecture, facts, recipe.stages(), where)
    return _carry_out(task, train, val, None, seed=seed, checkpoints=checkpoints, tell=tell)


def opened(folder: str | Path, *, device: str = "cpu") -> Trained:
    """A network that was trained before, from its folder."""
    path = Path(folder) / FINISHED
    try:
        tensors, told = read(path)
    except FileNotFoundError:
        raise OodometerError(f"{path}: no trained network here; `oodometer train --out {folder}` writes one") from None
    facts = told["facts"]
    recipe = recipes.create(facts["recipe"], **facts["settings"])
    architecture = Architecture(**{**facts["architecture"], "weights": ""})
    moments = tensors["mean"], tensors["std"]
    network = _made(recipe, architecture, moments, facts["classes"], tuple(facts["shape"]))
    _prepare_all(network, recipe)
    restore(network, tensors)
    return Trained(network, recipe, architecture, facts, torch.device(device))


def fastest() -> torch.device:
    """CUDA, Apple's MPS, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def device_of(bank: Bank, named: str = "") -> torch.device:
    """The named device ("auto": the fastest there is), or the one that the bank's images are on."""
    if named == "auto":
        return fastest()
    column = sample(bank) if IMAGES in bank.columns else None
    if named:
        try:
            return torch.empty(0, device=named).device
        except (RuntimeError, AssertionError) as error:
            reason = str(error).strip().split("\n", 1)[0]
            raise OodometerError(f"device {named!r}: {reason}. `oodometer doctor` shows what there is") from None
    return column.device if isinstance(column, Tensor) else torch.device("cpu")


# ---------------------------------------------------------------------------------------------- carrying out


@dataclass(frozen=True)
class _Task:
    """A network at its start, and the stages it goes through."""

    network: Network
    recipe: Recipe
    architecture: Architecture
    facts: dict[str, Any]
    stages: list[Stage]
    device: torch.device


def _carry_out(
    task: _Task,
    train_bank: Bank,
    val: Bank,
    outliers: Bank | None,
    *,
    seed: int,
    checkpoints: Path | Shelf | None,
    tell: Tell | None,
) -> Trained:
    """Train, or open what was trained before."""
    network, recipe = task.network.to(task.device), task.recipe
    folder = _folder(checkpoints, task, (train_bank, val, outliers))
    done = folder.finished() if folder is not None else None
    if done is not None:
        _prepare_all(network, recipe)
        restore(network.to(task.device), done[0])
        return Trained(network, recipe, task.architecture, done[1]["facts"], task.device)
    data = _data(task, train_bank, val, outliers)
    stages = train(network, task.stages, data, seed=seed, folder=folder, tell=tell)
    made = Trained(network, recipe, task.architecture, {**task.facts}, task.device)
    made.facts["stages"] = [*task.facts.get("stages", []), *stages]
    made.facts.update(_judged(made, val))
    if folder is not None:
        folder.save(network.state_dict(), {"facts": made.facts}, finished=True)
    return made


def _data(task: _Task, train_bank: Bank, val: Bank, outliers: Bank | None) -> Data:
    labels = train_bank.labels.astype(np.int64)
    weights = None
    if task.recipe.class_weights == "inverse":
        counts = np.bincount(labels, minlength=task.network.classes)
        weights = torch.as_tensor(len(labels) / (len(counts) * counts), dtype=torch.float32, device=task.device)
    return Data(
        train=Images(train_bank, task.device),
        labels=torch.as_tensor(labels, device=task.device),
        val=Images(val, task.device),
        val_labels=torch.as_tensor(val.labels.astype(np.int64), device=task.device),
        device=task.device,
        batch=task.recipe.batch,
        augment=task.recipe.augment,
        class_weights=weights,
        outliers=None if outliers is None else Images(outliers, task.device),
        bfloat16=task.recipe.bfloat16,
    )


def _folder(checkpoints: Path | Shelf | None, task: _Task, banks: tuple[Bank | None, ...]) -> Folder | None:
    """The folder of this very training: its rows, its start and its stages are part of its identity."""
    if checkpoints is None:
        return None
    rows = [None if bank is None else _rows_of(bank).fingerprint for bank in banks]
    measured = ("stages", "val_accuracy", "temperature")
    asked = {name: value for name, value in task.facts.items() if name not in measured}
    identity = {"facts": asked, "rows": rows, "device": task.device.type}
    return checkpoints.folder(identity) if isinstance(checkpoints, Shelf) else Folder(checkpoints, identity)


def _rows_of(bank: Bank) -> Bank:
    """What training reads of a bank."""
    return bank.select([name for name in (IMAGES, "labels") if name in bank.columns])


def _judged(made: Trained, val: Bank) -> dict[str, Any]:
    """Accuracy and temperature on validation rows."""
    seen = made.apply(val.select([IMAGES, "labels"]))
    return {"val_accuracy": float(derived.correct(seen).mean()), "temperature": bank_temperature(seen)}


def _made(
    recipe: Recipe, architecture: Architecture, moments: tuple[Tensor, Tensor], classes: int, shape: tuple[int, ...]
) -> Network:
    """A fresh network; with weights to start from, only its head is new."""
    first = architecture.weights_classes if architecture.weights else classes
    body = architectures.make(architecture.name, classes=first, shape=shape, options=architecture.options)
    outputs = recipe.outputs(classes)
    if architecture.weights:
        body = load_weights(body, Path(architecture.weights))
    network = Network(body, first, classes=classes, outputs=outputs, moments=moments, dropout=recipe.dropout)
    recipe.extend(network)
    return network


def _prepare_all(network: Network, recipe: Recipe) -> None:
    """Give the network every part that its recipe's stages add."""
    for stage in recipe.stages():
        stage.prepare(network)


def _check_fits(network: Network, shape: tuple[int, ...], name: str) -> None:
    """Refuse an architecture that cannot read images of this shape."""
    network.eval()
    try:
        with torch.no_grad():
            network(torch.zeros(2, *shape))
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise OodometerError(
            f"architecture {name} cannot read images of shape {shape} (channels first): {reason}"
        ) from None


def _is_replaced(name: str) -> bool:
    """Columns of images, and of another network."""
    return name in (IMAGES, "logits", "features") or name.startswith(("logits.", "layers.", "features."))


def _check_rows(train: Bank, val: Bank) -> int:
    """The number of classes; every one has training rows, and validation rows have no other."""
    for role, bank in (("train", train), ("validation", val)):
        if not len(bank):
            raise OodometerError(f"training needs {role} rows; the {role} bank has none")
        missing = [name for name in (IMAGES, "labels") if name not in bank.columns]
        if missing:
            raise OodometerError(
                f"training needs {' and '.join(missing)}; the {role} bank has {', '.join(bank.columns)}: make one with "
                "Bank(images=pixels, labels=y)"
            )
        row = derived.first_bad_row(bank, IMAGES) if _is_float(sample(bank)) else None
        if row is not None:
            raise OodometerError(f"image {row} of the {role} bank has NaN or infinity: drop such rows")
    return _check_labels(train.labels, val.labels)


def _check_labels(train: Ints, val: Ints) -> int:
    counts = np.bincount(train) if train.min() >= 0 else np.zeros(1)
    if len(counts) < 2 or not counts.all():
        raise OodometerError(
            "training needs at least two classes, numbered 0 … classes−1 without gaps; the training labels are "
            f"{', '.join(map(str, np.unique(train)[:8].tolist()))}: renumber them with "
            "np.unique(labels, return_inverse=True)"
        )
    beyond = np.unique(val[(val < 0) | (val >= len(counts))])
    if len(beyond):
        raise OodometerError(f"validation rows have classes that no training row has: {beyond[:8].tolist()}")
    return len(counts)


def _is_float(column: Array) -> bool:
    return "float" in str(column.dtype)

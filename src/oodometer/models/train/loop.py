"""The training loop that all recipes share: seeded epochs, early stopping, checkpoints, exact resume."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from oodometer.errors import OodometerError
from oodometer.models.train.checkpoints import Folder, part, prefixed
from oodometer.models.train.images import Images, cropped, drawn_crops
from oodometer.models.train.network import Network, restore, state_of

EVALUATED_ROWS = 1024
"""Rows of a batch that is only looked at."""
Memory = dict[str, Tensor]
"""What a loss keeps from batch to batch."""
Tell = Callable[[str, float], None]
"""Told what was done, and how much of the training (0 to 1) is done now."""


@dataclass(frozen=True)
class Batch:
    """Some rows: pixels, labels and the weight of each row; with exposure also the pixels of outliers."""

    pixels: Tensor
    labels: Tensor
    weights: Tensor | None
    epoch: int
    outliers: Tensor | None = None

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the rows, weighted by class where weights are given."""
        return values.mean() if self.weights is None else (values * self.weights).sum() / self.weights.sum()


Loss = Callable[[Network, Batch, Memory], Tensor]


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How weights move: optimiser, learning rate and its schedule, weight decay."""

    optimiser: Literal["sgd", "nesterov", "adam"] = "sgd"
    rate: float = 0.1
    decay: float = 5e-4
    cosine: bool = True
    milestones: tuple[int, ...] = ()
    """Epochs after which the rate is multiplied by `drop`."""
    drop: float = 0.1

    def make(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimiser of these parameters."""
        if self.optimiser == "adam":
            return torch.optim.Adam(parameters, lr=self.rate, weight_decay=self.decay)
        nesterov = self.optimiser == "nesterov"
        return torch.optim.SGD(parameters, lr=self.rate, momentum=0.9, weight_decay=self.decay, nesterov=nesterov)

    def at(self, epoch: int, share: float) -> float:
        """The rate in an epoch, when this share of all steps is done."""
        if self.cosine:
            return self.rate * 0.5 * (1 + math.cos(math.pi * share))
        return self.rate * self.drop ** sum(epoch >= milestone for milestone in self.milestones)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stretch of training with one loss; only the named parts of the network learn."""

    name: str
    epochs: int
    loss: Loss
    pace: Pace
    learning: tuple[str, ...] = ("encoder", "head")
    frozen_statistics: tuple[str, ...] = ()
    """Learning parts whose normalisation and dropout stay as at test time."""
    patience: int | None = None
    """Epochs without a lower validation loss after which the best epoch is kept; none: the last one is."""
    prepare: Callable[[Network], None] = lambda network: None
    memory: Callable[[], Memory] = dict


@dataclass(frozen=True)
class Data:
    """What is trained on, and how its batches are made."""

    train: Images
    labels: Tensor
    val: Images | None
    val_labels: Tensor | None
    device: torch.device
    batch: int
    augment: str
    class_weights: Tensor | None = None
    outliers: Images | None = None
    bfloat16: bool = False


@dataclass
class _Position:
    """Where training stands."""

    stage: int = 0
    epoch: int = 0
    best_epoch: int = 0
    best_loss: float = math.inf
    history: list[list[dict[str, Any]]] = field(default_factory=list)


# ---------------------------------------------------------------------------------------------- training


def train(
    network: Network,
    stages: list[Stage],
    data: Data,
    *,
    seed: int,
    folder: Folder | None = None,
    tell: Tell | None = None,
) -> list[dict[str, Any]]:
    """Train through all stages, from the last checkpoint if there is one; what happened in each stage.

    Every epoch draws from a generator of its own, made from the seed, the stage and the epoch: a training that goes
    on from a checkpoint takes the very steps it would have taken, and no global random state is used or changed.
    """
    run = _Run(network, stages, data, seed=seed, folder=folder, tell=tell or (lambda what, share: None))
    with deterministic():
        run.resume()
        while run.position.stage < len(stages):
            run.stage()
    return [_told(stage, history) for stage, history in zip(stages, run.position.history, strict=True) if history]


def _told(stage: Stage, history: list[dict[str, Any]]) -> dict[str, Any]:
    """What happened in a stage: its epochs, and the losses of the one that was kept."""
    if stage.patience is None:
        return {"stage": stage.name, "epochs": len(history), **history[-1]}
    best = _best(history)
    return {"stage": stage.name, "epochs": len(history), "best_epoch": best, **history[best - 1]}


def _best(history: list[dict[str, Any]]) -> int:
    losses = [epoch["val_loss"] for epoch in history]
    return losses.index(min(losses)) + 1


class _Run:
    """A training in progress: the network, the optimiser of the current stage, and the position."""

    def __init__(
        self, network: Network, stages: list[Stage], data: Data, *, seed: int, folder: Folder | None, tell: Tell
    ) -> None:
        self.network, self.stages, self.data, self.seed = network, stages, data, seed
        self.folder, self.tell = folder, tell
        self.position = _Position(history=[[] for _ in stages])
        self._best: dict[str, Tensor] = {}
        if any(stage.patience for stage in stages) and (data.val is None or not len(data.val)):
            raise OodometerError("early stopping needs validation rows: give some, or set patience to None")

    # ------------------------------------------------------------------------------------------ a stage

    def stage(self) -> None:
        """The rest of the current stage."""
        stage, position = self.stages[self.position.stage], self.position
        self._enter(stage)
        while position.epoch < stage.epochs and not self._stopped(stage):
            self._epoch(stage)
            if position.epoch < stage.epochs and not self._stopped(stage):
                self._save()
        if stage.patience and self._best:
            restore(self.network, self._best)
        position.stage, position.epoch, position.best_epoch, position.best_loss = position.stage + 1, 0, 0, math.inf
        self._best, self._entered = {}, None
        if position.stage < len(self.stages):
            self._enter(self.stages[position.stage])
            self._save()

    _entered: str | None = None

    def _enter(self, stage: Stage) -> None:
        """Freeze what does not learn, and start the optimiser."""
        if self._entered == stage.name:
            return
        stage.prepare(self.network)
        self.network.to(self.data.device)
        self.network.requires_grad_(False)
        parts = [module for name in stage.learning if (module := getattr(self.network, name)) is not None]
        for module in parts:
            module.requires_grad_(True)
        self.optimiser = stage.pace.make([p for module in parts for p in module.parameters()])
        self.memory = {name: value.to(self.data.device) for name, value in stage.memory().items()}
        self._entered = stage.name

    def _stopped(self, stage: Stage) -> bool:
        return stage.patience is not None and self.position.epoch - self.position.best_epoch >= stage.patience

    def _epoch(self, stage: Stage) -> None:
        position = self.position
        generator = torch.Generator().manual_seed(_seed_of(self.seed, stage.name, position.epoch))
        with _seeded(int(torch.randint(2**62, (), generator=generator)), self.data.device):
            loss = self._pass(stage, generator)
        told = {"loss": loss}
        position.epoch += 1
        if stage.patience is not None:
            told["val_loss"] = self._val_loss(stage)
        for value in told.values():
            if not math.isfinite(value):
                raise OodometerError(
                    f"training diverged: the loss is {value} in epoch {position.epoch} of {stage.name}: lower the rate "
                    f"(now {stage.pace.rate:g}), or look for images that are not finite"
                )
        if told.get("val_loss", math.inf) < position.best_loss:
            position.best_epoch, position.best_loss = position.epoch, told["val_loss"]
            self._best = state_of(self.network)
        position.history[position.stage].append(told)
        self.tell(f"{stage.name}, epoch {position.epoch}: loss {loss:.4f}", self._share())

    def _share(self) -> float:
        total = sum(stage.epochs for stage in self.stages)
        return (sum(stage.epochs for stage in self.stages[: self.position.stage]) + self.position.epoch) / total

    def _pass(self, stage: Stage, generator: torch.Generator) -> float:
        """One pass over the training rows in random order; the mean loss of its batches."""
        learning_mode(self.network, stage)
        shown = _Shown(self.data, self.position.epoch, generator)
        steps = _batches(len(self.data.train), self.data.batch)
        total = torch.zeros((), device=self.data.device)
        for step, place in enumerate(steps):
            share = (self.position.epoch + step / len(steps)) / stage.epochs
            for group in self.optimiser.param_groups:
                group["lr"] = stage.pace.at(self.position.epoch, share)
            batch = shown.batch(place)
            with self._precision():
                loss = stage.loss(self.network, batch, self.memory)
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimiser.step()
            total += loss.detach() * len(batch.labels)
        return float(total) / int(steps[-1].stop)

    def _val_loss(self, stage: Stage) -> float:
        """The stage's loss on validation rows, as they are and with all layers as at test time."""
        assert self.data.val is not None, "checked at the start"
        assert self.data.val_labels is not None, "checked at the start"
        self.network.eval()
        total, weight = 0.0, 0.0
        with torch.no_grad(), self._precision():
            for place, pixels in self.data.val.batches(EVALUATED_ROWS):
                batch = made(self.data, pixels, self.data.val_labels[place], self.position.epoch)
                share = len(pixels) if batch.weights is None else float(batch.weights.sum())
                total += float(stage.loss(self.network, batch, dict(self.memory))) * share
                weight += share
        return total / weight

    def _precision(self) -> Any:
        if not self.data.bfloat16:
            return nullcontext()
        return torch.autocast(self.data.device.type, torch.bfloat16)

    # ------------------------------------------------------------------------------------------ checkpoints

    def _save(self) -> None:
        if self.folder is None:
            return
        moving = {
            f"{place}.{name}": torch.as_tensor(value)
            for place, entry in self.optimiser.state_dict()["state"].items()
            for name, value in entry.items()
            if value is not None
        }
        tensors = {
            **prefixed("network", self.network.state_dict()),
            **prefixed("best", self._best),
            **prefixed("optimiser", moving),
            **prefixed("memory", self.memory),
        }
        facts = {**vars(self.position)}
        facts["best_loss"] = self.position.best_loss if math.isfinite(self.position.best_loss) else None
        self.folder.save(tensors, {"position": facts})

    def resume(self) -> None:
        """Go on from the last checkpoint, if there is one."""
        found = self.folder.running() if self.folder is not None else None
        if found is None:
            return
        tensors, facts = found
        told = facts["position"]
        told["best_loss"] = math.inf if told["best_loss"] is None else told["best_loss"]
        self.position = _Position(**told)
        for stage in self.stages[: self.position.stage]:
            stage.prepare(self.network)
        self._enter(self.stages[self.position.stage])
        device = self.data.device
        restore(self.network, part(tensors, "network"))
        self._best = {name: tensor.to(device) for name, tensor in part(tensors, "best").items()}
        self.memory = {name: tensor.to(device) for name, tensor in part(tensors, "memory").items()}
        _restore_optimiser(self.optimiser, part(tensors, "optimiser"))


def learning_mode(network: Network, stage: Stage) -> None:
    """Training mode for what learns; what is frozen is as at test time, batch statistics and dropout included."""
    network.eval()
    for name in stage.learning:
        module = getattr(network, name)
        if module is not None and name not in stage.frozen_statistics:
            module.train()
    network.dropout.train("head" in stage.learning)


def _restore_optimiser(optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        place, _, name = key.partition(".")
        state.setdefault(int(place), {})[name] = tensor
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})


def _batches(rows: int, size: int) -> list[slice]:
    """Batches of an order; a last one of a single row, on which batch normalisation fails, is left out."""
    found = [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
    return found[:-1] if len(found) > 1 and found[-1].stop - found[-1].start == 1 else found


class _Shown:
    """What an epoch shows, drawn at its start: the order of the rows, their crops, and as many outliers."""

    def __init__(self, data: Data, epoch: int, generator: torch.Generator) -> None:
        self._data, self._epoch, rows = data, epoch, len(data.train)
        order = torch.randperm(rows, generator=generator)
        self._labels = data.labels[order.to(data.device)]
        self._order, self._crops = data.train.numbers(order), self._drawn(rows, generator)
        if data.outliers is not None:
            others = _repeated(len(data.outliers), rows, generator)
            self._others, self._their_crops = data.outliers.numbers(others), self._drawn(rows, generator)

    def _drawn(self, rows: int, generator: torch.Generator) -> Tensor | None:
        if self._data.augment == "none":
            return None
        return drawn_crops(rows, self._data.augment, generator).to(self._data.device)

    def batch(self, place: slice) -> Batch:
        """The rows at this place of the order."""
        data, outliers = self._data, None
        pixels = _seen(data.train, self._order[place], self._crops, place)
        if data.outliers is not None:
            outliers = _seen(data.outliers, self._others[place], self._their_crops, place)
        return made(data, pixels, self._labels[place], self._epoch, outliers)


def _seen(images: Images, rows: Tensor, crops: Tensor | None, place: slice) -> Tensor:
    pixels = images.at(rows)
    return pixels if crops is None else cropped(pixels, crops[:, place])


def made(data: Data, pixels: Tensor, labels: Tensor, epoch: int, outliers: Tensor | None = None) -> Batch:
    """A batch with the weights of its classes."""
    weights = None if data.class_weights is None else data.class_weights[labels]
    return Batch(pixels, labels, weights, epoch, outliers)


def _repeated(count: int, wanted: int, generator: torch.Generator) -> Tensor:
    """So many numbers below `count`, one permutation after the other."""
    rounds = [torch.randperm(count, generator=generator) for _ in range(-(-wanted // count))]
    return torch.cat(rounds)[:wanted]


# ---------------------------------------------------------------------------------------------- determinism


def _seed_of(seed: int, *names: object) -> int:
    """A seed for one purpose, from the seed of the training."""
    text = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, *"/".join(map(str, names)).encode()]
    return int(np.random.SeedSequence(text).generate_state(1, np.uint64)[0] >> np.uint64(2))


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Global draws (dropout, initial weights) from this seed; their state afterwards is the one from before."""
    before = torch.get_rng_state()
    accelerator: Any = getattr(torch, device.type) if device.type in ("cuda", "mps") else None
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kept = accelerator.get_rng_state() if accelerator is not None else None
        try:
            torch.default_generator.manual_seed(seed)
            if accelerator is not None:
                accelerator.manual_seed(seed)
            yield
        finally:
            torch.set_rng_state(before)
            if accelerator is not None:
                accelerator.set_rng_state(kept)


def initialised(make: Callable[[], Network], *, seed: int) -> Network:
    """A network whose initial weights come from the seed."""
    with _seeded(_seed_of(seed, "weights"), torch.device("cpu")):
        return make()


@contextmanager
def deterministic() -> Iterator[None]:
    """The same kernels in every run, where the device has such ones; the settings afterwards are those from before."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    benchmark, filled = torch.backends.cudnn.benchmark, settings.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
        settings.fill_uninitialized_memory = False  # every byte is written here
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
        settings.fill_uninitialized_memory = filled

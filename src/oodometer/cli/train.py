"""`oodometer train`: train a classifier on images, with or without learned confidence, into weights and banks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from oodometer.cli import INTERRUPTED, OK, _terminal
from oodometer.errors import OodometerError

ABOUT = """
Trains a network on images by a published recipe, and writes its weights, the
facts of its training and, if asked, banks of any data. Every finished epoch
is kept: a training that was stopped goes on where it was, type the same
command again.

recipes: crossentropy (early stopping), confidnet, devries, deepgamblers.
Their settings are those published for CIFAR; --preset and --set change them.

DATA is a folder of images (a subfolder a class), a .npz, .npy or IDX file
(FILE.npz:train for x_train and y_train), or a saved bank with the column
images.

example:
  oodometer train --recipe crossentropy --data mnist.npz:train --out runs/plain
  oodometer train --recipe deepgamblers --data mnist.npz:train --arch cnn \\
      --set reward=3 epochs=30 pretraining=10 --device cuda \\
      --bank test=mnist.npz:test far=kmnist.npz:test --out runs/gamblers
  oodometer score --train runs/gamblers/banks/train \\
      --test id=runs/gamblers/banks/test far=runs/gamblers/banks/far \\
      --detector deepgamblers msp --out scores
"""


@dataclass
class Options:
    """What to train, on what, how, where to."""

    data: Annotated[str, tyro.conf.arg(metavar="DATA")]
    """Images with labels to train on."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FOLDER")]
    """Folder of the training: checkpoints, weights, facts, banks."""
    recipe: str = "crossentropy"
    """crossentropy, confidnet, devries or deepgamblers."""
    preset: str | None = None
    """Other published settings, e.g. svhn."""
    set: Annotated[_terminal.Many, tyro.conf.arg(metavar="KEY=VALUE …")] = field(default_factory=list)
    """Settings of the recipe, e.g. epochs=30 rate=0.05 augment=crop dropout=0.3 patience=None."""
    arch: str = "cnn"
    """cnn, mlp, vgg13, resnet20 … resnet110, or any of torchvision's (vit_b_16, r2plus1d_18, …)."""
    arch_set: Annotated[_terminal.Many, tyro.conf.arg(metavar="KEY=VALUE …")] = field(default_factory=list)
    """Options of the architecture, e.g. width=64."""
    weights: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Weights to start from: all but the last layer, which is new."""
    weights_classes: int = 1000
    """How many classes those weights tell apart."""
    val: Annotated[str | None, tyro.conf.arg(metavar="DATA")] = None
    """Validation rows (default: a share of the training rows)."""
    val_share: float = 0.1
    """Share of every class's training rows that validates, where --val is not given."""
    bank: Annotated[_terminal.Many, tyro.conf.arg(metavar="NAME=DATA …")] = field(default_factory=list)
    """Banks to write of the trained network; the training rows get one too."""
    passes: int = 0
    """Monte-Carlo dropout passes in the banks (needs the setting dropout)."""
    seed: int = 0
    """Of initial weights, order, crops and dropout."""
    device: Annotated[str, tyro.conf.arg(metavar="DEVICE")] = "auto"
    """Where to train: cpu, cuda, mps; auto takes the fastest there is."""
    json: bool = False
    """Print JSON instead of text."""


def main(arguments: list[str]) -> int:
    """Train, or go on; 130 if interrupted."""
    options = _terminal.parse(Options, arguments, command="train", about=ABOUT)
    try:
        return _train(options)
    except KeyboardInterrupt:
        _say(f"interrupted; what is finished is kept in {options.out}. The same command goes on from there")
        return INTERRUPTED


def _train(options: Options) -> int:
    from oodometer.models import train as training

    recipe = training.create(options.recipe, preset=options.preset, **_settings(options.set, "--set"))
    weights = str(options.weights) if options.weights is not None else ""
    given = _settings(options.arch_set, "--arch-set")
    architecture = training.Architecture(options.arch, given, weights, options.weights_classes)
    named = _named(options.bank)
    rows = training.read_images(options.data)
    if options.val is not None:
        train, val = rows, training.read_images(options.val)
    else:
        train, val = training.held_out(rows, options.val_share, options.seed)
    # Read before training, so that a mistyped name does not cost one.
    others = {name: training.read_images(text) for name, text in named.items()}
    with _progress() as tell:
        network = training.fit(
            recipe,
            architecture,
            train,
            val,
            seed=options.seed,
            device=options.device,
            checkpoints=options.out,
            tell=tell,
        )
    network.save(options.out)
    sets = {"train": train, **others} if others else {}
    for name, bank in sets.items():
        network.apply(bank, passes=options.passes).save(options.out / "banks" / name, overwrite=True)
    _report(options, network.facts, list(sets))
    return OK


# ---------------------------------------------------------------------------------------------- options


def _settings(groups: list[tuple[str, ...]], option: str) -> dict[str, Any]:
    """`epochs=30 augment=crop` as a number and a word."""
    found: dict[str, Any] = {}
    for text in _terminal.flat(groups):
        key, equals, value = text.partition("=")
        if not equals:
            raise OodometerError(f"{option} {text!r}: write KEY=VALUE, e.g. epochs=30")
        found[key.strip()] = _value(value.strip())
    return found


def _value(text: str) -> Any:
    """A Python literal (numbers, tuples, True, None), else a word."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _named(groups: list[tuple[str, ...]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in _terminal.flat(groups):
        name, equals, data = text.partition("=")
        if not equals or not name or name == "train" or name in found:
            raise OodometerError(f"--bank {text!r}: write NAME=DATA with a name of its own ('train' is taken)")
        found[name] = data
    return found


# ---------------------------------------------------------------------------------------------- output


@contextmanager
def _progress() -> Iterator[Any]:
    """A bar with the loss of the last epoch and the time that is left, on a terminal."""
    console = _terminal.log()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    left = (TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False))
    with Progress(*columns, *left, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=1.0)

        def tell(what: str, share: float) -> None:
            bar.update(task, description=what, completed=share)

        yield tell


def _report(options: Options, facts: dict[str, Any], banks: list[str]) -> None:
    if options.json:
        _terminal.write_json({"folder": str(options.out), "facts": facts, "banks": banks})
        return
    table = _terminal.plain_table()
    for title in ("stage", "epochs", "best", "loss", "validation loss"):
        table.add_column(title, justify="left" if title == "stage" else "right")
    for stage in facts["stages"]:
        best, val_loss = stage.get("best_epoch"), stage.get("val_loss")
        cells = (str(stage["epochs"]), "–" if best is None else str(best), f"{stage['loss']:.4f}")
        table.add_row(stage["stage"], *cells, "–" if val_loss is None else f"{val_loss:.4f}")
    judged = f"validation accuracy {facts['val_accuracy']:.4f}, temperature {facts['temperature']:.3f}"
    where = f"{options.out}: {facts['parameters']:,} parameters in weights.safetensors"
    more = f"; banks {', '.join(banks)} in {options.out / 'banks'}" if banks else ""
    _terminal.show(table, Text(), Text(judged), Text(where + more))


def _say(message: str) -> None:
    _terminal.log().print(Text(message), soft_wrap=True)

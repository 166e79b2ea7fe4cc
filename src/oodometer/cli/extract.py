"""`oodometer extract`: run a network over images once, into a bank."""

from __future__ import annotations

import ast
import warnings
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
Runs a PyTorch classifier over data once and writes a bank: logits, penultimate
features, intermediate layers, labels and the classifier's head, which every
detector works on from then on. The head is found and verified. A run that was
stopped goes on where it was: type the same command again.

--model is package.module:factory[:param=value,…], a TorchScript file or a
Hugging Face folder; --data a folder of images (a subfolder a class), a list
('path label' a line), a .npz, .npy, IDX or NIfTI file.

example:
  oodometer extract --model oodometer.models.zoo:resnet20 \\
      --weights resnet20.npz --data cifar10_test.npz --out banks/test
  oodometer extract --model torchvision.models:resnet50:weights=DEFAULT \\
      --data textures/ --ood --out banks/textures --device cuda
  oodometer doctor banks/test
"""


@dataclass
class Options:
    """Which network, which data, what to keep, where."""

    model: Annotated[str, tyro.conf.arg(metavar="MODEL")]
    """package.module:factory[:param=value,…], a TorchScript file or a Hugging Face folder."""
    data: Annotated[Path, tyro.conf.arg(metavar="DATA")]
    """A folder of images, an image list, a .npz, .npy, IDX or NIfTI file."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="BANK")]
    """Folder of the bank."""
    weights: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Weights for the model: .safetensors, .npz, .pt or .pth."""
    root: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where the paths of a list start (default: the list's own folder)."""
    part: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Which arrays of a file, e.g. test for x_test and y_test."""
    limit: Annotated[int | None, tyro.conf.arg(metavar="ROWS")] = None
    """Only the first rows."""
    ood: bool = False
    """The data are out of distribution: their labels need not be classes of the network."""
    preprocess: Annotated[_terminal.Many, tyro.conf.arg(metavar="NAME|FILE|KEY=VALUE …")] = field(default_factory=list)
    """A preset (imagenet, none), a TOML or JSON file, or e.g. resize=256 crop=224 mean=0.5 std=0.5."""
    columns: Annotated[_terminal.Many, tyro.conf.arg(metavar="NAME[:PARAM=VALUE,…] …")] = field(default_factory=list)
    """Columns (default: features logits labels)."""
    layers: Annotated[_terminal.Many, tyro.conf.arg(metavar="NAME[:POOLING] …")] = field(default_factory=list)
    """Intermediate layers: auto (default), none, or names; pooling is mean, mean+var, token or none."""
    head: Annotated[str | None, tyro.conf.arg(metavar="LAYER")] = None
    """The last linear layer, if it shall not be looked for; none for logits without features and head."""
    device: Annotated[str, tyro.conf.arg(metavar="DEVICE")] = "auto"
    """Where to compute, e.g. cpu, cuda:1."""
    dtype: str = "float32"
    """How columns are stored: float32, float16 or float64."""
    amp: str | None = None
    """Run the network in bfloat16 or float16."""
    batch_size: Annotated[str, tyro.conf.arg(metavar="ROWS")] = "auto"
    """Rows at a time; auto shrinks until they fit."""
    num_workers: Annotated[str, tyro.conf.arg(metavar="PROCESSES")] = "auto"
    """Processes that decode images."""
    shard: Annotated[str | None, tyro.conf.arg(metavar="I/N")] = None
    """Extract part I of N; the last part to finish joins them."""
    overwrite: bool = False
    """Replace a bank that is there."""
    json: bool = False
    """Print JSON instead of text."""


def main(arguments: list[str]) -> int:
    """Extract a bank; what a stopped run has done is kept."""
    options = _terminal.parse(Options, arguments, command="extract", about=ABOUT)
    try:
        with warnings.catch_warnings(record=True) as caught, _progress() as progress:
            warnings.simplefilter("default")
            bank = _extract(options, progress)
    except KeyboardInterrupt:
        _say(f"interrupted; what is finished is kept in {options.out}. The same command goes on from there")
        return INTERRUPTED
    finally:
        for one in caught:
            if issubclass(one.category, UserWarning):
                _say(f"warning: {one.message}")
    _report(bank, options)
    return OK


def _extract(options: Options, progress: Any) -> Any:
    from oodometer.data.sources import open_source
    from oodometer.models import extract
    from oodometer.models.building import build

    source = open_source(options.data, root=options.root, part=options.part, limit=options.limit)
    model, published = build(options.model, options.weights)
    columns = _terminal.flat(options.columns)
    return extract(
        model,
        source,
        out=options.out,
        columns=columns or ("features", "logits", "labels"),
        layers=_layers(_terminal.flat(options.layers)),
        head=False if options.head == "none" else options.head,
        preprocessing=_preprocessing(_terminal.flat(options.preprocess)) or published or "auto",
        device=options.device,
        dtype=options.dtype,
        amp=options.amp,
        batch_size=_count("batch-size", options.batch_size),
        num_workers=_count("num-workers", options.num_workers),
        shard=options.shard,
        ood=options.ood,
        overwrite=options.overwrite,
        progress=progress,
    )


# ---------------------------------------------------------------------------------------------- arguments


def _layers(given: list[str]) -> str | list[str]:
    return given[0] if given in (["auto"], ["none"]) else given or "auto"


def _preprocessing(given: list[str]) -> Any:
    """A preset or a file by itself, or a mapping."""
    if not given or (len(given) == 1 and "=" not in given[0]):
        return given[0] if given else None
    found: dict[str, Any] = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise OodometerError(f"--preprocess {pair!r}: write KEY=VALUE, e.g. resize=256 crop=224")
        found[key] = _value(value)
    for key in ("mean", "std"):
        if isinstance(found.get(key), int | float):
            found[key] = [found[key]]
    return found


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _count(option: str, text: str) -> int | str:
    if text == "auto" or text.isdigit():
        return text if text == "auto" else int(text)
    raise OodometerError(f"--{option} must be auto or a whole number; found {text!r}")


# ---------------------------------------------------------------------------------------------- output


@contextmanager
def _progress() -> Iterator[Any]:
    """A bar with the time that is left, on a terminal."""
    console = _terminal.log()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    left = (TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, *left, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=1.0)

        def progress(what: str, share: float) -> None:
            bar.update(task, description=what, completed=share)

        yield progress


def _report(bank: Any, options: Options) -> None:
    complete = (options.out / "bank.json").is_file()
    facts = {
        "bank": str(options.out),
        "complete": complete,
        "rows": len(bank),
        "columns": list(bank.columns),
        "head": bank.provenance["network"]["head"],
        "preprocessing": bank.provenance["extraction"]["preprocessing"],
        "accuracy": None if options.ood else _accuracy(bank),
    }
    if options.json:
        _terminal.write_json(facts)
        return
    table = _terminal.plain_table()
    table.show_header = False
    for name, value in facts.items():
        if name not in ("bank", "complete") and value is not None:
            table.add_row(Text(name, "dim"), Text(_text(name, value)))
    state = f"{options.out}" if complete else f"{options.out}: part {options.shard} is done, others are missing"
    _terminal.show(Text(state, "bold"), table)


def _text(name: str, value: Any) -> str:
    if name == "accuracy":
        return f"{100 * value:.2f} %"
    if isinstance(value, dict):
        return ", ".join(f"{key}={inner}" for key, inner in value.items() if inner not in (None, []))
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _accuracy(bank: Any) -> float | None:
    from oodometer import derived

    if "labels" not in bank or "logits" not in bank or not len(bank) or bool((bank.labels < 0).any()):
        return None
    return float((derived.predictions(bank) == bank.labels).mean())


def _say(message: str) -> None:
    _terminal.log().print(Text(message), soft_wrap=True)

"""`oodometer doctor`: what is installed, what the machine offers, and whether banks are fit for use."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich.table import Table
from rich.text import Text

from oodometer import __version__
from oodometer.arrays import to_numpy
from oodometer.bank import Bank
from oodometer.cli import FAILED, OK, _terminal
from oodometer.errors import OodometerError
from oodometer.readers import read_bank

ABOUT = """
Versions, threads, GPU and optional extras with the line that installs each.
With banks: NaN, labels, accuracy, constant columns, empty classes, the rank of
the head, fewer rows than features, and which detectors the columns allow.

exit code: 1 if a bank has a problem (a note is none).

example:
  oodometer doctor
  oodometer doctor train.npz test.npz
  oodometer doctor train.npz --json
"""

CORE = ("numpy", "scipy", "scikit-learn", "pandas", "matplotlib")
EXTRAS = {
    "torch": (("torch",), "PyTorch arrays, GPU, training, gradients"),
    "vision": (("torch", "torchvision", "timm"), "extraction with torchvision and timm"),
    "hf": (("transformers", "datasets"), "extraction from the Hugging Face hub"),
    "medical": (("nibabel",), "NIfTI volumes"),
    "faiss": (("faiss",), "the fastest neighbour search on a CPU"),
    "dask": (("dask", "distributed"), "studies on a Dask cluster"),
    "ray": (("ray",), "studies on a Ray cluster"),
    "parquet": (("pyarrow",), "results as Parquet"),
}
"""Modules of each extra, and what it is for."""

Level = Literal["ok", "note", "problem"]
STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


@dataclass
class Options:
    """What to look at."""

    banks: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[BANK …]")] = ()
    """Banks to check: folders, .npz or .safetensors files."""
    json: bool = False
    """Print JSON instead of text."""


@dataclass(frozen=True)
class Finding:
    """One thing seen in a bank, and what it means."""

    level: Level
    text: str


def main(arguments: list[str]) -> int:
    """Print what was found; 1 if a bank has a problem."""
    options = _terminal.parse(Options, arguments, command="doctor", about=ABOUT)
    absent = [path for path in options.banks if not Path(path).exists()]
    if absent:
        raise OodometerError(f"{absent[0]}: no such file or folder")
    facts = machine()
    banks = examine(options.banks)
    if options.json:
        listed = {path: [asdict(one) for one in findings] for path, findings in banks.items()}
        _terminal.write_json({**facts, "banks": listed})
    else:
        _terminal.show(*_machine_text(facts), *_bank_texts(banks))
    return FAILED if any(one.level == "problem" for findings in banks.values() for one in findings) else OK


# ---------------------------------------------------------------------------------------------- the machine


def machine() -> dict[str, Any]:
    """Versions, threads, PyTorch and extras as plain data."""
    return {
        "oodometer": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {name: metadata.version(name) for name in CORE},
        "threads": _threads(),
        "torch": _torch(),
        "extras": {
            name: {"installed": all(map(find_spec, modules)), "for": purpose, "install": _install(name)}
            for name, (modules, purpose) in EXTRAS.items()
        },
    }


def _install(extra: str) -> str:
    return f"pip install 'oodometer[{extra}]'"


def _threads() -> dict[str, Any]:
    libraries = [info for info in import_module("threadpoolctl").threadpool_info() if info["user_api"] == "blas"]
    blas = [f"{info['internal_api']} {info['version']}" for info in libraries]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": usable,
        "blas": blas,
        "blas_threads": max((info["num_threads"] for info in libraries), default=None),
        "set_by": {name: value for name, value in os.environ.items() if name.endswith("_NUM_THREADS")},
    }


def _torch() -> dict[str, Any] | None:
    if not find_spec("torch"):
        return None
    torch = import_module("torch")
    gpus = [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
    return {"version": str(torch.__version__), "cuda": torch.version.cuda, "gpus": gpus}


def _machine_text(facts: dict[str, Any]) -> list[Any]:
    threads, torch = facts["threads"], facts["torch"]
    versions = "  ".join(f"{name} {version}" for name, version in facts["versions"].items())
    settings = "".join(f", {name}={value}" for name, value in threads["set_by"].items())
    blas = f"{', '.join(threads['blas']) or 'unknown'} with {_count(threads['blas_threads'], 'thread')}{settings}"
    lines = {
        "python": f"{facts['python']} on {facts['platform']}",
        "libraries": versions,
        "threads": f"{_count(threads['cores'], 'core')}; BLAS {blas}",
        "torch": "not installed" if torch is None else f"{torch['version']}; {_gpus(torch)}",
    }
    table = _plain()
    for name, text in lines.items():
        table.add_row(Text(name, "dim"), Text(text))
    extras = _plain()
    extras.columns[0].no_wrap = True
    for name, extra in facts["extras"].items():
        how = Text("installed", "green") if extra["installed"] else Text(extra["install"])
        extras.add_row(Text(name, "dim"), how, Text(extra["for"]))
    return [Text(f"oodometer {facts['oodometer']}", "bold"), table, Text("\nextras", "bold"), extras]


def _count(n: int | None, noun: str) -> str:
    return f"{'unknown' if n is None else n} {noun}{'' if n == 1 else 's'}"


def _gpus(torch: dict[str, Any]) -> str:
    if torch["gpus"]:
        return f"CUDA {torch['cuda']}: {', '.join(torch['gpus'])}"
    return "no GPU" if torch["cuda"] else "built without CUDA"


# ---------------------------------------------------------------------------------------------- banks


def examine(paths: Sequence[str]) -> dict[str, list[Finding]]:
    """Everything worth saying about each bank, and whether they belong together."""
    found: dict[str, list[Finding]] = {}
    first: tuple[str, Bank] | None = None
    for path in paths:
        try:
            bank = read_bank(path)
        except OodometerError as error:
            found[path] = [Finding("problem", str(error))]
            continue
        size = Finding("ok" if len(bank) else "problem", repr(bank))
        found[path] = [size, *(finding for check in CHECKS for finding in check(bank))]
        if first is None:
            first = path, bank
        else:
            found[path] += _differences(bank, *first)
    return found


def _differences(bank: Bank, path: str, first: Bank) -> Iterator[Finding]:
    for name in (name for name in bank.columns if name in first.columns):
        here, there = bank.row_shape(name), first.row_shape(name)
        if here != there:
            text = f"rows of {name!r} have shape {here}, in {path} {there}: extract both with the same network"
            yield Finding("problem", text)
    if bank.head is not None and first.head is not None and not bank.head.same_as(first.head):
        yield Finding("problem", f"its head is not that of {path}: are these two networks?")


def _finite(bank: Bank) -> Iterator[Finding]:
    from oodometer.derived import first_bad_row

    for name in bank.columns:
        row = first_bad_row(bank, name)
        if row is not None:
            yield Finding("problem", f"column {name!r} holds NaN or infinity in row {row}: drop such rows")


def _labels(bank: Bank) -> Iterator[Finding]:
    if "labels" not in bank or not len(bank):
        return
    labels, classes = bank.labels, bank.classes
    outside = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(outside) == len(bank):
        yield Finding("note", f"no label is in 0 … {classes - 1}: right for an OOD bank, unusable for training")
        return
    if len(outside):
        where = f"row {outside[0]} has label {labels[outside[0]]}, outside 0 … {classes - 1}"
        more = f" ({len(outside):,} such rows)" if len(outside) > 1 else ""
        yield Finding("problem", f"{where}{more}: drop such rows or renumber the classes")
        return
    counts = np.bincount(labels, minlength=classes)
    empty = np.flatnonzero(counts == 0)
    if len(empty):
        has = "has" if len(empty) == 1 else "have"
        text = f"{len(empty)} of {classes} classes {has} no row ({_some(empty)}): class means leave them out"
        yield Finding("note", text)
    else:
        yield Finding("ok", f"{classes} classes with {counts.min():,} to {counts.max():,} rows")


def _accuracy(bank: Bank) -> Iterator[Finding]:
    from oodometer import derived

    if "labels" not in bank or "logits" not in bank or not len(bank):
        return
    labels = bank.labels
    known = (labels >= 0) & (labels < bank.classes)
    if not known.any():
        return
    rows, chance = int(known.sum()), 1 / bank.classes
    accuracy = float((derived.predictions(bank) == labels)[known].mean())
    if rows >= 10 * bank.classes and accuracy <= chance + 3 * np.sqrt(chance * (1 - chance) / rows):
        text = f"accuracy {100 * accuracy:.2f} % is chance: do labels and logits count the classes in the same order?"
        yield Finding("problem", text)
    else:
        yield Finding("ok", f"accuracy {100 * accuracy:.2f} %")


def _features(bank: Bank) -> Iterator[Finding]:
    if "features" not in bank or not len(bank):
        return
    low, high, zero = _ranges(bank)
    constant = np.flatnonzero(low == high)
    width = low.size
    if len(constant):
        text = f"{len(constant)} of {width} features are constant ({_some(constant)}): directions without variance"
        yield Finding("note", text)
    if zero:
        yield Finding("note", f"{zero:,} rows of features are all zero: they have no direction (cosine scores)")
    if len(bank) <= width:
        text = f"{len(bank):,} rows for {width} features: covariances are singular (mds, vim use pseudo-inverses)"
        yield Finding("note", text)


def _ranges(bank: Bank) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
    """Smallest and largest value of every feature (NaN aside), and how many rows are all zero, in one pass."""
    low: Any = np.inf
    high: Any = -np.inf
    zero = 0
    for block in bank.blocks():
        rows = to_numpy(block.features).reshape(len(block), -1)
        low = np.fmin(low, np.fmin.reduce(rows, axis=0))
        high = np.fmax(high, np.fmax.reduce(rows, axis=0))
        zero += int((~rows.any(axis=1)).sum())
    return np.asarray(low), np.asarray(high), zero


def _head(bank: Bank) -> Iterator[Finding]:
    if bank.head is None:
        return
    weight = to_numpy(bank.head.weight).astype(np.float64)
    rank, full = int(np.linalg.matrix_rank(weight)), min(weight.shape)
    if rank == full:
        yield Finding("ok", f"the head has full rank {rank}")
    else:
        text = f"the head has rank {rank} of {full}: some features or class differences never reach the logits"
        yield Finding("note", text)


def _detectors(bank: Bank) -> Iterator[Finding]:
    from oodometer.detectors import get, names

    lacking: dict[str, list[str]] = {}
    able = 0
    for name in names():
        absent = sorted(need for need in get(name).card.needs if not _has(bank, need))
        able += not absent
        if absent:
            lacking.setdefault(_remedy(bank, absent), []).append(name)
    yield Finding("ok" if able else "note", f"{able} of {len(names())} detectors can be fitted")
    for remedy, unable in sorted(lacking.items(), key=lambda item: item[0] == EXTRACTION):
        yield Finding("ok" if remedy == EXTRACTION else "note", f"{len(unable)} more with {remedy}: {_some(unable)}")


EXTRACTION = "columns that `oodometer extract` writes"


def _remedy(bank: Bank, absent: Sequence[str]) -> str:
    """What would let a detector be fitted that lacks these columns."""
    if set(absent) - {"features", "head", "labels", "logits"}:
        return EXTRACTION  # it says more than what else is missing
    computed = {"logits"} if "features" in bank else set()
    plain = [need for need in absent if need not in computed]
    if computed & set(absent) and "head" not in plain:
        plain.append("head")
    return " and ".join("a head (W and b)" if need == "head" else need for need in plain)


def _has(bank: Bank, need: str) -> bool:
    from oodometer.detectors.base import matching

    if need == "head":
        return bank.head is not None
    return any(name in bank for name in matching(bank, need))


def _some(items: Sequence[Any] | np.ndarray[Any, Any], most: int = 6) -> str:
    listed = ", ".join(str(item) for item in items[:most])
    return f"{listed}, …" if len(items) > most else listed


CHECKS: tuple[Callable[[Bank], Iterator[Finding]], ...] = (_finite, _labels, _accuracy, _features, _head, _detectors)


def _bank_texts(banks: dict[str, list[Finding]]) -> Iterator[Any]:
    for path, findings in banks.items():
        yield Text(f"\n{path}", "bold")
        table = _plain()
        for one in findings:
            table.add_row(Text(one.level, STYLES[one.level]), Text(one.text))
        yield table


def _plain() -> Table:
    table = _terminal.plain_table()
    table.show_header = False
    table.add_column(no_wrap=True)
    return table

"""`oodometer score`: fit detectors on a training bank, score test banks, write one table of scores."""

from __future__ import annotations

import csv
import io
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from oodometer import derived
from oodometer.bank import Bank, Head
from oodometer.cli import FAILED, OK, _terminal
from oodometer.detectors import Detector, create
from oodometer.errors import OodometerError
from oodometer.readers import read_bank
from oodometer.tables import KNOWN
from oodometer.text import split_parameters

ABOUT = """
Fit detectors on a training bank and score test banks: one CSV that
`oodometer metrics` reads, and one .npy a detector and data set. Higher scores
are more out of distribution. A bank is a folder written by Bank.save, a .npz or
a .safetensors file; its data set is named after the file, or by NAME=BANK.

example:
  oodometer score --train train.npz --id test.npz --ood svhn.npz textures.npz \\
      --detector msp knn:k=10 vim:dim=64 gen:gamma=0.1,m=50 --out scores
  oodometer metrics scores/scores.csv
"""

IN_DISTRIBUTION = "id"
"""A bank given to --test under this name is the in-distribution one."""

_logger = logging.getLogger(__name__)


@dataclass
class Options:
    """What to fit, on which rows, and what to score."""

    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FOLDER")]
    """Folder for scores.csv and the .npy files."""
    detector: Annotated[_terminal.Many, tyro.conf.arg(metavar="NAME[:PARAM=VALUE,…] …")] = field(default_factory=list)
    """Detectors (see `oodometer list`), with parameters; `preset=NAME` follows a published implementation."""
    train: Annotated[str | None, tyro.conf.arg(metavar="BANK")] = None
    """Training rows; optional for detectors that fit nothing."""
    val: Annotated[str | None, tyro.conf.arg(metavar="BANK")] = None
    """Validation rows for detectors that calibrate on them."""
    id: Annotated[str | None, tyro.conf.arg(metavar="[NAME=]BANK")] = None
    """The in-distribution test bank."""
    ood: Annotated[_terminal.Many, tyro.conf.arg(metavar="[NAME=]BANK …")] = field(default_factory=list)
    """Out-of-distribution test banks."""
    test: Annotated[_terminal.Many, tyro.conf.arg(metavar="[NAME=]BANK …")] = field(default_factory=list)
    """Test banks; the one named id is in distribution, the others are not."""
    device: Annotated[str | None, tyro.conf.arg(metavar="DEVICE")] = None
    """Where to compute, e.g. cuda (needs PyTorch); NumPy by default."""
    overwrite: bool = False
    """Replace the scores of an earlier run."""
    json: bool = False
    """Print JSON instead of text: the table, and what failed."""


@dataclass(frozen=True)
class DataSet:
    """A named test bank; whether it is out of distribution is not always known."""

    name: str
    bank: Bank
    is_ood: bool | None


def main(arguments: list[str]) -> int:
    """Score every detector; 1 if some failed, and the scores of the others are complete."""
    options = _terminal.parse(Options, arguments, command="score", about=ABOUT)
    target = _target(options)
    chosen = _detectors(options)
    train, val = _bank(options.train, options.device), _bank(options.val, options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    work = Work(train, val, _with_heads(_data_sets(options), train), options.out, _terminal.log())
    try:
        failed = work.score_all(chosen)
    finally:
        # An interruption keeps what is finished.
        if work.files:
            work.write_csv(target, [name for name in chosen if name in work.files])
            if not options.json:
                print(target)
    if failed:
        work.say(f"{len(failed)} of {len(chosen)} detectors failed")
    if options.json:
        scored = [name for name in chosen if name in work.files]
        _terminal.write_json({"table": str(target) if scored else None, "detectors": scored, "failed": failed})
    return FAILED if failed else OK


# ---------------------------------------------------------------------------------------------- arguments


def parse_detector(text: str) -> Detector:
    """A detector written as `name` or `name:param=value,param=value`.

    >>> parse_detector("vim:dim=64")
    VIM(dim=64)
    """
    name, params = split_parameters(text, "detector", example="knn:k=10")
    return create(name, **params)


def _target(options: Options) -> Path:
    if options.out.exists() and not options.out.is_dir():
        raise OodometerError(f"--out {options.out} is a file: give a folder")
    target = options.out / "scores.csv"
    if target.exists() and not options.overwrite:
        raise OodometerError(f"{target} exists: choose another --out, or pass --overwrite")
    return target


def _detectors(options: Options) -> dict[str, Detector]:
    wanted = _terminal.flat(options.detector)
    if not wanted:
        raise OodometerError("which detectors? Pass --detector NAME …, e.g. --detector msp knn:k=10 (`oodometer list`)")
    found = {name: parse_detector(name) for name in wanted}
    unfit = [name for name, detector in found.items() if detector.is_fitted_needed]
    if unfit and options.train is None:
        raise OodometerError(f"{', '.join(unfit)} must be fitted on training rows: pass --train BANK")
    _check_distinct([_file_name(name) for name in found], "detectors")
    return found


def _data_sets(options: Options) -> list[DataSet]:
    id_sets = [_terminal.named_path(options.id)] if options.id else []
    ood_sets = [_terminal.named_path(text) for text in _terminal.flat(options.ood)]
    others = [_terminal.named_path(text) for text in _terminal.flat(options.test)]
    if not id_sets:
        id_sets = [(name, path) for name, path in others if name == IN_DISTRIBUTION]
        others = [(name, path) for name, path in others if name != IN_DISTRIBUTION]
    every = [*id_sets, *ood_sets, *others]
    if not every:
        raise OodometerError("which rows to score? Pass --id BANK and --ood BANK …, or --test BANK …")
    _check_distinct([_file_name(name) for name, _ in every], "test banks")
    inside = {name for name, _ in id_sets}
    roles = {name: name not in inside if inside else None for name, _ in every}
    return [DataSet(name, _read(path, options.device), roles[name]) for name, path in every]


def _with_heads(sets: list[DataSet], train: Bank | None) -> list[DataSet]:
    """Features without a head get that of the training bank, or of the in-distribution one: one network made all."""
    lenders = [train, *(one.bank for one in sets if one.is_ood is False)]
    head = next((bank.head for bank in lenders if bank is not None and bank.head is not None), None)
    return [one if _is_complete(one.bank) or head is None else _lent(one, head) for one in sets]


def _is_complete(bank: Bank) -> bool:
    return bank.head is not None or "logits" in bank or "features" not in bank


def _lent(one: DataSet, head: Head) -> DataSet:
    width = int(head.weight.shape[1])
    if one.bank.row_shape("features") != (width,):
        raise OodometerError(
            f"test bank {one.name!r}: rows of 'features' have shape {one.bank.row_shape('features')}, the head of the "
            f"other banks reads {width}: extract all with one network"
        )
    return replace(one, bank=one.bank.with_head(head))


def _bank(path: str | None, device: str | None) -> Bank | None:
    return None if path is None else _read(path, device)


def _read(path: str, device: str | None) -> Bank:
    bank = read_bank(path)
    if device is None:
        return bank
    try:
        return bank.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise OodometerError(f"--device {device}: {reason}. `oodometer doctor` shows what there is") from None


def _check_distinct(files: Sequence[str], what: str) -> None:
    twice = sorted({name for name in files if files.count(name) > 1})
    if twice:
        raise OodometerError(f"two {what} are named {twice[0]!r}: give each a name of its own, as NAME=BANK")


# ---------------------------------------------------------------------------------------------- work


@dataclass
class Work:
    """The banks of one call, and the files of each detector that is finished (one a data set)."""

    train: Bank | None
    val: Bank | None
    sets: Sequence[DataSet]
    out: Path
    console: Console
    files: dict[str, list[Path]] = field(default_factory=dict)

    def score_all(self, chosen: dict[str, Detector]) -> dict[str, str]:
        """Score one detector after the other; those that failed, with their errors."""
        failed: dict[str, str] = {}
        with _progress(self.console) as progress:
            task = progress.add_task("", total=len(chosen))
            for name, detector in _shared_work_first(chosen):
                progress.update(task, description=name)
                try:
                    self.files[name] = self._score_one(name, detector)
                except OSError:
                    raise  # a full disk or a missing permission stops every detector alike
                except Exception as error:
                    failed[name] = self._report(name, error)
                progress.advance(task)
        return failed

    def _score_one(self, name: str, detector: Detector) -> list[Path]:
        start = time.perf_counter()
        if self.train is not None:
            detector.fit(self.train, val=self.val)
        fitted = time.perf_counter()
        scores = [_scores(detector, one) for one in self.sets]
        scored = time.perf_counter()
        files = [self.out / _file_name(name) / f"{_file_name(one.name)}.npy" for one in self.sets]
        for file, values in zip(files, scores, strict=True):
            with _terminal.replacing(file) as partial:
                np.save(partial, values, allow_pickle=False)
        rows = sum(map(len, scores))
        self.say(f"{name}: fitted in {fitted - start:.2f} s, scored {rows:,} rows in {scored - fitted:.2f} s")
        return files

    def _report(self, name: str, error: Exception) -> str:
        _logger.debug("%s failed", name, exc_info=error)
        kind = "" if isinstance(error, OodometerError) else f"unexpected {type(error).__name__}: "
        self.say(f"{name} failed: {kind}{error}")
        return f"{kind}{error}"

    def say(self, message: str) -> None:
        """One line for the user, not wrapped, above the progress bar."""
        self.console.print(Text(message), soft_wrap=True)

    def write_csv(self, target: Path, names: Sequence[str]) -> None:
        """All scores as one table (every digit kept), complete or not at all."""
        endings = [list(_endings(one)) for one in self.sets]
        with _terminal.replacing(target) as partial, partial.open("w", encoding="utf-8", newline="") as stream:
            stream.write(",".join(KNOWN) + "\n")
            for name in names:
                for one, file, ends in zip(self.sets, self.files[name], endings, strict=True):
                    start = _csv_cells(name, one.name)
                    scores = np.load(file, allow_pickle=False).tolist()
                    rows = enumerate(zip(scores, ends, strict=True))
                    stream.writelines(f"{start},{row},{score!r},{end}\n" for row, (score, end) in rows)


def _scores(detector: Detector, one: DataSet) -> npt.NDArray[np.float64]:
    try:
        return detector.score(one.bank)
    except OodometerError as error:
        raise OodometerError(f"test bank {one.name!r}: {error}") from None


def _shared_work_first(chosen: dict[str, Detector]) -> list[tuple[str, Detector]]:
    """The largest k first: its neighbour search serves all smaller ones."""
    return sorted(chosen.items(), key=lambda item: -_neighbours(item[1]))


def _neighbours(detector: Detector) -> int:
    k = getattr(detector, "k", 0)
    return k if isinstance(k, int) else 0


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


# ---------------------------------------------------------------------------------------------- files


def _file_name(text: str) -> str:
    """A name every file system takes: vim:dim=64 becomes vim_dim=64."""
    return "".join(c if c.isalnum() or c in "._=-," else "_" for c in text)


def _endings(one: DataSet) -> Iterator[str]:
    """is_ood,label,prediction of each row; empty where unknown."""
    bank = one.bank
    flag = "" if one.is_ood is None else str(int(one.is_ood))
    labels = bank.labels.tolist() if "labels" in bank else [""] * len(bank)
    predictions = derived.predictions(bank).tolist() if "logits" in bank else [""] * len(bank)
    return (f"{flag},{label},{guess}" for label, guess in zip(labels, predictions, strict=True))


def _csv_cells(*cells: str) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(cells)
    return line.getvalue()

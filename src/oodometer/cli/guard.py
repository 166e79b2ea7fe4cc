"""`oodometer guard`: fit a detector with its threshold, check what it does to fresh rows, apply it to a bank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import tyro
from rich.text import Text

from oodometer.bank import Bank
from oodometer.cli import FAILED, OK, _terminal
from oodometer.cli.score import parse_detector
from oodometer.errors import OodometerError
from oodometer.readers import read_bank

if TYPE_CHECKING:
    from oodometer.guard import Guard, Stream

ABOUT = """usage: oodometer guard fit|check|apply [OPTIONS]

A fitted detector that decides: its threshold comes from calibration rows that
nothing was fitted on, and a new in-distribution row is flagged with probability
at most alpha. A guard is one folder of JSON and safetensors.

  fit    fit the detector, choose the threshold, write the folder
  check  measure its errors on fresh rows against the promise
  apply  decide on every row of a bank, and on the bank as a stream

example:
  oodometer guard fit --detector vim:dim=64 --train train.npz \\
      --calibration val.npz --out guard
  oodometer guard check guard --id test.npz --ood svhn.npz
  oodometer guard apply guard new.npz --out decisions.csv

`oodometer guard fit --help` explains one of them; exit codes: 0 done, 1 the
promise is broken (check), 2 wrong usage or input, 130 interrupted"""

FIT = """
Fits the detector on the training bank and chooses its threshold on the
calibration bank. By default the threshold is conformal: a new row of the same
kind is flagged with probability at most alpha, whatever the detector; at least
1/alpha - 1 calibration rows are needed.

example:
  oodometer guard fit --detector vim:dim=64 --train train.npz \\
      --calibration val.npz --out guard
  oodometer guard fit --detector knn:k=10 --train train.npz \\
      --calibration val.npz --rule val --ood-validation svhn.npz --out guard-val
"""

CHECK = """
Measures a guard on fresh rows: the FPR on ID rows with Wilson's interval,
tested against the promise (exit code 1 if it is broken), and the FNR of every
OOD set at the same threshold. A set that chose the threshold is reported
under @test.

example:
  oodometer guard check guard --id test.npz --ood svhn.npz dtd=textures.npz
"""

APPLY = """
Decides on the rows of a bank, block by block: a CSV of row, score, p_value and
decision (1: out of distribution). Then the alarm rate, and whether the bank as
a stream has more alarms than in-distribution rows allow: a stream of such rows
is ever called shifted with probability at most delta.

example:
  oodometer guard apply guard new.npz --out decisions.csv
"""

ROWS = 1 << 13
"""Rows decided on at a time."""


@dataclass
class FitOptions:
    """What to fit, on which rows."""

    detector: Annotated[str, tyro.conf.arg(metavar="NAME[:PARAM=VALUE,…]")]
    """The detector (see `oodometer list`)."""
    train: Annotated[Path, tyro.conf.arg(metavar="BANK")]
    """Training rows."""
    calibration: Annotated[Path, tyro.conf.arg(metavar="BANK")]
    """In-distribution rows that nothing was fitted or tuned on."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FOLDER")]
    """Where the guard goes."""
    alpha: float = 0.05
    """The share of ID rows that may be flagged."""
    rule: Annotated[str, tyro.conf.arg(metavar="RULE")] = "conformal"
    """conformal, tnr (keep a share of the calibration rows) or val (FPR = FNR)."""
    tnr: float = 0.95
    """The share that --rule tnr keeps."""
    val: Annotated[Path | None, tyro.conf.arg(metavar="BANK")] = None
    """Validation rows for detectors that calibrate themselves."""
    ood_validation: Annotated[Path | None, tyro.conf.arg(metavar="BANK")] = None
    """OOD rows for --rule val; they are no test set any more."""
    overwrite: bool = False
    """Replace an earlier guard."""
    json: bool = False
    """Print JSON instead of text: the folder, the threshold, the facts."""


@dataclass
class CheckOptions:
    """The guard, and rows it has not seen."""

    guard: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="GUARD")]
    """The folder of a guard."""
    id: Annotated[Path, tyro.conf.arg(metavar="BANK")]
    """In-distribution rows."""
    ood: Annotated[_terminal.Many, tyro.conf.arg(metavar="[NAME=]BANK …")] = field(default_factory=list)
    """Out-of-distribution banks."""
    level: float = 0.95
    """Confidence level of the intervals."""
    json: bool = False
    """Print JSON instead of text."""


@dataclass
class ApplyOptions:
    """The guard, and the rows to decide on."""

    guard: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="GUARD")]
    """The folder of a guard."""
    bank: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="BANK")]
    """The rows."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE.csv")]
    """The decisions."""
    delta: float = 0.01
    """The probability that an unshifted stream is ever called shifted."""
    window: int = 1000
    """Rows of the windows in which late shifts are looked for."""
    overwrite: bool = False
    """Replace earlier decisions."""
    json: bool = False
    """Print JSON instead of text: the alarm rate and the verdict on the stream."""


def main(arguments: list[str]) -> int:
    """Run one of the three."""
    action, *rest = arguments or [""]
    if action in ("-h", "--help"):
        print(ABOUT)
        return OK
    if action not in ACTIONS:
        found = f"found {action!r}" if action else "none was given"
        raise OodometerError(f"guard: fit, check or apply was needed, {found}; see `oodometer guard --help`")
    return ACTIONS[action](rest)


def _fit(arguments: list[str]) -> int:
    options = _terminal.parse(FitOptions, arguments, command="guard fit", about=FIT)
    from oodometer.guard import Guard

    if options.out.exists() and not options.overwrite:
        raise OodometerError(f"{options.out} exists: choose another --out, or pass --overwrite")
    guard = Guard.fit(
        parse_detector(options.detector),
        read_bank(options.train),
        read_bank(options.calibration),
        alpha=options.alpha,
        rule=options.rule,  # type: ignore[arg-type]  # checked there, with all names it may have
        tnr=options.tnr,
        val=None if options.val is None else read_bank(options.val),
        ood_validation=None if options.ood_validation is None else read_bank(options.ood_validation),
    )
    guard.save(options.out, overwrite=options.overwrite)
    if options.json:
        facts = {"guard": str(options.out), "threshold": guard.threshold, "promised": guard.calibration.rate}
        _terminal.write_json({**facts, "facts": dict(guard.facts)})
    else:
        _say(repr(guard))
        print(options.out)
    return OK


def _check(arguments: list[str]) -> int:
    options = _terminal.parse(CheckOptions, arguments, command="guard check", about=CHECK)
    guard = _loaded(options.guard)
    named = _terminal.named_paths(_terminal.flat(options.ood), "OOD banks")
    ood = {name: read_bank(path) for name, path in named.items()}
    check = guard.check(read_bank(options.id), ood, level=options.level)
    if options.json:
        _terminal.write_json(check.to_dict())
    else:
        _terminal.show(Text(str(check)))
    return OK if check.kept else FAILED


def _apply(arguments: list[str]) -> int:
    options = _terminal.parse(ApplyOptions, arguments, command="guard apply", about=APPLY)
    if options.out.exists() and not options.overwrite:
        raise OodometerError(f"{options.out} exists: choose another --out, or pass --overwrite")
    stream = _loaded(options.guard).stream(delta=options.delta, window=options.window)
    bank = read_bank(options.bank)
    with _terminal.replacing(options.out) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        _write(stream, bank, file)
    if options.json:
        _terminal.write_json({"decisions": str(options.out), **stream.to_dict()})
    else:
        print(stream)
        print(options.out)
    return OK


def _write(stream: Stream, bank: Bank, file: TextIO) -> None:
    from rich.progress import track

    console = _terminal.log()
    file.write("row,score,p_value,decision\n")
    blocks = track(
        bank.blocks(ROWS),
        description="deciding",
        total=-(-len(bank) // ROWS),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    for block in blocks:
        start = stream.rows
        try:
            decisions = stream(block)
        except OodometerError as error:
            raise OodometerError(f"counting rows from row {start} of the bank: {error}") from None
        rows = enumerate(zip(*(values.tolist() for values in decisions), strict=True), start)
        file.writelines(f"{row},{score!r},{p!r},{int(flag)}\n" for row, (flag, score, p) in rows)


def _loaded(path: Path) -> Guard:
    from oodometer.guard import Guard

    return Guard.load(path)


def _say(message: str) -> None:
    _terminal.log().print(Text(message), soft_wrap=True)


ACTIONS: dict[str, Callable[[list[str]], int]] = {"fit": _fit, "check": _check, "apply": _apply}

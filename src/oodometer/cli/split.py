"""`oodometer split`: the folds of in- and out-of-distribution rows, printed and written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro
from rich.text import Text

from oodometer.cli import OK, _terminal
from oodometer.errors import OodometerError

if TYPE_CHECKING:
    from oodometer.splits import Folds
    from oodometer.study.data import DataSet

ABOUT = """
Deals ID rows and OOD classes into folds (DCV-ROOD): ID classes are in every
fold, an OOD class is in one. Rows come from a study file, from banks, or from
CSV tables with a column of classes (and any of levels, sample ids, subjects).
Writes one JSON a repeat and OOD set; `splits.Folds.load` reads it.

example:
  oodometer split --id cifar10.csv --ood svhn=svhn.csv --labels class \\
      --out folds
  oodometer split --id birds.csv --draw 0.2 --labels species \\
      --levels order species --kind hierarchical --out folds/birds
  oodometer split study.toml --out folds/study
"""


@dataclass
class Options:
    """What to split, and how."""

    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FOLDER")]
    """Folder for the folds."""
    study: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[STUDY.toml]")] = None
    """A study file, whose folds are wanted; other options except --set are then not needed."""
    set: Annotated[_terminal.Many, tyro.conf.arg(metavar="KEY=VALUE …")] = field(default_factory=list)
    """Values that replace those of the study file."""
    id: Annotated[str | None, tyro.conf.arg(metavar="TABLE")] = None
    """ID rows: a .csv table or a bank."""
    ood: Annotated[_terminal.Many, tyro.conf.arg(metavar="[NAME=]TABLE …")] = field(default_factory=list)
    """OOD rows: .csv tables or banks."""
    draw: Annotated[float | None, tyro.conf.arg(metavar="SHARE")] = None
    """Draw this share of the ID classes as OOD, from every class of the level above."""
    labels: Annotated[str, tyro.conf.arg(metavar="COLUMN")] = "labels"
    """The column of the classes."""
    levels: Annotated[tuple[str, ...], tyro.conf.arg(metavar="COLUMN …")] = ()
    """Columns of a class hierarchy, coarsest first."""
    ids: Annotated[str, tyro.conf.arg(metavar="COLUMN")] = ""
    """A column of sample ids (default: row numbers)."""
    subjects: Annotated[str, tyro.conf.arg(metavar="COLUMN")] = ""
    """A column of ID rows that stay together."""
    kind: Annotated[str, tyro.conf.arg(metavar="KIND")] = "dual"
    """dual, hierarchical or repeated-holdout."""
    folds: int = 5
    """Number of folds."""
    repeats: int | None = None
    """How often to split anew (repeated-holdout: 100)."""
    seed: int = 0
    """Equal seeds give equal folds."""
    overwrite: bool = False
    """Replace folds that are there."""


def main(arguments: list[str]) -> int:
    """Write and print the folds."""
    options = _terminal.parse(Options, arguments, command="split", about=ABOUT)
    dealt = _of_study(options) if options.study else _of_tables(options)
    from oodometer.results import folds_file

    files = {options.out / folds_file(repeat, name): (name, folds) for repeat, name, folds in dealt}
    there = [file for file in files if file.exists()]
    if there and not options.overwrite:
        raise OodometerError(f"{there[0]} exists: choose another --out, or pass --overwrite")
    for file, (name, folds) in files.items():
        folds.save(file)
        _terminal.show(Text(f"{name}  {file}", "bold"), Text(str(folds)), Text())
    return OK


def _of_study(options: Options) -> list[tuple[int, str, Folds]]:
    from oodometer.study import Study

    assert options.study is not None, "asked for"
    study = Study.from_toml(options.study, _terminal.flat(options.set))
    return [(repeat, name, folds) for repeat, dealt in enumerate(study.folds()) for name, folds in dealt.items()]


def _of_tables(options: Options) -> list[tuple[int, str, Folds]]:
    from oodometer.study.data import StudyData, drawn
    from oodometer.study.rows import deal, n_repeats
    from oodometer.study.spec import Draw, convert

    if options.id is None or not (options.ood or options.draw):
        raise OodometerError("split: a study file is needed, or --id TABLE with --ood TABLE … or --draw SHARE")
    plain: dict[str, Any] = {"kind": options.kind, "folds": options.folds, "repeats": options.repeats}
    split = convert({"data": {"id": options.id, "ood": {"any": ""}}, "detectors": ["msp"], "split": plain}).split
    inside = _table(options.id, Path(options.id).stem, options)
    named = _terminal.named_paths(_terminal.flat(options.ood), "OOD tables")
    ood = {name: _table(path, name, options) for name, path in named.items()}
    if options.draw is not None:
        inside, outside = drawn(inside, Draw(fraction=options.draw), labels=options.labels, seed=options.seed)
        ood = {outside.name: outside, **ood}
    data = StudyData(inside, ood, {})
    return [
        (repeat, name, folds)
        for repeat in range(n_repeats(split))
        for name, folds in deal(data, split, labels=options.labels, seed=options.seed, repeat=repeat).items()
    ]


def _table(path: str, name: str, options: Options) -> DataSet:
    """Labels from a CSV table (numbers or words), or from the columns of a bank."""
    from oodometer.bank import Bank
    from oodometer.study.data import DataSet

    columns = _csv_columns(Path(path)) if path.lower().endswith(".csv") else _bank_columns(path)

    def column(wanted: str) -> Any:
        if wanted not in columns:
            raise OodometerError(f"{path}: no column {wanted!r}; there are: {', '.join(columns)}")
        return columns[wanted]

    classes = column(options.labels)
    levels = {level: column(level) for level in options.levels} or {options.labels: classes}
    ids = column(options.ids) if options.ids else np.arange(len(classes))
    subjects = column(options.subjects) if options.subjects and options.subjects in columns else None
    codes = np.unique(classes, return_inverse=True)[1]
    return DataSet(name, Bank(labels=codes), classes, levels, ids, {"bank": path}, subjects)


def _csv_columns(path: Path) -> dict[str, Any]:
    import pandas as pd

    try:
        table = pd.read_csv(path, keep_default_na=False)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise OodometerError(f"{path}: no table of rows ({error})") from None
    return {str(name): table[name].to_numpy() for name in table.columns}


def _bank_columns(path: str) -> dict[str, Any]:
    from oodometer.arrays import to_numpy
    from oodometer.readers import read_bank

    bank = read_bank(path)
    return {name: to_numpy(bank[name]) for name in bank.columns if not bank.row_shape(name)}

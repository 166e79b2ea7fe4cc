"""`oodometer init`: a commented study file to start from."""

from __future__ import annotations

import json
import os
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.text import Text

from oodometer.bank import Bank
from oodometer.cli import OK, _terminal
from oodometer.errors import OodometerError

ABOUT = """
Writes a study file with every setting explained. Banks that are named go into
it, with the trainer that they allow; `oodometer run` takes it from there.

example:
  oodometer init study.toml --id cifar10.npz \\
      --ood svhn=svhn.npz textures.npz
  oodometer run study.toml --dry-run
"""


@dataclass
class Options:
    """Where to write it, and the banks it starts with."""

    study: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[STUDY.toml]")] = Path("study.toml")
    """The file to write."""
    id: Annotated[str, tyro.conf.arg(metavar="BANK")] = ""
    """The in-distribution bank."""
    ood: Annotated[_terminal.Many, tyro.conf.arg(metavar="[NAME=]BANK …")] = field(default_factory=list)
    """Out-of-distribution banks."""
    overwrite: bool = False
    """Replace a file that is there."""


def main(arguments: list[str]) -> int:
    """Write the file; an existing one is kept unless told otherwise."""
    options = _terminal.parse(Options, arguments, command="init", about=ABOUT)
    if options.study.exists() and not options.overwrite:
        raise OodometerError(f"{options.study} exists: choose another name, or pass --overwrite")
    given = [options.id] if options.id else []
    ood = _terminal.named_paths(_terminal.flat(options.ood), "OOD banks")
    frozen = _have_logits([*given, *ood.values()])
    here = {name: _from(options.study.parent, path) for name, path in ood.items()} or {"ood": "banks/ood"}
    inside = _from(options.study.parent, options.id) if options.id else "banks/id"
    with _terminal.replacing(options.study) as partial:
        partial.write_text(study_file(options.study.stem, inside, here, frozen=frozen), encoding="utf-8")
    print(options.study)
    return OK


def _from(folder: Path, path: str) -> str:
    """A path as the study file needs it: from its own folder, where that is not the present one."""
    return path if Path(path).is_absolute() else Path(os.path.relpath(path, folder)).as_posix()


def _have_logits(paths: list[str]) -> bool:
    """Whether the banks come with a classifier, the first one's head serving all; unreadable ones are believed to."""
    from oodometer.readers import read_bank

    found: list[Bank] = []
    for path in paths:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.append(read_bank(path))
        except OodometerError as error:
            _terminal.log().print(Text(f"note: {error}"), soft_wrap=True)
    lent = bool(found) and found[0].head is not None
    return all("logits" in bank or (lent and "features" in bank) for bank in found)


def _key(name: str) -> str:
    """A TOML key, quoted where it has to be."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def study_file(name: str, inside: str, ood: dict[str, str], *, frozen: bool = True) -> str:
    """The text of a study file; `frozen`: the banks have logits of their own."""
    tables = "\n".join(_TABLE.format(name=_key(key), bank=_text(bank)) for key, bank in ood.items())
    trainer = _FROZEN if frozen else _PROBE
    return _TEXT.format(name=_text(name), bank=_text(inside), tables=tables, trainer=trainer)


_TABLE = """\
[data.ood.{name}]
bank = {bank}
# labels = "labels"          # classes that stay together in one fold
# group = "near"             # a tag in the results
# source = ""                # where the data come from, if two sets share it
"""

_TEXT = """\
# A study: oodometer run STUDY.toml --out runs/NAME
# Lines that start with # show defaults and choices. Paths start from the folder of this file.

name = {name}
seed = 0                     # equal seeds give equal bytes

# Detectors by name (`oodometer list`), with parameters, a published variant, or a grid to choose from.
detectors = [
  "msp",
  "energy",
  {{ name = "knn", k = 50 }},
  # {{ name = "gen", tune = true }},                        # the published grid
  # {{ name = "knn", grid = {{ k = [1, 10, 100] }} }},        # a grid of your own
  # {{ name = "knn", grid = {{ k = [1, 10] }}, tune = false }}, # every point as a method of its own
]

# exposure = ["without", "with"]   # with: OOD training folds are shown to the classifier (trainer "probe")
# metrics = ["auroc", "fpr95_ood", "tpr5", "aupr_ood", "autc"]

[data.id]
bank = {bank}
# A frozen network has learned its training rows by heart: give rows that it has not seen.
# name = ""                  # how results call it (default: the bank's name)
# labels = "labels"          # the column of the classes
# levels = ["super", "labels"]     # a class hierarchy, coarsest first, for split.kind = "hierarchical"
# subjects = "patient"       # rows of one subject stay in one fold
# ids = "sample"             # sample ids instead of row numbers

{tables}
# OOD classes drawn from the ID bank itself (Algorithm 2 of DCV-ROOD); needs trainer = "probe":
# [data.draw]
# fraction = 0.2

# OOD sets that only choose parameters (tune.rule = "auroc"); never tested:
# [data.ood_val.places]
# bank = "banks/places"

[split]
kind = "dual"                # or hierarchical, repeated-holdout (the benchmark truth), holdout (data.id.test)
folds = 5
# repeats = 10               # cross-validations with seeds seed, seed + 1, … (1); or repetitions of a holdout (100)
validation = 0.1             # share of the ID training rows for parameters, scales and thresholds

[tune]
rule = "augrc"               # ID rows only; or nested, leave-one-out, auroc (see data.ood_val)

[trainer]
{trainer}# hidden = 128               # probe: one layer of so many ReLUs in front of the head
"""

_FROZEN = """\
name = "frozen"              # the bank's own logits; or probe: a classifier trained on each fold's features
"""

_PROBE = """\
name = "probe"               # a classifier trained on each fold's features; or frozen: the bank's own logits
"""

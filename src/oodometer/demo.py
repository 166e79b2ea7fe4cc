"""The demo: a complete study of a digit classifier on data that come with the package's dependencies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from oodometer.bank import Bank
from oodometer.errors import OodometerError

if TYPE_CHECKING:
    from oodometer.results import Results
    from oodometer.study import Progress

STUDY = """\
# The study of `oodometer demo`: which detectors notice what a digit classifier has never seen?

name = "demo"
seed = 0

# `tune = true` chooses among the published values; see `oodometer list NAME`.
detectors = [
  "msp", "mls", "energy", "entropy", "klm", "openmax",
  "mds", "rmds", "vim", "fdbd", "relation", "she",
  { name = "gen", tune = true },
  { name = "knn", tune = true },
  { name = "react", tune = true },
  { name = "ash", tune = true },
]

# with: the classifier is trained on with OOD classes that are not tested in the same fold (outlier exposure)
exposure = ["without", "with"]

[data.id]
bank = "banks/digits"
levels = ["kind", "labels"]

# Digits the classifier never sees: three fifths of the round, of the straight and of the mixed ones (Algorithm 2).
[data.draw]
fraction = "3/5"
name = "other digits"
group = "near"

[data.ood.photograph]
bank = "banks/flower"
levels = ["kind", "labels"]
group = "far"

[split]
kind = "hierarchical"
folds = 5

# Parameters are chosen on another photograph, which is not tested.
[data.ood_val.china]
bank = "banks/china"

[tune]
rule = "auroc"

# A network with one hidden layer, trained anew on every fold.
[trainer]
name = "probe"
hidden = 64
"""


def prepare(folder: Path) -> Path:
    """Write the demo's banks and its study file; what is there already is kept if it is the same."""
    from oodometer.data import PHOTOGRAPHS, digits, photograph_patches

    for name, bank in {"digits": digits(), **{name: photograph_patches(name) for name in PHOTOGRAPHS}}.items():
        _save(bank, folder / "banks" / name)
    path = folder / "study.toml"
    if path.exists() and path.read_text(encoding="utf-8") != STUDY:
        raise OodometerError(
            f"{path} is not the demo's study any more: run yours with `oodometer run {path} --out FOLDER`, "
            "or choose another folder for the demo with --out"
        )
    path.write_text(STUDY, encoding="utf-8")
    return path


def _save(bank: Bank, path: Path) -> None:
    if not path.exists():
        bank.save(path)
    elif Bank.open(path).fingerprint != bank.fingerprint:
        raise OodometerError(f"{path} is not the demo's bank: choose another folder with --out")


def run(folder: Path, *, n_jobs: int = 1, progress: Progress | None = None) -> Results:
    """Prepare, run the study, and write its report; a second call only computes what is missing."""
    from oodometer.study import Study

    study = Study.from_toml(prepare(folder))
    results = study.run(folder / "results", n_jobs=n_jobs, progress=progress)
    results.report(folder / "report.html")
    return results


def known_digits(results: Results) -> list[int]:
    """The digits that were left in distribution."""
    from oodometer.data import digits
    from oodometer.results import folds_file
    from oodometer.splits import Folds

    folds = Folds.load(results.folder / "folds" / folds_file(0, "other digits"))
    found: list[int] = sorted(set(digits().labels[folds.id_names].tolist()))
    return found

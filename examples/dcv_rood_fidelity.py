"""Does dual cross-validation conclude what a hundred repetitions conclude? DCV-ROOD's experiment on small images.

Fashion-MNIST against MNIST, Kuzushiji-MNIST, letters and Omniglot, with and without outlier exposure: eight rows,
eight methods, a probe with one hidden layer on pixels, trained on every fold. The truth is the mean of repeated
holdouts; ten 5-fold dual cross-validations are compared with it, pair by pair of methods.

The folder holds fashion_mnist.npz (x_train, y_train), mnist.npz and kmnist_test.npz (x_test, y_test),
chars74k_fnt_28.npz (x, y: classes 0-9 are digits, the others letters) and omniglot_small_28.npz (x, y), grey images
of 28x28 bytes, white on black. What is computed is kept: the same command goes on after an interruption.

    python examples/dcv_rood_fidelity.py --data FOLDER --out runs/dcv-rood --n-jobs 2
    oodometer fidelity runs/dcv-rood/truth runs/dcv-rood/cv --metric tpr5 auroc --pairs
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import oodometer
from oodometer import Bank
from oodometer.cli import main as oodometer_command

DETECTORS = ("energy", "fdbd", "gen", "klm", "knn", "mds", "nnguide", "relation")
METRICS = ("tpr5", "auroc", "aupr_id", "f1_max_id", "acc90")
"""The published ones: AUPR and F1 take ID rows as positive, as the numbers of the paper do."""
ID = "fashion_mnist.npz"
OOD = {
    "mnist": "mnist.npz",
    "kmnist": "kmnist_test.npz",
    "letters": "chars74k_fnt_28.npz",
    "omniglot": "omniglot_small_28.npz",
}


@dataclass(frozen=True)
class Size:
    """How large the experiment is."""

    id_rows: int
    ood_rows: int
    hidden: int
    repetitions: int
    runs: int


FULL = Size(id_rows=10_000, ood_rows=4000, hidden=128, repetitions=100, runs=10)
QUICK = Size(id_rows=600, ood_rows=400, hidden=16, repetitions=3, runs=2)


def check(folder: Path) -> None:
    """A data set that is missing ends the example with the reason."""
    missing = [file for file in (ID, *OOD.values()) if not (folder / file).exists()]
    if missing:
        print(f"skipped: {folder} has no {', no '.join(missing)}")
        raise SystemExit(0)


def bank(path: Path, rows: int, *, part: str = "", first_class: int = 0) -> Bank:
    """Pixels as features, of up to so many randomly drawn rows of the classes from `first_class` on."""
    with np.load(path) as data:
        x, y = data[f"x{part}"], data[f"y{part}"]
    kept = np.flatnonzero(y >= first_class)
    kept = np.sort(np.random.default_rng(0).permutation(kept)[:rows])
    features = x[kept].reshape(len(kept), -1).astype(np.float32) / 255
    return Bank(features=features, labels=y[kept].astype(np.int64), provenance={"file": path.name})


def data_sets(folder: Path, size: Size) -> dict[str, Any]:
    """One ID set and four OOD sets."""
    rows = size.ood_rows
    return {
        "id": {"bank": bank(folder / ID, size.id_rows, part="_train"), "name": "fashion"},
        "ood": {
            "mnist": bank(folder / OOD["mnist"], rows, part="_test"),
            "kmnist": bank(folder / OOD["kmnist"], rows, part="_test"),
            "letters": bank(folder / OOD["letters"], rows, first_class=10),
            "omniglot": bank(folder / OOD["omniglot"], rows),
        },
    }


def study(name: str, data: dict[str, Any], size: Size, split: dict[str, Any]) -> oodometer.Study:
    """The truth and the cross-validations differ in nothing but how rows are dealt."""
    return oodometer.Study(
        name=name,
        data=data,
        detectors=list(DETECTORS),
        trainer={"name": "probe", "hidden": size.hidden},
        exposure=["without", "with"],
        split=split,
        metrics=list(METRICS),
    )


def progress(what: str, share: float) -> None:
    """How far it is, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r{share:4.0%} {what:<12}", end="", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the .npz files")
    parser.add_argument("--out", type=Path, default=Path("runs/dcv-rood"), help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="a tiny experiment, to see that all works")
    parser.add_argument("--n-jobs", type=int, default=1, help="processes that share the folds")
    options = parser.parse_args(arguments)
    check(options.data)
    size = QUICK if options.quick else FULL
    data = data_sets(options.data, size)
    # A fifth of the ID rows and of the OOD classes is tested, in repetitions and in folds alike.
    splits = {
        "truth": {"kind": "repeated-holdout", "repeats": size.repetitions, "id_test": 0.2, "ood_test": 0.2},
        "cv": {"kind": "dual", "folds": 5, "repeats": size.runs},
    }
    for name, split in splits.items():
        study(name, data, size, split).run(options.out / name, n_jobs=options.n_jobs, progress=progress)
    for alpha in ("0.05", "0.1"):
        folders = [str(options.out / name) for name in splits]
        oodometer_command(["fidelity", *folders, "--alpha", alpha])
        print()


if __name__ == "__main__":
    main()

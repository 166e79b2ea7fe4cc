"""Does a classifier of clothes notice digits and letters? A small study from the images' pixels.

The folder holds fashion_mnist.npz and mnist.npz (x_train, y_train, x_test, y_test) and letters.npz or
chars74k_fnt_28.npz (x, y: classes 0-9 are digits, the others letters), grey images of 28x28 bytes.

    python examples/fashion_vs_letters.py --data FOLDER --out runs/fashion
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import oodometer
from oodometer import Bank

FILES = {"fashion": ("fashion_mnist.npz",), "mnist": ("mnist.npz",), "letters": ("letters.npz", "chars74k_fnt_28.npz")}


def found(folder: Path) -> dict[str, Path]:
    """The file of every data set; what is missing ends the example with the reason."""
    paths = {name: [folder / file for file in files if (folder / file).exists()] for name, files in FILES.items()}
    missing = [" or ".join(FILES[name]) for name, there in paths.items() if not there]
    if missing:
        print(f"skipped: {folder} has no {', no '.join(missing)}")
        raise SystemExit(0)
    return {name: there[0] for name, there in paths.items()}


def bank(path: Path, rows: int, *, first_class: int = 0) -> Bank:
    """Pixels as features, of up to so many evenly drawn rows of the classes from `first_class` on."""
    with np.load(path) as data:
        x, y = (data["x_test"], data["y_test"]) if "x_test" in data else (data["x"], data["y"])
    kept = np.flatnonzero(y >= first_class)
    kept = np.sort(np.random.default_rng(0).permutation(kept)[:rows])
    features = x[kept].reshape(len(kept), -1).astype(np.float32) / 255
    return Bank(features=features, labels=y[kept].astype(np.int64), provenance={"file": path.name})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the .npz files")
    parser.add_argument("--out", type=Path, help="folder of the results (default: a temporary one)")
    parser.add_argument("--rows", type=int, default=3000, help="rows of each data set")
    options = parser.parse_args(arguments)
    paths = found(options.data)
    study = oodometer.Study(
        name="fashion",
        data={
            "id": {"bank": bank(paths["fashion"], options.rows), "name": "fashion"},
            "ood": {
                "mnist": bank(paths["mnist"], options.rows),
                "letters": bank(paths["letters"], options.rows, first_class=10),
            },
        },
        detectors=["msp", "energy", "klm", "knn", "mds", "vim", {"name": "gen", "tune": True}],
        trainer={"name": "probe", "hidden": 128},
        exposure=["without", "with"],
        split={"kind": "dual", "folds": 3},
        tune={"rule": "leave-one-out"},
    )
    with tempfile.TemporaryDirectory() as place:
        results = oodometer.run(study, options.out or place)
        table = results.summary().query("metric == 'auroc'")
        print(table.pivot(index="detector", columns=["ood", "exposure"], values="mean").round(4))
        if options.out is not None:
            print("\nreport:", results.report(options.out / "report.html"))


if __name__ == "__main__":
    main()

"""Split a data set with a class hierarchy, so that every alphabet is trained on and tested, as ID and as OOD.

The labels are like Omniglot's: characters of several alphabets, each drawn by several people. A file with `y` (the
class of every row) and `names` ("Alphabet/character" of every class) takes their place.

    python examples/hierarchical_split.py
    python examples/hierarchical_split.py --data omniglot.npz
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from oodometer.splits import HierarchicalDualKFold, select_ood_classes

ALPHABETS = {"Balinese": 24, "Early Aramaic": 22, "Greek": 24, "Korean": 40, "Latin": 26, "Tagalog": 17}
DRAWINGS = 20


def labels(path: str | None) -> dict[str, np.ndarray]:
    """Alphabet and character of every row."""
    if path is None:
        names = [f"{alphabet}/{number:02d}" for alphabet, count in ALPHABETS.items() for number in range(1, count + 1)]
        rows = np.repeat(np.arange(len(names)), DRAWINGS)
    else:
        with np.load(path) as data:
            names, rows = data["names"].tolist(), data["y"]
    alphabets = np.array([name.split("/")[0] for name in names])
    return {"alphabet": alphabets[rows], "character": np.array(names)[rows]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="an .npz file with y and names")
    hierarchy = labels(parser.parse_args(arguments).data)

    # Algorithm 2 of DCV-ROOD: a fifth of the characters of every alphabet becomes OOD.
    chosen = select_ood_classes(hierarchy, level="character", fraction="1/5", seed=0)
    print(chosen, end="\n\n")

    # Algorithm 3: ID rows stratified by character, OOD characters dealt to folds within their alphabet.
    folds = HierarchicalDualKFold(5, level="character", seed=0).split(chosen.id_hierarchy, chosen.ood_hierarchy)
    print(folds, end="\n\n")

    ood = chosen.ood_hierarchy["character"]
    shared = [len(np.intersect1d(ood[fold.ood_train], ood[fold.ood_test])) for fold in folds]
    print("characters both exposed and tested, by fold:", *shared)


if __name__ == "__main__":
    main()

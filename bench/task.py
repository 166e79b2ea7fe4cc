"""One measured task in a process of its own: `python -m bench.task SIDE METHOD FOLDER ROWS` (see `work`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench import banks, openood, pytorch_ood, study
from bench.measure import Cost, cost_of, show
from oodometer import Bank, create

SAME_WORK = {
    "knn": {"k": 50},
    "nnguide": {"k": 10, "alpha": 1.0},
    "gen": {"m": 100},
    "ash": {"variant": "s"},
}
"""Our parameters where the peers' side of the table does a certain amount of work."""


def work(side: str, method: str, data: banks.Arrays) -> Callable[[], object]:
    """Fit on the training rows and score the test rows, on fresh inputs that remember nothing."""
    if side == "openood":
        return lambda: openood.PEERS[method](data)
    if side == "pytorch-ood":
        package = pytorch_ood.detectors()
        return lambda: pytorch_ood.PEERS[method](package, data)
    if side == "shared":
        return study.shared(data, method.split(","))
    train, test = data.banks
    subspace = {"dim": banks.subspace(data.train.shape[1])} if method in ("vim", "residual") else {}
    return lambda: create(method, **SAME_WORK.get(method, subspace)).fit(train, val=_first_rows(train)).score(test)


def _first_rows(train: Bank) -> Bank:
    return train.rows(slice(0, len(train)))


def main(side: str, method: str, folder: str, rows: str) -> Cost:
    """The cost on the bank in a folder; a small bank first, so that imports and caches are warm."""
    work(side, method, _small())()
    data = banks.load(Path(folder), int(rows))
    return cost_of(lambda: work(side, method, data))


def _small() -> banks.Arrays:
    rng = np.random.default_rng(0)
    h = np.maximum(rng.standard_normal((1500, 300), dtype=np.float32), 0)
    w, b = rng.standard_normal((4, 300), dtype=np.float32), np.zeros(4, np.float32)
    z = h @ w.T
    return banks.Arrays(h, z, z.argmax(1), h[:50], z[:50], w, b)


if __name__ == "__main__":
    show(main(*sys.argv[1:]))

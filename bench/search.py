"""How near the neighbour searches come to the machine's matrix product, measured in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench import banks
from bench.table import Table
from oodometer import create

CALLS = {
    "knn": {"k": 50},
    "relation": {},
    "nnguide": {"k": 10, "alpha": 1.0},
}
PASSES = 3
"""Each is run so often, in turn; the best wall time of each counts."""


def report(folder: Path, rows: int) -> None:
    """Print GF/s of SGEMM, of a faiss search in one batch, and of ours."""
    data = banks.load(folder, rows)
    work: dict[str, Callable[[], object]] = {"SGEMM": lambda: _product(data)}
    work |= _faiss(data)
    work |= {name: _ours(name, params, data) for name, params in CALLS.items()}
    best = dict.fromkeys(work, np.inf)
    for _ in range(PASSES):
        for name, function in work.items():
            start = time.perf_counter()
            function()
            best[name] = min(best[name], time.perf_counter() - start)
    flops = 2 * len(data.train) * rows * data.train.shape[1]
    table = Table("search", "wall s", "GF/s", "share of SGEMM")
    for name, seconds in best.items():
        table.row(name, f"{seconds:.3f}", f"{flops / seconds / 1e9:.0f}", f"{best['SGEMM'] / seconds:.0%}")


def _product(data: banks.Arrays) -> None:
    out = np.empty((1024, len(data.train)), np.float32)
    for start in range(0, len(data.test), 1024):
        part = data.test[start : start + 1024]
        np.matmul(part, data.train.T, out=out[: len(part)])


def _faiss(data: banks.Arrays) -> dict[str, Callable[[], object]]:
    try:
        import faiss
    except ImportError:
        return {}
    unit = [np.ascontiguousarray(x / np.linalg.norm(x, axis=1, keepdims=True)) for x in (data.train, data.test)]
    index = faiss.IndexFlatIP(data.train.shape[1])
    index.add(unit[0])
    return {"faiss, one batch": lambda: index.search(unit[1], 50)}


def _ours(name: str, params: dict[str, object], data: banks.Arrays) -> Callable[[], object]:
    def run() -> object:
        train, test = data.banks
        return create(name, **params).fit(train).score(test)

    return run

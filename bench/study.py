"""Dual cross-validation with shared quantities, beside refitting every setting on every fold as peers do."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench import banks
from bench.measure import Cost, in_own_process
from bench.table import Table
from oodometer import Bank, create

FOLDS = 5
OOD_SETS = 11
METHODS = ("msp", "energy", "gen", "knn", "mds", "rmds", "vim", "react")
GOALS = {"all": 20.0, "without k-NN": 50.0}


def settings(method: str, width: int) -> list[dict[str, object]]:
    """The parameter sets of a method, for features of some width."""
    searched: dict[str, list[dict[str, object]]] = {
        "gen": [{"gamma": gamma} for gamma in (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0)],
        # The largest first, as a study searches: its neighbours serve all smaller k.
        "knn": [{"k": k} for k in (1000, 500, 200, 100, 50)],
        "vim": [{"dim": banks.subspace(width) // 2}, {"dim": banks.subspace(width)}],
        "react": [{"percentile": percentile} for percentile in (85, 90, 95, 99)],
    }
    return searched.get(method, [{}])


def shared(data: banks.Arrays, methods: list[str]) -> Callable[[], object]:
    """Every setting on every fold, ID test rows and every OOD set scored."""
    train, test = data.banks
    width = data.train.shape[1]
    cuts = np.array_split(np.arange(len(train)), FOLDS)
    parts = [train.rows(slice(int(cut[0]), int(cut[-1]) + 1)) for cut in cuts]
    edges = np.linspace(0, len(test), OOD_SETS + 1).astype(int)
    ood = [test.rows(slice(int(a), int(b))) for a, b in itertools.pairwise(edges)]

    def run() -> None:
        for fold in range(FOLDS):
            rest = Bank.concat([part for place, part in enumerate(parts) if place != fold])
            for method in methods:
                for params in settings(method, width):
                    detector = create(method, **params).fit(rest)
                    for bank in (parts[fold], *ood):
                        detector.score(bank)

    return run


def report(folder: Path) -> None:
    """Print both ways' CPU-seconds: ours measured whole, a peer's measured once a method and multiplied."""
    table = Table("dual CV, 5 folds, 11 OOD sets", "peers' way s", "shared s", "ratio", "goal")
    width = np.load(folder / "W.npy").shape[1]
    with tempfile.TemporaryDirectory() as place:
        _write_fold(folder, Path(place))
        peers = {method: in_own_process("openood", method, place, "1000000") for method in METHODS}
    for name, methods in {"all": list(METHODS), "without k-NN": [m for m in METHODS if m != "knn"]}.items():
        ours = in_own_process("shared", ",".join(methods), str(folder), "1000000")
        failed = [f"{m}: {peers[m]}" for m in methods if isinstance(peers[m], str)]
        if failed or isinstance(ours, str):
            table.note("; ".join([*failed, str(ours)]))
            continue
        theirs = FOLDS * sum(len(settings(m, width)) * _cpu(peers[m]) for m in methods)
        table.row(name, f"{theirs:.0f}", f"{ours.cpu:.1f}", f"{theirs / ours.cpu:.0f}×", f"{GOALS[name]:g}×")
    table.note(f"peers' way: one fold of each method measured, times its settings, times {FOLDS} folds")


def _cpu(cost: Cost | str) -> float:
    return cost.cpu if isinstance(cost, Cost) else float("nan")


def _write_fold(source: Path, target: Path) -> None:
    """One fold as a peer sees it: four fifths of the training rows; the fifth and all OOD rows to score."""
    data = banks.load(source)
    cut = len(data.train) // FOLDS
    fold = dataclasses.replace(
        data,
        train=data.train[cut:],
        train_logits=data.train_logits[cut:],
        labels=data.labels[cut:],
        test=np.concatenate([data.train[:cut], data.test]),
        test_logits=np.concatenate([data.train_logits[:cut], data.test_logits]),
    )
    named = {"train.features": fold.train, "train.logits": fold.train_logits, "train.labels": fold.labels}
    named |= {"test.features": fold.test, "test.logits": fold.test_logits, "W": fold.W, "b": fold.b}
    for name, array in named.items():
        np.save(target / f"{name}.npy", array)

"""A synthetic run folder in the layout that `oodometer.results` reads, with everything a report may meet."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from oodometer.results import (
    CLASSIFIER_COLUMNS,
    DEFAULT_METRICS,
    INDEX_COLUMNS,
    RESULT_COLUMNS,
    TUNING_COLUMNS,
    Results,
    Scores,
    Store,
    evaluate,
    folds_file,
    key_of,
    params_text,
    write_json,
    write_table,
)
from oodometer.splits import DualKFold

SCRIPT = "<script>alert(1)</script>"
QUOTED = 'naïve & "quoted"'
LONG = "a-name-that-goes-on-" * 6 + "end"
UNICODE = "字形 ✓ ∂"
AWKWARD = (SCRIPT, QUOTED, LONG, UNICODE)

DETECTORS = ("knn", "vim", "mds", "energy", "msp", "mls", "gen", "entropy", "nnguide", "relation", "neco", "residual")
SETS = ("mnist", "kmnist", "svhn", "textures", "omniglot", "usps", "places365", "isun", "lsun", "cifar100", "a", "b")
GROUPS = ("near", "near", "far", "far")


@dataclass(frozen=True)
class Shape:
    """How large the run is, and what is wrong with it."""

    detectors: int = 6
    sets: int = 5
    folds: int = 3
    repeats: int = 1
    rows: int = 240
    ood_rows: int = 180
    exposures: tuple[str, ...] = ("without",)
    awkward: bool = False
    failed: bool = False
    nan: bool = False
    tuned: bool = True
    predictions: bool = True
    metrics: tuple[str, ...] = DEFAULT_METRICS
    seed: int = 0


def detector_names(shape: Shape) -> list[str]:
    plain = [*DETECTORS, *(f"mine-{i}" for i in range(shape.detectors))][: shape.detectors]
    return [*plain[:-1], SCRIPT + "-detector"] if shape.awkward else plain


def set_names(shape: Shape) -> list[str]:
    plain = [*SETS, *(f"set-{i}" for i in range(shape.sets))][: shape.sets]
    return [*AWKWARD, *plain][: shape.sets] if shape.awkward else plain


def make_run(folder: Path, shape: Shape | None = None, **changes: Any) -> Results:
    """Write the folder and open it."""
    run = _Run(folder, shape or Shape(**changes))
    run.write()
    return Results.open(folder)


class _Run:
    def __init__(self, folder: Path, shape: Shape) -> None:
        self.folder, self.shape = folder, shape
        self.store = Store(folder / "cells")
        self.names, self.sets = detector_names(shape), set_names(shape)
        self.tables: dict[str, list[tuple[Any, ...]]] = {"results": [], "tuning": [], "classifiers": [], "index": []}
        self.failed: list[dict[str, Any]] = []
        self.study = f"digits {SCRIPT}" if shape.awkward else "digits"
        groups = (QUOTED, "far") if shape.awkward else GROUPS
        self.group = {name: groups[at % len(groups)] for at, name in enumerate(self.sets)}

    def write(self) -> None:
        for repeat, exposure, ood in product(range(self.shape.repeats), self.shape.exposures, self.sets):
            folds = self._folds(repeat, ood)
            for fold, rows in enumerate(folds):
                self._fold(repeat, fold, exposure, ood, len(rows.id_test), len(rows.ood_test))
        tables = {
            "results.csv": RESULT_COLUMNS,
            "tuning.csv": TUNING_COLUMNS,
            "classifiers.csv": CLASSIFIER_COLUMNS,
            "cells/index.csv": INDEX_COLUMNS,
        }
        for name, columns in tables.items():
            write_table(self.folder / name, columns, self.tables[Path(name).stem])
        write_json(self.folder / "run.json", self._facts())

    def _folds(self, repeat: int, ood: str) -> Any:
        shape = self.shape
        id_labels, ood_labels = np.arange(shape.rows) % 10, np.arange(shape.ood_rows) % 7
        folds = DualKFold(shape.folds, seed=repeat).split(id_labels, ood_labels)
        folds.save(self.folder / "folds" / folds_file(repeat, ood))
        held_out = [fold.names("id_train")[: shape.rows // 4].tolist() for fold in folds]
        write_json(self.folder / "folds" / f"{repeat}.validation.json", {"id": held_out})
        return folds

    def _fold(self, repeat: int, fold: int, exposure: str, ood: str, n_id: int, n_ood: int) -> None:
        n_val = self.shape.rows // 4
        own = ood if exposure == "with" else ""
        correct = {"test": self._rng("c", repeat, fold, own).random(n_id) < 0.9, "val": np.ones(n_val, bool)}
        classifier = self._cell({"c": 1, "at": (repeat, fold, exposure, own)}, correct)
        self.tables["classifiers"].append(
            (self.study, repeat, fold, "digits", ood, exposure, float(correct["test"].mean()), 1.0, n_id, n_val)
        )
        for place, name in enumerate(self.names):
            if self.shape.failed and (place, fold, ood) == (1, 0, self.sets[0]):
                at = {"repeat": repeat, "fold": fold, "ood": ood, "exposure": exposure, "detector": name}
                self.failed.append({**at, "error": f"k = 500 needs 500 rows, 120 were found {SCRIPT}"})
                continue
            self._detector(repeat, fold, exposure, ood, name, place, (n_id, n_ood, n_val), (classifier, correct))

    def _detector(
        self, repeat: int, fold: int, exposure: str, ood: str, name: str, place: int, sizes: Any, classifier: Any
    ) -> None:
        params = self._tune(repeat, fold, exposure, ood, name, place)
        own = ood if exposure == "with" else ""
        rng = self._rng("id", repeat, fold, own, name)
        scale, shift = 10.0 ** (place % 4 - 1), 5.0 * place - 3
        id_scores = {
            "test": rng.normal(0, 1, sizes[0]) * scale + shift,
            "val": rng.normal(0, 1, sizes[2]) * scale + shift,
        }
        # Better detectors come first; sets differ; exposure helps.
        noise = float(self._rng("gap", exposure, ood, name).normal(0, 0.4))
        gap = 2.6 - 0.15 * place + 0.25 * (self.sets.index(ood) % 4) + 0.5 * (exposure == "with") + noise
        far = self._rng("ood", repeat, fold, exposure, ood, name).normal(max(gap, 0.0), 1.3, sizes[1]) * scale + shift
        at = {"detector": name, "at": (repeat, fold, exposure)}
        cells = (self._cell({**at, "own": own}, id_scores), self._cell({**at, "ood": ood}, {"test": far}))
        keys = (repeat, fold, ood, exposure, name, "", params_text(params), *cells, classifier[0])
        self.tables["index"].append(keys)
        no_names: Any = np.zeros(0)
        correct = classifier[1]["test"] if self.shape.predictions else None
        scores = Scores(name, params, id_scores["test"], far, id_scores["val"], correct, no_names, no_names, no_names)
        values, _ = evaluate(scores, self.shape.metrics)
        for metric, value in values.items():
            gone = self.shape.nan and (place, metric) == (2, "autc")
            head = (self.study, repeat, fold, "digits", ood, self.group[ood], exposure)
            row = (*head, name, params_text(params), "", metric, float("nan") if gone else value)
            self.tables["results"].append(row)

    def _tune(self, repeat: int, fold: int, exposure: str, ood: str, name: str, place: int) -> dict[str, Any]:
        """Every other detector has a grid of one parameter; its best point moves with the fold."""
        if not self.shape.tuned or place % 2:
            return {}
        grid = (1, 5, 10, 50, 100, 5000)
        best = 2 + fold % 2
        for at, k in enumerate(grid):
            status, reason = ("invalid", f"k={k} exceeds the bank {SCRIPT}") if k == 5000 else ("acts", "")
            value = float("nan") if k == 5000 else 0.9 - 0.02 * abs(at - best)
            head = (self.study, repeat, fold, exposure, ood, name, "", params_text({"k": k}), "auroc")
            shared = "mnist" if place == 0 else ""
            self.tables["tuning"].append((*head, value, status, reason, int(at == best), shared))
        return {"k": grid[best]}

    def _cell(self, facts: dict[str, Any], segments: dict[str, Any]) -> str:
        key = key_of(facts)
        if not (self.store.folder / f"{key}.json").exists():
            self.store.write(key, {"what": facts}, segments)
        return key

    def _rng(self, *words: Any) -> np.random.Generator:
        return np.random.default_rng([self.shape.seed, *json.dumps(words).encode()])

    def _facts(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "study": self.study,
            "command": f"oodometer run study.toml --out 'runs/{self.study}'",
            "versions": {"oodometer": "0.1.0", "python": "3.11.7", "numpy": np.__version__},
            "machine": {"system": "Linux", "cores": 2},
            "seeds": {"study": shape.seed},
            "fingerprints": {name: key_of({"data": name}) for name in ("digits", *self.sets)},
            "test_to_train": 1 / max(shape.folds - 1, 1),
            "warnings": [f"the head is rank-deficient: 9 of 10 classes {SCRIPT}"] if shape.awkward else [],
            "failed": self.failed,
            "timings": {"fit": 1.25, "score": 3.5},
        }

"""From cells to what a reader opens: the tidy table, search curves, classifiers, the index, and the run's facts."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from oodometer import __version__
from oodometer.bank import Bank
from oodometer.cells import Setting
from oodometer.results import (
    CLASSIFIER_COLUMNS,
    INDEX_COLUMNS,
    RESULT_COLUMNS,
    TUNING_COLUMNS,
    Cell,
    Store,
    evaluate,
    folds_file,
    key_of,
    params_text,
    scores_of,
    write_json,
    write_table,
)
from oodometer.study.plan import Plan, Search, Unit
from oodometer.study.spec import Chosen

Row = tuple[Any, ...]
TABLES = {
    "results.csv": RESULT_COLUMNS,
    "tuning.csv": TUNING_COLUMNS,
    "classifiers.csv": CLASSIFIER_COLUMNS,
    "cells/index.csv": INDEX_COLUMNS,
}
_NO_NAMES: Any = np.zeros(0)


def write_folds(plan: Plan, folder: Path) -> None:
    """The folds of every repeat and OOD set, and the sample ids of the validation rows."""
    for repeat, dealt in enumerate(plan.folds):
        for name, folds in dealt.items():
            folds.save(folder / folds_file(repeat, name))
        held_out = [plan.val_ids(rows) for rows in plan.rows if rows.repeat == repeat]
        write_json(folder / f"{repeat}.validation.json", {"id": held_out})


def publish(plan: Plan, store: Store, folder: Path, facts: dict[str, Any], tick: Callable[[], None]) -> list[str]:
    """Write all tables and then `run.json`, without which a folder has no results; notes on absent numbers."""
    (folder / "run.json").unlink(missing_ok=True)
    write_folds(plan, folder / "folds")
    found = Collected(plan, store, tick)
    found.collect()
    for name, columns in TABLES.items():
        write_table(folder / name, columns, found.tables[name])
    notes = [*facts["warnings"], *dict.fromkeys(found.notes)]
    write_json(folder / "run.json", {**facts, "warnings": notes, "failed": found.failed}, durable=True)
    return found.notes


@dataclass
class Collected:
    """The rows of every table, read from finished cells in the order of the plan."""

    plan: Plan
    store: Store
    tick: Callable[[], None]
    tables: dict[str, list[Row]] = field(default_factory=lambda: {name: [] for name in TABLES})
    failed: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def collect(self) -> None:
        """Walk all units."""
        for rows in self.plan.rows:
            for unit in self.plan.units(rows):
                self._unit(unit)
                self.tick()

    def _unit(self, unit: Unit) -> None:
        cell = self._read(unit.key)
        if cell.error:
            ood = unit.ood[0] if unit.exposure == "with" else ""
            self._failed(cell, unit, ood, detector="classifier", variant="", params="")
            return
        for name in unit.ood:
            self.tables["classifiers.csv"].append(self._classifier_row(unit, name, cell))
        for chosen in self.plan.spec.detectors:
            if chosen.tune:
                for search in self.plan.searches(unit, chosen):
                    self._search(unit, search)
            for name, setting in self.plan.settings(unit, chosen, self.store).items():
                self._scores(unit, chosen, setting, name, cell)

    def _read(self, key: str) -> Cell:
        cell = self.store.read(key)
        assert cell is not None, f"cell {key} was not computed"
        return cell

    def _classifier_row(self, unit: Unit, name: str, cell: Cell) -> Row:
        test, val = cell.segment("test"), cell.segment("val")
        at = (self.plan.spec.name, unit.rows.repeat, unit.rows.fold, self.plan.data.id.name, name, unit.exposure)
        return (*at, float(test.mean()), float(val.mean()), len(test), len(val))

    def _search(self, unit: Unit, search: Search) -> None:
        cell, chosen = self._read(search.key), search.chosen
        if cell.error:
            params = params_text({**chosen.params, **chosen.grid})
            self._failed(cell, unit, search.ood, detector=chosen.name, variant=chosen.variant, params=params)
            return
        at = (self.plan.spec.name, unit.rows.repeat, unit.rows.fold, unit.exposure)
        shared = " ".join(cell.facts["shared"])
        for name in [search.ood] if search.ood else unit.ood:
            for place, point in enumerate(cell.facts["curve"]):
                value = float("nan") if point["value"] is None else float(point["value"])
                self.tables["tuning.csv"].append(
                    (
                        *(*at, name, chosen.name, chosen.variant, params_text(point["params"])),
                        *(cell.facts["criterion"], value, point["status"], point["reason"]),
                        *(int(place == cell.facts["chosen"]), shared),
                    )
                )

    def _scores(self, unit: Unit, chosen: Chosen, setting: Setting, name: str, classifier: Cell) -> None:
        id_cell = self._read(key_of(self.plan.id_facts(unit, setting)))
        ood_cell = self._read(key_of(self.plan.ood_facts(unit, setting, name)))
        for cell, ood in ((id_cell, ""), (ood_cell, name)):
            if cell.error:
                self._failed(cell, unit, ood, detector=chosen.name, variant=chosen.variant, params=setting.text)
        if id_cell.error or ood_cell.error:
            return
        plan, rows = self.plan, unit.rows
        keys = (id_cell.key, ood_cell.key, classifier.key)
        at = (rows.repeat, rows.fold, name, unit.exposure, chosen.name, chosen.variant, setting.text)
        self.tables["cells/index.csv"].append((*at, *keys))
        scores = scores_of(
            chosen.name, dict(setting.params), id_cell, ood_cell, classifier, names=(_NO_NAMES, _NO_NAMES, _NO_NAMES)
        )
        values, reasons = evaluate(scores, plan.spec.metrics)
        self.notes += reasons
        head = (plan.spec.name, rows.repeat, rows.fold, plan.data.id.name, name, plan.data.ood[name].group)
        label = (unit.exposure, chosen.name, setting.text, chosen.variant)
        self.tables["results.csv"] += [(*head, *label, metric, value) for metric, value in values.items()]

    def _failed(self, cell: Cell, unit: Unit, ood: str, *, detector: str, variant: str, params: str) -> None:
        """A failed cell, named once (the ID rows of a detector serve several OOD sets)."""
        if any(one["cell"] == cell.key for one in self.failed):
            return
        at = {"repeat": unit.rows.repeat, "fold": unit.rows.fold, "ood": ood, "exposure": unit.exposure}
        what = {"detector": detector, "variant": variant, "params": params, "error": cell.error, "cell": cell.key}
        self.failed.append({**at, **what})


# ---------------------------------------------------------------------------------------------- facts of a run


def run_facts(plan: Plan, command: str, said: list[str], timings: dict[str, float]) -> dict[str, Any]:
    """What a reader needs to know to repeat a run."""
    spec = plan.spec
    return {
        "study": spec.name,
        "spec": msgspec.to_builtins(spec, enc_hook=_described),
        "command": command,
        "versions": dict(_versions()),
        "machine": {"system": platform.platform(), "cores": os.cpu_count()},
        "seeds": {"study": spec.seed, "repeats": [spec.seed + repeat for repeat in range(len(plan.folds))]},
        "fingerprints": plan.data.fingerprints,
        "device": plan.options.device,
        "threads": plan.options.threads,
        "test_to_train": plan.test_to_train,
        "warnings": list(dict.fromkeys(said)),
        "timings": timings,
    }


def spent_in(folder: Path, cpu: float, computed: int) -> dict[str, float]:
    """CPU-seconds of this run and of the finished ones before it in the folder, and how many cells they computed.

    What a killed run had spent is not known; fewer cells are then computed than kept.
    """
    try:
        before = json.loads((folder / "run.json").read_text())["timings"]
        cpu, computed = cpu + before["cpu"], computed + before["computed"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # the first run here, or facts that lack it
    return {"cpu": cpu, "computed": computed}


def _described(value: Any) -> Any:
    if isinstance(value, Bank):
        return f"Bank {value.fingerprint}"
    return json.loads(json.dumps(value, default=str))


def _versions() -> Iterator[tuple[str, str]]:
    yield "oodometer", __version__
    yield "python", platform.python_version()
    for name in ("numpy", "scipy", "scikit-learn", "torch"):
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue

"""A study expanded: its folds, the classifiers of every fold, and the key of every cell."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from oodometer import __version__
from oodometer.cells import Setting, finished
from oodometer.errors import OodometerError, OodometerWarning
from oodometer.results import Store, key_of
from oodometer.splits import Folds
from oodometer.splits.assign import random_keys
from oodometer.study.data import StudyData, open_data
from oodometer.study.rows import FoldRows, deal, joined, n_repeats, rows_of
from oodometer.study.spec import Chosen, Exposure, Spec
from oodometer.tune import expand


@dataclass(frozen=True)
class Options:
    """How a study is computed; what changes the last digits of a number is part of every key."""

    device: str | None = None
    threads: int = 1


@dataclass(frozen=True, eq=False)
class Unit:
    """One classifier of one fold: without exposure it serves all OOD sets, with exposure one."""

    rows: FoldRows
    exposure: Exposure
    ood: tuple[str, ...]
    facts: Mapping[str, Any]
    """What determines the classifier."""

    @cached_property
    def key(self) -> str:
        """The classifier's cell."""
        return key_of(self.facts)


@dataclass(frozen=True, eq=False)
class Search:
    """The choice of a detector's parameters for one OOD set (for all of them, if no OOD rows take part)."""

    chosen: Chosen
    ood: str
    sources: tuple[str, ...]
    facts: Mapping[str, Any]

    @cached_property
    def key(self) -> str:
        """The cell of the search curve."""
        return key_of(self.facts)


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything a run does, before it does it."""

    spec: Spec
    data: StudyData
    options: Options
    folds: tuple[Mapping[str, Folds], ...]
    """The folds of every repeat, by OOD set."""
    rows: tuple[FoldRows, ...]
    """Every fold of every repeat."""
    environment: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """What tells two plans apart."""
        keys = [unit.key for rows in self.rows for unit in self.units(rows)]
        chosen = [repr(one) for one in self.spec.detectors]
        return key_of({"classifiers": keys, "detectors": chosen, "tune": self.spec.tune.rule})

    # ------------------------------------------------------------------------------------------ units and cells

    def units(self, rows: FoldRows) -> Iterator[Unit]:
        """The classifiers of a fold: one without exposure, one a OOD set with it."""
        every = tuple(self.data.ood)
        base = self._classifier_facts(rows)
        for exposure in self.spec.exposure:
            if exposure == "without":
                yield Unit(rows, exposure, every, {**base, "outliers": None})
            else:
                for name in every:
                    yield Unit(rows, exposure, (name,), {**base, "outliers": self._ood_facts(rows, name, "train")})

    def _classifier_facts(self, rows: FoldRows) -> dict[str, Any]:
        trainer = self.spec.trainer
        return {
            "kind": "classifier",
            **self.environment,
            "trainer": {"name": trainer.name, "params": trainer.params},
            "seed": None if self.spec.own_head else self.seed(rows),
            "id": self.data.id.identity,
            **rows.identity(),
        }

    def _ood_facts(self, rows: FoldRows, name: str, role: str) -> dict[str, Any]:
        return {"data": self.data.ood[name].identity, role: rows.ood_identity(name, role)}

    def seed(self, rows: FoldRows) -> int:
        """The seed of a fold's trainer."""
        return int(random_keys(1, self.spec.seed, "trainer", rows.repeat, rows.fold)[0] >> np.uint64(33))

    def searches(self, unit: Unit, chosen: Chosen) -> list[Search]:
        """The searches that choose this detector's parameters on this unit."""
        rule = self.spec.tune.rule
        if rule == "augrc":
            return [self._search(unit, chosen, "", ())]
        return [self._search(unit, chosen, name, self._sources(name)) for name in unit.ood]

    def _sources(self, ood: str) -> tuple[str, ...]:
        """The OOD sets whose rows choose parameters for this one."""
        if self.spec.tune.rule == "auroc":
            return tuple(self.data.ood_val)
        return tuple(name for name in self.data.ood if (name == ood) == (self.spec.tune.rule == "nested"))

    def _search(self, unit: Unit, chosen: Chosen, ood: str, sources: tuple[str, ...]) -> Search:
        if self.spec.tune.rule == "auroc":
            seen: list[Any] = [self.data.ood_val[name].identity for name in sources]
        else:
            seen = [self._ood_facts(unit.rows, name, "train") for name in sources]
        facts = {
            "kind": "search",
            "classifier": unit.key,
            "detector": chosen.name,
            "fixed": chosen.params,
            "grid": chosen.grid,
            "rule": self.spec.tune.rule,
            "sources": seen,
            # Whether a source is shared with the test is part of what the cell says.
            "tested": [self.tested_source(ood), [self.source(name) for name in sources]] if ood else [],
        }
        return Search(chosen, ood, sources, facts)

    def source(self, name: str) -> str:
        """Where the rows of an OOD set that chooses parameters come from."""
        sets = self.data.ood_val if self.spec.tune.rule == "auroc" else self.data.ood
        return sets[name].source

    def tested_source(self, ood: str) -> str:
        """Where the rows of a tested OOD set come from."""
        return self.data.ood[ood].source

    def settings(self, unit: Unit, chosen: Chosen, store: Store) -> dict[str, Setting]:
        """The parameters for every OOD set; sets whose search is not finished, or failed, are left out."""
        if not chosen.tune:
            return dict.fromkeys(unit.ood, self._setting(chosen, None))
        found: dict[str, Setting] = {}
        for search in self.searches(unit, chosen):
            cell = finished(store, search.key)
            if cell is not None:
                setting = self._setting(chosen, cell.facts["chosen"])
                found |= dict.fromkeys([search.ood] if search.ood else unit.ood, setting)
        return found

    def _setting(self, chosen: Chosen, place: int | None) -> Setting:
        """The fixed parameters, and those of a point of the grid."""
        key = (chosen.label, place)
        if key not in self._settings:
            point = {} if place is None else expand(chosen.grid)[place]
            self._settings[key] = Setting(chosen.name, {**chosen.params, **point})
        return self._settings[key]

    @cached_property
    def _settings(self) -> dict[tuple[str, int | None], Setting]:
        return {}

    def id_facts(self, unit: Unit, setting: Setting) -> dict[str, Any]:
        """What determines the scores of the ID rows."""
        return {"kind": "id", "classifier": unit.key, **setting.identity}

    def ood_facts(self, unit: Unit, setting: Setting, ood: str) -> dict[str, Any]:
        """What determines the scores of an OOD set."""
        tested = self._ood_facts(unit.rows, ood, "test")
        return {"kind": "ood", "classifier": unit.key, **setting.identity, "ood": tested}

    # ------------------------------------------------------------------------------------------ names of rows

    def val_ids(self, rows: FoldRows) -> list[Any]:
        """Sample ids of a fold's validation rows, in the order of their scores."""
        ids: list[Any] = self.data.id.ids[np.sort(joined(rows.val))].tolist()
        return ids

    @property
    def test_to_train(self) -> float:
        """Test rows per training row, on average over folds (Nadeau & Bengio's correction)."""
        ratios = [
            sum(map(len, rows.test)) / (sum(map(len, rows.train)) + sum(map(len, rows.val))) for rows in self.rows
        ]
        return float(np.mean(ratios))


def make_plan(spec: Spec, options: Options) -> Plan:
    """Open the data, deal the rows, and check that what the study asks for can be done."""
    data = open_data(spec, own_head=spec.own_head, device=options.device)
    folds, rows = [], []
    for repeat in range(n_repeats(spec.split)):
        dealt = deal(data, spec.split, labels=spec.data.id.labels, seed=spec.seed, repeat=repeat)
        folds.append(dealt)
        rows += rows_of(dealt, data.id, spec.split, seed=spec.seed, repeat=repeat)
    environment = {"oodometer": __version__, "device": options.device, "threads": options.threads}
    plan = Plan(spec, data, options, tuple(folds), tuple(rows), environment)
    _check_outliers(plan)
    return plan


def _check_outliers(plan: Plan) -> None:
    """Exposure, and tuning on OOD training folds, need such rows in every fold."""
    tuned = any(chosen.tune for chosen in plan.spec.detectors) and plan.spec.tune.rule in ("nested", "leave-one-out")
    if not tuned and "with" not in plan.spec.exposure:
        return
    if tuned and plan.spec.tune.rule == "nested" and "with" in plan.spec.exposure:
        warnings.warn(
            "tune.rule = 'nested' with exposure 'with' chooses parameters on OOD rows that the classifier was shown: "
            "they look easier than tested rows",
            OodometerWarning,
            stacklevel=2,
        )
    what = "exposure 'with'" if "with" in plan.spec.exposure else f"tune.rule = {plan.spec.tune.rule!r}"
    for rows in plan.rows:
        for name, index in rows.ood_train.items():
            if not len(index):
                raise OodometerError(
                    f"study: {what} needs OOD rows to train or tune on; {name!r} reserves none in fold {rows.fold}: "
                    "give data.ood.NAME.train (holdout), or split.ood_test below 1 (repeated holdout)"
                )

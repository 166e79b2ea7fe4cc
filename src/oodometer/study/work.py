"""Computes the missing cells of one fold: its classifiers, the choice of parameters, the scores."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import numpy as np

from oodometer import trainers, tune
from oodometer.arrays import Ints, row_bytes
from oodometer.bank import Bank
from oodometer.cells import (
    Segments,
    Setting,
    Test,
    classifier_segments,
    finished,
    fitted,
    id_segments,
    ood_segments,
    order_of,
    write_cell,
)
from oodometer.detectors import Detector
from oodometer.errors import OodometerWarning
from oodometer.results import Cell, Store, key_of
from oodometer.study.cost import score_work, search_work, training_work
from oodometer.study.data import ascending_rows
from oodometer.study.plan import Plan, Search, Unit
from oodometer.study.rows import FoldRows, Piece, joined
from oodometer.study.spec import Chosen
from oodometer.tune import Choice, Train, Validation

GATHERED_BYTES = 512 << 20
"""Pieces of a bank up to this size are gathered once; those of larger banks are read row by row where they lie."""

Tick = Callable[[str, float], None]
"""Told what was finished, and its share of the expected work."""


@dataclass
class Worker:
    """Works on folds, one after the other; what folds share is computed once."""

    plan: Plan
    store: Store
    tick: Tick
    said: list[str] = field(default_factory=list)
    _pieces: dict[Piece, Bank] = field(default_factory=dict)

    def do(self, rows: FoldRows) -> None:
        """All cells of a fold that are not finished yet."""
        self.trainer()  # what it computes with is loaded before threads are counted
        with _one_thread_count(self.plan.options.threads), _heard(self.said):
            wanted = {*rows.train, *rows.val, *rows.test}
            self._pieces = {piece: bank for piece, bank in self._pieces.items() if piece in wanted}
            fold = FoldBanks(self, rows)
            for unit in self.plan.units(rows):
                UnitWork(fold, unit).do()

    def trainer(self) -> trainers.Trainer:
        """The study's trainer; long trainings are kept beside the cells while they run, and when they are done."""
        chosen = self.plan.spec.trainer
        made = trainers.create(chosen.name, **chosen.params)
        if isinstance(made, trainers.Resumable):
            return made.keeping(self.store.folder.parent / "training", lambda what, share: self.tick(what, 0.0))
        return made

    def piece(self, piece: Piece) -> Bank:
        """The rows of a piece; the same object for every fold, which makes what is derived from it shared."""
        if piece not in self._pieces:
            whole = self.plan.data.id.bank
            rows = ascending_rows(whole, piece.rows)
            self._pieces[piece] = rows.with_columns() if _bytes(whole) <= GATHERED_BYTES else rows
            if self.plan.spec.own_head:
                self._pieces[piece] = _with_logits(self._pieces[piece])
        return self._pieces[piece]


@contextmanager
def _one_thread_count(threads: int) -> Iterator[None]:
    """The same number of threads wherever a cell is computed: sums of another order differ in their last digits."""
    with import_module("threadpoolctl").threadpool_limits(threads):
        yield


@contextmanager
def _heard(said: list[str]) -> Iterator[None]:
    """Warnings are collected for the results instead of printed a hundred times."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said += [str(one.message) for one in caught if issubclass(one.category, OodometerWarning | RuntimeWarning)]


@dataclass(eq=False)
class FoldBanks:
    """The banks of a fold by role, and the classifier that was fitted without outliers."""

    worker: Worker
    rows: FoldRows

    def _joined(self, pieces: tuple[Piece, ...]) -> Bank:
        return Bank.concat([self.worker.piece(piece) for piece in pieces])

    @cached_property
    def train(self) -> Bank:
        return self._joined(self.rows.train)

    @cached_property
    def val(self) -> Bank:
        return self._joined(self.rows.val)

    @cached_property
    def test(self) -> Bank:
        return self._joined(self.rows.test)

    @cached_property
    def val_order(self) -> Ints:
        return order_of(joined(self.rows.val))

    @cached_property
    def test_order(self) -> Ints:
        return order_of(joined(self.rows.test))

    @cached_property
    def seed(self) -> int:
        return self.worker.plan.seed(self.rows)

    @cached_property
    def classifier(self) -> trainers.Classifier:
        """What the trainer makes of the ID training rows."""
        return self.worker.trainer().fit(self.train, self.val, seed=self.seed)

    def outliers(self, name: str, role: str) -> Bank:
        """Rows of an OOD set: 'train' (exposure, tuning) or 'test'."""
        rows = self.rows.ood_train if role == "train" else self.rows.ood_test
        return ascending_rows(self.worker.plan.data.ood[name].bank, rows[name])


@dataclass(eq=False)
class UnitWork:
    """The cells behind one classifier."""

    fold: FoldBanks
    unit: Unit

    @property
    def plan(self) -> Plan:
        return self.fold.worker.plan

    @property
    def store(self) -> Store:
        return self.fold.worker.store

    def do(self) -> None:
        """Classifier, searches, scores; each only if it is not finished."""
        cell = finished(self.store, self.unit.key) or self._classify()
        self.fold.worker.tick("classifier", training_work(self.plan, self.unit))
        if cell.error:
            return
        for chosen in self.plan.spec.detectors:
            if chosen.tune:
                self._choose(chosen)
                self.fold.worker.tick(f"{chosen.label}, grid", search_work(self.plan, self.unit, chosen))
        for chosen, setting, names in self._settings():
            self._score(setting, names)
            self.fold.worker.tick(chosen.label, score_work(self.plan, self.unit, chosen, names))

    # ------------------------------------------------------------------------------------------ classifier and banks

    def _classify(self) -> Cell:
        def compute() -> tuple[Mapping[str, Any], Segments]:
            values = classifier_segments(self.test, self.val, self.fold.val_order)
            return {"classifier_facts": self.classifier.facts}, values

        return write_cell(self.store, self.unit.key, self.unit.facts, compute)

    @cached_property
    def classifier(self) -> trainers.Classifier:
        """The fold's classifier, after exposure where this unit asks for it."""
        base, fold = self.fold.classifier, self.fold
        if self.unit.exposure == "without":
            return base
        shown = fold.outliers(self.unit.ood[0], "train")
        return base.expose(shown, fold.train, fold.val, seed=fold.seed)

    @cached_property
    def train(self) -> Train:
        return Train(_with_logits(self.classifier.apply(self.fold.train)))

    @cached_property
    def val(self) -> Validation:
        return Validation(_with_logits(self.classifier.apply(self.fold.val)))

    @cached_property
    def test(self) -> Test:
        return Test(_with_logits(self.classifier.apply(self.fold.test)), self.fold.test_order)

    @cached_property
    def _ood_tests(self) -> dict[str, Test]:
        return {}

    def ood_test(self, name: str) -> Test:
        """The test rows of an OOD set."""
        if name not in self._ood_tests:
            bank = _with_logits(self.classifier.apply(_gathered(self.fold.outliers(name, "test"))))
            self._ood_tests[name] = Test(bank, np.arange(len(bank)))
        return self._ood_tests[name]

    @cached_property
    def _ood_vals(self) -> dict[str, Validation]:
        return {}

    def ood_val(self, name: str) -> Validation:
        """Rows of an OOD set that choose parameters: a validation set, or OOD training folds."""
        if name not in self._ood_vals:
            own = self.plan.spec.tune.rule == "auroc"
            bank = self.plan.data.ood_val[name].bank if own else self.fold.outliers(name, "train")
            self._ood_vals[name] = Validation(_with_logits(self.classifier.apply(_gathered(bank))), name)
        return self._ood_vals[name]

    # ------------------------------------------------------------------------------------------ parameters

    def _choose(self, chosen: Chosen) -> None:
        """Search the grid once for all OOD sets whose choice is missing, and write a cell for each."""
        missing = [one for one in self.plan.searches(self.unit, chosen) if finished(self.store, one.key) is None]
        if not missing:
            return
        sources = list(dict.fromkeys(name for search in missing for name in search.sources))
        try:
            found: tune.Search | Exception = tune.search(
                chosen.name,
                self.train,
                self.val,
                ood_val=[self.ood_val(name) for name in sources],
                grid=chosen.grid,
                **chosen.params,
            )
        except OSError:
            raise
        except Exception as error:
            found = error
        for search in missing:
            write_cell(self.store, search.key, search.facts, partial(self._chosen, search, found))

    def _chosen(self, search: Search, found: tune.Search | Exception) -> tuple[dict[str, Any], None]:
        """The facts of a search's cell."""
        if isinstance(found, Exception):
            raise found
        choice = found.by_auroc(search.sources) if search.sources else found.by_augrc()
        shared: tuple[str, ...] = ()
        if search.sources:
            shared = tune.shares_source(map(self.plan.source, search.sources), [self.plan.tested_source(search.ood)])
        return {**choice_facts(choice), "shared": list(shared)}, None

    def _settings(self) -> Iterator[tuple[Chosen, Setting, list[str]]]:
        """Every setting with the OOD sets it is for, larger neighbour searches first."""
        found: list[tuple[Chosen, Setting, list[str]]] = []
        for chosen in self.plan.spec.detectors:
            by_text: dict[str, tuple[Setting, list[str]]] = {}
            for name, setting in self.plan.settings(self.unit, chosen, self.store).items():
                by_text.setdefault(setting.text, (setting, []))[1].append(name)
            found += [(chosen, setting, names) for setting, names in by_text.values()]
        yield from sorted(found, key=lambda one: one[1].size)

    # ------------------------------------------------------------------------------------------ scores

    def _score(self, setting: Setting, names: list[str]) -> None:
        """Fit once, and score the ID rows and every OOD set whose cell is missing."""
        detector = _Once(lambda: fitted(setting, self.train, self.val))

        def inside() -> tuple[dict[str, Any], Segments]:
            return {}, id_segments(detector(), self.test, self.val, self.fold.val_order)

        def outside(name: str) -> tuple[dict[str, Any], Segments]:
            return {}, ood_segments(detector(), self.ood_test(name))

        self._complete(self.plan.id_facts(self.unit, setting), inside)
        for name in names:
            self._complete(self.plan.ood_facts(self.unit, setting, name), partial(outside, name))

    def _complete(self, facts: dict[str, Any], compute: Callable[[], tuple[dict[str, Any], Segments]]) -> None:
        key = key_of(facts)
        if finished(self.store, key) is None:
            write_cell(self.store, key, facts, compute)


class _Once:
    """A fitted detector, fitted when first asked for; a failure is kept and repeated."""

    def __init__(self, fit: Callable[[], Detector]) -> None:
        self._fit = fit
        self._found: Detector | Exception | None = None

    def __call__(self) -> Detector:
        if self._found is None:
            try:
                self._found = self._fit()
            except OSError:
                raise
            except Exception as error:
                self._found = error
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


def _gathered(bank: Bank) -> Bank:
    """The rows copied together if they are few, so that many detectors read them in order."""
    return bank.with_columns() if _bytes(bank) <= GATHERED_BYTES else bank


def _with_logits(bank: Bank) -> Bank:
    """The bank with logits as a column of every part, if that copies little: detectors then share the parts as well."""
    if "logits" in bank.columns or _bytes(bank) + 4 * bank.classes * len(bank) > GATHERED_BYTES:
        return bank
    return Bank.concat([part.with_columns(logits=part.logits) for part in bank.parts])


def _bytes(bank: Bank) -> int:
    first = bank.rows(slice(0, 0))
    return len(bank) * sum(row_bytes(first[name]) for name in bank.columns)


def choice_facts(choice: Choice) -> dict[str, Any]:
    """A search as plain data: every point in grid order, and the place of the chosen one."""
    usable = [place for place, trial in enumerate(choice.curve) if trial.value == choice.value]
    chosen = next(p for p in usable if choice.params == {**choice.params, **choice.curve[p].params})
    curve = [
        {"params": trial.params, "value": trial.value, "status": trial.status, "reason": trial.reason}
        for trial in choice.curve
    ]
    return {"criterion": choice.rule, "chosen": chosen, "curve": curve}

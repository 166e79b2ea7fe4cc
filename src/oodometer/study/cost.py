"""How much work a study is, roughly: enough to order detectors by cost and to foresee the time of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from oodometer import detectors
from oodometer.study.spec import Chosen

if TYPE_CHECKING:
    from oodometer.bank import Bank
    from oodometer.study.plan import Plan, Unit

OVERHEAD = 2e7
"""Operations that a cell costs besides its arithmetic: a file, a hash, a few Python calls."""
PASSES = {"linear": (100, 80), "hidden": (11, 10)}
"""Passes over the training rows that a probe takes to be fitted and to be exposed (with as many outliers beside)."""


def total_work(plan: Plan) -> float:
    """Operations of the whole study."""
    units = [unit for rows in plan.rows for unit in plan.units(rows)]
    return sum(unit_work(plan, unit, chosen) for unit, chosen in _pairs(plan)) + sum(
        training_work(plan, unit) for unit in units
    )


def training_work(plan: Plan, unit: Unit) -> float:
    """Fit or expose a probe; how long other trainers take is not foreseen."""
    trainer = plan.spec.trainer
    if trainer.name != "probe":
        return OVERHEAD
    bank, hidden = plan.data.id.bank, _hidden(plan)
    width, rows = _row_size(bank), sum(map(len, unit.rows.train))
    # The products of a layer are square enough for the full rate of a matrix product.
    weights = SHARE_OF_RATE * hidden * (width + bank.classes) if hidden else width * bank.classes
    fit, expose = PASSES["hidden" if hidden else "linear"]
    fitted = unit.exposure == plan.spec.exposure[0] and unit.ood[0] == next(iter(plan.data.ood))
    passes = fit * fitted + expose * (unit.exposure == "with")
    return OVERHEAD + 4.0 * rows * weights * passes


def _hidden(plan: Plan) -> int:
    trainer = plan.spec.trainer
    return int(trainer.params.get("hidden", 0)) if trainer.name == "probe" else 0


def _row_size(bank: Bank) -> int:
    return int(np.prod(bank.row_shape("features"))) if "features" in bank.columns else bank.classes


def _pairs(plan: Plan) -> list[tuple[Unit, Chosen]]:
    units = [unit for rows in plan.rows for unit in plan.units(rows)]
    return list(product(units, plan.spec.detectors))


def unit_work(plan: Plan, unit: Unit, chosen: Chosen) -> float:
    """Operations of one detector on one classifier."""
    search = search_work(plan, unit, chosen) if chosen.tune else 0.0
    return search + score_work(plan, unit, chosen, unit.ood)


def score_work(plan: Plan, unit: Unit, chosen: Chosen, names: Sequence[str]) -> float:
    """Fit, and score ID test and validation rows and these OOD sets."""
    inside = sum(map(len, (*unit.rows.test, *unit.rows.val)))
    rows = inside + sum(len(unit.rows.ood_test[name]) for name in names)
    return _operations(plan, unit, chosen, rows) + OVERHEAD * (1 + len(names))


def search_work(plan: Plan, unit: Unit, chosen: Chosen) -> float:
    """Every grid point on the validation rows of both sides."""
    names = {name for search in plan.searches(unit, chosen) for name in search.sources}
    if plan.spec.tune.rule == "auroc":
        outside = sum(len(plan.data.ood_val[name]) for name in names)
    else:
        outside = sum(len(unit.rows.ood_train[name]) for name in names)
    points = int(np.prod([len(values) for values in chosen.grid.values()]))
    rows = sum(map(len, unit.rows.val)) + outside
    cost = detectors.get(chosen.name).card.cost
    # One neighbour search, or one eigendecomposition, serves all points.
    times = 1 + 0.1 * (points - 1) if cost in ("search", "subspace") else points
    return times * _operations(plan, unit, chosen, rows) + OVERHEAD * points


def _operations(plan: Plan, unit: Unit, chosen: Chosen, rows: int) -> float:
    """Fit on the unit's training rows and score so many rows."""
    card, bank = detectors.get(chosen.name).card, plan.data.id.bank
    width = _hidden(plan) or _row_size(bank)
    train, classes = sum(map(len, unit.rows.train)), bank.classes
    scored = {
        "elementwise": 30 * classes,
        "head": 2 * width * classes,
        "classes": 4 * width * classes,
        "subspace": 2 * width**2,
        "search": 2 * width * train,
    }[card.cost]
    fitted = {"classes": 2 * train * width + 10 * width**3, "subspace": 2 * train * width**2 + 10 * width**3}
    return float(rows * scored + fitted.get(card.cost, 0))


def rate(threads: int) -> float:
    """Operations a second of one matrix product, measured now (about 20 ms)."""
    a = np.ones((1024, 1024), np.float32)
    with import_module("threadpoolctl").threadpool_limits(threads):
        a @ a
        start = time.perf_counter()
        for _ in range(3):
            a @ a
        spent = time.perf_counter() - start
    return 3 * 2 * 1024**3 / spent


SHARE_OF_RATE = 0.4
"""How much of a matrix product's rate a whole detector reaches, passes over memory included."""

"""What a run still has to do: cells of every detector, and about how long the missing ones take."""

from __future__ import annotations

from dataclasses import dataclass

from oodometer.cells import finished
from oodometer.results import Store, key_of
from oodometer.study.cost import SHARE_OF_RATE, rate, training_work, unit_work
from oodometer.study.plan import Plan, Unit
from oodometer.study.spec import Chosen


@dataclass(frozen=True)
class Line:
    """One detector (or the classifiers): its cells, those that are finished, and the expected seconds of the rest."""

    method: str
    params: str
    cells: int
    finished: int
    seconds: float


def preview(plan: Plan, store: Store) -> list[Line]:
    """A line for the classifiers and one for every detector; nothing is computed."""
    units = [unit for rows in plan.rows for unit in plan.units(rows)]
    missing = [unit for unit in units if finished(store, unit.key) is None]
    trainer = plan.spec.trainer
    given = ", ".join(f"{key}={value}" for key, value in trainer.params.items())
    speed = SHARE_OF_RATE * rate(plan.options.threads)
    training = sum(training_work(plan, unit) for unit in missing) / speed
    lines = [Line(f"classifier ({trainer.name})", given, len(units), len(units) - len(missing), training)]
    return [*lines, *(_line(plan, store, units, chosen, speed) for chosen in plan.spec.detectors)]


def _line(plan: Plan, store: Store, units: list[Unit], chosen: Chosen, speed: float) -> Line:
    cells, done, work = 0, 0, 0.0
    for unit in units:
        keys = cell_keys(plan, unit, chosen, store)
        there = sum(key is not None and finished(store, key) is not None for key in keys)
        cells += len(keys)
        done += there
        work += unit_work(plan, unit, chosen) * (len(keys) - there) / len(keys)
    grid = ", ".join(f"{key}: {len(values)} values" for key, values in chosen.grid.items())
    given = ", ".join(f"{key}={value}" for key, value in chosen.params.items())
    return Line(chosen.label, ", ".join(text for text in (given, grid) if text), cells, done, work / speed)


def cell_keys(plan: Plan, unit: Unit, chosen: Chosen, store: Store) -> list[str | None]:
    """The cells of a detector on a classifier; None for those whose parameters are still to be chosen."""
    keys: list[str | None] = [search.key for search in plan.searches(unit, chosen)] if chosen.tune else []
    settings = plan.settings(unit, chosen, store)
    inside = {setting.text: key_of(plan.id_facts(unit, setting)) for setting in settings.values()}
    outside = [key_of(plan.ood_facts(unit, setting, name)) for name, setting in settings.items()]
    # Without parameters: a cell for the OOD set, and one for the ID rows.
    unknown = len(unit.ood) - len(settings)
    return [*keys, *inside.values(), *outside, *([None] * (unknown + (unknown > 0 and not inside)))]


def is_finished(plan: Plan, store: Store, unit: Unit) -> bool:
    """Whether nothing is left to compute on a classifier."""
    if finished(store, unit.key) is None:
        return False
    keys = [key for chosen in plan.spec.detectors for key in cell_keys(plan, unit, chosen, store)]
    return all(key is not None and finished(store, key) is not None for key in keys)

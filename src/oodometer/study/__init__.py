"""A study: detectors × folds × data sets, described once, computed cell by cell, resumed where it stopped."""

from __future__ import annotations

import os
import shlex
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from oodometer.errors import OodometerError, OodometerWarning
from oodometer.results import DamagedCellError, Results, Store
from oodometer.splits import Folds
from oodometer.study.cost import total_work
from oodometer.study.data import open_data
from oodometer.study.lock import locked
from oodometer.study.pending import Line, is_finished, preview
from oodometer.study.plan import Options, Plan, make_plan
from oodometer.study.rows import deal, n_repeats
from oodometer.study.spec import Spec, convert, read_toml, with_settings
from oodometer.study.tables import publish, run_facts, spent_in
from oodometer.study.work import Worker

__all__ = ["Line", "Plan", "Progress", "Study", "preview", "run"]

Progress = Callable[[str, float], None]
"""Called as work gets done, with what it was and how much of the whole (0 to 1) is done now."""


class Study:
    """What is to be computed; the same keys in Python, in TOML and on the command line.

    >>> study = Study(data={"id": "banks/cifar10", "ood": {"svhn": "banks/svhn"}}, detectors=["msp", "knn"])
    >>> results = study.run("runs/a")
    """

    def __init__(
        self,
        *,
        data: Mapping[str, Any] | None = None,
        detectors: Sequence[str | Mapping[str, Any]] | str | None = None,
        name: str = "study",
        trainer: str | Mapping[str, Any] = "frozen",
        exposure: str | Sequence[str] = "without",
        split: Mapping[str, Any] | None = None,
        tune: Mapping[str, Any] | None = None,
        metrics: Sequence[str] | None = None,
        seed: int = 0,
        **unknown: Any,
    ) -> None:
        given = {"data": data, "detectors": detectors, "split": split, "tune": tune, "metrics": metrics}
        known = {key: value for key, value in given.items() if value is not None}
        plain = {"name": name, "trainer": trainer, "exposure": exposure, "seed": seed}
        self.spec: Spec = convert({**known, **plain, **unknown})

    @classmethod
    def from_toml(cls, path: str | Path, settings: Sequence[str] = ()) -> Study:
        """A study file; `settings` such as "split.folds=3" go on top. Its paths start from the file's folder."""
        path = Path(path)
        made = cls.__new__(cls)
        made.spec = convert(with_settings(read_toml(path), settings), base=path.resolve().parent)
        return made

    def run(self, out: str | Path, **options: Any) -> Results:
        """Compute what is missing in the folder `out`; see `oodometer.run`."""
        return run(self, out, **options)

    def plan(self, *, device: str | None = None, threads: int = 1) -> Plan:
        """The folds and cells, without computing any."""
        return make_plan(self.spec, Options(device, threads))

    def folds(self) -> list[dict[str, Folds]]:
        """The folds of every repeat, by OOD set; labels alone decide them."""
        data = open_data(self.spec, own_head=False)
        labels, seed = self.spec.data.id.labels, self.spec.seed
        repeats = range(n_repeats(self.spec.split))
        return [deal(data, self.spec.split, labels=labels, seed=seed, repeat=repeat) for repeat in repeats]

    def __repr__(self) -> str:
        names = ", ".join(chosen.label for chosen in self.spec.detectors)
        return f"Study({self.spec.name!r}: {names} on {len(self.spec.data.ood) or 'drawn'} OOD sets)"


def run(
    study: Study | Mapping[str, Any] | str | Path,
    out: str | Path,
    *,
    n_jobs: int = 1,
    device: str | None = None,
    threads: int = 1,
    progress: Progress | None = None,
) -> Results:
    """Compute the cells that the folder `out` lacks, and write its tables.

    Finished cells are kept, whatever ended the run that made them; failed ones are tried again. `n_jobs` processes
    (−1: one a core) work on folds; each uses `threads` threads, so that results do not depend on `n_jobs`.

    >>> results = oodometer.run("study.toml", out="runs/a", n_jobs=4)
    """
    spec = study_of(study).spec
    folder = _folder(out, n_jobs, threads)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = make_plan(spec, Options(device, threads))
    said = [str(one.message) for one in caught]
    with locked(folder):
        start = time.perf_counter()
        store = Store(folder.absolute() / "cells")  # worker processes may have been started elsewhere
        said += _mended(store, folder)
        there = len(store.keys())
        share = _Share(progress, total_work(plan))
        heard, cpu = _compute(plan, store, n_jobs, share)
        kept = len(store.keys())
        timings = {"cells": time.perf_counter() - start, **spent_in(folder, cpu, kept - there), "kept": kept}
        facts = run_facts(plan, shlex.join(sys.argv), said + heard, timings)
        publish(plan, store, folder, facts, lambda: share("measuring", 0.0))
        share.done()
    results = Results(folder)
    for message in results.facts["warnings"]:
        warnings.warn(message, OodometerWarning, stacklevel=2)
    return results


def _folder(out: str | Path, n_jobs: int, threads: int) -> Path:
    for name, value, allowed in (("n_jobs", n_jobs, n_jobs == -1 or n_jobs > 0), ("threads", threads, threads > 0)):
        if not allowed:
            raise OodometerError(
                f"run: {name} needs a whole number from 1{' or −1' * (name == 'n_jobs')}; found {value}"
            )
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise OodometerError(f"run: {folder} is a file; results need a folder")
    return folder


def study_of(given: Study | Mapping[str, Any] | str | Path) -> Study:
    """A study, a study file, or the tables of one."""
    if isinstance(given, Study):
        return given
    if isinstance(given, str | Path):
        return Study.from_toml(given)
    if isinstance(given, Mapping):
        return Study(**given)
    raise OodometerError(f"run: a Study, a study file or its tables are needed; found {type(given).__name__}")


def _mended(store: Store, folder: Path) -> list[str]:
    """Clear away what a killed run left half-written, and cells that fail their checksum; which those were."""
    for place in (folder, folder / "cells", folder / "folds"):
        for partial in place.glob(".*.partial"):
            partial.unlink(missing_ok=True)
    damaged, keys = [], store.keys()
    for key in keys:
        try:
            store.read(key)
        except DamagedCellError as error:
            damaged.append(str(error).replace("run the study again, and this cell is computed anew", "computed anew"))
            store.discard(key)
    return damaged


class _Share:
    """Adds up work, and tells the progress how much of the whole it is."""

    def __init__(self, progress: Progress | None, total: float) -> None:
        self._progress, self._total, self._sum = progress, max(total, 1.0), 0.0

    def __call__(self, what: str, work: float) -> None:
        self._sum += work
        if self._progress is not None:
            self._progress(what, min(self._sum / self._total, 1.0))

    def done(self) -> None:
        self("done", self._total)


# ---------------------------------------------------------------------------------------------- workers


Done = tuple[list[tuple[str, float]], list[str], float]
"""What a worker process tells of a fold: its share of the work, what was warned of, and its CPU-seconds."""


def _compute(plan: Plan, store: Store, n_jobs: int, share: _Share) -> tuple[list[str], float]:
    """All missing cells; what was warned of, and the CPU-seconds of all processes."""
    if n_jobs == 1:
        start = time.process_time()
        worker = Worker(plan, store, share)
        for rows in plan.rows:
            worker.do(rows)
        return worker.said, time.process_time() - start
    said, total = [], 0.0
    for ticks, heard, cpu in _in_processes(plan, store, n_jobs):
        said += heard
        total += cpu
        for what, work in ticks:
            share(what, work)
    return said, total


def _in_processes(plan: Plan, store: Store, n_jobs: int) -> Iterator[Done]:
    """A job a fold, through joblib: its backends (loky, Dask, Ray) say where."""
    from joblib import Parallel, delayed

    jobs = [
        place
        for place, rows in enumerate(plan.rows)
        if not all(is_finished(plan, store, unit) for unit in plan.units(rows))
    ]
    if jobs:
        calls = (delayed(_do_fold)(plan, store, place, os.getpid()) for place in jobs)
        yield from Parallel(n_jobs=n_jobs, return_as="generator_unordered")(calls)


_workers: dict[tuple[str, Path], Worker] = {}
"""In a worker process: the plan and folder it works on, so that folds share what is derived from their pieces."""


def _do_fold(plan: Plan, store: Store, place: int, run_pid: int) -> Done:
    """One fold, in a worker process."""
    start = time.process_time()
    # A process outlives a run: the next one may be the same study in another folder.
    place_of_work = plan.digest, store.folder
    if place_of_work not in _workers:
        _end_with(run_pid)
        _workers.clear()
        _workers[place_of_work] = Worker(plan, store, lambda what, work: None)
    worker = _workers[place_of_work]
    ticks: list[tuple[str, float]] = []
    worker.tick, worker.said = lambda what, work: ticks.append((what, work)), []
    worker.do(worker.plan.rows[place])
    return ticks, worker.said, time.process_time() - start


def _end_with(run_pid: int) -> None:
    """End this worker when the run that started it is gone; a killed parent cannot tell its workers to stop."""
    if os.getppid() != run_pid:
        return  # it works in the run's own process, or on another machine

    def watch() -> None:
        while os.getppid() == run_pid:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

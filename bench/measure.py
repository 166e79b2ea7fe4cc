"""CPU-seconds and extra peak memory of one piece of work, each measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

REPEAT_UNTIL = 0.5
"""Short work is repeated for so many CPU-seconds; the fastest run counts."""


@dataclass(frozen=True)
class Cost:
    """CPU-seconds (all threads), wall seconds, and megabytes above what the inputs took."""

    cpu: float
    wall: float
    extra_mb: float


def cost_of(prepare: Callable[[], Callable[[], object]]) -> Cost:
    """Cost of the work that `prepare` returns; it is prepared afresh for every run, outside the clock."""
    _reset_peak()
    work = prepare()
    before = _status("VmRSS")
    _reset_peak()
    best = _timed(work)
    extra = (_status("VmHWM") - before) / 1024
    spent = best[0]
    while spent < REPEAT_UNTIL:
        again = _timed(prepare())
        spent += max(again[0], 1e-4)
        best = min(best, again)
    return Cost(*best, max(extra, 0.0))


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def _status(field: str) -> int:
    """A line of /proc/self/status in kilobytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def in_own_process(task: str, *arguments: str) -> Cost | str:
    """Run `python -m bench.task TASK …`, which prints a cost; a failure comes back as its last line."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.task", task, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1][:100]
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def show(cost: Cost) -> None:
    """Print a cost for `in_own_process`."""
    print(json.dumps(asdict(cost)))

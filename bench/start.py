"""How long the library and the command take to start (best of several fresh processes)."""

from __future__ import annotations

import subprocess
import sys
import time

from bench.table import Table

STARTS = {
    "python -c pass": ([sys.executable, "-c", "pass"], ""),
    "import oodometer": ([sys.executable, "-c", "import oodometer"], "0.15 s"),
    "oodometer --help": ([sys.executable, "-m", "oodometer", "--help"], "0.4 s"),
}
PASSES = 7


def report() -> None:
    """Print wall seconds, the interpreter's own start included and shown."""
    table = Table("start", "wall s", "goal")
    for name, (command, goal) in STARTS.items():
        table.row(name, f"{min(_seconds(command) for _ in range(PASSES)):.3f}", goal)


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - start

"""Every detector beside its peers: CPU-seconds of fit + score, and extra peak memory, as ratios with their goals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import openood, pytorch_ood
from bench.banks import SIZES
from bench.measure import Cost, in_own_process
from bench.table import Table

GOALS = {
    "S": {"mds": 8, "rmds": 8, "klm": 100, "gradnorm": 100, "openmax": 100, "vim": 1.5, "residual": 1.5,
          "relation": 1.5, "knn": 1.0, "nnguide": 1.0},
    "L": {"mds": 200, "rmds": 200},
}  # fmt: skip
AGAINST_OPENOOD = {"mds", "rmds", "klm", "gradnorm", "openmax"}
"""Goals stated against OpenOOD; all others against the fastest peer."""
OTHERS = 2.0
SLOW_ROWS = (400, 1200)
"""On bank L a peer scores so many rows; the cost of all rows follows the line through both."""


@dataclass(frozen=True)
class Row:
    """One method: our cost, the peers' costs, and what they come to."""

    method: str
    ours: Cost
    peers: dict[str, Cost]
    goal: float

    @property
    def ratio(self) -> float:
        """How many times cheaper than the peer the goal names."""
        if self.method in AGAINST_OPENOOD and "OpenOOD" in self.peers:
            return self.peers["OpenOOD"].cpu / self.ours.cpu
        return min(peer.cpu for peer in self.peers.values()) / self.ours.cpu


def methods() -> list[str]:
    """Methods with at least one peer."""
    return list(dict.fromkeys([*openood.PEERS, *pytorch_ood.PEERS]))


def rows(size: str, folder: Path, wanted: list[str]) -> Iterator[Row | str]:
    """Measure one method after the other."""
    for method in wanted:
        ours = in_own_process("ours", method, str(folder), str(SIZES[size].test))
        if isinstance(ours, str):
            yield f"{method}: {ours}"
            continue
        peers = dict(_peers(size, folder, method))
        failed = [f"{method}, {name}: {cost}" for name, cost in peers.items() if isinstance(cost, str)]
        measured = {name: cost for name, cost in peers.items() if isinstance(cost, Cost)}
        yield from failed
        if measured:
            yield Row(method, ours, measured, GOALS.get(size, {}).get(method, OTHERS))


def _peers(size: str, folder: Path, method: str) -> Iterator[tuple[str, Cost | str]]:
    if method in openood.PEERS:
        yield "OpenOOD", _peer("openood", size, folder, method)
    if method in pytorch_ood.PEERS and size != "L":
        yield "pytorch-ood", _peer("pytorch-ood", size, folder, method)


def _peer(side: str, size: str, folder: Path, method: str) -> Cost | str:
    every = SIZES[size].test
    if size != "L":
        return in_own_process(side, method, str(folder), str(every))
    few, more = (in_own_process(side, method, str(folder), str(count)) for count in SLOW_ROWS)
    if isinstance(few, str) or isinstance(more, str):
        return few if isinstance(few, str) else more
    step = (more.cpu - few.cpu) / (SLOW_ROWS[1] - SLOW_ROWS[0])
    return Cost(more.cpu + max(step, 0.0) * (every - SLOW_ROWS[1]), float("nan"), more.extra_mb)


def report(size: str, folder: Path, wanted: list[str]) -> None:
    """Print the table row by row."""
    table = Table("method", "ours s", "OpenOOD s", "pytorch-ood s", "ratio", "goal", "", "extra MB", "peer's MB")
    for row in rows(size, folder, wanted or methods()):
        if isinstance(row, str):
            table.note(row)
            continue
        cells = [f"{row.peers[name].cpu:.4f}" if name in row.peers else "–" for name in ("OpenOOD", "pytorch-ood")]
        verdict = "met" if row.ratio >= row.goal else "MISSED"
        memory = min(peer.extra_mb for peer in row.peers.values())
        table.row(
            row.method, f"{row.ours.cpu:.4f}", *cells, f"{row.ratio:.1f}×", f"{row.goal:g}×", verdict,
            f"{row.ours.extra_mb:.0f}", f"{memory:.0f}",
        )  # fmt: skip

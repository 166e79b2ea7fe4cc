"""Forward samples that 20 methods cost on a benchmark of CIFAR-10's size, counted inside the network."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from bench.table import Table
from oodometer import Bank, create, tune
from oodometer.models import extract

# OpenOOD v1.5's CIFAR-10 benchmark.
TRAIN, VAL, TEST, OOD_VAL = 50_000, 1_000, 9_000, 1_000
OOD_TESTS = {
    "cifar100": 9_000, "tin": 7_793, "mnist": 70_000, "svhn": 26_032, "texture": 5_640, "places365": 35_195,
}  # fmt: skip
METHODS = (
    "msp", "mls", "energy", "gen", "tempscale", "klm", "openmax", "odin", "mds", "rmds",
    "knn", "she", "relation", "nnguide", "fdbd", "vim", "residual", "react", "ash", "dice",
)  # fmt: skip
PEERS = 4_191_460
"""What OpenOOD forwards for 20 methods: each runs its own passes over the training, validation and test sets."""
GOAL = 600_000
SHARED = ("features", "logits", "labels")
SCORED_ROWS = 200
"""Rows a set on which every method scores: enough to show that the banks hold what it reads."""


class Counting(torch.nn.Module):
    """A linear classifier of tiny inputs that counts the rows it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(16, 24), torch.nn.Linear(24, 10)
        self.samples = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.samples += len(x)
        return self.uncounted(x)

    def uncounted(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.flatten(1)).relu())


def counted() -> tuple[dict[str, int], int]:
    """Forward samples of each step, and how many methods the banks served."""
    torch.manual_seed(0)
    network, steps, before = Counting(), {}, 0
    rows = np.random.default_rng(0)

    def made(step: str, count: int, *columns: str) -> Bank:
        nonlocal before
        x = rows.standard_normal((count, 1, 4, 4), dtype=np.float32)
        labels = network.uncounted(torch.from_numpy(x)).argmax(1).numpy()
        bank = extract(
            network, (x, labels), columns=(*SHARED, *columns), layers=None, device="cpu", batch_size=512, progress=False
        )
        steps[step] = steps.get(step, 0) + network.samples - before
        before = network.samples
        return bank

    grid = create("odin").card.grid
    every = f"logits.odin:temperatures={grid['temperature']},epsilons={grid['epsilon']}"
    train = made("training rows, once", TRAIN)
    val = made("validation rows, ODIN's whole grid", VAL, every)
    ood_val = made("validation rows, ODIN's whole grid", OOD_VAL, every)
    choice = tune.tune(
        "odin", tune.Train(train), tune.Validation(val), ood_val=tune.Validation(ood_val, source="tin"), rule="auroc"
    )
    chosen = "logits.odin:temperatures={temperature},epsilons={epsilon}".format(**choice.params)
    tests = [made("test rows, ODIN's chosen setting", count, chosen) for count in (TEST, *OOD_TESTS.values())]
    served = sum(_serves(name, choice.params, train, val, tests) for name in METHODS)
    assert network.samples == before, "scoring runs no network"
    return steps, served


def _serves(name: str, odin: dict[str, object], train: Bank, val: Bank, tests: list[Bank]) -> bool:
    detector = create(name, **(odin if name == "odin" else {"dim": 8} if name in ("vim", "residual") else {}))
    detector.fit(train.rows(slice(0, 5_000)), val=val)
    return all(np.isfinite(detector.score(bank.rows(slice(0, SCORED_ROWS)))).all() for bank in tests)


def report() -> None:
    """Print the count of each step and its sum beside the peer's."""
    table = Table("forward samples, 20 methods, CIFAR-10", "count", "OpenOOD", "ratio", "goal")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps, served = counted()
    for step, count in steps.items():
        table.row(step, f"{count:,}", "", "", "")
    total = sum(steps.values())
    table.row(f"together, {served} methods served", f"{total:,}", f"{PEERS:,}", f"{PEERS / total:.1f}×", f"≤ {GOAL:,}")

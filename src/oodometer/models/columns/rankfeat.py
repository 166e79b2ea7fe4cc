"""RankFeat's columns: logits of a network whose last maps have lost their largest singular component."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from oodometer.errors import OodometerError
from oodometer.models.columns import Pass, column
from oodometer.models.hooks import first_tensor
from oodometer.models.layers import PREFIX, Pooler, Wanted, modules_of

Change = Callable[[Tensor], Tensor]


# ---------------------------------------------------------------------------------------------- one map


def without_rank_one(matrices: Tensor) -> Tensor:
    """A − σ₁u₁v₁ᵀ of each matrix (rows × channels × positions), exactly.

    A v₁v₁ᵀ needs one singular vector: that of the smaller Gram matrix, in float64, comes about twice as fast as a
    full decomposition (three times on an accelerator).
    """
    a = matrices.double()
    if a.shape[1] < a.shape[2]:
        return without_rank_one(matrices.mT).mT
    top = torch.linalg.eigh(a.mT @ a).eigenvectors[..., -1:]
    rest: Tensor = a - (a @ top) @ top.mT
    return rest.to(matrices.dtype)


def without_power_iterate(matrices: Tensor, start: Tensor, iterations: int) -> Tensor:
    """A − σuvᵀ with u, v from power iteration: v ∝ Aᵀu, u ∝ Av, σ = uᵀAv."""
    a = matrices.double()
    u = start.to(a).expand(len(a), -1)[:, :, None]
    for _ in range(iterations):
        v = functional.normalize(a.mT @ u, dim=1)
        u = functional.normalize(a @ v, dim=1)
    rest: Tensor = a - (u.mT @ a @ v) * (u @ v.mT)
    return rest.to(matrices.dtype)


def on_matrices(change: Change, pooler: Pooler) -> Change:
    """A change of matrices as a change of maps: rows × channels × positions …, channels last, or tokens."""

    def of_map(x: Tensor) -> Tensor:
        if x.ndim < 3 or not x.is_floating_point():
            raise OodometerError(
                f"rankfeat: a block must give maps (rows × channels × positions …); found shape {tuple(x.shape)}: "
                "name the last blocks before pooling, e.g. blocks=('layer3', 'layer4')"
            )
        if x.ndim == 3:
            return change(x)
        maps = pooler(x, "none")
        changed = change(maps.flatten(2)).reshape(maps.shape)
        return changed if maps.shape == x.shape else changed.movedim(1, -1)

    return of_map


# ---------------------------------------------------------------------------------------------- the columns


@contextmanager
def changing(module: torch.nn.Module, change: Change) -> Iterator[None]:
    """While inside, what the module gives is changed before the rest of the network sees it."""

    def hook(module: torch.nn.Module, args: Any, output: Any) -> Any:
        x = first_tensor(output)
        if isinstance(output, Tensor):
            return change(output)
        if x is None or not isinstance(output, tuple):
            raise OodometerError(f"rankfeat: a block must give a tensor or a tuple; found {type(output).__name__}")
        return tuple(change(x) if part is x else part for part in output)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def logits_of_changed(run: Pass, blocks: tuple[str, ...] | None, change: Change) -> Tensor:
    """Rows × blocks × classes: one pass a block, with that block's map changed."""
    names = blocks or tuple(name.removeprefix(PREFIX) for name in run.layers)[-2:]
    if not names:
        raise OodometerError(
            "rankfeat: name the last blocks, e.g. blocks=('layer3', 'layer4'), or extract with layers='auto'"
        )
    of_map, found = on_matrices(change, Pooler.of(run.network.model)), []
    modules = modules_of(run.network.model, [Wanted(name) for name in names])
    with torch.no_grad():
        for name in names:
            with changing(modules[name], of_map):
                found.append(run.network(run.inputs.detach()).logits)
    return torch.stack(found, dim=1)


@column("logits.rankfeat")
@dataclass(frozen=True, kw_only=True)
class RankFeat:
    """Logits without the rank-1 part of the last blocks' maps, one block at a time (Song et al., NeurIPS 2022)."""

    blocks: tuple[str, ...] | None = None
    """Modules; by default the last two extracted layers."""

    def __call__(self, run: Pass) -> Tensor:
        return logits_of_changed(run, self.blocks, without_rank_one)


@column("logits.rankfeat.power")
@dataclass(frozen=True, kw_only=True)
class RankFeatPower:
    """The same with power iteration in place of the decomposition, from one seeded start for all rows."""

    blocks: tuple[str, ...] | None = None
    iterations: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise OodometerError(f"rankfeat: iterations must be 1 or more; found {self.iterations}")

    def __call__(self, run: Pass) -> Tensor:
        def change(matrices: Tensor) -> Tensor:
            start = np.random.default_rng(self.seed).standard_normal(matrices.shape[1])
            return without_power_iterate(matrices, torch.from_numpy(start), self.iterations)

        return logits_of_changed(run, self.blocks, change)

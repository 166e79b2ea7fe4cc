"""Intermediate layers: which ones tell most, and how a map or a token sequence becomes one vector a row."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from oodometer.errors import OodometerError
from oodometer.models.hooks import first_tensor

Pooling = Literal["mean", "mean+var", "token", "none"]
"""Average over positions; average and variance side by side; the class token; or the whole map."""
PREFIX = "layers."
CLASS_TOKENS = ("cls_token", "class_token", "class_embedding")
CONTAINERS = ("Sequential", "ModuleList")
BLOCKS = 2
"""So many equal blocks in a row make a transformer's trunk."""


@dataclass(frozen=True)
class Wanted:
    """A module to record, and how; without a pooling the class token if there is one, else the average."""

    module: str
    pooling: Pooling | None = None


def parse(layers: str | Iterable[str] | None) -> tuple[Wanted, ...] | None:
    """The layers a user named as `module` or `module:pooling`; None where they are to be found."""
    if layers == "auto":
        return None
    if layers is None or layers == "none":
        return ()
    found = tuple(map(_one, [layers] if isinstance(layers, str) else layers))
    names = [one.module for one in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise OodometerError(f"layers: {twice[0]!r} is named twice; a layer has one pooling")
    return found


def _one(text: str) -> Wanted:
    module, colon, pooling = text.removeprefix(PREFIX).partition(":")
    if colon and pooling not in get_args(Pooling):
        raise OodometerError(f"layers: {text!r}: pooling must be one of {', '.join(get_args(Pooling))}")
    return Wanted(module, cast(Pooling, pooling) if colon else None)


def modules_of(model: nn.Module, wanted: Sequence[Wanted]) -> dict[str, nn.Module]:
    """The modules of these layers; an error names the nearest one where a name is wrong."""
    known = dict(model.named_modules())
    for one in wanted:
        if one.module not in known or not one.module:
            near = difflib.get_close_matches(one.module, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            top = ", ".join(name for name, _ in model.named_children())
            raise OodometerError(f"layers: the network has no layer {one.module!r}; {hint}its outermost layers: {top}")
    return {one.module: known[one.module] for one in wanted}


# ---------------------------------------------------------------------------------------------- pooling


@dataclass(frozen=True)
class Pooler:
    """How this network's outputs are laid out."""

    class_token: bool
    sequences_end_in_positions: bool

    @classmethod
    def of(cls, model: nn.Module) -> Pooler:
        named = any(name.rpartition(".")[2] in CLASS_TOKENS for name, _ in model.named_parameters())
        return cls(named, any(isinstance(module, nn.Conv1d) for module in model.modules()))

    def default(self, x: Tensor) -> Pooling:
        """The class token where there is one (BROAD), else the average over positions."""
        return "token" if self.class_token and x.ndim == 3 and not self.sequences_end_in_positions else "mean"

    def __call__(self, x: Tensor, pooling: Pooling) -> Tensor:
        """Rows × channels; with pooling "none" rows × channels × positions …"""
        if x.ndim == 2:
            return x
        if self._channels_last(x):
            x = x.movedim(-1, 1)
        if pooling == "none":
            return x
        positions = x.flatten(2)
        if pooling == "token":
            return positions[:, :, 0]
        mean = positions.mean(2)
        if pooling == "mean":
            return mean
        return torch.cat([mean, positions.var(2, correction=0)], dim=1)

    def positions(self, x: Tensor) -> tuple[int, ...]:
        """The axes that pooling averages over."""
        return tuple(x.shape[1:-1] if self._channels_last(x) else x.shape[2:])

    def _channels_last(self, x: Tensor) -> bool:
        """Token sequences, and maps whose first two axes, not their last two, are the square (as Swin's)."""
        if x.ndim == 3:
            return not self.sequences_end_in_positions
        return x.ndim == 4 and x.shape[1] == x.shape[2] != x.shape[3]


# ---------------------------------------------------------------------------------------------- automatic choice


@dataclass(frozen=True)
class Seen:
    """One module's output: its shape without the rows, and the pooled tensor."""

    module: str
    kind: str
    shape: tuple[int, ...]
    positions: tuple[int, ...]
    pooling: Pooling
    pooled: Tensor


@dataclass
class Outputs:
    """Every module's output in the order of completion, pooled at once: an observer for `hooks.observing`."""

    pooler: Pooler
    rows: int
    seen: list[Seen] = field(default_factory=list)
    learned: bool = False

    def __call__(self, name: str, module: nn.Module, given: Tensor | None, output: Any) -> None:
        # What runs before any parameter (flatten, normalise) repeats the input.
        self.learned = self.learned or next(module.parameters(), None) is not None
        x = first_tensor(output)
        if x is None or not self.learned or x.ndim < 2 or len(x) != self.rows or not x.is_floating_point():
            return
        how = self.pooler.default(x)
        shape, positions = tuple(x.shape[1:]), self.pooler.positions(x)
        self.seen.append(Seen(name, type(module).__name__, shape, positions, how, self.pooler(x, how).detach()))


def choose(outputs: Outputs, head: str | None, width: int | None) -> tuple[dict[str, Tensor], tuple[Wanted, ...]]:
    """Blocks of a transformer; else the last map at each resolution (a stem and its stages); else one of each width."""
    seen = outputs.seen
    names = [one.module for one in seen]
    if head in names:
        seen = seen[: names.index(head)]
    # Of a module that runs several times, later batches keep the last output.
    last = {one.module: one for one in outputs.seen}
    seen = [one for one in seen if one is last[one.module]]
    maps = [one for one in seen if math.prod(one.positions) > 1]
    if maps:
        chosen = _blocks(maps) or _shrinking(_last_of_each(_outside_blocks(maps), lambda one: one.positions))
    else:
        # A layer as wide as the features is taken to be the features.
        chosen = _last_of_each([one for one in seen if one.shape[0] != width], lambda one: one.shape)
    return {PREFIX + one.module: one.pooled for one in chosen}, tuple(Wanted(one.module, one.pooling) for one in chosen)


def _outside_blocks(maps: Sequence[Seen]) -> list[Seen]:
    """Without the inside of blocks where it differs from their output: a block that halves starts at the stage before.

    A block is a module, no plain container, that sees two resolutions at the most.
    """
    inside: dict[str, set[int]] = {}
    for one in maps:
        for name in (one.module, *_ancestors(one.module)):
            inside.setdefault(name, set()).add(_scale(one))
    blocks = {one.module: one.positions for one in maps if one.kind not in CONTAINERS and len(inside[one.module]) <= 2}
    return [
        one for one in maps if all(blocks.get(name, one.positions) == one.positions for name in _ancestors(one.module))
    ]


def _scale(one: Seen) -> int:
    """The resolution in powers of two: padding makes 113 of 112 and nothing new."""
    return round(math.log2(math.prod(one.positions)) / len(one.positions))


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def _shrinking(seen: Sequence[Seen]) -> list[Seen]:
    """Without maps larger than an earlier one, which are attention weights and the like."""
    found: list[Seen] = []
    for one in seen:
        if not found or math.prod(one.positions) <= math.prod(found[-1].positions):
            found.append(one)
    return found


def _blocks(maps: Sequence[Seen]) -> list[Seen]:
    """The most modules of one class in one container that give token sequences of one shape, the outermost first."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[Seen]] = {}
    for one in maps:
        container, _, place = one.module.rpartition(".")
        if len(one.shape) == 2 and place[-1:].isdigit():
            groups.setdefault((container, one.kind, one.shape), []).append(one)
    most = max(groups.values(), key=lambda group: (len(group), -group[0].module.count(".")), default=[])
    return most if len(most) >= BLOCKS else []


def _last_of_each(seen: Sequence[Seen], key: Callable[[Seen], Hashable]) -> list[Seen]:
    last = {key(one): place for place, one in enumerate(seen)}
    return [seen[place] for place in sorted(last.values())]

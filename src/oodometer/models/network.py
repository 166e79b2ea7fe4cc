"""A classifier as extraction sees it: one pass gives logits, penultimate features and intermediate layers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oodometer.errors import OodometerError
from oodometer.models import heads, hooks, layers


@dataclass(frozen=True)
class Output:
    """What one pass gave, one entry a row; features only where the network has a linear head."""

    logits: Tensor
    features: Tensor | None
    layers: Mapping[str, Tensor]


@dataclass(frozen=True)
class Network:
    """A module on its device in evaluation mode, its head and the layers to record."""

    model: nn.Module
    found: heads.Found | None
    place: str
    wanted: tuple[layers.Wanted, ...]

    @property
    def head(self) -> nn.Module | None:
        return None if self.found is None else self.model.get_submodule(self.found.name)

    def __call__(self, inputs: Tensor) -> Output:
        candidates, pooled = heads.Candidates(), _Pooled(layers.Pooler.of(self.model), self.wanted)
        with ExitStack() as stack:
            if self.found is not None:
                stack.enter_context(hooks.observing({self.found.name: self._head()}, candidates))
            stack.enter_context(hooks.observing(layers.modules_of(self.model, self.wanted), pooled))
            outputs = _outputs(self.model(inputs))
        return Output(*self._logits_and_features(outputs, candidates), pooled.columns(len(inputs)))

    def _head(self) -> nn.Module:
        head = self.head
        assert head is not None, "asked for only where a head was found"
        return head

    def _logits_and_features(
        self, outputs: Mapping[str, Tensor], candidates: heads.Candidates
    ) -> tuple[Tensor, Tensor | None]:
        return _logits_and_features(self.found, self.place, self.head, outputs, candidates)


def discover(model: nn.Module, inputs: Tensor, head: str | bool | None, wanted: Any) -> tuple[Network, Output]:
    """Find head and layers during the pass over the first batch, and return what that pass gave: no row runs twice.

    `head` is a name, None (find it) or False (there is none); `wanted` are layers, or None (find them).
    """
    if isinstance(head, str):
        heads.check_name(model, head)
    candidates, pooler = heads.Candidates(), layers.Pooler.of(model)
    pooled = _Pooled(pooler, wanted or ())
    every = layers.Outputs(pooler, len(inputs))
    inner = {name: module for name, module in model.named_modules() if name} if wanted is None else {}
    with ExitStack() as stack:
        stack.enter_context(hooks.observing({} if head is False else heads.linear_layers(model), candidates))
        stack.enter_context(hooks.observing(layers.modules_of(model, wanted or ()), pooled))
        stack.enter_context(hooks.observing(inner, every))
        outputs = _outputs(model(inputs))
    found, place = None, next(iter(outputs))
    if head is not False:
        found, place = heads.find(candidates, outputs, named=head if isinstance(head, str) else None)
    logits, features = _logits_and_features(
        found, place, model.get_submodule(found.name) if found else None, outputs, candidates
    )
    columns = pooled.columns(len(inputs))
    if wanted is None:
        width = None if features is None else features.shape[1]
        columns, wanted = layers.choose(every, found.name if found else None, width)
    return Network(model, found, place, tuple(wanted)), Output(logits, features, columns)


def input_dtype(model: nn.Module) -> torch.dtype:
    """The precision of the network's first floating-point parameter: what its inputs have to be."""
    floating = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(floating, torch.float32)


def _outputs(output: Any) -> dict[str, Tensor]:
    found = heads.logits_of(output)
    if not found:
        tensor = hooks.first_tensor(output)
        shape = f"shape {tuple(tensor.shape)}" if tensor is not None else type(output).__name__
        raise OodometerError(f"the network must return rows × classes (or a tuple or mapping with such); found {shape}")
    return found


def _logits_and_features(
    found: heads.Found | None,
    place: str,
    head: nn.Module | None,
    outputs: Mapping[str, Tensor],
    candidates: heads.Candidates,
) -> tuple[Tensor, Tensor | None]:
    if found is None or head is None:
        return outputs[place], None
    features = candidates.features(found)
    if found.readout == "logits":
        return outputs[place], features
    weight, bias = heads.weights(head)
    return features.to(weight.dtype) @ weight.T + bias, features


@dataclass
class _Pooled:
    """An observer that keeps the wanted layers, pooled."""

    pooler: layers.Pooler
    wanted: tuple[layers.Wanted, ...]

    def __post_init__(self) -> None:
        self._poolings = {one.module: one.pooling for one in self.wanted}
        self._found: dict[str, Tensor] = {}

    def __call__(self, name: str, module: nn.Module, given: Tensor | None, output: Any) -> None:
        x = hooks.first_tensor(output)
        if x is not None:
            self._found[name] = self.pooler(x, self._poolings[name] or self.pooler.default(x))

    def columns(self, rows: int) -> dict[str, Tensor]:
        for one in self.wanted:
            x = self._found.get(one.module)
            if x is None or x.ndim < 2 or len(x) != rows:
                what = "did not run" if x is None else f"gives shape {tuple(x.shape)}"
                raise OodometerError(f"layers: {one.module!r} {what}: it needs one output a row ({rows} rows)")
        return {layers.PREFIX + one.module: self._found[one.module] for one in self.wanted}

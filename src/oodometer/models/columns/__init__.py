"""Columns a network's pass can fill: a registry of small producers, one new file here each.

A producer is a dataclass decorated with `@column("name")`; its fields are its parameters. It is called once a batch,
after the one shared forward pass, and returns a tensor with one entry a row:

    @column("logits.odin", gradients=True)
    @dataclass(frozen=True, kw_only=True)
    class Odin:
        '''Logits of inputs moved towards their predicted class (Liang et al., ICLR 2018).'''
        epsilon: float = 0.0014

        def __call__(self, run: Pass) -> torch.Tensor:
            (slope,) = torch.autograd.grad(loss(run.logits), run.inputs)
            return run.network(run.inputs - self.epsilon * slope.sign()).logits

`Pass` holds the inputs, what the shared pass gave, and the network for further passes. With `gradients=True` the
shared pass is differentiable with respect to `run.inputs`; use `torch.autograd.grad`, never `backward`, so that no
parameter's `.grad` changes, and `retain_graph=True`, since other columns share the pass. Discovery finds the file;
users write `columns=("features", "logits", "logits.odin:epsilon=0.002")`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from oodometer.data.preprocess import AnyPreprocessing
from oodometer.errors import OodometerError
from oodometer.text import split_parameters

SHARED = ("features", "logits", "labels")
"""Columns of the shared pass and of the data themselves."""
C = TypeVar("C", bound=type)


class Network(Protocol):
    """The classifier on its device, in evaluation mode: a further pass costs what the first one cost."""

    @property
    def model(self) -> torch.nn.Module:
        """The user's module, for hooks of your own (remove them again)."""

    @property
    def head(self) -> torch.nn.Module | None:
        """The last linear layer."""

    def __call__(self, inputs: torch.Tensor) -> Any:
        """An output with `logits`, `features` and `layers`."""


@dataclass(frozen=True)
class Pass:
    """One batch after its shared forward pass, on the network's device."""

    network: Network
    inputs: torch.Tensor
    logits: torch.Tensor
    features: torch.Tensor | None
    layers: Mapping[str, torch.Tensor]
    preprocessing: AnyPreprocessing | None


class Column(Protocol):
    """A producer of one column."""

    @property
    def name(self) -> str:
        """The column of the bank it fills."""

    @property
    def gradients(self) -> bool:
        """Whether the shared pass must be differentiable with respect to the inputs."""

    def __call__(self, run: Pass) -> torch.Tensor:
        """One entry a row."""


_REGISTRY: dict[str, Any] = {}


def column(name: str, *, gradients: bool = False) -> Callable[[C], C]:
    """Register a dataclass as the producer of the column of this name."""

    def register(made: C) -> C:
        made.name, made.gradients = name, gradients  # type: ignore[attr-defined]
        _REGISTRY[name] = made
        return made

    return register


def names() -> list[str]:
    """Columns that can be asked for besides features, logits and labels."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return sorted(_REGISTRY)


def producers(columns: Iterable[str | Column]) -> tuple[tuple[str, ...], tuple[Column, ...]]:
    """What was asked for: columns of the shared pass by name, and producers of the others."""
    shared, made = [], []
    for wanted in columns:
        if isinstance(wanted, str) and wanted in SHARED:
            shared.append(wanted)
        else:
            made.append(_create(wanted) if isinstance(wanted, str) else wanted)
    found = [*shared, *(one.name for one in made)]
    twice = sorted({name for name in found if found.count(name) > 1})
    if twice or not set(found) - {"labels"}:
        problem = f"column {twice[0]!r} is asked for twice" if twice else "no column that the network computes"
        raise OodometerError(f"columns: {problem}; found {', '.join(found) or 'nothing'}")
    return tuple(shared), tuple(made)


def describe(one: Column) -> dict[str, Any]:
    """A producer's name and parameters as plain values."""
    fields: list[str] = [entry.name for entry in dataclasses.fields(one)] if dataclasses.is_dataclass(one) else []
    return {"name": one.name} | {name: getattr(one, name) for name in fields}


def _create(text: str) -> Column:
    name, params = split_parameters(text, "column")
    known = [*SHARED, *names()]
    if name not in _REGISTRY:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        layers = "; intermediate layers are asked for with layers=…" if name.startswith("layers") else ""
        raise OodometerError(f"columns: unknown column {name!r}; {hint}known: {', '.join(known)}{layers}")
    fields = [entry.name for entry in dataclasses.fields(_REGISTRY[name])]
    for key in params:
        if key not in fields:
            raise OodometerError(f"column {name}: unknown parameter {key!r}; known: {', '.join(fields) or 'none'}")
    made: Column = _REGISTRY[name](**params)
    return made

"""Reading a network without touching it: hooks that come off again, and a model that is given back as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Observer = Callable[[str, nn.Module, Tensor | None, Any], None]
"""Called with a module's name, itself, its first input and its output, each time it has run."""


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """The model in evaluation mode on the device; afterwards its modes, tensors and gradients are those from before.

    Tensors are put back, not moved back: the caller's storage is the same, and two devices never become one.
    """
    modes = [(module, module.training) for module in model.modules() if hasattr(module, "training")]
    tensors = None if _lives_on(model, device) else _tensors(model)
    try:
        model.eval()
        if tensors is not None:
            model.to(device)
        yield model
    finally:
        for module, training in modes:
            module.training = training
        if tensors is not None:
            for held in tensors:
                held.put_back()


@contextmanager
def observing(modules: Mapping[str, nn.Module], observer: Observer) -> Iterator[None]:
    """Call the observer after each run of these modules; hooks are removed at the end, also on error."""
    with ExitStack() as handles:
        for name, module in modules.items():
            handle = module.register_forward_hook(_hook(name, observer), with_kwargs=True)
            handles.callback(handle.remove)
        yield


def _hook(name: str, observer: Observer) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = args[0] if args else next(iter(kwargs.values()), None)
        observer(name, module, given if isinstance(given, Tensor) else None, output)

    return hook


def first_tensor(output: Any) -> Tensor | None:
    """The output itself, or the first tensor of a tuple or mapping (as transformer blocks return them)."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, tuple | list):
        return next((found for found in output if isinstance(found, Tensor)), None)
    return output if isinstance(output, Tensor) else None


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel and torch.compile, which run copies or skip hooks."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrapped(model.module)
    inner = getattr(model, "_orig_mod", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


# ---------------------------------------------------------------------------------------------- tensors


@dataclass(frozen=True)
class _Held:
    """A parameter or buffer as it was: the object, and the storage that moving it replaces in place."""

    table: dict[str, Any]
    name: str
    tensor: Tensor
    data: Tensor
    gradient: Tensor | None
    gradient_data: Tensor | None

    @classmethod
    def of(cls, table: dict[str, Any], name: str) -> _Held:
        tensor = table[name]
        gradient = tensor.grad if isinstance(tensor, nn.Parameter) else None
        return cls(table, name, tensor, tensor.data, gradient, None if gradient is None else gradient.data)

    def put_back(self) -> None:
        # Gradients go first and come last: one on another device would not fit the data.
        self.tensor.grad = None
        self.tensor.data = self.data
        if self.gradient is not None and self.gradient_data is not None:
            self.gradient.data = self.gradient_data
            self.tensor.grad = self.gradient
        self.table[self.name] = self.tensor


def _lives_on(model: nn.Module, device: torch.device) -> bool:
    return all(tensor.device == device for tensor in [*model.parameters(), *model.buffers()])


def _tensors(model: nn.Module) -> list[_Held]:
    tables = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    return [_Held.of(table, name) for table in tables for name, tensor in table.items() if tensor is not None]

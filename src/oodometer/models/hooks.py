"""Reading a network without touching it: hooks that come off again, and a model that is given back as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
            _put_back(tensors)


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


def _lives_on(model: nn.Module, device: torch.device) -> bool:
    tensors = [*model.parameters(), *model.buffers()]
    return all(tensor.device == device for tensor in tensors)


def _tensors(model: nn.Module) -> list[tuple[nn.Module, str, str, Any, Any, Any]]:
    """Of every module: each parameter with its data and gradient, each buffer."""
    found: list[tuple[nn.Module, str, str, Any, Any, Any]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.append((module, "_parameters", name, parameter, parameter.data, parameter.grad))
        for name, buffer in module._buffers.items():
            found.append((module, "_buffers", name, buffer, None, None))
    return found


def _put_back(tensors: list[tuple[nn.Module, str, str, Any, Any, Any]]) -> None:
    for module, table, name, value, data, gradient in tensors:
        if data is not None:
            # Gradients go first: one of another device would not fit the data.
            value.grad = None
            value.data = data
            value.grad = gradient
        getattr(module, table)[name] = value

"""Weights into a model and their identity: safetensors, NPZ, and PyTorch files without running what they contain."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from oodometer.errors import OodometerError
from oodometer.readers import READERS

WRAPPERS = ("state_dict", "model_state_dict", "model", "net", "weights")
PREFIXES = ("module.", "_orig_mod.", "model.")
COUNTER = "num_batches_tracked"
"""A counter of BatchNorm's that evaluation never reads; exports often leave it out."""
SHOWN = 5


def load_weights(model: nn.Module, path: str | Path) -> nn.Module:
    """Load a .safetensors, .npz, .pt or .pth file into a model; every parameter must be there and must fit."""
    path = Path(path)
    found = read_weights(path)
    own = model.state_dict()
    for prefix in PREFIXES:
        if found and all(name.startswith(prefix) for name in found) and not any(n.startswith(prefix) for n in own):
            found = {name.removeprefix(prefix): value for name, value in found.items()}
    _check(own, found, path)
    model.load_state_dict(found, strict=False)
    return model


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a weights file by name."""
    if not path.is_file():
        raise OodometerError(f"{path}: no such weights file")
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return {name: torch.from_numpy(array) for name, array in READERS[suffix](path).items()}
    if suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return dict(load_file(path))
        except SafetensorError as error:
            raise OodometerError(f"{path} is truncated or no .safetensors file ({error}): copy it again") from None
    if suffix in (".pt", ".pth", ".bin", ".ckpt"):
        return _read_pytorch(path)
    raise OodometerError(f"{path}: weights are read from .safetensors, .npz, .pt or .pth files")


def _read_pytorch(path: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OodometerError(
            f"{path} is damaged or holds more than tensors ({reason}). Files that run code are never opened: save "
            "model.state_dict(), best as .safetensors"
        ) from None
    while isinstance(content, Mapping):
        inner = next((content[name] for name in WRAPPERS if isinstance(content.get(name), Mapping)), None)
        if inner is None:
            break
        content = inner
    tensors = {str(k): v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, Mapping) else {}
    if not tensors:
        raise OodometerError(f"{path} holds no tensors by name: save model.state_dict()")
    return tensors


def _check(own: Mapping[str, Any], found: Mapping[str, Tensor], path: Path) -> None:
    missing = [name for name in own if name not in found and not name.endswith(COUNTER)]
    spare = [name for name in found if name not in own]
    if missing or spare:
        parts = [f"lacks {_some(missing)}"] if missing else []
        parts += [f"has {_some(spare)}, which the model lacks"] if spare else []
        raise OodometerError(f"{path} {' and '.join(parts)}: is it another architecture's?")
    for name, value in found.items():
        if tuple(own[name].shape) != tuple(value.shape):
            raise OodometerError(
                f"{path}: {name} has shape {tuple(value.shape)}, the model's has {tuple(own[name].shape)}: another "
                "architecture, or another number of classes (pass it to the factory, e.g. classes=100)"
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of all parameters and buffers with their names: equal for equal networks on every machine."""
    found = hashlib.sha256()
    for name, value in [*sorted(model.state_dict().items()), *constants(model)]:
        if not isinstance(value, Tensor):
            found.update(f"{name}:{value!r}\n".encode())
            continue
        found.update(f"{name}:{value.dtype}:{tuple(value.shape)}\n".encode())
        # Viewed as bytes, since NumPy has no bfloat16.
        plain = value.detach().cpu().contiguous().reshape(-1)
        found.update(plain.view(torch.uint8).numpy().data if plain.numel() else b"")
    return found.hexdigest()


def constants(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a frozen TorchScript module, whose parameters have become constants of its graph."""
    if not isinstance(model, torch.jit.ScriptModule) or not hasattr(model, "forward"):
        return
    nodes = list(model.inlined_graph.nodes())
    for place, node in enumerate(nodes):
        for block in node.blocks():
            nodes.extend(block.nodes())  # read by this very loop
        value = node.output().toIValue() if node.kind() == "prim::Constant" and node.outputsSize() == 1 else None
        if isinstance(value, Tensor):
            yield f"constant {place}", value

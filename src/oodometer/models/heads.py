"""The classifier's head, found in one pass: the last linear layer that turns its own input into the logits."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from oodometer.errors import OodometerError

TOLERANCE = 1e-3
"""Largest allowed gap between head(features) and the logits, relative to the largest logit."""
HALF_TOLERANCE = 2e-2
SHOWN = 8
"""Candidates an error lists, the last ones first."""

Reduction = Callable[[Tensor], Tensor]
# A head may run on every position (tokens, pixels) before the positions are averaged: linear layers and means commute.
REDUCTIONS: Mapping[str, Reduction] = {
    "rows": lambda x: x,
    "mean of tokens": lambda x: x.flatten(1, -2).mean(1),
    "first token": lambda x: x.flatten(1, -2)[:, 0],
    "mean of positions": lambda x: x.flatten(2).mean(2),
}
READOUTS: Mapping[str, Reduction] = {
    "logits": lambda z: z,
    "softmax": lambda z: z.softmax(1),
    "log_softmax": lambda z: z.log_softmax(1),
}
"""What a network may return of its logits."""


@dataclass(frozen=True)
class Found:
    """Where the head is, how its input becomes one feature vector a row, and what the network returns of the logits."""

    name: str
    reduction: str
    readout: str


@dataclass
class Candidates:
    """Linear layers as they run: an observer for `hooks.observing` that keeps one vector a row of each input."""

    calls: list[tuple[str, nn.Module, str, Tensor]] = field(default_factory=list)

    def __call__(self, name: str, module: nn.Module, given: Tensor | None, output: Any) -> None:
        if given is not None:
            vectors = {reduction: REDUCTIONS[reduction](given).detach() for reduction in _reductions(module, given)}
            self.calls += [(name, module, reduction, x) for reduction, x in vectors.items()]

    def features(self, found: Found) -> Tensor:
        """The penultimate features of the pass that was observed."""
        return next(x for name, _, how, x in reversed(self.calls) if (name, how) == (found.name, found.reduction))


def is_linear(module: nn.Module) -> bool:
    """Whether a module can be a head: Linear, or a convolution that looks at one position."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return module.groups == 1 and all(size == 1 for size in module.kernel_size)
    weight = getattr(module, "weight", None)
    return isinstance(module, nn.Linear) or (
        type(module).__name__.endswith("Linear") and isinstance(weight, Tensor) and weight.ndim == 2
    )


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that can be heads, by name."""
    return {name: module for name, module in model.named_modules() if is_linear(module)}


def weights(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight (classes × features) and bias of a linear layer, zeros for a layer without bias."""
    weight = module.weight.detach().flatten(1)  # type: ignore[operator]
    bias = getattr(module, "bias", None)
    return weight, weight.new_zeros(len(weight)) if bias is None else bias.detach()


def find(candidates: Candidates, outputs: Mapping[str, Tensor], *, named: str | None = None) -> tuple[Found, str]:
    """The head, and which of the network's outputs its logits are; an error with all candidates if there is none."""
    calls = [call for call in candidates.calls if named is None or call[0] == named or call[0].startswith(f"{named}.")]
    for name, module, reduction, features in reversed(calls):
        told = _apply(module, features)
        for place, output in outputs.items():
            readout = _readout(told, output)
            if readout is not None:
                return Found(name, reduction, readout), place
    raise OodometerError(_not_found(candidates, calls, outputs, named))


def check_name(model: nn.Module, named: str) -> None:
    """Refuse a name that no module has."""
    modules = dict(model.named_modules())
    if named not in modules:
        near = difflib.get_close_matches(named, [name for name in modules if name], n=1)
        listed = ", ".join(list(linear_layers(model))[-SHOWN:]) or "none"
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise OodometerError(f"head: the network has no layer {named!r}; {hint}linear layers: {listed}")


def logits_of(output: Any) -> dict[str, Tensor]:
    """Tensors of a network's output that may be logits (rows × classes), the likeliest first."""
    if isinstance(output, Tensor):
        return {"": _flat(output)} if _flat(output).ndim == 2 else {}
    named = dict(output.items()) if isinstance(output, Mapping) else {}
    if isinstance(output, tuple | list):
        named = {str(place): value for place, value in enumerate(output)}
    if not named and hasattr(output, "logits"):
        named = {"logits": output.logits}
    found = {str(name): _flat(value) for name, value in named.items() if isinstance(value, Tensor)}
    order = sorted(found, key=lambda name: name != "logits")
    return {name: found[name] for name in order if found[name].ndim == 2}


# ---------------------------------------------------------------------------------------------- helpers


def _flat(x: Tensor) -> Tensor:
    """Rows × classes × 1 × 1, as fully convolutional networks return them, without the ones."""
    return x.flatten(1) if x.ndim > 2 and x[0].numel() == x.shape[1] else x


def _reductions(module: nn.Module, given: Tensor) -> Iterator[str]:
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        yield from ("mean of positions",) if given.ndim > 2 else ()
    elif given.ndim == 2:
        yield "rows"
    elif given.ndim > 2:
        yield from ("mean of tokens", "first token")


def _apply(module: nn.Module, features: Tensor) -> Tensor:
    weight, bias = weights(module)
    return (features.to(weight.dtype) @ weight.T + bias).float()


def _readout(told: Tensor, output: Tensor) -> str | None:
    """What of the logits the output is; None if it is something else. Rows that are not finite prove nothing."""
    if told.shape != output.shape:
        return None
    given = output.detach()
    tolerance = TOLERANCE if given.dtype in (torch.float32, torch.float64) else HALF_TOLERANCE
    finite = torch.isfinite(told).all(1) & torch.isfinite(given).all(1)
    if not bool(finite.any()):
        # Not one row to compare: whoever reads the logits next will refuse them.
        return None if bool(torch.isfinite(given).all(1).any()) else "logits"
    told, given = told[finite], given[finite]
    for readout, function in READOUTS.items():
        expected = function(told)
        scale = max(float(expected.abs().max()), float(given.abs().max()), 1e-6)
        if float((expected - given.float()).abs().max()) <= tolerance * scale:
            return readout
    return None


def _not_found(
    candidates: Candidates,
    calls: list[tuple[str, nn.Module, str, Tensor]],
    outputs: Mapping[str, Tensor],
    named: str | None,
) -> str:
    wanted = next(iter(outputs.values()))
    what = "no linear layer gives" if named is None else f"layer {named!r} does not give"
    lines = [
        f"head: {what} the network's {wanted.shape[1]} outputs a row from its own input.",
        "Candidates, the last to run first:",
        *(f"  {_candidate(*call, wanted)}" for call in reversed((calls or candidates.calls)[-SHOWN:])),
        "Name the layer with head='…' (--head), or pass head=False (--head none) for logits without features and head.",
    ]
    if not candidates.calls:
        lines[1:3] = ["It runs no Linear layer and no 1×1 convolution that hooks can see."]
    return "\n".join(lines)


def _candidate(name: str, module: nn.Module, reduction: str, features: Tensor, wanted: Tensor) -> str:
    weight, _ = weights(module)
    shape = f"{name} ({weight.shape[1]} → {weight.shape[0]}, {reduction})"
    if len(weight) != wanted.shape[1]:
        return f"{shape}: another number of outputs"
    gap = (_apply(module, features) - wanted.detach().float()).abs().max()
    return f"{shape}: differs from the outputs by up to {float(gap):.3g}"

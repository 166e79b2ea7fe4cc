"""ODIN's and iODIN's columns: logits of the inputs after one signed gradient step, for any grid of settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oodometer.errors import OodometerError
from oodometer.models.columns import Pass, column

Std = float | tuple[float, ...] | None


# ---------------------------------------------------------------------------------------------- the step


def input_gradient(outputs: Tensor, inputs: Tensor, direction: Tensor) -> Tensor:
    """∇_x ⟨direction, outputs⟩; the pass stays whole for other columns, and parameters get no gradient."""
    if not (outputs.requires_grad and inputs.requires_grad):
        raise OodometerError(
            "the network's outputs do not depend differentiably on its inputs (a no_grad, a detach or integers inside "
            "the network): columns that move inputs need the gradient"
        )
    (found,) = torch.autograd.grad(outputs, inputs, direction, retain_graph=True, allow_unused=True)
    if found is None:
        raise OodometerError("the network's outputs do not depend on its inputs: there is no gradient to follow")
    return found


def signs(gradient: Tensor, sign0: int = 0) -> Tensor:
    """The sign of each entry; `sign0` stands for the sign of zero (some implementations take +1)."""
    found = torch.sign(gradient)
    return torch.where(gradient == 0, float(sign0), found) if sign0 else found


def scale_of(run: Pass, std: Std) -> Tensor:
    """σ of the channels: given, else what the preprocessing divides by, else 1; shaped to divide the inputs."""
    x = run.inputs
    declared = getattr(run.preprocessing, "std", ()) or 1.0
    values = torch.as_tensor(declared if std is None else std, dtype=x.dtype, device=x.device).reshape(-1)
    if len(values) not in (1, x.shape[1]) or not bool((values > 0).all() and values.isfinite().all()):
        raise OodometerError(
            f"std must be one positive number, or one for each of the inputs' {x.shape[1]} channels; found "
            f"{values.tolist()}: give the standard deviations that the preprocessing divides by"
        )
    return values.reshape(1, -1, *[1] * (x.ndim - 2))


def moved(run: Pass, step: Tensor) -> Any:
    """The network's output for x − step."""
    with torch.no_grad():
        return run.network(run.inputs.detach() - step)


def as_numbers(name: str, values: float | Sequence[float], *, above_zero: bool = False) -> tuple[float, ...]:
    """A number or several, each once, as a tuple."""
    found = tuple(float(value) for value in ([values] if isinstance(values, int | float) else values))
    low_enough = all(0 < value < torch.inf if above_zero else 0 <= value < torch.inf for value in found)
    if not found or len(set(found)) < len(found) or not low_enough:
        raise OodometerError(
            f"{name} must be finite numbers {'above 0' if above_zero else 'of 0 or more'}, each once; found {values!r}"
        )
    return found


# ---------------------------------------------------------------------------------------------- the loss


def loss_direction(logits: Tensor, temperature: float) -> Tensor:
    """∇_z CE(z/T, ŷ) of each row up to a positive factor: softmax over the classes but ŷ, and −1 at ŷ.

    Only the sign of the input's gradient counts. The plain p − e_ŷ loses its entry at ŷ, or all of them, where p_ŷ
    rounds to one, and a batch mean can underflow; this multiple of it does neither.
    """
    if logits.shape[1] < 2:
        raise OodometerError("ODIN needs two classes or more: with one the softmax is 1 for every input")
    top = logits.argmax(dim=1, keepdim=True)
    others = (logits / temperature).scatter(1, top, -torch.inf).softmax(dim=1)
    return others.scatter(1, top, -1.0)


def largest_entry(gradient: Tensor) -> Tensor:
    """One at the entry of largest size in each row (the first of equal ones), zero elsewhere."""
    flat = gradient.flatten(1).abs()
    return torch.zeros_like(flat).scatter(1, flat.argmax(dim=1, keepdim=True), 1.0).reshape(gradient.shape)


# ---------------------------------------------------------------------------------------------- the columns


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Temperatures × step lengths, and what a step is measured in."""

    temperatures: float | tuple[float, ...] = (1000.0,)
    epsilons: float | tuple[float, ...] = (0.0014,)
    std: Std = None
    """σ of the channels: inputs move by ε/σ. By default what the preprocessing divides by, so that ε is in pixels."""
    sign0: int = 0
    """The sign of a zero gradient."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperatures", as_numbers("temperatures", self.temperatures, above_zero=True))
        object.__setattr__(self, "epsilons", as_numbers("epsilons", self.epsilons))
        if self.sign0 not in (-1, 0, 1):
            raise OodometerError(f"sign0 must be -1, 0 or 1; found {self.sign0!r}")

    def logits(self, run: Pass, chosen: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows × settings × classes, the step lengths varying fastest.

        The shared pass serves all gradients; each T costs a backward pass and each (T, ε > 0) a forward pass.
        """
        plain, scale = run.logits.detach(), scale_of(run, self.std)
        found = []
        for temperature in as_numbers("temperatures", self.temperatures):
            step = None
            for epsilon in as_numbers("epsilons", self.epsilons):
                if epsilon and step is None:
                    step = self._step(run, temperature, chosen) / scale
                found.append(moved(run, epsilon * step).logits if step is not None and epsilon else plain)
        return torch.stack(found, dim=1)

    def _step(self, run: Pass, temperature: float, chosen: Callable[[Tensor], Tensor]) -> Tensor:
        gradient = input_gradient(run.logits, run.inputs, loss_direction(run.logits.detach(), temperature))
        return signs(gradient, self.sign0) * chosen(gradient)


@column("logits.odin", gradients=True)
@dataclass(frozen=True, kw_only=True)
class ODIN(Steps):
    """z(x − ε·sign(∇_x CE(z/T, ŷ))/σ) for each T and ε (Liang et al., ICLR 2018)."""

    def __call__(self, run: Pass) -> Tensor:
        return self.logits(run, torch.ones_like)


@column("logits.iodin", gradients=True)
@dataclass(frozen=True, kw_only=True)
class IODIN(Steps):
    """As ODIN, but only the entry with the largest gradient moves (OpenOOD's iODIN)."""

    def __call__(self, run: Pass) -> Tensor:
        return self.logits(run, largest_entry)

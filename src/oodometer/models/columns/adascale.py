"""AdaScale's column: features of the input after its least important entries were moved."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oodometer.errors import OodometerError
from oodometer.models.columns import Pass, column
from oodometer.models.columns.odin import input_gradient, moved


def smallest_entries(gradient: Tensor, count: int) -> Tensor:
    """One at the entries of smallest size in each row (the first of equal ones), zero elsewhere."""
    flat = gradient.flatten(1).abs()
    places = flat.argsort(dim=1, stable=True)[:, :count]
    return torch.zeros_like(flat).scatter(1, places, 1.0).reshape(gradient.shape)


@column("features.adascale", gradients=True)
@dataclass(frozen=True, kw_only=True)
class AdaScale:
    """h(x + .5·sign(∇_x z_ŷ)) on the o = 5 % of the entries with the smallest gradient (Regmi, 2025)."""

    share: float = 0.05
    step: float = 0.5
    """In units of the preprocessed inputs."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or not 0 < self.step < torch.inf:
            raise OodometerError(
                f"adascale: share must be above 0 and at most 1, step above 0; found {self.share} and {self.step}"
            )

    def __call__(self, run: Pass) -> Tensor:
        if run.features is None:
            raise OodometerError("adascale needs penultimate features: name the head with head='…'")
        top = run.logits.detach().argmax(dim=1, keepdim=True)
        direction = torch.zeros_like(run.logits).scatter(1, top, 1.0)
        gradient = input_gradient(run.logits, run.inputs, direction)
        count = int(gradient[0].numel() * self.share) if len(gradient) else 0
        if not count:
            raise OodometerError(f"adascale: share={self.share} of {gradient[0].numel()} input entries is none")
        # A step of −(−gradient): the logit of the predicted class rises.
        features: Tensor = moved(run, -self.step * torch.sign(gradient) * smallest_entries(gradient, count)).features
        return features

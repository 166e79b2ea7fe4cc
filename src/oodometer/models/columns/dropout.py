"""Monte-Carlo dropout's column: logits of many passes, each with its own units silenced."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from oodometer.detectors.mcd import dropout_masks
from oodometer.errors import OodometerError, OodometerWarning
from oodometer.models import heads
from oodometer.models.columns import Pass, column

WHOLE_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
ALPHA = (nn.AlphaDropout, nn.FeatureAlphaDropout)
SATURATED = -1.7580993408473766
"""What a SELU gives far below zero: alpha dropout silences units to it, and keeps mean and variance."""


def dropout_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers that drop anything, by name."""
    return {name: one for name, one in model.named_modules() if isinstance(one, _DropoutNd) and one.p > 0}


def dropped(x: Tensor, layer: nn.Module, rng: np.random.Generator) -> Tensor:
    """What the layer gives in training, with one mask for all rows (of whole channels, for layers that drop those)."""
    p = float(layer.p)  # type: ignore[arg-type]
    shape = (1, x.shape[1], *[1] * (x.ndim - 2)) if isinstance(layer, WHOLE_CHANNELS) else (1, *x.shape[1:])
    kept = torch.as_tensor(rng.random(shape) >= p, dtype=x.dtype, device=x.device)
    if not isinstance(layer, ALPHA):
        return x * kept / (1 - p) if p < 1 else torch.zeros_like(x)
    # Klambauer et al. (NeurIPS 2017), §3: an affine map restores mean 0 and variance 1.
    a = ((1 - p) * (1 + p * SATURATED**2)) ** -0.5 if p < 1 else 0.0
    return a * (x * kept + SATURATED * (1 - kept)) - a * p * SATURATED


@dataclass
class Dropping:
    """Hooks that let the dropout layers drop, and nothing else change: every module stays in evaluation mode."""

    layers: Mapping[str, nn.Module]
    rows: int
    seed: int
    number: int = 0
    """Of the pass: it and the call's place in the pass name the mask."""
    calls: int = 0
    first: Tensor | None = None
    """What the first call of the pass was given."""

    @contextmanager
    def switched_on(self, number: int) -> Iterator[None]:
        self.number, self.calls, self.first = number, 0, None
        with ExitStack() as stack:
            for layer in self.layers.values():
                stack.callback(layer.register_forward_hook(self._hook).remove)
            yield

    def drop(self, given: Tensor, layer: nn.Module, number: int, call: int = 0) -> Tensor:
        return dropped(given, layer, np.random.default_rng((self.seed, number, call)))

    def dropped_alone(self, features: Tensor | None) -> Tensor | None:
        """The head's input, if that is all that was dropped: further passes are then passes of the head."""
        first = self.first
        if features is None or first is None or not self.calls == len(self.layers) == 1:
            return None
        return features if first.shape == features.shape and torch.equal(first, features) else None

    def _hook(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if output.ndim < 2 or len(output) % self.rows:
            raise OodometerError(
                f"dropout: a layer drops {tuple(output.shape)}, whose first axis is not the {self.rows} rows: one mask "
                "for all rows is impossible. Use where='features'"
            )
        self.first = output if self.first is None else self.first
        self.calls += 1
        return self.drop(output, layer, self.number, self.calls - 1)


@column("logits.mcd")
@dataclass(frozen=True, kw_only=True)
class MCDropout:
    """Logits of R passes with dropout (Gal & Ghahramani, ICML 2016): rows × passes × classes.

    Only dropout layers drop; normalisation layers never leave evaluation mode. All rows of a pass share its masks, so
    that a row's value depends neither on its neighbours nor on its place. A network without dropout layers gets dropout
    on its penultimate features: R passes of the head.
    """

    passes: int = 50
    where: Literal["auto", "layers", "features"] = "auto"
    """The network's dropout layers; its penultimate features; or (auto) the layers where there are any."""
    p: float = 0.5
    """Probability that a penultimate feature is dropped; dropout layers have their own."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.passes < 2 or not 0 < self.p < 1 or self.where not in ("auto", "layers", "features"):
            raise OodometerError(
                "dropout: two passes or more, p between 0 and 1, where 'auto', 'layers' or 'features' are needed; "
                f"found passes={self.passes}, p={self.p}, where={self.where!r}"
            )

    def __call__(self, run: Pass) -> Tensor:
        layers = {} if self.where == "features" else dropout_layers(run.network.model)
        with torch.no_grad():
            if layers:
                return self._of_layers(run, layers)
            self._say_there_are_none()
            return self._of_features(run)

    def _say_there_are_none(self) -> None:
        told = "the network has no dropout layer with p > 0"
        if self.where == "layers":
            raise OodometerError(f"dropout: {told}: use where='features', which drops penultimate features")
        if self.where == "auto":
            warnings.warn(f"dropout: {told}: penultimate features are dropped", OodometerWarning, stacklevel=4)

    def _of_features(self, run: Pass) -> Tensor:
        h, head = run.features, run.network.head
        if h is None or head is None:
            raise OodometerError("dropout on the features needs them and a head: name the head with head='…'")
        masks = dropout_masks(h.shape[1], passes=self.passes, p=self.p, seed=self.seed)
        return torch.stack([_head(head, h * torch.as_tensor(one).to(h)) for one in masks], dim=1)

    def _of_layers(self, run: Pass, layers: Mapping[str, nn.Module]) -> Tensor:
        dropping = Dropping(layers, len(run.inputs), self.seed)
        found = []
        for number in range(self.passes):
            alone = dropping.dropped_alone(run.features) if number else None
            if alone is not None:
                found.append(_head(run.network.head, dropping.drop(alone, next(iter(layers.values())), number)))
                continue
            with dropping.switched_on(number):
                found.append(run.network(run.inputs.detach()).logits)
            if not dropping.calls:
                raise OodometerError(
                    f"dropout: none of the network's dropout layers ({', '.join(layers)}) ran: use where='features'"
                )
        return torch.stack(found, dim=1)


def _head(head: nn.Module | None, features: Tensor) -> Tensor:
    assert head is not None, "features come with a head"
    weight, bias = heads.weights(head)
    return features.to(weight.dtype) @ weight.T + bias

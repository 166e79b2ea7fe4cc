"""MDSEns' column: Mahalanobis distances of all layers, each of the input moved towards that layer's nearest class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from oodometer.arrays import namespace, pooled, real
from oodometer.bank import Bank
from oodometer.detectors.mds import nearest_squared
from oodometer.detectors.mds_layers import Layer
from oodometer.errors import OodometerError
from oodometer.models.columns import Pass, column
from oodometer.models.columns.odin import Std, as_numbers, input_gradient, moved, scale_of, signs


@column("mdsens", gradients=True)
@dataclass(frozen=True, kw_only=True)
class MDSEnsemble:
    """Squared distance to the nearest class of each layer after a step that reduces it (Lee et al., NeurIPS 2018).

    `train` is the bank of the training rows with their layers and labels, or its folder: each layer's class means and
    covariance come from it. Extract with the same layers.
    """

    train: Bank | str | Path
    layers: tuple[str, ...] | None = None
    """Columns, e.g. ("layers.block1", "layers.block2"); by default all layers of the training bank."""
    epsilons: float | tuple[float, ...] = (0.0014,)
    std: Std = None
    """σ of the channels: inputs move by ε/σ. By default what the preprocessing divides by, so that ε is in pixels."""
    sign0: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilons", as_numbers("epsilons", self.epsilons))
        train = self.train if isinstance(self.train, Bank) else Bank.open(self.train)
        names = train.layers if self.layers is None else tuple(self.layers)
        absent = [name for name in names if name not in train.columns] + (["labels"] if "labels" not in train else [])
        if absent or not names:
            raise OodometerError(
                f"mdsens: the training bank lacks {', '.join(absent) or 'layers'}; it has {', '.join(train.columns)}: "
                "extract the training rows with layers='auto' and their labels first"
            )
        object.__setattr__(self, "layers", names)
        object.__setattr__(self, "_fitted", tuple(Layer.of(train, name) for name in names))
        # What describes this column is which rows it was fitted on, not their values.
        object.__setattr__(self, "train", train.fingerprint)

    def __call__(self, run: Pass) -> Tensor:
        """Rows × step lengths × layers. Each ε > 0 costs a forward and, once for all, a backward pass a layer."""
        fitted: tuple[Layer, ...] = self._fitted  # type: ignore[attr-defined]
        inputs, maps = _layers(run, [layer.column for layer in fitted])
        scale = scale_of(run, self.std)
        found = [self._of_layer(run, layer, maps[layer.column], inputs, scale) for layer in fitted]
        return torch.stack(found, dim=2)

    def _of_layer(self, run: Pass, layer: Layer, here: Tensor, inputs: Tensor, scale: Tensor) -> Tensor:
        """Rows × step lengths."""
        epsilons = as_numbers("epsilons", self.epsilons)
        distances = nearest(layer, here)
        step = torch.zeros_like(inputs)
        if any(epsilons):
            step = signs(input_gradient(distances, inputs, torch.ones_like(distances)), self.sign0) / scale
        found = [
            nearest(layer, moved(run, epsilon * step).layers[layer.column]) if epsilon else distances.detach()
            for epsilon in epsilons
        ]
        return torch.stack(found, dim=1)


def nearest(layer: Layer, x: Tensor) -> Tensor:
    """Squared Mahalanobis distance to the nearest class mean, differentiable: its gradient is that class's."""
    with torch.autocast(x.device.type, enabled=False):  # whitening magnifies what half precision rounds
        white = layer.whitening(pooled(real(x)))
        return cast(Tensor, nearest_squared(white, layer.points, namespace(white)))


def _layers(run: Pass, names: Sequence[str]) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The layers as functions of the inputs: of the shared pass, or of another where it recorded values alone."""
    absent = [name for name in names if name not in run.layers]
    if absent:
        raise OodometerError(
            f"mdsens: this pass does not record {', '.join(absent)}; it records {', '.join(run.layers) or 'none'}: "
            f"extract with layers=[{', '.join(repr(name) for name in names)}], as the training bank was"
        )
    if all(run.layers[name].requires_grad for name in names):
        return run.inputs, run.layers
    with torch.enable_grad():
        inputs = run.inputs.detach().requires_grad_()
        return inputs, run.network(inputs).layers

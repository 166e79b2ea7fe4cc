"""A network that is trained here: an encoder, the classifier's head on its features, and a confidence branch."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from oodometer.errors import OodometerError
from oodometer.models.train.images import scaled

CONFIDENCE_WIDTH, CONFIDENCE_LAYERS = 400, 4
"""ConfidNet's branch (Corbière et al., NeurIPS 2019, supplement B.1): four hidden layers of 400 ReLUs."""


class Network(nn.Module):
    """Pixels to (features, outputs); outputs are the C logits, and a reservation after them for Deep Gamblers.

    The head is the body's own last linear layer, or a new one where the number of outputs differs.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        body: nn.Module,
        body_classes: int,
        *,
        classes: int,
        outputs: int,
        moments: tuple[Tensor, Tensor],
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.classes = classes
        self.channels = _first_channels(body)
        self.head_name, old = last_linear(body, body_classes)
        self.encoder = body
        _replace(body, self.head_name, nn.Identity())
        self.head = old if outputs == body_classes else _linear(old.in_features, outputs)
        self.dropout = nn.Dropout(dropout)
        self.confidence: nn.Module | None = None
        self.confidence_encoder: nn.Module | None = None
        for name, moment in zip(("mean", "std"), moments, strict=True):
            self.register_buffer(name, moment)

    @property
    def width(self) -> int:
        """How many features the head reads."""
        return int(self.head.in_features)

    def normalised(self, pixels: Tensor) -> Tensor:
        """Scaled to 0…1, then less the mean and by the standard deviation of the training pixels."""
        shape = (1, -1, *[1] * (pixels.ndim - 2))
        x = (scaled(pixels) - self.mean.reshape(shape)) / self.std.reshape(shape)
        # Grey images for a network of colour images: the same in every channel.
        return x.expand(-1, self.channels, *x.shape[2:]) if x.shape[1] == 1 and self.channels > 1 else x

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Penultimate features and outputs of every row, in float32; in training dropout falls on the features."""
        features = self.dropout(self.encoder(self.normalised(pixels)).flatten(1))
        outputs = self.head(features)
        return features.float(), outputs.float()

    def class_logits(self, outputs: Tensor) -> Tensor:
        """The logits of the classes alone."""
        return outputs[:, : self.classes]

    def confidence_logit(self, pixels: Tensor, features: Tensor) -> Tensor:
        """The confidence branch before its sigmoid, on the shared features or on those of its own encoder."""
        assert self.confidence is not None, "only recipes with a confidence branch ask for it"
        found: Tensor = self.confidence(self.confidence_features(pixels, features))[:, 0]
        return found.float()

    def confidence_features(self, pixels: Tensor, features: Tensor) -> Tensor:
        """What the confidence branch reads: the classifier's features, or those of its own encoder."""
        if self.confidence_encoder is None:
            return features
        found: Tensor = self.confidence_encoder(self.normalised(pixels)).flatten(1)
        return found

    def own_encoder(self) -> None:
        """Give the confidence branch a copy of the encoder, so that training it leaves the classifier as it is."""
        self.confidence_encoder = copy.deepcopy(self.encoder)

    def learns(self, part: str) -> bool:
        """Whether a part is in training mode."""
        module = getattr(self, part)
        return module is not None and bool(module.training)

    def exported(self) -> dict[str, Tensor]:
        """The classifier's weights under the names of the architecture they came from, without a reservation."""
        head = {f"{self.head_name}.{name}": rows[: self.classes] for name, rows in self.head.state_dict().items()}
        return {**self.encoder.state_dict(), **head}


def confidence_branch(width: int, hidden: int = CONFIDENCE_LAYERS) -> nn.Module:
    """`hidden` layers of 400 ReLUs and one output; none for the linear unit of DeVries & Taylor."""
    sizes = [width, *[CONFIDENCE_WIDTH] * hidden]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [_linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, _linear(sizes[-1], 1))


def last_linear(body: nn.Module, classes: int) -> tuple[str, nn.Linear]:
    """The head of an architecture: its last linear layer with one output a class."""
    found = [(name, module) for name, module in body.named_modules() if isinstance(module, nn.Linear)]
    fitting = [(name, module) for name, module in found if module.out_features == classes]
    if not fitting:
        listed = ", ".join(f"{name} ({module.in_features} → {module.out_features})" for name, module in found)
        raise OodometerError(f"the network has no linear layer with {classes} outputs; it has {listed or 'none'}")
    return fitting[-1]


def _first_channels(body: nn.Module) -> int:
    """Channels of the first convolution; 1 for networks without any."""
    kinds = (nn.Conv2d, nn.Conv3d)
    return next((module.in_channels for module in body.modules() if isinstance(module, kinds)), 1)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    bound = 1 / math.sqrt(inputs)
    nn.init.uniform_(layer.weight, -bound, bound)
    nn.init.zeros_(layer.bias)
    return layer


def _replace(body: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    if not last or not name:
        raise OodometerError("a network that is one linear layer has no encoder: wrap it in a module of its own")
    setattr(body.get_submodule(parent), last, module)


def state_of(network: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and buffer."""
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


def restore(network: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put saved parameters and buffers back."""
    with torch.no_grad():
        network.load_state_dict(dict(state))

"""A small convolutional network trained on scikit-learn's digits, and one batch of it as extraction sees it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sklearn.datasets import load_digits  # noqa: E402

from oodometer.models.columns import Pass  # noqa: E402
from oodometer.models.layers import parse  # noqa: E402
from oodometer.models.network import discover  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor, nn
else:
    from torch import nn

LAYERS = ("first", "second")


class Digits(nn.Module):
    """Two blocks of 8×8 and 4×4 maps, pooled to 2×2, dropout and a linear head."""

    def __init__(self, channels: int = 1, classes: int = 10, dims: int = 2) -> None:
        super().__init__()
        conv, norm, pool = (getattr(nn, f"{kind}{dims}d") for kind in ("Conv", "BatchNorm", "MaxPool"))
        self.first = nn.Sequential(conv(channels, 12, 3, padding=1), norm(12), nn.ReLU())
        self.second = nn.Sequential(pool(2), conv(12, 24, 3, padding=1), norm(24), nn.ReLU())
        self.pool, self.drop = pool(2), nn.Dropout(0.2)
        self.fc = nn.Linear(24 * 2**dims, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.pool(self.second(self.first(x))).flatten(1)
        return self.fc(self.drop(h))


@functools.cache
def images() -> tuple[Any, Any]:
    """Digits as 1 × 8 × 8 in [−1, 1], and their labels."""
    data = load_digits()
    return torch.as_tensor(data.images[:, None] / 8 - 1, dtype=torch.float32), torch.as_tensor(data.target)


@functools.cache
def trained() -> nn.Module:
    """The network after a few epochs on the first 1200 digits (some 97 % of the rest are right)."""
    x, y = images()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Digits()
        optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(8):
            for batch in torch.randperm(1200).split(64):
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimiser.step()
    model.zero_grad(set_to_none=True)
    return model.eval()


def far_images(rows: int = 200) -> Tensor:
    """Faint images without a digit's shape: the pixels of each in an order of its own, at a third of the contrast."""
    rng = np.random.default_rng(0)
    x = images()[0][1200 : 1200 + rows].reshape(-1, 64).numpy()
    return torch.as_tensor((rng.permuted(x, axis=1) + 1) * 0.3 - 1).reshape(-1, 1, 8, 8)


def pass_of(
    model: nn.Module, x: Tensor, *, layers: Sequence[str] = LAYERS, gradients: bool = True, preprocessing: Any = None
) -> Pass:
    """One batch after its shared pass."""
    inputs = x.detach().clone().requires_grad_(gradients)
    with torch.set_grad_enabled(gradients):
        network, output = discover(model, inputs, None, parse(tuple(layers)))
    return Pass(network, inputs, output.logits, output.features, output.layers, preprocessing)

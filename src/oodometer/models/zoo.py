"""Small classifiers to start from; each carries the preprocessing its published weights expect, if there are any."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import pad, relu

from oodometer.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, AnyPreprocessing, Preprocessing

VGG13 = ((64, 64), (128, 128), (256, 256), (512, 512), (512, 512))
"""Channels of each stage's convolutions (Simonyan & Zisserman, 2015, table 1, column B)."""


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut without parameters: every second pixel, new channels zero (option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.margin = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.stride > 1 or self.margin:
            x = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.margin, self.margin))
        return relu(x + y)


class CifarResNet(nn.Module):
    """The residual networks for 32×32 images of He et al. (CVPR 2016, §4.2): 6n + 2 layers, 16 to 64 channels."""

    preprocessing: AnyPreprocessing = Preprocessing(
        resize=32, crop=32, mode="RGB", mean=IMAGENET_MEAN, std=IMAGENET_STD
    )

    def __init__(self, depth: int = 20, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        blocks = (depth - 2) // 6
        self.layer1 = self._stage(16, 16, 1, blocks)
        self.layer2 = self._stage(16, 32, 2, blocks)
        self.layer3 = self._stage(32, 64, 2, blocks)
        self.linear = nn.Linear(64, classes)

    @staticmethod
    def _stage(inputs: int, outputs: int, stride: int, blocks: int) -> nn.Sequential:
        rest = [BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1)]
        return nn.Sequential(BasicBlock(inputs, outputs, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))  # type: ignore[no-any-return]


def resnet20(classes: int = 10) -> CifarResNet:
    """ResNet-20 for 32×32 images."""
    return CifarResNet(20, classes)


def resnet32(classes: int = 10) -> CifarResNet:
    """ResNet-32 for 32×32 images."""
    return CifarResNet(32, classes)


def resnet44(classes: int = 10) -> CifarResNet:
    """ResNet-44 for 32×32 images."""
    return CifarResNet(44, classes)


def resnet56(classes: int = 10) -> CifarResNet:
    """ResNet-56 for 32×32 images."""
    return CifarResNet(56, classes)


def resnet110(classes: int = 10) -> CifarResNet:
    """ResNet-110 for 32×32 images."""
    return CifarResNet(110, classes)


def cnn(classes: int = 10, channels: int = 1, width: int = 32) -> nn.Sequential:
    """Three convolutions and two halvings, then the average over positions: for small images of any size."""
    return nn.Sequential(
        *_convolution(channels, width),
        nn.MaxPool2d(2),
        *_convolution(width, 2 * width),
        nn.MaxPool2d(2),
        *_convolution(2 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


def vgg13(classes: int = 10, dropout: float = 0.5) -> nn.Sequential:
    """VGG-13 with batch normalisation for 32×32 images, dropout before its one linear layer."""
    layers: list[nn.Module] = []
    channels = 3
    for stage in VGG13:
        for outputs in stage:
            layers += _convolution(channels, outputs)
            channels = outputs
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(dropout), nn.Linear(channels, classes))


def mlp(classes: int = 10, inputs: int = 784, hidden: Sequence[int] = (256, 128)) -> nn.Sequential:
    """A multilayer perceptron with ReLU on flattened input."""
    widths = (inputs, *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def _convolution(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

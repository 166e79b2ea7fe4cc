"""Architectures to train, by name: the zoo's own, and torchvision's where it is installed."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn

from oodometer.errors import OodometerError
from oodometer.models import zoo

OWN: dict[str, Callable[..., nn.Module]] = {
    factory.__name__: factory
    for factory in (
        zoo.cnn,
        zoo.mlp,
        zoo.vgg13,
        zoo.resnet20,
        zoo.resnet32,
        zoo.resnet44,
        zoo.resnet56,
        zoo.resnet110,
    )
}
TORCHVISION = ("vit_b_16", "r2plus1d_18", "resnet18", "resnet50")
"""Those of the papers; any other name that torchvision knows works too."""


def names() -> list[str]:
    """The zoo's architectures."""
    return sorted(OWN)


def check_name(name: str) -> None:
    """Refuse a name that no architecture has, or one whose library is missing."""
    if name in OWN or name in _of_torchvision():
        return
    if name in TORCHVISION:
        raise OodometerError(f"architecture {name!r} comes with torchvision: pip install 'oodometer[vision]'")
    near = difflib.get_close_matches(name, [*OWN, *TORCHVISION, *_of_torchvision()], n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    more = ", and torchvision's" if _of_torchvision() else f"; with torchvision also {', '.join(TORCHVISION)}"
    raise OodometerError(f"unknown architecture {name!r}; {hint}known: {', '.join(names())}{more}")


def make(name: str, *, classes: int, shape: tuple[int, ...], options: Mapping[str, Any]) -> nn.Module:
    """A fresh network for rows of this shape (channels first); what it takes of them is told from its signature."""
    check_name(name)
    if name not in OWN:
        module: nn.Module = import_module("torchvision.models").get_model(name, num_classes=classes, **options)
        return module
    known = inspect.signature(OWN[name]).parameters
    given: dict[str, Any] = {"channels": shape[0], "inputs": _product(shape)}
    for key in options:
        if key not in known or key == "classes":
            raise OodometerError(f"architecture {name} has no option {key!r}; options: {', '.join(known)}")
    fitting = {key: value for key, value in given.items() if key in known}
    return OWN[name](classes=classes, **{**fitting, **options})


def _of_torchvision() -> list[str]:
    if find_spec("torchvision") is None:
        return []
    listed: list[str] = import_module("torchvision.models").list_models()
    return listed


def _product(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found

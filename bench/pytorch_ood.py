"""pytorch-ood 0.4 as installed, through its array interface (`fit_features`, `predict_features`, `score`).

It imports torchvision for data sets and models that are not used here, and no CPU build of torchvision goes with the
pinned PyTorch: a stand-in module lets the import pass.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from bench.banks import Arrays, subspace

Scores = np.ndarray


class _Anything(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *_, **__: None})


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name.split(".", maxsplit=1)[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run: every attribute is made when asked for."""


def detectors() -> Any:
    """The package's detectors."""
    sys.meta_path.insert(0, _StandIn())
    return importlib.import_module("pytorch_ood.detector")


def _logits(score: str) -> Callable[[Any, Arrays], Scores]:
    def run(d: Any, data: Arrays) -> Scores:
        return np.asarray(getattr(d, score).score(torch.from_numpy(data.test_logits)))

    return run


def _features(make: Callable[[Any, Arrays], Any]) -> Callable[[Any, Arrays], Scores]:
    def run(d: Any, data: Arrays) -> Scores:
        detector = make(d, data)
        detector.fit_features(torch.from_numpy(data.train), torch.from_numpy(data.labels))
        return np.asarray(detector.predict_features(torch.from_numpy(data.test)).detach())

    return run


def _head(data: Arrays) -> torch.nn.Linear:
    layer = torch.nn.Linear(data.W.shape[1], data.W.shape[0])
    layer.weight.data, layer.bias.data = torch.from_numpy(data.W), torch.from_numpy(data.b)
    return layer.requires_grad_(False)


def _shaped(name: str) -> Callable[[Any, Arrays], Scores]:
    """ASH and SCALE read feature maps: the pooled features as 1×1 maps."""

    def run(d: Any, data: Arrays) -> Scores:
        layer = _head(data)
        detector = getattr(d, name)(backbone=None, head=lambda maps: layer(maps.flatten(1)))
        maps = torch.from_numpy(data.test)[:, :, None, None]
        return np.asarray(detector.predict_feature_maps(maps).detach())

    return run


def _fitted_logits(make: Callable[[Any], Any]) -> Callable[[Any, Arrays], Scores]:
    def run(d: Any, data: Arrays) -> Scores:
        detector = make(d)
        detector.fit_logits(torch.from_numpy(data.train_logits), torch.from_numpy(data.labels))
        return np.asarray(detector.predict_logits(torch.from_numpy(data.test_logits)))

    return run


def _vim(d: Any, data: Arrays) -> Any:
    return d.ViM(None, subspace(data.train.shape[1]), torch.from_numpy(data.W), torch.from_numpy(data.b))


PEERS: dict[str, Callable[[Any, Arrays], Scores]] = {
    "msp": _logits("MaxSoftmax"),
    "mls": _logits("MaxLogit"),
    "energy": _logits("EnergyBased"),
    "entropy": _logits("Entropy"),
    "gen": _logits("GEN"),
    "klm": _fitted_logits(lambda d: d.KLMatching(None)),
    "openmax": _fitted_logits(lambda d: d.OpenMax(None, tailsize=25, alpha=10)),
    "mds": _features(lambda d, _: d.Mahalanobis(None)),
    "rmds": _features(lambda d, _: d.RMD(None)),
    "vim": _features(_vim),
    "knn": _features(lambda d, _: d.KNN(None, k=50)),
    "nnguide": _features(lambda d, data: d.NNGuide(lambda x: x, _head(data))),
    "she": _features(lambda d, data: d.SHE(lambda x: x, _head(data))),
    "fdbd": _features(lambda d, data: d.fDBD(torch.nn.Identity(), _head(data))),
    "nci": _features(lambda d, data: d.NCI(torch.nn.Identity(), _head(data))),
    "gmm": _features(lambda d, _: d.GMM(None)),
    "pnml": _features(lambda d, data: d.PNML(lambda x: x, _head(data))),
    "dice": _features(lambda d, data: d.DICE(None, torch.from_numpy(data.W), torch.from_numpy(data.b), 0.9)),
    "ash": _shaped("ASH"),
    "scale": _shaped("SCALE"),
}

"""Every detector is one small file here; `names()` finds them, `create(name, **params)` makes one."""

from __future__ import annotations

from oodometer.detectors.base import Card, Detector, Parameter, create, detector, get, names, param
from oodometer.detectors.projection import projected
from oodometer.detectors.tempering import tempered

__all__ = ["Card", "Detector", "Parameter", "create", "detector", "get", "names", "param", "projected", "tempered"]

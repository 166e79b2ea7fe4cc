"""From measurement to use: a fitted detector with its threshold, saved without pickle, for production."""

from __future__ import annotations

from oodometer.guard.calibration import Calibration, calibrate
from oodometer.guard.check import Check
from oodometer.guard.guard import Decisions, Guard
from oodometer.guard.stream import Stream

__all__ = ["Calibration", "Check", "Decisions", "Guard", "Stream", "calibrate"]

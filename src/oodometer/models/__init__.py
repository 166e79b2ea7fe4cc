"""The only place that runs a network: extraction of banks, weights, and a small zoo."""

from __future__ import annotations

from oodometer.errors import OodometerError

try:
    import torch as _torch  # noqa: F401
except ImportError:
    raise OodometerError("running a network needs PyTorch: pip install 'oodometer[torch]'") from None

from oodometer.models.columns import Column, Pass, column
from oodometer.models.extract import extract
from oodometer.models.weights import load_weights

__all__ = ["Column", "Pass", "column", "extract", "load_weights"]

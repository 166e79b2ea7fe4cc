"""oodometer: measure how well a classifier knows what it does not know."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Bank": "bank",
    "Guard": "guard",
    "Head": "bank",
    "Results": "results",
    "Study": "study",
    "create": "detectors",
    "extract": "models",
    "projected": "detectors",
    "run": "study",
    "tempered": "detectors",
}
_MODULES = ("arrays", "bank", "derived", "detectors", "errors", "metrics", "splits", "stats", "temperature", "tune")
__all__ = ["__version__", *_HOME, *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import oodometer` costs milliseconds."""
    if name in _HOME:
        return getattr(import_module(f"oodometer.{_HOME[name]}"), name)
    if name in _MODULES:
        return import_module(f"oodometer.{name}")
    raise AttributeError(f"module 'oodometer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

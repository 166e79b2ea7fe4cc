"""Figures, the report page and tables for papers, from the results of a study."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oodometer.results import Results

__all__ = ["write"]


def write(results: Results, path: str | os.PathLike[str], **options: Any) -> Path:
    """Write the report of a run as one HTML file (see `oodometer.report.html.write` for the options)."""
    written: Path = import_module("oodometer.report.html").write(results, path, **options)
    return written

"""`python -m bench [SECTION …]`: prints ratios against peers and against the machine, measured in this run."""

from __future__ import annotations

import argparse
import tempfile
from importlib import import_module
from pathlib import Path

from bench import banks, detectors, ranking, search, start, study

SECTIONS = ("start", "ranking", "search", "detectors", "study", "forwards", "gpu")
SAVED = {"search", "detectors", "study"}
"""Sections that read the saved banks."""


def main() -> None:
    """Write the banks once, then run the sections asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"any of {', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--size", choices=banks.SIZES, default="S", help="the bank (XS for a quick look)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "oodometer-bench")
    parser.add_argument("--only", nargs="*", default=[], help="these detectors only")
    options = parser.parse_args()
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"unknown section {', '.join(sorted(unknown))}; choose from {', '.join(SECTIONS)}")
    folder, size = options.folder / options.size, banks.SIZES[options.size]
    if set(options.sections or SECTIONS) & SAVED and not (folder / "b.npy").exists():
        banks.write(size, folder)
    for section in options.sections or SECTIONS:
        print(f"\n## {section} ({options.size}: {size.train:,} × {size.features}, {size.classes} classes)\n")
        {
            "start": start.report,
            "ranking": ranking.report,
            "search": lambda: search.report(folder, size.test),
            "detectors": lambda: detectors.report(options.size, folder, options.only),
            "study": lambda: study.report(folder),
            "forwards": lambda: import_module("bench.forwards").report(),  # loads PyTorch
            "gpu": lambda: import_module("bench.gpu").report(options.size, options.only),
        }[section]()


if __name__ == "__main__":
    main()

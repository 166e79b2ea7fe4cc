"""`python -m oodometer` is the command `oodometer`."""

from __future__ import annotations

import sys

from oodometer.cli import main

if __name__ == "__main__":
    sys.exit(main())

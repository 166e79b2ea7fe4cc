"""Small real data that needs no download: handwritten digits and patches of photographs, as scikit-learn ships them.

All have the same levels, so that they can be split together: `kind` above `labels`, no number of one in the other.
"""

from __future__ import annotations

from oodometer.data.digits import KINDS, digits
from oodometer.data.photographs import PHOTOGRAPHS, photograph_patches

__all__ = ["KINDS", "PHOTOGRAPHS", "digits", "photograph_patches"]

"""One exception type for everything a user can mend: what was needed, what was found, how to mend it."""

from __future__ import annotations


class OodometerError(ValueError):
    """A mistake in the input, stated so that the reader knows what to change."""


class NotFittedError(OodometerError):
    """A detector was asked to score before it saw training rows."""


class NotFiniteError(OodometerError):
    """A detector's score overflowed or is undefined for some row."""


class OodometerWarning(UserWarning):
    """Something was done that the user should know about (a rule applied to an edge case)."""

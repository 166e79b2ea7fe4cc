"""A guard over a stream: a running alarm rate, and a test of the stream itself that may be read after every row."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from oodometer.bank import Bank
from oodometer.derived import F64
from oodometer.errors import OodometerError
from oodometer.guard.check import p_text

if TYPE_CHECKING:
    from oodometer.guard.guard import Decisions, Guard


class Evidence:
    """How much likelier the rows in the tail are under a higher rate than under the law of an unshifted stream.

    Of n calibration rows, l − 1 lie beyond the tail's threshold, which they have set. The tail of an exchangeable
    stream then follows a Pólya urn of l balls for the tail and b = n + 1 − l others, so that the number of tail rows is
    beta-binomial: the calibration set is finite, and its own error is part of the law (Marques F., Statistics &
    Probability Letters 2025). The evidence is the mean likelihood ratio of urns with c balls of the b moved to the
    tail, over several c (Robbins' mixture). It is a nonnegative martingale that starts at 1, so by Ville's
    inequality it ever reaches 1/δ with probability at most δ. With ties the tail only gets rarer, and the ratio
    increases with every row in it: the bound stays.
    """

    def __init__(self, tail: int, rest: int) -> None:
        self._tail, self._rest = tail, rest
        # From half of all balls down to one standard deviation of the urn's own rate.
        halvings = max(1, math.ceil(math.log2(rest / math.sqrt(tail))))
        self._moved = rest / 2.0 ** np.arange(1, halvings + 1)
        self._logs: F64 = np.zeros(len(self._moved))
        self.rows, self.hits = 0, 0

    def extend(self, in_tail: npt.NDArray[np.bool_]) -> F64:
        """Take in rows; the logarithm of the evidence after each of them."""
        hits = self.hits + np.cumsum(in_tail) - in_tail
        misses = self.rows + np.arange(len(in_tail)) - hits
        tail, rest = (self._tail + hits)[:, None], (self._rest + misses)[:, None]
        # One more draw from the urn of the alternative over one from the null's; their totals are equal.
        steps = np.where(in_tail[:, None], np.log1p(self._moved / tail), np.log1p(-self._moved / rest))
        path = np.cumsum(np.concatenate([self._logs[None, :], steps]), axis=0)
        self._logs = path[-1]
        self.rows, self.hits = self.rows + len(in_tail), self.hits + int(in_tail.sum())
        return np.asarray(np.logaddexp.reduce(path[1:], axis=1) - math.log(len(self._moved)))


class Stream:
    """Decisions batch by batch, with the running alarm rate and a verdict on the stream; memory is bounded.

    The verdict is a sequential test that the rows are exchangeable with the calibration rows, against more rows in the
    tail (p ≤ `expected_rate`) than that allows. It watches the whole stream and, so that a late shift does not drown
    in a long past, each window of rows by itself. Over calibration and stream together, an unshifted stream is *ever*
    called shifted with probability at most `delta`, however often one looks. A shift that puts fewer rows
    into the tail is not looked for.
    """

    def __init__(self, guard: Guard, *, delta: float = 0.01, window: int = 1000) -> None:
        if not 0 < delta < 1:
            raise OodometerError(f"stream: delta must be a probability in (0, 1); found {delta!r}")
        if not isinstance(window, int | np.integer) or window < 1:
            raise OodometerError(f"stream: window must be a number of rows ≥ 1; found {window!r}")
        self.guard, self.delta, self.window = guard, delta, int(window)
        self.alarms = 0
        self.shifted_at: int | None = None
        """The row at which the stream was called shifted; None so far."""
        self._whole, self._part, self._parts = self._evidence(), self._evidence(), 1
        self._latest: deque[bool] = deque(maxlen=self.window)
        self._peak = 0.0

    def _evidence(self) -> Evidence:
        calibration = self.guard.calibration
        return Evidence(calibration.tail, calibration.rows + 1 - calibration.tail)

    def __call__(self, bank: Bank | None = None, /, **columns: Any) -> Decisions:
        """The guard's decisions on these rows, which the stream takes in; rows that are refused leave no trace."""
        decisions = self.guard(bank, **columns)
        flagged = np.atleast_1d(decisions.decision)
        self.alarms += int(flagged.sum())
        self._latest.extend(flagged[-self.window :].tolist())
        self._take(np.atleast_1d(decisions.p_value) <= self.expected_rate)
        return decisions

    def _take(self, in_tail: npt.NDArray[np.bool_]) -> None:
        start = 0
        while start < len(in_tail):
            rows = in_tail[start : start + self.window - self._part.rows]
            self._weigh(rows)
            start += len(rows)

    def _weigh(self, in_tail: npt.NDArray[np.bool_]) -> None:
        """Add rows of one window. Half of δ is spent on the whole stream, the other half on windows 1, 2, 3, …"""
        before = self._whole.rows
        whole = self._whole.extend(in_tail) - math.log(2)
        part = self._part.extend(in_tail) - math.log(2 * self._parts * (self._parts + 1))
        path = np.maximum(whole, part)
        reached = np.flatnonzero(path >= -math.log(self.delta))
        if self.shifted_at is None and len(reached):
            self.shifted_at = before + int(reached[0])
        self._peak = max(self._peak, float(path.max()))
        if self._part.rows == self.window:
            self._part, self._parts = self._evidence(), self._parts + 1

    # ------------------------------------------------------------------------------------------ what it knows

    @property
    def rows(self) -> int:
        """How many rows have been taken in."""
        return self._whole.rows

    @property
    def alarm_rate(self) -> float:
        """The share of flagged rows; NaN before the first row."""
        return self.alarms / self.rows if self.rows else math.nan

    @property
    def recent_alarm_rate(self) -> float:
        """The share of flagged rows among the latest `window`; NaN before the first row."""
        return sum(self._latest) / len(self._latest) if self._latest else math.nan

    @property
    def tail_rate(self) -> float:
        """The share of rows with p ≤ `expected_rate`: the alarm rate, unless the threshold came from OOD rows."""
        return self._whole.hits / self.rows if self.rows else math.nan

    @property
    def expected_rate(self) -> float:
        """The share of ID rows in the tail, at most."""
        return self.guard.calibration.rate

    @property
    def p_value(self) -> float:
        """Valid after every row: of an unshifted stream, it ever falls to p with probability at most p."""
        return math.exp(-self._peak)

    @property
    def shifted(self) -> bool:
        """Whether the stream has been called shifted, at any time."""
        return self.shifted_at is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "rows": self.rows,
            "alarms": self.alarms,
            "alarm_rate": self.alarm_rate,
            "expected_rate": self.expected_rate,
            "delta": self.delta,
            "p_value": self.p_value,
            "shifted": self.shifted,
            "shifted_at": self.shifted_at,
        }

    def __str__(self) -> str:
        if not self.rows:
            return "no rows yet"
        told = f"{self.rows:,} rows: alarm rate {100 * self.alarm_rate:.2f} %"
        if self.guard.facts["rule"] == "val":
            told += f"; {100 * self.tail_rate:.2f} % in the tail"
        told += f", expected at most {100 * self.expected_rate:.2f} %"
        if self.shifted_at is None:
            return f"{told}; no evidence of a shift ({p_text(self.p_value)})"
        return f"{told}; SHIFTED, noticed at row {self.shifted_at:,} ({p_text(self.p_value)})"

    def __repr__(self) -> str:
        return f"Stream(delta={self.delta:g}, window={self.window}; {self})"

"""What activation shaping shares: the activations it acts on, the largest of them, and the scores of the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal

import numpy as np

from oodometer import derived
from oodometer.arrays import Array, double, largest_values, like, logsumexp, namespace, pooled, real, to_numpy
from oodometer.bank import Bank, Head
from oodometer.derived import F64
from oodometer.detectors.base import param
from oodometer.detectors.logits import max_softmax
from oodometer.detectors.quantiles import on_host
from oodometer.errors import OodometerError

Where = Literal["pooled", "map"]
End = Literal["energy", "msp", "mls"]

MAP = "features.map"
"""The column of the last feature map before pooling: rows × channels × positions …"""
MAX_EXPONENT = 700.0
"""exp(s1/s2) stays finite in float64 up to here."""


def where_param() -> Any:
    """The hyperparameter that says which activations are shaped."""
    text = f"shape the pooled features, or the map before pooling (column {MAP!r}, rows × channels × positions …)"
    return param("pooled", text, choices=("pooled", "map"))


def percentile_param(default: float, doc: str) -> Any:
    """A hyperparameter in percent."""
    return param(default, doc, low=0.0, high=100.0)


def column_of(where: Where) -> str:
    """The column that is shaped."""
    return MAP if where == "map" else "features"


def needs_of(needs: frozenset[str], where: Where) -> frozenset[str]:
    """What is read of a bank: maps take the place of the pooled features and of logits computed from them."""
    return needs - {"features", "logits"} | {MAP} if where == "map" else needs


# ---------------------------------------------------------------------------------------------- activations


def check_map(bank: Bank, where: Where, name: str) -> None:
    """Refuse maps that cannot be pooled into the features the head reads."""
    if where == "map":
        assert bank.head is not None, "the door has refused a bank without a head"
        shape, width = bank.row_shape(MAP), int(bank.head.weight.shape[1])
        if len(shape) < 2 or shape[0] != width or 0 in shape:
            raise OodometerError(
                f"{name}: rows of {MAP!r} must be maps (channels × positions …) of the {width} channels that the head "
                f"reads after pooling; found rows of shape {shape}. Extract the last map with channels first"
            )


def activations(block: Bank, where: Where, *, relu: bool = False) -> Array:
    """The activations of a block in working precision: rows × channels [× positions …].

    Host memory comes as NumPy, which selects the largest entries of a row ten times faster than PyTorch does.
    """
    x = on_host(real(block[column_of(where)]))
    return namespace(x).clip(x, min=0) if relu else x


def end_scores(z: Array, end: End) -> Array:
    """The score of shaped logits."""
    xp = namespace(z)
    if end == "energy":
        return -logsumexp(z, xp)
    return -max_softmax(z, xp) if end == "msp" else -xp.max(z, axis=-1)


def scores_of_shaped(
    bank: Bank, where: Where, name: str, shape: Callable[[Array, ModuleType], Array], end: End = "energy"
) -> F64:
    """The scores of head(pool(shape(activations))), block by block."""
    check_map(bank, where, name)
    pieces = []
    for block in derived.column_blocks(bank, column_of(where)):
        x = activations(block, where)
        assert bank.head is not None
        pieces.append(to_numpy(end_scores(bank.head(pooled(shape(x, namespace(x)))), end)))
    return np.concatenate(pieces).astype(np.float64)


# ---------------------------------------------------------------------------------------------- largest entries


def kept_count(width: int, percentile: float, name: str) -> int:
    """k = D − round(D·q/100), halves rounded to even as in the published code."""
    k = width - int(np.round(width * percentile / 100))
    if k < 1:
        raise OodometerError(
            f"{name}: percentile={percentile!r} keeps none of {width} activations: choose at most "
            f"{100 * (1 - 1 / width):.4g}"
        )
    return k


def largest(x: Array, k: int, xp: ModuleType) -> tuple[Array, F64]:
    """The k-th largest entry of each row (as a column), and the sum of the k largest in float64."""
    if isinstance(x, np.ndarray):
        place = x.shape[-1] - k
        parted = np.partition(x, place, axis=-1)
        return parted[:, place : place + 1], parted[:, place:].sum(axis=-1, dtype=np.float64)
    top = largest_values(x, k, xp)
    return xp.min(top, axis=-1, keepdims=True), row_sums(top, xp)


def row_sums(x: Array, xp: ModuleType) -> F64:
    """Sum of each row in float64."""
    return to_numpy(xp.sum(x, axis=-1, dtype=xp.float64))


def top_mask(x: Array, k: int, kth: Array, xp: ModuleType) -> Array:
    """Where the k largest entries of each row are; of equal ones the first count."""
    mask = x >= kth
    tied = np.flatnonzero(to_numpy(xp.count_nonzero(mask, axis=-1)) > k)
    if len(tied):
        rows, bound = x[tied, :], kth[tied, :]
        above, level = rows > bound, rows == bound
        room = k - xp.count_nonzero(above, axis=-1, keepdims=True)
        mask[tied, :] = above | (level & (xp.cumulative_sum(xp.astype(level, xp.int32), axis=-1) <= room))
    return mask


# ---------------------------------------------------------------------------------------------- rescaling


def without_bias(shaped: Array, head: Head) -> Array:
    """W·pool(shaped)."""
    h = pooled(shaped)
    return h @ like(to_numpy(head.weight), h).T


def factors(total: F64, kept: F64) -> F64:
    """exp(s1/s2), one where s2 ≤ 0 leaves it undefined, with the exponent capped so that it stays finite."""
    with np.errstate(over="ignore"):
        exponent = np.divide(total, kept, out=np.zeros_like(total), where=kept > 0)
    return np.exp(np.minimum(exponent, MAX_EXPONENT))


def rescaled_energy(product: Array, factor: F64, head: Head) -> F64:
    """The energy score of factor · W·h + b, in float64: factors can be far beyond float32."""
    product = double(product)
    with np.errstate(over="ignore"):
        z = like(factor, product)[:, None] * product + like(to_numpy(head.bias), product)
    return to_numpy(end_scores(z, "energy"))


def oddities(name: str, sums: Sequence[tuple[F64, F64]]) -> str:
    """What the user should know of rows whose s1/s2 is not the ratio it is meant to be; empty if there are none."""
    total, kept = (np.concatenate([pair[place] for pair in sums]) for place in (0, 1))
    undefined = kept <= 0
    # The kept activations are the largest: they sum to more than all only if some of the others are negative.
    signed = (kept < 0) | (kept > total + 1e-9 * np.abs(total))
    told = [
        (undefined, "have no positive sum s2 of kept activations: their factor exp(s1/s2) is undefined and taken as 1"),
        (~undefined & (total > MAX_EXPONENT * kept), f"have s1/s2 above {MAX_EXPONENT:g}, where it is capped"),
        (signed, "have negative activations, for which s1/s2 means little: set relu=True for features without a ReLU"),
    ]
    found = [f"{int(rows.sum())} of {len(total)} rows {text}" for rows, text in told if rows.any()]
    return f"{name}: {'; '.join(found)}" if found else ""

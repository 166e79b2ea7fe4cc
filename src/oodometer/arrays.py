"""The few array operations every detector uses: NumPy and PyTorch (CPU, CUDA) behind one namespace."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from oodometer.errors import OodometerError

Array: TypeAlias = Any
"""Anything that follows the array API standard: numpy.ndarray, torch.Tensor, …"""
Floats: TypeAlias = npt.NDArray[np.floating[Any]]
Ints: TypeAlias = npt.NDArray[np.integer[Any]]

BLOCK_BYTES = 8 << 20
"""Working set of one block of rows on a CPU: large enough for a GEMM, small enough to stay in cache."""
ACCELERATOR_BLOCK_BYTES = 512 << 20
"""The same on an accelerator, where launches cost more than memory."""


EXACT_ENTRIES = 1 << 20
"""Up to so many training entries distances are taken in float64: it costs nothing noticeable and saves five digits."""


# ---------------------------------------------------------------------------------------------- namespaces


def namespace(*arrays: Array) -> ModuleType:
    """The array-API namespace of these arrays."""
    if all(isinstance(array, np.ndarray) for array in arrays):
        import array_api_compat.numpy as xp

        return xp
    from array_api_compat import array_namespace

    found: ModuleType = array_namespace(*arrays)
    return found


def is_array(value: object) -> bool:
    """Whether a value already follows the array API (lists and tuples do not)."""
    if isinstance(value, np.ndarray):
        return True
    from array_api_compat import is_array_api_obj

    return bool(is_array_api_obj(value))


def to_numpy(array: Array) -> npt.NDArray[Any]:
    """A NumPy view (or copy, from an accelerator) of any array."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        if str(array.dtype) == "torch.bfloat16":
            array = array.float()
    return np.asarray(array)


_SENT: dict[int, dict[tuple[type, str, str], Array]] = {}
"""Copies of frozen values by the values' identity, then by kind of array, device and dtype; they go with the values."""


def frozen(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same values, read-only: `like` converts and sends them once, not for every block of rows they meet."""
    values = values.view()
    values.flags.writeable = False
    _SENT[id(values)] = {}
    weakref.finalize(values, _SENT.pop, id(values))
    return values


def like(values: npt.ArrayLike, reference: Array) -> Array:
    """Small fitted values as an array of the reference's namespace, device and (floating) dtype."""
    values = np.asarray(values)
    dtype: Any = working_dtype(reference) if values.dtype.kind == "f" else values.dtype
    sent = _SENT.get(id(values))
    if sent is None:
        return _sent(values, dtype, reference)
    place = (type(reference), str(getattr(reference, "device", "cpu")), dtype.name)
    if place not in sent:
        sent[place] = _sent(values, dtype, reference)
    return sent[place]


def _sent(values: npt.NDArray[Any], dtype: npt.DTypeLike, reference: Array) -> Array:
    if isinstance(reference, np.ndarray):
        return values.astype(dtype, copy=False)
    from array_api_compat import device

    # PyTorch cannot look at an array from its end, as eigenvectors in descending order are, nor share a read-only one.
    whole = np.ascontiguousarray(values.astype(dtype, copy=not values.flags.writeable)).reshape(values.shape)
    return namespace(reference).asarray(whole, device=device(reference))


def working_dtype(array: Array) -> np.dtype[Any]:
    """The precision a score is computed in: float64 for float64 input, float32 for everything else."""
    wide = array.dtype == np.float64 if isinstance(array, np.ndarray) else str(array.dtype).endswith("float64")
    return np.dtype(np.float64 if wide else np.float32)


def real(array: Array) -> Array:
    """The array in its working precision (float16, bfloat16 and integers become float32)."""
    dtype = working_dtype(array)
    if isinstance(array, np.ndarray):
        return array.astype(dtype, copy=False)
    xp = namespace(array)
    return xp.astype(array, getattr(xp, dtype.name), copy=False)


def double(array: Array) -> Array:
    """The array in float64."""
    if isinstance(array, np.ndarray):
        return array.astype(np.float64, copy=False)
    xp = namespace(array)
    return xp.astype(array, xp.float64, copy=False)


def on_cpu(array: Array) -> bool:
    """Whether NumPy can see the array's memory without a copy between devices."""
    if isinstance(array, np.ndarray):
        return True
    return str(getattr(array, "device", "cpu")) == "cpu" and hasattr(array, "detach")


# ---------------------------------------------------------------------------------------------- blocks


def block_rows(row_bytes: int, *, cpu: bool = True) -> int:
    """How many rows make one block, a multiple of 64 (short rows still come by the hundred)."""
    budget = BLOCK_BYTES if cpu else ACCELERATOR_BLOCK_BYTES
    return max(256, min(1 << 20, budget // max(row_bytes, 1)) // 64 * 64)


def slices(n: int, step: int) -> Iterator[slice]:
    """Consecutive slices that cover range(n)."""
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def row_bytes(array: Array) -> int:
    """Bytes of one row in working precision."""
    width = int(np.prod(array.shape[1:], dtype=np.int64))
    return width * working_dtype(array).itemsize


def first_not_finite(array: Array) -> int | None:
    """Index of the first row with a NaN or an infinity, block by block; None if all are finite."""
    xp = namespace(array)
    if not xp.isdtype(array.dtype, ("real floating", "complex floating")):
        return None
    for rows in slices(array.shape[0], block_rows(row_bytes(array), cpu=on_cpu(array))):
        block = array[rows, ...]
        # A finite sum proves finite terms, at a third of the cost of looking at each one.
        with np.errstate(all="ignore"):
            if bool(xp.isfinite(xp.sum(real(block)))):
                continue
        bad = ~xp.all(xp.reshape(xp.isfinite(block), (block.shape[0], -1)), axis=1)
        if bool(xp.any(bad)):
            return int(rows.start) + int(np.flatnonzero(to_numpy(bad))[0])
    return None


SUMMED_ROWS = 128
"""Rows summed in single precision before their sum is added in double: a copy in double costs seven times as much."""


SUMMED_WIDTH = 512
"""Columns that are added at a time where the rows have fewer."""


def column_sums(x: Array) -> Array:
    """Sum of all rows, in float64 and where the rows are; finite if and only if every entry is."""
    xp = namespace(x)
    fold = SUMMED_WIDTH // x.shape[1] if x.ndim == 2 and x.shape[1] else 0
    if isinstance(x, np.ndarray) and fold > 1 and len(x) > fold and x.flags.c_contiguous:
        # Several short rows as one long row: a loop over the columns of one costs more than its additions.
        whole = len(x) // fold * fold
        sums = column_sums(x[:whole].reshape(-1, fold * x.shape[1])).reshape(fold, -1)
        return np.sum(sums, axis=0) + np.sum(x[whole:], axis=0, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        if x.dtype == xp.float32:
            whole = x.shape[0] // SUMMED_ROWS * SUMMED_ROWS
            groups = xp.sum(xp.reshape(x[:whole, ...], (-1, SUMMED_ROWS, *x.shape[1:])), axis=1)
            sums = xp.sum(groups, axis=0, dtype=xp.float64) + xp.sum(x[whole:, ...], axis=0)
            if bool(xp.all(xp.isfinite(sums))):
                return sums
        return xp.sum(x, axis=0, dtype=xp.float64)


# ---------------------------------------------------------------------------------------------- rows


SHORT_ROW = 64
"""Up to so many columns NumPy reduces faster down columns that lie in memory one after the other, the copy included."""


SHORTEST_ROW = 24
"""The same for argmax, which takes three passes down the columns."""


def by_columns(x: Array) -> Array:
    """The same matrix; of a NumPy one with short rows a copy with each column in one piece.

    NumPy's reductions over the last axis call their inner loop once a row: for ten columns the calls cost ten times
    as much as the arithmetic. What is computed elementwise from such a copy keeps its layout.
    """
    if isinstance(x, np.ndarray) and x.ndim == 2 and x.shape[1] <= SHORT_ROW:
        return np.asfortranarray(x)
    return x


def row_sums(x: Array, xp: ModuleType, *, keepdims: bool = False) -> Array:
    """Sum of each row, in the precision of the row."""
    if isinstance(x, np.ndarray) and x.ndim == 2 and x.shape[1] <= SHORT_ROW:
        # Column after column is no pairwise summation: in double it loses nothing.
        return np.sum(x, axis=-1, keepdims=keepdims, dtype=np.float64).astype(x.dtype, copy=False)
    return xp.sum(x, axis=-1, keepdims=keepdims)


def argmax(x: Array, xp: ModuleType) -> Array:
    """The first column with the largest value of each row."""
    if not (isinstance(x, np.ndarray) and x.ndim == 2 and 0 < x.shape[1] <= SHORTEST_ROW):
        return xp.argmax(x, axis=-1)
    x = by_columns(x)
    # The first of the columns that hold the maximum has the most columns behind it.
    behind = np.arange(x.shape[1], 0, -1, dtype=np.uint8)
    return x.shape[1] - np.max((x == np.max(x, axis=-1, keepdims=True)) * behind, axis=-1).astype(np.int64)


def logsumexp(x: Array, xp: ModuleType) -> Array:
    """log Σ exp over the last axis, safe for any finite input."""
    x = by_columns(x)
    top = xp.max(x, axis=-1, keepdims=True)
    if hasattr(x, "softmax"):
        # PyTorch's softmax is one pass over memory, and the largest one is 1 / Σ exp(x − max).
        return top[..., 0] - xp.log(xp.max(x.softmax(-1), axis=-1))
    return xp.log(row_sums(xp.exp(x - top), xp)) + top[..., 0]


def softmax(x: Array, xp: ModuleType) -> Array:
    """Softmax over the last axis, safe for any finite input."""
    if hasattr(x, "softmax"):
        return x.softmax(-1)
    x = by_columns(x)
    e = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    return e / row_sums(e, xp, keepdims=True)


def log_softmax(x: Array, xp: ModuleType) -> Array:
    """log softmax over the last axis, safe for any finite input."""
    if hasattr(x, "log_softmax"):
        return x.log_softmax(-1)
    x = by_columns(x)
    x = x - xp.max(x, axis=-1, keepdims=True)
    return x - xp.log(row_sums(xp.exp(x), xp, keepdims=True))


def norms(x: Array, xp: ModuleType) -> Array:
    """Euclidean norm of each row."""
    if isinstance(x, np.ndarray):
        return np.sqrt(np.einsum("ij,ij->i", x, x))
    return xp.linalg.vector_norm(x, axis=-1)


def absolute_sums(x: Array, xp: ModuleType) -> Array:
    """Sum of the absolute values of each row."""
    if isinstance(x, np.ndarray):
        return np.sum(np.abs(x), axis=-1)
    return xp.linalg.vector_norm(x, axis=-1, ord=1)


def row_products(x: Array, y: Array, xp: ModuleType) -> Array:
    """Inner product of each row with the same row of the other array."""
    if isinstance(x, np.ndarray):
        return np.einsum("ij,ij->i", x, y)
    return xp.sum(x * y, axis=-1)


def unit(x: Array, xp: ModuleType) -> Array:
    """Rows scaled to length one; a zero row stays zero (peers turn it into NaN)."""
    length = norms(x, xp)[:, None]
    return x / xp.where(length > 0, length, xp.ones_like(length))


def pooled(x: Array) -> Array:
    """Maps (rows × channels × positions …) averaged over their positions; a matrix stays as it is."""
    if x.ndim <= 2:
        return x
    xp = namespace(x)
    return xp.mean(xp.reshape(x, (x.shape[0], x.shape[1], -1)), axis=-1)


def take_columns(x: Array, columns: Array, xp: ModuleType) -> Array:
    """x[i, columns[i]] for every row i."""
    return xp.take_along_axis(x, columns[:, None], axis=-1)[:, 0]


def top_values(x: Array, k: int, xp: ModuleType) -> Array:
    """The k largest values of each row, in descending order."""
    k = min(k, x.shape[-1])
    if isinstance(x, np.ndarray):
        x = np.ascontiguousarray(x)  # rows are sorted in place where they lie in one piece
        # One introselect then a short sort beats a full sort and torch.topk on CPUs.
        kept = np.partition(x, x.shape[-1] - k, axis=-1)[..., -k:] if k < x.shape[-1] else x
        return np.sort(kept, axis=-1)[..., ::-1]
    if hasattr(x, "topk") and k < x.shape[-1]:
        return x.topk(k, dim=-1).values
    return xp.sort(x, axis=-1, descending=True)[..., :k]


def largest_values(x: Array, k: int, xp: ModuleType) -> Array:
    """The k largest values of each row, in no order."""
    if k >= x.shape[-1]:
        return x
    if isinstance(x, np.ndarray):
        place = x.shape[-1] - k
        return np.partition(np.ascontiguousarray(x), min(place, x.shape[-1] - 1), axis=-1)[..., place:]
    return x.topk(k, dim=-1, sorted=False).values if hasattr(x, "topk") else top_values(x, k, xp)


def kth_largest(x: Array, k: int, xp: ModuleType) -> Array:
    """The k-th largest value of each row, as a column."""
    if isinstance(x, np.ndarray):
        place = x.shape[-1] - k
        return np.partition(x, place, axis=-1)[..., place : place + 1]
    return top_values(x, k, xp)[..., k - 1 : k]


def percentile(x: Array, q: float) -> float:
    """The q-th percentile of all entries (linear interpolation), by one introselect."""
    flat = to_numpy(x).ravel()
    place = (flat.size - 1) * q / 100
    low = int(np.floor(place))
    high = min(low + 1, flat.size - 1)
    # A single kth is several times faster than two; the neighbour is the minimum of what lies above.
    parted = np.partition(flat, low)
    a = float(parted[low])
    b = float(parted[high:].min()) if high > low else a
    return a + (b - a) * (place - low)


def take_rows(x: Array, index: Ints) -> Array:
    """Rows by an integer index that lives on the host."""
    if isinstance(x, np.ndarray):
        return x[index]
    xp = namespace(x)
    return xp.take(x, like(index, x), axis=0)


def segment_sums(x: Array, labels: Ints, segments: int) -> Array:
    """Sum of the rows of each segment, in float64; rows labelled outside 0 … segments−1 are left out.

    NumPy for arrays in the host's memory; elsewhere the sums stay where the rows are.
    """
    inside = (labels >= 0) & (labels < segments)
    if on_cpu(x) or not hasattr(namespace(x), "segment_reduce"):
        from scipy.sparse import csr_array

        rows = np.flatnonzero(inside)
        pick = csr_array((np.ones(len(rows)), (labels[rows], rows)), shape=(segments, len(labels)))
        return np.asarray(pick @ double(to_numpy(x)))
    return _sorted_sums(x, np.where(inside, labels, segments), segments + 1)[:segments, :]


def _sorted_sums(x: Array, labels: Ints, segments: int) -> Array:
    """The sums of PyTorch's segments on an accelerator: rows in order, added in order, so that bytes repeat."""
    xp = namespace(x)
    order = xp.argsort(like(labels, x), stable=True)
    lengths = like(np.bincount(labels, minlength=segments), x)
    return xp.segment_reduce(double(xp.take(x, order, axis=0)), "sum", lengths=lengths, axis=0)


# ---------------------------------------------------------------------------------------------- threads

Mapper: TypeAlias = Callable[..., list[Any]]
"""`map` as a list."""


@contextmanager
def thread_map() -> Iterator[Mapper]:
    """A map over blocks of rows on as many threads as the BLAS has, each product using one of them meanwhile.

    A BLAS spreads its products over the cores, but not the comparisons and selections between them.
    """
    controller = _blas()
    threads = max((one["num_threads"] for one in controller.info()), default=1)
    if threads == 1:
        yield lambda function, *blocks: list(map(function, *blocks))
        return
    with controller.limit(limits=1), ThreadPoolExecutor(threads) as pool:
        yield lambda function, *blocks: list(pool.map(function, *blocks))


@cache
def _blas() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


# ---------------------------------------------------------------------------------------------- similarities

TILE_ROWS = 1024
"""Rows of one product with a block of keys on a CPU."""


def top_products(query: Array, keys: Iterator[Array], k: int, xp: ModuleType) -> Array:
    """For each query row the k largest inner products with all key rows, in descending order.

    The keys come in blocks, so that neither the keys nor the products are ever held whole.
    """
    if not isinstance(query, np.ndarray):
        best: Array = None
        for block in keys:
            best = _merge_top(best, query @ block.T, k, xp)
        return top_values(best, k, xp)
    tiles = [query[rows] for rows in slices(len(query), TILE_ROWS)]
    tops: list[Any] = [None] * len(tiles)
    with thread_map() as each:
        for keys_t in (block.T for block in keys):
            tops = each(lambda tile, top, keys_t=keys_t: _merge_top(top, tile @ keys_t, k, np), tiles, tops)
        return np.concatenate(each(lambda top: top_values(top, k, np), tops))


def _merge_top(best: Array, products: Array, k: int, xp: ModuleType) -> Array:
    if not isinstance(products, np.ndarray):
        top = _top_of_groups(products, k, xp)
        return top if best is None else largest_values(xp.concat([best, top], axis=1), k, xp)
    if best is None or best.shape[1] < k:
        pool = products if best is None else np.concatenate([best, products], axis=1)
        return _first_top(pool, k)
    return _beat(best, products, best.min(axis=1, keepdims=True), strict=True)


GROUP = 16
"""Columns whose maximum stands for them while the largest are looked for."""


def _top_of_groups(products: Array, k: int, xp: ModuleType) -> Array:
    """The k largest of each row: they lie in the k groups of columns with the largest maxima."""
    n, width = products.shape
    groups = width // GROUP
    if groups < 4 * k or not hasattr(products, "topk"):
        return largest_values(products, k, xp)
    # A group's columns lie far apart, so that the maxima are taken of whole stretches of memory.
    split = xp.reshape(products[:, : groups * GROUP], (n, GROUP, groups))
    best = xp.max(split, axis=1).topk(k, dim=-1, sorted=False).indices
    pool = xp.reshape(xp.take_along_axis(split, best[:, None, :], axis=2), (n, GROUP * k))
    return largest_values(xp.concat([pool, products[:, groups * GROUP :]], axis=1), k, xp)


def _first_top(products: Floats, k: int) -> Floats:
    """The k largest of each row of the first block.

    Maxima over disjoint groups of columns bound the k-th largest from below with one cheap pass; only the few
    entries above that bound are then partitioned.
    """
    n, width = products.shape
    groups = width // GROUP
    if groups < 4 * k:
        return np.partition(products, width - k, axis=1)[:, width - k :] if k < width else products
    maxima = products[:, : groups * GROUP].reshape(n, GROUP, groups).max(axis=1)
    bound = kth_largest(maxima, k, np)
    return _beat(np.full((n, k), -np.inf, products.dtype), products, bound, strict=False)


def _beat(best: Floats, products: Floats, bound: Floats, *, strict: bool) -> Floats:
    """Merge the entries above each row's bound into that row's k best."""
    k = best.shape[1]
    n, width = products.shape
    found = np.flatnonzero(products > bound if strict else products >= bound)
    if not len(found):
        return best
    rows = found // width
    counts = np.bincount(rows, minlength=n)
    within = np.arange(len(found)) - (np.cumsum(counts) - counts)[rows]
    pool = np.full((n, k + int(counts.max())), -np.inf, products.dtype)
    pool[:, :k] = best
    pool[rows, k + within] = products.ravel()[found]
    return np.partition(pool, pool.shape[1] - k, axis=1)[:, -k:]


# ---------------------------------------------------------------------------------------------- linear algebra


def psd_eigh(
    matrix: npt.NDArray[np.float64], near: Array | None = None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Eigenvalues (descending, clipped at zero) and eigenvectors (columns) of a symmetric PSD matrix.

    With `near`, an array on an accelerator, they are computed there.
    """
    if near is None or on_cpu(near):
        with one_thread_if_small(matrix):
            values, vectors = np.linalg.eigh(matrix)
    else:
        xp = namespace(near)
        values, vectors = map(to_numpy, xp.linalg.eigh(xp.asarray(matrix, device=near.device)))
    return np.maximum(values[::-1], 0.0), vectors[:, ::-1]


SMALL_EIGH = 1024


def one_thread_if_small(matrix: npt.NDArray[Any]) -> AbstractContextManager[Any]:
    """A BLAS of one thread for the thousands of small steps of an eigendecomposition.

    Each would wake a second thread: no gain when the cores are free, and many times the cost when they are not.
    """
    return _blas().limit(limits=1) if len(matrix) <= SMALL_EIGH else nullcontext()


CLEAR = 1e-5
"""Eigenvalues of a Gram matrix above this share of the largest keep ten digits."""


def pinv_rank_aware(matrix: npt.NDArray[Any], near: Array | None = None) -> tuple[npt.NDArray[np.float64], int]:
    """Pseudo-inverse and rank, with the cut-off that the precision of the STORED matrix allows.

    A head's rows nearly sum to zero; inverting that spurious singular value would put the origin anywhere.
    """
    stored = matrix.dtype if matrix.dtype.kind == "f" else np.dtype(np.float32)
    cut, wide = max(matrix.shape) * float(np.finfo(stored).eps), matrix.shape[0] <= matrix.shape[1]
    size = np.abs(matrix).max(initial=0.0).astype(np.float64)
    if size == 0:
        raise OodometerError("the head's weight is zero: a pseudo-inverse needs at least one non-zero row")
    matrix = matrix / size  # in float64, and so that no square overflows
    values, vectors = psd_eigh(matrix @ matrix.T if wide else matrix.T @ matrix, near)
    kept = values > CLEAR * values[0]
    if (kept | (values < (cut**2) * values[0])).all():
        # A⁺ = Aᵀ(AAᵀ)⁺ = (AᵀA)⁺Aᵀ, several times cheaper than a decomposition of A and as good for such a spectrum.
        inverse = (vectors[:, kept] / values[kept]) @ vectors[:, kept].T
        return (matrix.T @ inverse if wide else inverse @ matrix.T) / size, int(kept.sum())
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    rank = int((s > cut * s[0]).sum())
    return (vt[:rank].T / s[:rank]) @ u[:, :rank].T / size, rank

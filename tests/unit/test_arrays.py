"""The array layer against plain NumPy loops: selections, similarities and numerics at the edges."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from oodometer import arrays
from oodometer.errors import OodometerError

RNG = np.random.default_rng(0)
matrices = hnp.arrays(
    np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=12), elements=st.floats(-100, 100, width=32)
)


@given(matrices, st.data())
def test_top_values_and_kth_largest_are_a_sort(x: np.ndarray, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, x.shape[1]))
    expected = -np.sort(-x, axis=1)
    np.testing.assert_array_equal(arrays.top_values(x, k, np), expected[:, :k])
    np.testing.assert_array_equal(arrays.kth_largest(x, k, np), expected[:, k - 1 : k])


@given(matrices, st.floats(0, 100))
def test_percentile_is_numpys(x: np.ndarray, q: float) -> None:
    np.testing.assert_allclose(arrays.percentile(x, q), np.percentile(x.astype(np.float64), q), rtol=1e-6, atol=1e-6)


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 400), st.integers(1, 120), st.booleans())
def test_top_products_in_blocks_are_those_of_the_whole(seed: int, n: int, keys: int, step: int, ties: bool) -> None:
    """The bounds that spare most of the sorting lose no neighbour, with or without ties."""
    rng = np.random.default_rng(seed)
    query, bank = (rng.standard_normal((rows, 5)).astype(np.float32) for rows in (n, keys))
    if ties:
        query, bank = np.round(query), np.round(bank)
    k = int(rng.integers(1, keys + 1))
    blocks = (bank[rows] for rows in arrays.slices(keys, step))
    found = arrays.top_products(query, blocks, k, np)
    expected = -np.sort(-(query @ bank.T), axis=1)[:, :k]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_top_products_of_many_keys_use_the_group_bound() -> None:
    query, bank = RNG.standard_normal((7, 8)), RNG.standard_normal((5000, 8))
    found = arrays.top_products(query, iter([bank[:3000], bank[3000:]]), 10, np)
    np.testing.assert_allclose(found, -np.sort(-(query @ bank.T), axis=1)[:, :10], rtol=1e-12)


@given(hnp.arrays(np.float64, (3, 4), elements=st.floats(-1e4, 1e4)))
def test_logsumexp_and_softmax_are_scipys_and_finite(x: np.ndarray) -> None:
    np.testing.assert_allclose(arrays.logsumexp(x, np), scipy.special.logsumexp(x, axis=1), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(arrays.softmax(x, np), scipy.special.softmax(x, axis=1), atol=1e-12)
    np.testing.assert_allclose(arrays.log_softmax(x, np), scipy.special.log_softmax(x, axis=1), rtol=1e-9, atol=1e-9)


def test_n25_the_unit_of_a_zero_row_is_zero() -> None:
    x = np.array([[0.0, 0.0], [3.0, 4.0]])
    np.testing.assert_allclose(arrays.unit(x, np), [[0, 0], [0.6, 0.8]])


def test_pooled_averages_positions_and_leaves_matrices() -> None:
    maps = RNG.standard_normal((3, 2, 4, 5, 6))
    np.testing.assert_allclose(arrays.pooled(maps), maps.mean((2, 3, 4)))
    assert arrays.pooled(maps[:, :, 0, 0, 0]) is not None
    np.testing.assert_array_equal(arrays.pooled(maps[:, :, 0, 0, 0]), maps[:, :, 0, 0, 0])


@given(hnp.arrays(np.int64, st.integers(1, 30), elements=st.integers(-1, 4)))
def test_segment_sums_leave_out_what_is_in_no_segment(labels: np.ndarray) -> None:
    x = RNG.standard_normal((len(labels), 3)).astype(np.float32)
    expected = np.stack([x[labels == c].astype(np.float64).sum(0) for c in range(4)])
    np.testing.assert_allclose(arrays.segment_sums(x, labels, 4), expected, atol=1e-12)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 299, 1999])
def test_the_first_bad_row_is_found(value: float, row: int) -> None:
    x = RNG.standard_normal((2000, 3)).astype(np.float32)
    assert arrays.first_not_finite(x) is None
    x[row, 1] = value
    x[-1, 0] = np.nan
    assert arrays.first_not_finite(x) == row


def test_large_finite_values_are_not_taken_for_infinite() -> None:
    x = np.full((10, 4), np.float32(3e38))
    assert arrays.first_not_finite(x) is None  # although their sum overflows


def test_n29_a_spurious_singular_value_does_not_enter_the_pseudo_inverse() -> None:
    weight = RNG.standard_normal((6, 10)).astype(np.float32)
    weight -= weight.mean(0)  # softmax is shift-invariant: trained heads look like this
    inverse, rank = arrays.pinv_rank_aware(weight)
    assert rank == 5
    np.testing.assert_allclose(inverse, np.linalg.pinv(weight.astype(np.float64), rcond=1e-5), atol=1e-9)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (1, 4), (4, 1)])
@pytest.mark.parametrize("smallest", [1.0, 1e-2, 1e-4])
def test_the_pseudo_inverse_of_any_shape_and_condition(shape: tuple[int, int], smallest: float) -> None:
    rng = np.random.default_rng(0)
    u, _, vt = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
    weight = (u * np.geomspace(1.0, smallest, min(shape))) @ vt
    inverse, rank = arrays.pinv_rank_aware(weight.astype(np.float32))
    assert rank == min(shape)
    expected = np.linalg.pinv(weight.astype(np.float32).astype(np.float64))
    np.testing.assert_allclose(inverse, expected, rtol=0, atol=1e-9 * np.abs(expected).max())


def test_a_zero_head_has_no_pseudo_inverse() -> None:
    with pytest.raises(OodometerError, match="zero"):
        arrays.pinv_rank_aware(np.zeros((3, 4), np.float32))


def test_eigenvalues_are_descending_and_not_negative() -> None:
    x = RNG.standard_normal((3, 8))
    values, vectors = arrays.psd_eigh(x.T @ x)
    assert (np.diff(values) <= 0).all()
    assert values.min() >= 0
    np.testing.assert_allclose((vectors * values) @ vectors.T, x.T @ x, atol=1e-10)


def test_blocks_cover_all_rows_and_stay_bounded() -> None:
    assert [*arrays.slices(10, 4)] == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert arrays.block_rows(1) % 64 == 0
    assert arrays.block_rows(4 * 2048) * 4 * 2048 <= arrays.BLOCK_BYTES


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_arrays_of_any_precision(dtype: str) -> None:
    import torch

    x = torch.tensor(RNG.standard_normal((4, 3))).to(getattr(torch, dtype))
    working = arrays.real(x)
    assert str(working.dtype) == ("torch.float64" if dtype == "float64" else "torch.float32")
    assert arrays.to_numpy(x).shape == (4, 3)
    np.testing.assert_allclose(arrays.to_numpy(working), arrays.to_numpy(x), rtol=1e-6)
    assert arrays.on_cpu(x)


@pytest.mark.torch
def test_torch_selections_agree_with_numpy() -> None:
    import torch

    x = RNG.standard_normal((9, 20)).astype(np.float32)
    xp = arrays.namespace(torch.from_numpy(x))
    np.testing.assert_array_equal(arrays.top_values(torch.from_numpy(x), 4, xp), arrays.top_values(x, 4, np))
    np.testing.assert_array_equal(arrays.take_rows(torch.from_numpy(x), np.array([3, 1])), x[[3, 1]])
    labels = RNG.integers(-1, 4, 9)
    np.testing.assert_allclose(
        arrays.segment_sums(torch.from_numpy(x), labels, 4), arrays.segment_sums(x, labels, 4), atol=1e-12
    )


def test_column_sums_are_exact_and_finite_if_and_only_if_every_entry_is() -> None:
    x = np.random.default_rng(0).random((1000, 6)).astype(np.float32)
    np.testing.assert_allclose(arrays.column_sums(x), x.astype(np.float64).sum(0), rtol=1e-7)
    np.testing.assert_array_equal(arrays.column_sums(x[:5].astype(np.float64)), x[:5].astype(np.float64).sum(0))
    large = np.full((300, 2), 3e38, np.float32)
    np.testing.assert_allclose(arrays.column_sums(large), 300 * np.float64(np.float32(3e38)))
    assert arrays.column_sums(large[:0]).tolist() == [0.0, 0.0]
    for value in (np.nan, np.inf):
        large[123, 1] = value
        assert np.isfinite(arrays.column_sums(large)).tolist() == [True, False]


@pytest.mark.torch
@given(hnp.arrays(np.int64, st.integers(1, 30), elements=st.integers(0, 4)))
def test_sums_over_sorted_segments_are_those_of_the_sparse_product(labels: np.ndarray) -> None:
    """What an accelerator does with PyTorch's segments; the last of them is left out."""
    import torch

    x = RNG.standard_normal((len(labels), 3)).astype(np.float32)
    found = arrays._sorted_sums(torch.tensor(x), labels, 5).numpy()
    np.testing.assert_allclose(found[:4], arrays.segment_sums(x, labels, 4), atol=1e-12)


@pytest.mark.torch
@pytest.mark.parametrize(("width", "k"), [(1000, 3), (1003, 15), (64, 1), (50, 10), (1003, 1003)])
@pytest.mark.parametrize("ties", [False, True])
def test_the_largest_lie_in_the_groups_of_the_largest_maxima(width: int, k: int, ties: bool) -> None:
    import array_api_compat.torch as xp
    import torch

    x = RNG.standard_normal((20, width))
    x = x.round(1) if ties else x
    expected = -np.sort(-x, axis=1)[:, :k]
    for found in (arrays._top_of_groups(torch.tensor(x), k, xp), arrays.largest_values(torch.tensor(x), k, xp)):
        np.testing.assert_array_equal(-np.sort(-found.numpy(), axis=1), expected)
    np.testing.assert_array_equal(-np.sort(-arrays.largest_values(x, k, np), axis=1), expected)


@pytest.mark.torch
def test_frozen_values_are_sent_once_and_cannot_change() -> None:
    import torch

    values = np.arange(6.0).reshape(2, 3)
    kept, reference = arrays.frozen(values), torch.zeros(1)
    sent = arrays.like(kept, reference)
    assert sent.dtype == torch.float32
    assert arrays.like(kept, reference) is sent
    assert arrays.like(values, reference) is not arrays.like(values, reference)
    assert arrays.like(kept, torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
    with pytest.raises(ValueError, match="read-only"):
        kept[0, 0] = 1.0
    size = len(arrays._SENT)
    del kept
    assert len(arrays._SENT) == size - 1  # the copies go with the values


@pytest.mark.torch
def test_row_functions_of_torch_are_those_of_numpy() -> None:
    import array_api_compat.torch as xp
    import torch

    x = 30 * np.random.default_rng(1).standard_normal((9, 20))
    for function in (arrays.logsumexp, arrays.softmax, arrays.log_softmax, arrays.norms, arrays.absolute_sums):
        np.testing.assert_allclose(function(torch.tensor(x), xp).numpy(), function(x, np), rtol=1e-12, atol=1e-12)


def test_threads_leave_the_blas_as_it_was_and_results_in_order() -> None:
    before = [one["num_threads"] for one in arrays._blas().info()]
    with arrays.thread_map() as each:
        assert each(lambda a, b: a - b, range(50), range(0, 100, 2)) == [-n for n in range(50)]
    assert [one["num_threads"] for one in arrays._blas().info()] == before
    with pytest.raises(ZeroDivisionError), arrays.thread_map() as each:
        each(lambda a: 1 // a, [1, 0])
    assert [one["num_threads"] for one in arrays._blas().info()] == before


def test_top_products_do_not_depend_on_the_number_of_threads() -> None:
    rng = np.random.default_rng(0)
    query, keys = rng.standard_normal((2500, 20), np.float32), rng.standard_normal((3000, 20), np.float32)
    with arrays._blas().limit(limits=1):
        one = arrays.top_products(query, iter([keys]), 7, np)
    many = arrays.top_products(query, iter([keys]), 7, np)
    assert one.tobytes() == many.tobytes()
    np.testing.assert_allclose(one, -np.sort(-(query @ keys.T), axis=1)[:, :7], rtol=1e-5)


@pytest.mark.parametrize("width", [1, 2, 10, 24, 25, 64, 65, 200])
def test_rows_of_any_width_reduce_to_the_same_as_by_definition(width: int) -> None:
    """Short rows are reduced down their columns; ties go to the first column either way."""
    z = np.random.default_rng(width).integers(-3, 4, (501, width)).astype(np.float32)
    assert np.array_equal(arrays.argmax(z, np), z.argmax(1))
    exact = np.exp(z.astype(np.float64))
    np.testing.assert_allclose(arrays.logsumexp(z, np), np.log(exact.sum(1)), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(arrays.softmax(z, np), exact / exact.sum(1, keepdims=True), rtol=2e-6)
    np.testing.assert_allclose(arrays.row_sums(z, np), z.sum(1, dtype=np.float64), rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 50, 51, 52, 1000, 70_001])
def test_sums_of_short_columns_leave_no_row_out(rows: int) -> None:
    x = np.random.default_rng(rows).integers(0, 9, (rows, 10)).astype(np.float32)
    assert np.array_equal(arrays.column_sums(x), x.sum(0, dtype=np.float64))
    x[rows - 1, 3] = np.inf
    assert not np.isfinite(arrays.column_sums(x)).all()

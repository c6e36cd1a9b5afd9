"""Every kernel of a matrix against its dense values; the invariant one bit by bit."""

import pytest
import torch

from stopway_engine.kernels import (
    INT4_ROWS_MAX,
    PlainLinear,
    RmsNorm,
    SmallBatchLinear,
    TiledLinear,
    compute_dtype,
    make_linear,
    packs_bf16,
    silu_mul,
)
from stopway_engine.numerics import ROW_TILE, Numerics, thread_environment, threads_for
from stopway_engine.weights.matrix import Q4, Matrix, stack

CPU = torch.device("cpu")


def q4_matrix(rows: int, cols: int) -> Matrix:
    scale = torch.rand(rows, cols // 32) * 0.02 + 0.001
    q4 = Q4(torch.randint(0, 16, (rows, cols), dtype=torch.uint8), scale, -8.0 * scale)
    return Matrix(q4.dense(), q4)


@pytest.mark.parametrize("rows", [1, 2, INT4_ROWS_MAX, INT4_ROWS_MAX + 1, 8, 33, 130])
@pytest.mark.parametrize(("n", "k"), [(96, 64), (576, 192), (40, 96)])
def test_fast_kernels_agree_with_the_dense_product(rows, n, k):
    torch.manual_seed(0)
    for matrix in (q4_matrix(n, k), Matrix(torch.randn(n, k) * 0.05)):
        linear = make_linear(matrix, CPU, invariant=False)
        x = torch.randn(rows, k).to(compute_dtype(CPU, invariant=False))
        expected = x.float() @ matrix.dense.t()
        torch.testing.assert_close(linear(x).float(), expected, rtol=0.02, atol=0.03)


@pytest.mark.skipif(not packs_bf16(CPU), reason="needs oneDNN with bf16")
def test_four_bit_codes_are_used_where_the_kernel_fits():
    assert isinstance(make_linear(q4_matrix(96, 64), CPU, invariant=False), SmallBatchLinear)
    assert not isinstance(make_linear(q4_matrix(40, 64), CPU, invariant=False), SmallBatchLinear)


def test_without_packed_kernels_linear_is_plain(monkeypatch):
    monkeypatch.setattr("stopway_engine.kernels.packs_bf16", lambda device: False)
    matrix = q4_matrix(96, 64)
    linear = make_linear(matrix, CPU, invariant=False)
    assert isinstance(linear, PlainLinear) and compute_dtype(CPU, invariant=False) == torch.float32
    x = torch.randn(5, 64)
    torch.testing.assert_close(linear(x), x @ matrix.dense.t())


@pytest.mark.parametrize(("n", "k"), [(960, 576), (576, 1536), (576, 672), (320, 576), (48, 32)])
def test_a_row_of_a_tiled_product_depends_on_itself_alone(n, k):
    torch.manual_seed(0)
    linear = TiledLinear(torch.randn(n, k) * 0.05, CPU)
    row = torch.randn(k)
    results = []
    for tiles in (1, 3):
        for position in (*range(ROW_TILE), tiles * ROW_TILE - 1):
            x = torch.randn(tiles * ROW_TILE, k)
            x[position] = row
            results.append(linear(x)[position])
    assert all(torch.equal(results[0], other) for other in results)


def test_norm_and_gate():
    x, weight = torch.randn(7, 64), torch.randn(64)
    expected = torch.nn.functional.rms_norm(x, (64,), weight, 1e-5)
    torch.testing.assert_close(RmsNorm(weight, 1e-5, torch.float32, CPU)(x), expected)
    rounded = RmsNorm(weight, 1e-5, torch.bfloat16, CPU)(x)
    torch.testing.assert_close(rounded, expected.bfloat16())
    both = torch.randn(7, 20)
    gate, up = both[:, :10].clone(), both[:, 10:].clone()
    torch.testing.assert_close(silu_mul(both, 10), torch.nn.functional.silu(gate) * up)


def test_stacking_keeps_codes_only_if_all_have_them():
    a, b = q4_matrix(32, 64), q4_matrix(16, 64)
    both = stack(a, b)
    assert both.q4 is not None and torch.equal(both.q4.dense(), both.dense)
    assert stack(a, Matrix(b.dense)).q4 is None


def test_threads_share_the_cores():
    assert [threads_for(n, Numerics.FAST, cores=6) for n in (1, 2, 4, 9)] == [6, 3, 1, 1]
    assert [threads_for(n, Numerics.INVARIANT, cores=6) for n in (1, 2, 4)] == [4, 2, 1]
    assert thread_environment(1)["GOMP_SPINCOUNT"] == "0"

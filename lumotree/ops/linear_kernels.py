"""Triton kernels of the skinny-M matrix products of a decode step, and of the norms behind them.

out^T = W x^T: a tile of the weight's rows stands on the wide side of the matrix instruction and
the few rows of x on its narrow side, so that nearly all shared memory and all loads in flight
belong to the weight, whose bytes are what the product costs.

Programs that share a weight tile are neighbours in the grid: more rows than one program holds
read it from L2.

Bits: an output element is one chain over k in steps of BLOCK_K, within its share of K; shares
(splits) are added in order by the kernels that read the partial sums. Neither depends on the row
count, which only sets the narrow side of the instruction and a mask.

A weight may be 8-bit floats with a scale a row (lumotree.ops.eight_bits): widened to float16 as
it is multiplied, scaled in the float32 sum. Rows of bfloat16 become float16 too: values beyond
65504 overflow and those below 1e-5 lose bits, at the cost of a draft and of no answer.

Early start (PDL): a kernel lets the next one begin, a product when its loads are done, and waits
for the one in front before it touches anything that kernels write.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _tile(source, row0, k, N, K, stride, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
          TMA: tl.constexpr, EVEN: tl.constexpr, POLICY: tl.constexpr):  # fmt: skip
    """[ROWS, BLOCK_K] of a matrix [N, K] with contiguous K, zero outside of it."""
    if TMA:
        tile = source.load([row0, k])
    else:
        n = row0 + tl.arange(0, ROWS)
        at = source + n.to(tl.int64)[:, None] * stride + (k + tl.arange(0, BLOCK_K))[None, :]
        inside = (n < N)[:, None]
        if not EVEN:
            inside = inside & (k + tl.arange(0, BLOCK_K) < K)[None, :]
        tile = tl.load(at, mask=inside, other=0.0, eviction_policy=POLICY)
    return tile


@triton.jit
def _dot(weight, tile, acc, WIDE: tl.constexpr):
    """acc + weight tile^T; WIDE: for the interpreter, whose products know no bfloat16."""
    if weight.dtype == tl.float8e4nv:
        if tile.dtype == tl.float32:
            weight = weight.to(tl.float32)
        else:
            weight, tile = weight.to(tl.float16), tile.to(tl.float16)
    if WIDE:
        weight, tile = weight.to(tl.float32), tile.to(tl.float32)
    return tl.dot(weight, tl.trans(tile), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x,  # [rows, K] or its descriptor, with stride `stride` between rows
    w,  # [N, K] or its descriptor
    scale_ptr,  # None, or float32 [N] that w's rows are to be multiplied with
    out_ptr,  # [rows, N], or partial sums float32 [splits, rows, N]
    rows,
    N,
    K,
    stride,
    ROWS: tl.constexpr,  # rows of a program, a power of two
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,  # K is a multiple of BLOCK_K
    PDL: tl.constexpr,
    WIDE: tl.constexpr,
):
    x0 = tl.program_id(0) * ROWS
    row0 = tl.program_id(1) * BLOCK_N
    split = tl.program_id(2)
    steps = tl.cdiv(K, BLOCK_K)
    first = steps * split // tl.num_programs(2)
    last = steps * (split + 1) // tl.num_programs(2)
    if PDL:
        gdc_wait()
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for step in range(first, last):
        k = step * BLOCK_K
        weight = _tile(w, row0, k, N, K, K, BLOCK_N, BLOCK_K, TMA, EVEN, "evict_first")
        tile = _tile(x, x0, k, rows, K, stride, ROWS, BLOCK_K, TMA, EVEN, "")
        acc = _dot(weight, tile, acc, WIDE)
    if PDL:
        gdc_launch_dependents()
    n = row0 + tl.arange(0, BLOCK_N)
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr + n, mask=n < N, other=0.0)[:, None]
    row = x0 + tl.arange(0, ROWS)
    to = out_ptr + split.to(tl.int64) * rows * N + row[None, :] * N + n[:, None]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (row < rows)[None, :])


@triton.jit(do_not_specialize=["rows"])
def swiglu_kernel(
    x,  # as in linear_kernel
    w,  # [2 F, K]: rows of the gate, then of the up projection
    scale_ptr,  # None, or float32 [2 F]
    out_ptr,  # [rows, F]
    rows,
    N,  # F
    K,
    stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """silu(gate) * up, rounded where the definition rounds: both products, silu, the result."""
    x0 = tl.program_id(0) * ROWS
    row0 = tl.program_id(1) * BLOCK_N
    if PDL:
        gdc_wait()
    gate = tl.zeros([BLOCK_N, ROWS], tl.float32)
    up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for step in range(0, tl.cdiv(K, BLOCK_K)):
        k = step * BLOCK_K
        tile = _tile(x, x0, k, rows, K, stride, ROWS, BLOCK_K, TMA, EVEN, "")
        weight = _tile(w, row0, k, 2 * N, K, K, BLOCK_N, BLOCK_K, TMA, EVEN, "evict_first")
        gate = _dot(weight, tile, gate, WIDE)
        weight = _tile(w, N + row0, k, 2 * N, K, K, BLOCK_N, BLOCK_K, TMA, EVEN, "evict_first")
        up = _dot(weight, tile, up, WIDE)
    if PDL:
        gdc_launch_dependents()
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    n = row0 + tl.arange(0, BLOCK_N)
    if scale_ptr is not None:
        gate *= tl.load(scale_ptr + n, mask=n < N, other=0.0)[:, None]
        up *= tl.load(scale_ptr + N + n, mask=n < N, other=0.0)[:, None]
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    out = (silu * up.to(dtype).to(tl.float32)).to(dtype)
    row = x0 + tl.arange(0, ROWS)
    to = out_ptr + row[None, :] * N + n[:, None]
    tl.store(to, out, mask=(n < N)[:, None] & (row < rows)[None, :])


@triton.jit
def _sum_splits(partial_ptr, at, inside, stride, SPLITS: tl.constexpr):
    """Partial sums at offsets `at` of each split, added in order."""
    total = tl.load(partial_ptr + at, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partial_ptr + split * stride + at, mask=inside, other=0.0)
    return total


@triton.jit
def sum_kernel(
    partial_ptr,  # float32 [SPLITS, size]
    out_ptr,  # [size]
    size,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = _sum_splits(partial_ptr, at, at < size, size, SPLITS)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < size)


@triton.jit
def _normed(x, scale, eps):
    """x / sqrt(sum x^2 + eps) * scale of one row; elements past its width are zero."""
    return x * tl.rsqrt(tl.sum(x * x) + eps) * scale


@triton.jit(do_not_specialize=["rows"])
def add_norm_kernel(
    partial_ptr,  # float32 [SPLITS, rows, width]
    residual_ptr,  # [rows, width]
    scale_ptr,  # float32 [width]
    eps_ptr,  # float32 [1]
    sum_ptr,  # [rows, width]
    normed_ptr,  # [rows, width]
    rows,
    width,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least `width`
    PDL: tl.constexpr,
):
    """One row: residual + sum of partial sums, rounded once, and the norm of what was rounded."""
    if PDL:
        gdc_launch_dependents()
    dim = tl.arange(0, BLOCK)
    inside = dim < width
    scale = tl.load(scale_ptr + dim, mask=inside, other=0.0)
    eps = tl.load(eps_ptr)
    at = tl.program_id(0) * width + dim
    if PDL:
        gdc_wait()
    residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
    total = _sum_splits(partial_ptr, at, inside, rows * width, SPLITS)
    total = (total + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + at, total, mask=inside)
    normed = _normed(total.to(tl.float32), scale, eps)
    tl.store(normed_ptr + at, normed.to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_kernel(
    x_ptr,  # [rows, width]
    scale_ptr,  # float32 [width]
    eps_ptr,  # float32 [1]
    out_ptr,  # [rows, width]
    width,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """RMSNorm of one row; same bits as add_norm_kernel with the same BLOCK and warps."""
    if PDL:
        gdc_launch_dependents()
    dim = tl.arange(0, BLOCK)
    inside = dim < width
    scale = tl.load(scale_ptr + dim, mask=inside, other=0.0)
    eps = tl.load(eps_ptr)
    at = tl.program_id(0).to(tl.int64) * width + dim
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    normed = _normed(x, scale, eps)
    tl.store(out_ptr + at, normed.to(out_ptr.dtype.element_ty), mask=inside)

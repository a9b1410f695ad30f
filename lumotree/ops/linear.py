"""Matrix products of a decode step, 1 to 512 rows, and the norms behind them, as Triton kernels.

Weights stay as checkpoints store them, [N, K] with contiguous K. Definitions: `linear`,
`linear_add`, `swiglu` and `rms_norm` of lumotree.ops.reference. A row's bits depend neither on
its neighbours nor on the row count: the order over K is one for all, and the narrow side of the
matrix instruction (16 to 128 rows) changes no bit on an H200, which a test on the device checks.

Measured on one H200 (torch 2.11, Triton 3.6, scripts/device/linear.py, medians of 50 replays):
the dense part of a 27B step, 64 layers and the output head with weights of their own, 51.2 GB,
one graph. Milliseconds at 1 / 16 / 32 / 64 / 128 rows: these kernels with both norms of a layer
12.54 / 12.81 / 12.96 / 14.81 / 19.20; torch.mm (cuBLAS) without norms 13.19 / 13.59 / 13.61 /
14.23 / 15.75. Products alone, 64 layers, 32 rows: 11.98 against 12.98.
What bounds it: a kernel that only reads gets 4.1 TB/s from tiles with 128 bytes of a row, 4.3
with 256, 4.5 with 2 KiB and 4.6 from contiguous memory, hence 128 columns a step where that
measured faster; and each kernel's end and the next one's start are 2 to 3 microseconds apart.
Asking the L2 cache for weights ahead (by the waiting kernel, in the loop, by the kernel in front)
gained nothing in the chain and mostly lost; so did letting all kernels begin early: their
programs pile up on some multiprocessors. Above 32 rows cuBLAS is faster.

Drafts may read weights in 8 bits (eight_bits.Scaled): the same kernels at half the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as HopperDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from lumotree.ops.device import Limits, limits_of
from lumotree.ops.eight_bits import KIND, Scaled
from lumotree.ops.linear_hopper import hopper_kernel
from lumotree.ops.linear_kernels import (
    add_norm_kernel,
    linear_kernel,
    norm_kernel,
    sum_kernel,
    swiglu_kernel,
)
from lumotree.ops.reference import Norm

# Narrow side of the matrix instruction for this many rows or fewer, and at most.
MIN_ROWS, TALLEST = 16, 128
# Rows of a step: those of several requests together. More are a prompt.
MAX_STEP_ROWS = 512
SUM_BLOCK = 1024


Weight = Tensor | Scaled


@dataclass(frozen=True)
class Block:
    """How a product runs: n rows of the weight by k columns a step, in `warps` warps.

    k and splits (shares of K) decide the bits, all else only speed. stages: tiles in flight at
    32 rows; hopper: by linear_hopper where it can run; early: there, the kernel behind may begin
    at once.
    """

    n: int
    k: int
    splits: int = 1
    stages: int = 4
    warps: int = 4
    hopper: bool = False
    early: bool = False


# Measured on one H200, bfloat16: (N, K) of the weight -> block. Others get the rule of `choose`.
TABLE: dict[tuple[int, int], Block] = {
    (16480, 5120): Block(64, 128, stages=4, hopper=True),
    (14336, 5120): Block(128, 128, stages=4, warps=8, hopper=True),
    (5120, 6144): Block(64, 128, splits=3, stages=4),
    (34816, 5120): Block(64, 64, stages=3),
    (5120, 17408): Block(128, 128, splits=3, stages=4, warps=8, hopper=True, early=True),
    (5120, 10240): Block(128, 128, splits=3, stages=4, warps=8),
    (248320, 5120): Block(128, 64, stages=5),
}


# The same for weights in 8 bits, one row: 0.300 ms where bfloat16 takes 0.577 (output head), 0.056
# for 0.087 (gate and up), 0.024 for 0.037, 0.027 for 0.043, 0.018 for 0.031, 0.012 for 0.018;
# scripts/device/linear8.py.
TABLE_8: dict[tuple[int, int], Block] = {
    (248320, 5120): Block(128, 256, stages=3, warps=8),
    (34816, 5120): Block(128, 128, stages=4),
    (14336, 5120): Block(64, 128, stages=4),
    (5120, 17408): Block(64, 128, splits=4, stages=5),
    (5120, 10240): Block(128, 128, splits=6, stages=4, warps=8),
    (5120, 6144): Block(128, 128, splits=6, stages=4, warps=8),
}


def choose(n: int, k: int, halves: int, dtype: torch.dtype, limits: Limits) -> Block:
    """The block for a weight [n, k] in dtype: used whole (halves 1), by `linear_swiglu` (2).

    From the table, else 128 rows a program (64 where that leaves multiprocessors idle) and as
    many shares of K as give every multiprocessor about one program, each with 8 steps or more.
    Stages are cut until the tiles fit the device. Never depends on the rows of x.
    """
    block = TABLE.get((n, k)) if dtype == torch.bfloat16 else None
    if block is None and dtype == torch.bfloat16:
        rows = 128 if n >= 64 * limits.processors and halves == 1 else 64
        programs = triton.cdiv(n // halves, rows)
        splits = 1 if halves == 2 else max(1, min(limits.processors // programs, k // (8 * 64)))
        block = Block(rows, 64, splits, stages=5)
    if dtype == KIND:
        shares = min(3 * limits.processors // triton.cdiv(n, 64), k // 1024)
        splits = max(1, shares) if halves == 1 else 1
        # Without Hopper's instructions the widened tile takes registers: a small one.
        wide = Block(64, 128, splits, stages=4) if limits.hopper else Block(64, 64, splits)
        block = (TABLE_8.get((n, k)) if limits.hopper else None) or wide
    block = block or Block(64, 32, stages=3)
    row = max(dtype.itemsize, 2)  # of x, an element

    def size(b: Block) -> int:
        return b.stages * (b.k * (halves * b.n * dtype.itemsize + 32 * row) + 16)

    while size(block) > limits.shared and block.stages > 2:
        block = replace(block, stages=block.stages - 1)
    while size(block) > limits.shared and block.n > 64:
        block = replace(block, n=block.n // 2, warps=4)
    return block


_choice = lru_cache(maxsize=256)(choose)


def _parts(weight: Weight) -> tuple[Tensor, Tensor | None]:
    """Its values and their scale, None for one."""
    return (weight.values, weight.scale) if isinstance(weight, Scaled) else (weight, None)


def _chosen(x: Tensor, weight: Weight, halves: int = 1) -> Block:
    return _choice(*weight.shape, halves, _parts(weight)[0].dtype, limits_of(x.device))


def pack(weight: Tensor) -> Tensor:
    """[N, K] weight -> the right-hand side of the products here: the same, contiguous."""
    return weight.contiguous()


def _row_block(rows: int) -> int:
    return min(TALLEST, max(MIN_ROWS, triton.next_power_of_2(rows)))


def _start(pdl: bool) -> dict:
    return {"launch_pdl": True} if pdl else {}


def _aligned(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def _checked(x: Tensor, weight: Weight) -> Tensor:
    """x with contiguous K; raises ValueError if it and the weight do not fit."""
    if x.shape[0] > MAX_STEP_ROWS:  # a prompt, which a library's product serves better
        raise ValueError(f"{x.shape[0]} rows, at most {MAX_STEP_ROWS} have kernels: use torch.mm")
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"rows of {x.shape[1]} values for a weight of {weight.shape[1]} columns")
    if isinstance(weight, Tensor) and x.dtype != weight.dtype:
        raise ValueError(f"rows in {x.dtype} for a weight in {weight.dtype}")
    return x if x.stride(1) == 1 else x.contiguous()


def _stages(block: Block, tall: int, halves: int, row: int, itemsize: int) -> int:
    """As many tiles in flight as fit where `stages` of them fit at 32 rows.

    row, itemsize: bytes of an element of x and of the weight.
    """
    weight = halves * block.n * itemsize
    return max(2, min(block.stages, block.stages * (weight + 32 * row) // (weight + tall * row)))


def _launch(x: Tensor, weight: Weight, out: Tensor, block: Block, halves: int) -> None:
    """out = the product of x and the weight, or of its halves by `swiglu`."""
    rows, width = x.shape
    weight, scale = _parts(weight)
    n, tall = weight.shape[0] // halves, _row_block(rows)
    grid = (triton.cdiv(rows, tall), triton.cdiv(n, block.n), block.splits)
    limits, aligned = limits_of(x.device), _aligned(x) and _aligned(weight)
    pdl = limits.early_start
    options = dict(
        ROWS=tall, BLOCK_N=block.n, BLOCK_K=block.k, num_warps=block.warps, **_start(pdl)
    )
    stages = _stages(block, tall, halves, x.element_size(), weight.element_size())
    x_view = (x, [rows, width], [x.stride(0), 1], [tall, block.k])
    w_view = (weight, list(weight.shape), [width, 1], [block.n, block.k])
    if block.hopper and aligned and weight.dtype == torch.bfloat16 and limits.hopper:
        views = [
            HopperDescriptor(*v, gl.NVMMASharedLayout.get_default_for(v[3], gl.bfloat16))
            for v in (x_view, w_view)
        ]
        hopper_kernel[grid](
            *views, out, rows, n, width, block.splits,
            HALVES=halves, STAGES=stages, EARLY=block.early, **options,
        )  # fmt: skip
        return
    # Before Hopper descriptors become loads into registers, and no tile is on its way ahead.
    blocks = aligned and (pdl or bool(triton.knobs.runtime.interpret))
    sources = (TensorDescriptor(*x_view), TensorDescriptor(*w_view)) if blocks else (x, weight)
    kernel = linear_kernel if halves == 1 else swiglu_kernel
    kernel[grid](
        *sources, scale, out, rows, n, width, x.stride(0),
        TMA=blocks,
        EVEN=width % block.k == 0,
        PDL=pdl,
        WIDE=bool(triton.knobs.runtime.interpret),
        num_stages=stages,
        **options,
    )  # fmt: skip


def _product(x: Tensor, weight: Weight, block: Block, dtype: torch.dtype) -> Tensor:
    """[rows, N] in dtype, or partial sums float32 [splits, rows, N]."""
    shape = (x.shape[0], weight.shape[0])
    if block.splits > 1:
        shape, dtype = (block.splits, *shape), torch.float32
    out = torch.empty(shape, dtype=dtype, device=x.device)
    _launch(x, weight, out, block, 1)
    return out


def linear(
    x: Tensor, packed: Weight, out_dtype: torch.dtype | None = None, block: Block | None = None
) -> Tensor:
    """x [rows, K], packed [N, K] -> [rows, N] in out_dtype (x's), rounded once from float32.

    Raises ValueError, as do the products below, when shapes or dtypes do not fit or there are more
    than MAX_STEP_ROWS rows.
    """
    x, dtype = _checked(x, packed), out_dtype or x.dtype
    block = block or _chosen(x, packed)
    out = _product(x, packed, block, dtype)
    if block.splits == 1:
        return out
    pdl = limits_of(x.device).early_start
    total = torch.empty(out.shape[1:], dtype=dtype, device=x.device)
    sum_kernel[(triton.cdiv(total.numel(), SUM_BLOCK),)](
        out, total, total.numel(), SPLITS=block.splits, BLOCK=SUM_BLOCK, PDL=pdl, **_start(pdl),
    )  # fmt: skip
    return total


def linear_swiglu(x: Tensor, packed: Weight, block: Block | None = None) -> Tensor:
    """x [rows, K], packed [2 F, K] (gate, then up) -> silu(gate) * up, [rows, F]."""
    x = _checked(x, packed)
    out = torch.empty(x.shape[0], packed.shape[0] // 2, dtype=x.dtype, device=x.device)
    _launch(x, packed, out, block or _chosen(x, packed, 2), 2)
    return out


def _norm_options(x: Tensor) -> dict:
    block, pdl = triton.next_power_of_2(x.shape[-1]), limits_of(x.device).early_start
    return dict(BLOCK=block, PDL=pdl, num_warps=min(16, max(1, block // 512)), **_start(pdl))


def linear_add_norm(
    residual: Tensor, x: Tensor, packed: Weight, norm: Norm, block: Block | None = None
) -> tuple[Tensor, Tensor]:
    """residual [rows, N] + x @ packed^T, rounded once, and its RMSNorm; both in x's dtype."""
    x, residual, (rows, width) = _checked(x, packed), residual.contiguous(), residual.shape
    block = block or _chosen(x, packed)
    partial = _product(x, packed, block, torch.float32)
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    add_norm_kernel[(rows,)](
        partial, residual, norm.scale, norm.eps, total, normed, rows, width,
        SPLITS=block.splits, **_norm_options(total),
    )  # fmt: skip
    return total, normed


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """RMSNorm of the last dim of x [..., d], any rows, in float32; result in x's dtype."""
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    norm_kernel[(x.numel() // width,)](x, norm.scale, norm.eps, out, width, **_norm_options(x))
    return out

"""Matrix products of a decode step, 1 to 128 rows, and the norms behind them, as Triton kernels.

Weights stay as checkpoints store them, [N, K] with contiguous K. Definitions: `linear`,
`linear_add`, `swiglu` and `rms_norm` of lumotree.ops.reference. A row's bits depend neither on
its neighbours nor on the row count.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lumotree.ops.linear_kernels import (
    add_norm_kernel,
    linear_kernel,
    norm_kernel,
    sum_kernel,
    swiglu_kernel,
)
from lumotree.ops.reference import Norm, swiglu

# Rows the kernels take; more of them (a prompt) go to torch.mm.
MAX_ROWS = 128
# Narrow side of the matrix instruction for this many rows or fewer.
MIN_ROWS = 16
SUM_BLOCK = 1024


@dataclass(frozen=True)
class Block:
    """How a product runs. n, k and splits decide nothing but speed and, with splits, the bits.

    n rows of the weight by k columns a step; splits shares of K; stages tiles in flight; ask:
    bytes of each weight row asked for before the kernel in front has ended.
    """

    n: int
    k: int
    splits: int = 1
    stages: int = 4
    warps: int = 4
    tma: bool = True
    ask: int = 0
    line: int = 128
    roll: int = 0
    late: bool = False
    early: bool = True


class Ahead(NamedTuple):
    """A weight that a later product reads in `splits` shares of K, and bytes to ask for of each
    row and share."""

    weight: Tensor
    splits: int
    block_k: int
    bytes: int


def pack(weight: Tensor) -> Tensor:
    """[N, K] weight -> the right-hand side of the products here: the same, contiguous."""
    return weight.contiguous()


def _row_block(rows: int) -> int:
    return max(MIN_ROWS, triton.next_power_of_2(rows))


@lru_cache(maxsize=64)
def _early(device: torch.device) -> bool:
    """Whether a kernel may begin before the one in front ends (compute capability 9 and on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _aligned(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def _checked(x: Tensor, weight: Tensor) -> Tensor:
    """x with contiguous K; raises ValueError if it and the weight do not fit."""
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"rows of {x.shape[1]} values for a weight of {weight.shape[1]} columns")
    if x.dtype != weight.dtype:
        raise ValueError(f"rows in {x.dtype} for a weight in {weight.dtype}")
    return x if x.stride(1) == 1 else x.contiguous()


def _operands(x: Tensor, weight: Tensor, block: Block, then: Ahead | None):
    """Arguments and options of both product kernels, but for grid, output and splits."""
    rows, width = x.shape
    tall = _row_block(rows)
    tma = block.tma and _aligned(x) and _aligned(weight)
    early = block.early and _early(x.device)
    sources = (x, weight)
    if tma:
        sources = (
            TensorDescriptor(x, [rows, width], [x.stride(0), 1], [tall, block.k]),
            TensorDescriptor(weight, list(weight.shape), [width, 1], [block.n, block.k]),
        )
    options = dict(
        ROWS=tall,
        BLOCK_N=block.n,
        BLOCK_K=block.k,
        TMA=tma,
        EVEN=width % block.k == 0,
        PDL=early,
        ASK=block.ask if early and width % block.k == 0 else 0,
        LINE=block.line,
        ROLL=block.roll if early and width % block.k == 0 else 0,
        LATE=block.late,
        NEXT=then is not None and early,
        LANES=32 * block.warps,
        WIDE=x.device.type == "cpu",
        num_warps=block.warps,
        num_stages=block.stages,
    )
    if early:
        options["launch_pdl"] = True
    ahead = (weight, 0, 0, 1, 1, 0)
    if then is not None:
        ahead = (then.weight, *then.weight.shape, then.splits, then.block_k, then.bytes)
    return sources, ahead, options


def _product(
    x: Tensor, weight: Tensor, block: Block, dtype: torch.dtype, then: Ahead | None = None
) -> Tensor:
    """[rows, N] in dtype, or partial sums float32 [splits, rows, N]."""
    rows, n = x.shape[0], weight.shape[0]
    shape, dtype = ((rows, n), dtype) if block.splits == 1 else ((block.splits, rows, n), None)
    out = torch.empty(shape, dtype=dtype or torch.float32, device=x.device)
    sources, ahead, options = _operands(x, weight, block, then)
    linear_kernel[(triton.cdiv(n, block.n), block.splits)](
        *sources, weight, out, rows, n, x.shape[1], x.stride(0), *ahead, **options
    )
    return out


def linear(
    x: Tensor,
    packed: Tensor,
    out_dtype: torch.dtype | None = None,
    block: Block | None = None,
    then: Ahead | None = None,
) -> Tensor:
    """x [rows, K], packed [N, K] -> [rows, N] in out_dtype (x's), rounded once from float32."""
    x, dtype = _checked(x, packed), out_dtype or x.dtype
    if x.shape[0] > MAX_ROWS:
        return torch.mm(x, packed.t()).to(dtype)
    block = block or choose(packed.shape, x)
    out = _product(x, packed, block, dtype, then)
    if block.splits == 1:
        return out
    early = block.early and _early(x.device)
    total = torch.empty(out.shape[1:], dtype=dtype, device=x.device)
    sum_kernel[(triton.cdiv(total.numel(), SUM_BLOCK),)](
        out, total, total.numel(), SPLITS=block.splits, BLOCK=SUM_BLOCK, PDL=early,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return total


def linear_swiglu(
    x: Tensor, packed: Tensor, block: Block | None = None, then: Ahead | None = None
) -> Tensor:
    """x [rows, K], packed [2 F, K] (gate, then up) -> silu(gate) * up, [rows, F]."""
    x, rows, n = _checked(x, packed), x.shape[0], packed.shape[0] // 2
    if rows > MAX_ROWS:
        return swiglu(torch.mm(x, packed.t()))
    block = block or choose(packed.shape, x)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    sources, ahead, options = _operands(x, packed, block, then)
    swiglu_kernel[(triton.cdiv(n, block.n),)](
        *sources, packed, out, rows, n, x.shape[1], x.stride(0), *ahead, **options
    )
    return out


def _norm_options(width: int, early: bool) -> dict:
    block = triton.next_power_of_2(width)
    options = dict(BLOCK=block, PDL=early, num_warps=min(16, max(1, block // 512)))
    if early:
        options["launch_pdl"] = True
    return options


def linear_add_norm(
    residual: Tensor,
    x: Tensor,
    packed: Tensor,
    norm: Norm,
    block: Block | None = None,
    then: Ahead | None = None,
) -> tuple[Tensor, Tensor]:
    """residual [rows, N] + x @ packed^T, rounded once, and its RMSNorm; both in x's dtype."""
    x, (rows, width) = _checked(x, packed), residual.shape
    if rows > MAX_ROWS:
        total = torch.addmm(residual, x, packed.t())
        return total, rms_norm(total, norm)
    block = block or choose(packed.shape, x)
    early = block.early and _early(x.device)
    partial = _product(x, packed, block, torch.float32, then)
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    add_norm_kernel[(rows,)](
        partial, residual, norm.scale, norm.eps, total, normed, rows, width,
        SPLITS=block.splits, **_norm_options(width, early),
    )  # fmt: skip
    return total, normed


def rms_norm(x: Tensor, norm: Norm, early: bool = True) -> Tensor:
    """RMSNorm of the last dim of contiguous x [..., d] in float32, result in x's dtype."""
    out, width = torch.empty_like(x), x.shape[-1]
    norm_kernel[(x.numel() // width,)](
        x, norm.scale, norm.eps, out, width, **_norm_options(width, early and _early(x.device))
    )
    return out


def choose(shape: tuple[int, int], x: Tensor) -> Block:
    return Block(64, 64, stages=3)

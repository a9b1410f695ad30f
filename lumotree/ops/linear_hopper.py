"""The product kernels of linear_kernels.py spelled for Hopper: weights are on their way early.

Same tiles, same instruction, same order of sums, hence the same bits. What Triton's own pipeline
cannot say is that a program's first weight tiles may be loaded before the kernel in front of it
has ended (weights are written by no kernel), while x must wait: so the memory stays busy where
one kernel ends and the next begins.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.jit
def _load_weight(w, row0, step, BLOCK_K: gl.constexpr, HALVES: gl.constexpr, N, bar, w_tiles, slot,
                 more, BYTES: gl.constexpr):  # fmt: skip
    """Starts loading the weight tiles of a step; the barrier waits for x too."""
    mbarrier.expect(bar, BYTES, more)
    for half in gl.static_range(HALVES):
        tile = w_tiles.index(slot * HALVES + half)
        tma.async_copy_global_to_shared(w, [half * N + row0, step * BLOCK_K], bar, tile, more)


@gluon.jit(do_not_specialize=["rows", "splits"])
def hopper_kernel(
    x,  # descriptor of [rows, K], blocks [ROWS, BLOCK_K]
    w,  # descriptor of [HALVES N, K], blocks [BLOCK_N, BLOCK_K]
    out_ptr,  # [rows, N], or partial sums float32 [splits, rows, N]
    rows,
    N,
    K,
    splits,
    HALVES: gl.constexpr,  # 2: silu(first half of the weight) * second half
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,  # the next kernel may begin at once, not only when loads are done
    num_warps: gl.constexpr,
):
    x0 = gl.program_id(0) * ROWS
    row0 = gl.program_id(1) * BLOCK_N
    split = gl.program_id(2)
    steps = (K + BLOCK_K - 1) // BLOCK_K
    first = steps * split // splits
    last = steps * (split + 1) // splits
    dtype: gl.constexpr = w.dtype
    BYTES: gl.constexpr = w.block_type.nbytes * HALVES + x.block_type.nbytes
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES * HALVES, BLOCK_N, BLOCK_K], w.layout)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK_K], x.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(bars.index(slot), count=1)
    fence_async_shared()
    if EARLY:
        gdc_launch_dependents()
    for slot in gl.static_range(STAGES):
        _load_weight(w, row0, first + slot, BLOCK_K, HALVES, N, bars.index(slot), w_tiles, slot,
                     first + slot < last, BYTES)  # fmt: skip
    gdc_wait()
    for slot in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            x, [x0, (first + slot) * BLOCK_K], bars.index(slot), x_tiles.index(slot),
            first + slot < last,
        )  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, ROWS, 16]
    )
    acc = gl.zeros([BLOCK_N, ROWS], gl.float32, layout)
    up = gl.zeros([BLOCK_N, ROWS], gl.float32, layout)
    for step in range(first, last):
        here = (step - first) % STAGES
        mbarrier.wait(bars.index(here), ((step - first) // STAGES) & 1)
        tile = x_tiles.index(here).permute((1, 0))
        acc = warpgroup_mma(w_tiles.index(here * HALVES), tile, acc, is_async=True)
        if HALVES == 2:
            up = warpgroup_mma(w_tiles.index(here * HALVES + 1), tile, up, is_async=True)
            acc, up = warpgroup_mma_wait(2, deps=(acc, up))
        else:
            acc = warpgroup_mma_wait(1, deps=(acc,))
        # The step before is multiplied: its slot takes the step STAGES after it.
        after = step - 1 + STAGES
        more = (step > first) & (after < last)
        free = (step - first + STAGES - 1) % STAGES
        bar = bars.index(free)
        _load_weight(w, row0, after, BLOCK_K, HALVES, N, bar, w_tiles, free, more, BYTES)
        tma.async_copy_global_to_shared(
            x, [x0, after * BLOCK_K], bar, x_tiles.index(free), more
        )  # fmt: skip
    if HALVES == 2:
        acc, up = warpgroup_mma_wait(0, deps=(acc, up))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    if not EARLY:
        gdc_launch_dependents()
    result: gl.constexpr = out_ptr.dtype.element_ty
    if HALVES == 2:  # rounded where the definition rounds: both products, silu, the result
        gate = acc.to(result).to(gl.float32)
        silu = (gate / (1.0 + gl.exp(-gate))).to(result).to(gl.float32)
        acc = silu * up.to(result).to(gl.float32)
    store: gl.constexpr = gl.BlockedLayout([BLOCK_N // 32, 1], [32, 1], [1, num_warps], [0, 1])
    out = gl.convert_layout(acc.to(result), store)
    n = row0 + gl.arange(0, BLOCK_N, gl.SliceLayout(1, store))
    row = x0 + gl.arange(0, ROWS, gl.SliceLayout(0, store))
    to = out_ptr + split.to(gl.int64) * rows * N + row[None, :] * N + n[:, None]
    gl.store(to, out, mask=(n < N)[:, None] & (row < rows)[None, :])

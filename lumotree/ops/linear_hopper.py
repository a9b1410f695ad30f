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


@gluon.jit
def _result(acc, up, HALVES: gl.constexpr, result: gl.constexpr):
    """The finished tile in the output's dtype, rounded where the definition rounds."""
    if HALVES == 2:
        gate = acc.to(result).to(gl.float32)
        silu = (gate / (1.0 + gl.exp(-gate))).to(result).to(gl.float32)
        acc = silu * up.to(result).to(gl.float32)
    return acc.to(result)


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
    AHEAD: gl.constexpr,  # steps before its end that the next kernel may begin; -1: at once
    num_warps: gl.constexpr,
):
    row0 = gl.program_id(0) * BLOCK_N
    split = gl.program_id(1)
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
    if AHEAD < 0:
        gdc_launch_dependents()
    for slot in gl.static_range(STAGES):
        _load_weight(w, row0, first + slot, BLOCK_K, HALVES, N, bars.index(slot), w_tiles, slot,
                     first + slot < last, BYTES)  # fmt: skip
    gdc_wait()
    for slot in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            x, [0, (first + slot) * BLOCK_K], bars.index(slot), x_tiles.index(slot),
            first + slot < last,
        )  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, ROWS, 16]
    )
    acc = gl.zeros([BLOCK_N, ROWS], gl.float32, layout)
    up = gl.zeros([BLOCK_N, ROWS], gl.float32, layout)
    for step in range(first, last):
        if AHEAD > 0:
            if step + AHEAD == last:
                gdc_launch_dependents()
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
            x, [0, after * BLOCK_K], bar, x_tiles.index(free), more
        )  # fmt: skip
    if HALVES == 2:
        acc, up = warpgroup_mma_wait(0, deps=(acc, up))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    if AHEAD == 0:
        gdc_launch_dependents()
    acc = _result(acc, up, HALVES, out_ptr.dtype.element_ty)
    store: gl.constexpr = gl.BlockedLayout([BLOCK_N // 32, 1], [32, 1], [1, num_warps], [0, 1])
    out = gl.convert_layout(acc, store)
    n = row0 + gl.arange(0, BLOCK_N, gl.SliceLayout(1, store))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, store))
    to = out_ptr + split * rows * N + row[None, :] * N + n[:, None]
    gl.store(to, out, mask=(n < N)[:, None] & (row < rows)[None, :])


@gluon.jit(do_not_specialize=["rows"])
def stream_kernel(
    x,  # as in hopper_kernel
    w,
    out_ptr,  # [rows, N]
    partial_ptr,  # float32 [programs, HALVES, ROWS, BLOCK_N]
    flag_ptr,  # int32 [programs], zero before and after
    rows,
    N,
    K,
    HALVES: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Programs share all steps of all tiles evenly, so each multiprocessor reads as much.

    A tile's steps may lie with several programs. The one that has its first step adds what the
    others bring, in order; which is which depends on the shape and the device alone.
    """
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    steps = (K + BLOCK_K - 1) // BLOCK_K
    total = (N + BLOCK_N - 1) // BLOCK_N * steps
    first = total * program // programs
    last = total * (program + 1) // programs
    dtype: gl.constexpr = w.dtype
    BYTES: gl.constexpr = w.block_type.nbytes * HALVES + x.block_type.nbytes
    PART: gl.constexpr = ROWS * BLOCK_N
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES * HALVES, BLOCK_N, BLOCK_K], w.layout)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK_K], x.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(bars.index(slot), count=1)
    fence_async_shared()
    gdc_launch_dependents()
    for slot in gl.static_range(STAGES):
        at = first + slot
        _load_weight(w, at // steps * BLOCK_N, at % steps, BLOCK_K, HALVES, N, bars.index(slot),
                     w_tiles, slot, at < last, BYTES)  # fmt: skip
    gdc_wait()
    for slot in gl.static_range(STAGES):
        at = first + slot
        tma.async_copy_global_to_shared(
            x, [0, at % steps * BLOCK_K], bars.index(slot), x_tiles.index(slot), at < last
        )
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, ROWS, 16]
    )
    store: gl.constexpr = gl.BlockedLayout([BLOCK_N // 32, 1], [32, 1], [1, num_warps], [0, 1])
    in_tile = gl.arange(0, BLOCK_N, gl.SliceLayout(1, store))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, store))
    in_part = row[None, :] * BLOCK_N + in_tile[:, None]
    begin = first
    while begin < last:
        tile = begin // steps
        tile_end = (tile + 1) * steps
        end = gl.minimum(last, tile_end)
        acc = gl.zeros([BLOCK_N, ROWS], gl.float32, layout)
        up = gl.zeros([BLOCK_N, ROWS], gl.float32, layout)
        for step in range(begin, end):
            here = (step - first) % STAGES
            mbarrier.wait(bars.index(here), ((step - first) // STAGES) & 1)
            rows_tile = x_tiles.index(here).permute((1, 0))
            acc = warpgroup_mma(w_tiles.index(here * HALVES), rows_tile, acc, is_async=True)
            if HALVES == 2:
                up = warpgroup_mma(w_tiles.index(here * HALVES + 1), rows_tile, up, is_async=True)
                acc, up = warpgroup_mma_wait(2, deps=(acc, up))
            else:
                acc = warpgroup_mma_wait(1, deps=(acc,))
            after = step - 1 + STAGES
            more = (step > first) & (after < last)
            free = (step - first + STAGES - 1) % STAGES
            bar = bars.index(free)
            _load_weight(w, after // steps * BLOCK_N, after % steps, BLOCK_K, HALVES, N, bar,
                         w_tiles, free, more, BYTES)  # fmt: skip
            tma.async_copy_global_to_shared(
                x, [0, after % steps * BLOCK_K], bar, x_tiles.index(free), more
            )
        if HALVES == 2:
            acc, up = warpgroup_mma_wait(0, deps=(acc, up))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        whole = gl.convert_layout(acc, store)
        whole_up = gl.convert_layout(up, store)
        if begin == tile * steps:
            helper = program
            reached = end
            while reached < tile_end:
                helper += 1
                flag = flag_ptr + helper
                while gl.atomic_cas(flag, 1, 1, sem="acquire", scope="gpu") == 0:
                    pass
                gl.thread_barrier()
                part = partial_ptr + helper * (HALVES * PART) + in_part
                whole += gl.load(part, cache_modifier=".cg")
                if HALVES == 2:
                    whole_up += gl.load(part + PART, cache_modifier=".cg")
                gl.thread_barrier()
                gl.atomic_xchg(flag, 0, sem="relaxed", scope="gpu")
                reached = gl.minimum(total * (helper + 1) // programs, tile_end)
            out = _result(whole, whole_up, HALVES, out_ptr.dtype.element_ty)
            n = tile * BLOCK_N + in_tile
            to = out_ptr + row[None, :] * N + n[:, None]
            gl.store(to, out, mask=(n < N)[:, None] & (row < rows)[None, :])
        else:
            part = partial_ptr + program * (HALVES * PART) + in_part
            gl.store(part, whole)
            if HALVES == 2:
                gl.store(part + PART, whole_up)
            gl.thread_barrier()
            gl.atomic_xchg(flag_ptr + program, 1, sem="release", scope="gpu")
        begin = end

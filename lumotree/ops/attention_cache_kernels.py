"""Triton kernels around the attention of a step: queries, keys and values into place, and moved.

Layouts: projected [rows, q | k | v | gate] with (2 heads + 2 kv heads) d columns; q [rows, heads,
d]; keys and values of one layer [kv_heads, slots, d]. `length` int32 [1] is the prefix m; row r
stands at position m + depth[r] and writes slot m + slot[r]. With seats (lumotree.ops.seats) keys,
values and length have a leading dimension of seats, and rows stand request after request.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lumotree.ops.seats import part


@triton.jit
def await_front(PDL: tl.constexpr):
    """Lets the next kernel start and waits for the one in front. In every kernel, before it reads
    what others wrote: one that ended without waiting would free its successor from both."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit(do_not_specialize=["count", "slots", "stride", "padded"])
def prepare_kernel(
    projected_ptr,
    scale_ptr,  # float32 [heads + kv_heads, d]
    eps_ptr,  # float32 [1]
    rope_ptr,  # [positions, 2, d]
    partner_ptr,  # int64 [d]
    length_ptr,
    depth_ptr,  # int32 [rows]
    slot_ptr,  # int32 [rows]
    q_ptr,
    key_ptr,
    value_ptr,
    count,  # rows that write keys and values
    slots,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PDL: tl.constexpr,
    seats_ptr=None,  # int32 [R], or None for one request
    stride=None,  # rows of d from a seat's keys and values to the next's
    padded=None,  # rows of a request
):
    """One program: one row and one head of q, k or v. Norm, rotation, cache writes."""
    await_front(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    if seats_ptr is not None:
        request = tl.program_id(2)
        seat = tl.load(seats_ptr + request)
        if seat < 0:
            return
        length_ptr += seat
        key_ptr = part(key_ptr, seat, stride, D)
        value_ptr = part(value_ptr, seat, stride, D)
        projected_ptr = part(projected_ptr, request, padded, (2 * HEADS + 2 * KV_HEADS) * D)
        q_ptr = part(q_ptr, request, padded, HEADS * D)
    dim = tl.arange(0, D)
    source = projected_ptr + (row * (2 * HEADS + 2 * KV_HEADS) + head) * D
    length = tl.load(length_ptr)
    slot = length + tl.load(slot_ptr + row)
    keep = tl.full([D], row < count, tl.int1)
    x = tl.load(source + dim)
    if head < HEADS + KV_HEADS:
        other = tl.load(partner_ptr + dim)
        x32 = x.to(tl.float32)
        y32 = tl.load(source + other).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x32 * x32, 0) + tl.load(eps_ptr))
        scale = scale_ptr + head * D
        x32 = (x32 * inverse * tl.load(scale + dim)).to(x.dtype).to(tl.float32)
        y32 = (y32 * inverse * tl.load(scale + other)).to(x.dtype).to(tl.float32)
        angle = rope_ptr + (length + tl.load(depth_ptr + row)) * (2 * D) + dim
        cos = tl.load(angle).to(tl.float32)
        sin = tl.load(angle + D).to(tl.float32)
        straight = (x32 * cos).to(x.dtype).to(tl.float32)
        turned = tl.fma(y32, sin, straight).to(x.dtype)
        if head < HEADS:
            tl.store(q_ptr + (row * HEADS + head) * D + dim, turned)
        else:
            tl.store(key_ptr + ((head - HEADS) * slots + slot) * D + dim, turned, mask=keep)
    else:
        # A draft row that overflowed would reach its siblings as 0 * inf.
        finite = tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)
        place = ((head - HEADS - KV_HEADS) * slots + slot) * D
        tl.store(value_ptr + place + dim, finite, mask=keep)


@triton.jit(do_not_specialize=["slots", "stride", "path_stride", "count_stride"])
def move_kernel(
    key_ptr,  # [layers, kv_heads, slots, d], contiguous
    value_ptr,
    path_ptr,  # int32: rows from the root
    count_ptr,  # int32 [1]
    slot_ptr,  # int32 [rows]
    length_ptr,
    slots,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
    seats_ptr=None,  # int32 [R], or None for one request
    stride=None,  # rows of d from a seat's keys and values to the next's
    path_stride=None,  # from a request's path to the next's
    count_stride=None,
):
    """One program: one layer and head of keys or values; slot m + slot[path[i]] -> m + i.

    Sources ascend and lie at or after their places, so a tile of rows may be read before it is
    written, and written before the next is read.
    """
    await_front(PDL)
    side_ptr = key_ptr if tl.program_id(1) == 0 else value_ptr
    if seats_ptr is not None:
        request = tl.program_id(2)
        seat = tl.load(seats_ptr + request)
        if seat < 0:
            return
        length_ptr += seat
        side_ptr = part(side_ptr, seat, stride, D)
        path_ptr += request * path_stride
        count_ptr += request * count_stride
    length = tl.load(length_ptr)
    base = side_ptr + tl.program_id(0).to(tl.int64) * slots * D
    dim = tl.arange(0, D)
    count = tl.load(count_ptr)
    for first in range(0, count, ROWS):
        place = first + tl.arange(0, ROWS)
        row = tl.load(path_ptr + place, mask=place < count, other=0)
        source = tl.load(slot_ptr + row)
        moved = ((place < count) & (source != place))[:, None]
        at = (length + source)[:, None] * D + dim[None, :]
        rows = tl.load(base + at, mask=moved)
        tl.debug_barrier()  # other threads' stores may hit what is read here
        tl.store(base + (length + place)[:, None] * D + dim[None, :], rows, mask=moved)

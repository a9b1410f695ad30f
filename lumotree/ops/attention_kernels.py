"""Triton kernels of the attention of a verification step: prefix, tail, combine.

Keys are cut at absolute positions into chunks, and a chunk into blocks. A chunk's partial result
(peak, mass, weighted sum) is an online softmax over its blocks in order, from a fresh start; the
partials of a row are combined in chunk order. `prefix_kernel` runs the full blocks of the prefix
for all rows at once; the last chunk is continued for one row (`_tail`), over keys gathered in
path order, so that a key stands in the block and the column of its absolute position. All blocks
are one function on tiles of one instruction shape. So a row's bits are those of a root-only step
on a cache that holds its path in line: whatever the tree, the row count or the launch.

Layouts: q [rows, heads, d]; projected [rows, q | k | v | gate] with (2 heads + 2 kv heads) d
columns; keys and values of one layer [kv_heads, slots, d]. Partials float32: sums
[chunks, kv_heads, queries, d], stats (peak, mass) [2, chunks, kv_heads, queries], where query
row * group + g is query head g of a key head's group. `length` int32 [1] is the prefix m; row r
stands at position m + depth[r], and its key of depth j lies in slot m + path[r, j]. With seats
(lumotree.ops.seats) keys, values and length have a leading dimension of seats, partials one of
requests, and rows of q, projected and the output stand request after request.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lumotree.ops.attention_cache_kernels import await_front
from lumotree.ops.seats import part

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _prefetch(side_ptr, row, rows, D: tl.constexpr, ROWS: tl.constexpr):
    """Asks L2 for the rows [row, row + ROWS) of [..., D] that lie before row + rows."""
    line: tl.constexpr = 128 // (side_ptr.dtype.element_ty.primitive_bitwidth // 8)
    at = tl.arange(0, ROWS * D // line) * line
    at = tl.where(at < rows * D, at, 0)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [(side_ptr + row * D + at).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _block(q, key, value, seen, peak, mass, total, MASK: tl.constexpr, PRECISION: tl.constexpr):
    """One block of the online softmax; unseen keys (and their values) enter as exact zeros.

    q [TILE, D], key and value [BLOCK, D], seen bool [BLOCK], read only if MASK; peak and mass
    [TILE], total [TILE, D] float32. Fused multiply-adds are spelled out, so that no compiler
    decides them differently in two kernels.
    """
    scores = tl.dot(q, tl.trans(key), input_precision=PRECISION)
    if MASK:
        scores = tl.where(seen[None, :], scores, float("-inf"))
    top = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(top == float("-inf"), 0.0, top)
    shift = tl.broadcast_to((base * -LOG2_E)[:, None], scores.shape)
    weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, LOG2_E, tl.float32), shift))
    fall = tl.exp2((peak - base) * LOG2_E)
    mass = mass * fall + tl.sum(weights, 1)
    total = tl.dot(weights.to(value.dtype), value, total * fall[:, None], input_precision=PRECISION)
    return top, mass, total


@triton.jit
def _queries(q_ptr, head, query, live, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
             D: tl.constexpr):  # fmt: skip
    """[TILE, D] queries of a key head, zero where not live."""
    at = ((query // GROUP) * (KV_HEADS * GROUP) + head * GROUP + query % GROUP) * D
    tile = at[:, None] + tl.arange(0, D)[None, :]
    return tl.load(q_ptr + tile, mask=live[:, None], other=0.0)


@triton.jit
def _partials(sum_ptr, stat_ptr, request, queries, chunks, KV_HEADS: tl.constexpr,
              D: tl.constexpr):  # fmt: skip
    """Partial results of a request."""
    count = chunks * KV_HEADS * queries
    return part(sum_ptr, request, count, D), part(stat_ptr, request, count, 2)


@triton.jit
def _rows(projected_ptr, out_ptr, request, padded, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
          D: tl.constexpr):  # fmt: skip
    """Projected and output rows of a request."""
    width: tl.constexpr = 2 * KV_HEADS * (GROUP + 1) * D
    out_width: tl.constexpr = KV_HEADS * GROUP * D
    return part(projected_ptr, request, padded, width), part(out_ptr, request, padded, out_width)


@triton.jit
def _store(peak, mass, total, chunk, head, query, live, sum_ptr, stat_ptr, queries, chunks,
           KV_HEADS: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Partial results of a chunk into their place."""
    place = (chunk * KV_HEADS + head) * queries + query
    tl.store(stat_ptr + place, peak, mask=live)
    tl.store(stat_ptr + chunks * KV_HEADS * queries + place, mass, mask=live)
    sums = sum_ptr + place[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(sums, total, mask=live[:, None])


@triton.jit
def _tail(q, peak, mass, total, row, own, length, full, head, query, live, key_ptr, value_ptr,
          path_ptr, sum_ptr, stat_ptr, queries, slots, chunks, steps, KV_HEADS: tl.constexpr,
          D: tl.constexpr, FIRST: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
          CHUNK: tl.constexpr, ROW_STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """From position `full` to the row's own, keys gathered in path order; partials are stored.

    peak, mass, total: what the chunk of `full` holds so far; later chunks start afresh.
    """
    column = tl.arange(0, BLOCK)
    dim = tl.arange(0, D)
    for chunk in tl.range(full // CHUNK, own // CHUNK + 1, num_stages=1):
        begin = tl.maximum(chunk * CHUNK, full)
        stop = tl.minimum(chunk * CHUNK + CHUNK, own + 1)
        for first in tl.range(begin, stop, BLOCK, num_stages=ROW_STAGES):
            position = first + column
            seen = (position <= own) & (position >= FIRST)
            step = position - length
            on_path = seen & (step >= 0)
            slot = tl.load(path_ptr + row * steps + step, mask=on_path, other=0)
            slot = tl.where(on_path, length + slot, position)
            tile = (head * slots + slot)[:, None] * D + dim[None, :]
            key = tl.load(key_ptr + tile, mask=seen[:, None], other=0.0)
            value = tl.load(value_ptr + tile, mask=seen[:, None], other=0.0)
            peak, mass, total = _block(
                q, key, value, seen, peak, mass, total, MASK=True, PRECISION=PRECISION
            )
        _store(peak, mass, total, chunk, head, query, live, sum_ptr, stat_ptr, queries, chunks,
               KV_HEADS, D)  # fmt: skip
        peak = tl.full([TILE], float("-inf"), tl.float32)
        mass = tl.zeros([TILE], tl.float32)
        total = tl.zeros([TILE, D], tl.float32)


@triton.jit
def _spans(length, lane, rows, BLOCK: tl.constexpr, CHUNK: tl.constexpr, WALK: tl.constexpr):
    """First chunk of a lane, one past the last, and the position where its blocks end.

    With WALK the first `rows` lanes have the last chunk alone, the others the chunks before.
    """
    full = length // BLOCK * BLOCK
    first = lane - rows
    if not WALK:
        return first, (full + CHUNK - 1) // CHUNK, full
    last = full // CHUNK
    walking = lane < rows
    stop = tl.where(walking, full, last * CHUNK)
    return tl.where(walking, last, first), tl.where(walking, last + 1, last), stop


@triton.jit(
    do_not_specialize=[
        "queries", "slots", "chunks", "steps", "rows", "lanes", "stride", "padded"
    ]
)  # fmt: skip
def prefix_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    key_blocks,  # descriptors of keys and values [all rows, d] by [BLOCK, D] if TMA
    value_blocks,
    length_ptr,
    depth_ptr,  # int32 [rows]
    path_ptr,  # int32 [rows, steps]
    sum_ptr,
    stat_ptr,
    queries,
    slots,
    chunks,
    steps,
    rows,  # how many rows walk their last chunk here; then there is one tile
    lanes,  # programs that share the chunks of a tile and key head
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    FIRST: tl.constexpr,  # keys before this position exist for nobody
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    ROW_STAGES: tl.constexpr,
    WALK: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    seats_ptr=None,  # int32 [R], or None for one request
    stride=None,  # rows of d from a seat's keys and values to the next's
    padded=None,  # rows of a request
):
    """One program: a tile of queries of one key head, the full blocks of every lanes-th chunk.

    With WALK the first programs walk one row's last chunk to the row itself, and nothing is left
    for `tail_kernel`. Tiles of a head are neighbours in the grid, to read a chunk from L2
    together; the grid knows the device and not the prefix, whose chunks are shared out here.
    """
    head = tl.program_id(1)
    lane = tl.program_id(2)
    if seats_ptr is not None:
        request = head // KV_HEADS
        head = head % KV_HEADS
    if PDL:
        # The prefix is older than the kernel in front: its way to L2 begins at once.
        if seats_ptr is None:
            early = tl.load(length_ptr, volatile=True)
        else:
            seat = tl.load(seats_ptr + request, volatile=True)
            early = tl.load(length_ptr + seat, mask=seat >= 0, other=0, volatile=True)
        chunk, last, stop = _spans(early, lane, rows, BLOCK, CHUNK, WALK)
        if seats_ptr is not None:
            last = tl.where(seat >= 0, last, 0)
        if chunk < last:
            at = head * slots + chunk * CHUNK
            if seats_ptr is not None:
                at += seat.to(tl.int64) * stride
            _prefetch(key_ptr, at, stop - chunk * CHUNK, D, 2 * BLOCK)
            _prefetch(value_ptr, at, stop - chunk * CHUNK, D, 2 * BLOCK)
    await_front(PDL)
    above = 0  # rows of the descriptors before the seat
    if seats_ptr is not None:
        seat = tl.load(seats_ptr + request)
        if seat < 0:
            return
        above = seat * stride
        length_ptr += seat
        key_ptr = part(key_ptr, seat, stride, D)
        value_ptr = part(value_ptr, seat, stride, D)
        q_ptr = part(q_ptr, request, padded, KV_HEADS * GROUP * D)
        sum_ptr, stat_ptr = _partials(sum_ptr, stat_ptr, request, queries, chunks, KV_HEADS, D)
    length = tl.load(length_ptr)
    start, last, stop = _spans(length, lane, rows, BLOCK, CHUNK, WALK)
    if start >= last:
        return
    base = tl.program_id(0) * TILE
    limit = queries
    if WALK:
        if lane < rows:
            base = lane * GROUP
            limit = base + GROUP
    query = base + tl.arange(0, TILE)
    live = query < limit
    q = _queries(q_ptr, head, query, live, GROUP, KV_HEADS, D)
    column = tl.arange(0, BLOCK)
    tile = head * slots * D + column[:, None] * D + tl.arange(0, D)[None, :]
    for chunk in tl.range(start, last, lanes, num_stages=1):
        peak = tl.full([TILE], float("-inf"), tl.float32)
        mass = tl.zeros([TILE], tl.float32)
        total = tl.zeros([TILE, D], tl.float32)
        begin = chunk * CHUNK
        for first in tl.range(begin, tl.minimum(begin + CHUNK, stop), BLOCK, num_stages=STAGES):
            seen = first + column >= FIRST
            if TMA:
                key = key_blocks.load([head * slots + first + above, 0])
                value = value_blocks.load([head * slots + first + above, 0])
            elif FIRST > 0:
                key = tl.load(key_ptr + first * D + tile, mask=seen[:, None], other=0.0)
                value = tl.load(value_ptr + first * D + tile, mask=seen[:, None], other=0.0)
            else:
                key = tl.load(key_ptr + first * D + tile)
                value = tl.load(value_ptr + first * D + tile)
            peak, mass, total = _block(
                q, key, value, seen, peak, mass, total, MASK=FIRST > 0, PRECISION=PRECISION
            )
        if WALK:
            if lane < rows:
                own = length + tl.load(depth_ptr + lane)
                _tail(q, peak, mass, total, lane, own, length, stop, head, query, live, key_ptr,
                      value_ptr, path_ptr, sum_ptr, stat_ptr, queries, slots, chunks, steps,
                      KV_HEADS, D, FIRST, TILE, BLOCK, CHUNK, ROW_STAGES, PRECISION)  # fmt: skip
            else:
                _store(peak, mass, total, chunk, head, query, live, sum_ptr, stat_ptr, queries,
                       chunks, KV_HEADS, D)  # fmt: skip
        else:
            _store(peak, mass, total, chunk, head, query, live, sum_ptr, stat_ptr, queries,
                   chunks, KV_HEADS, D)  # fmt: skip


@triton.jit
def _zero(out_ptr, HEADS: tl.constexpr, D: tl.constexpr):
    """Zeros into [HEADS, D]."""
    for head in range(HEADS):
        tl.store(out_ptr + head * D + tl.arange(0, D), tl.zeros([D], out_ptr.dtype.element_ty))


@triton.jit
def _combine(row, head, own, projected_ptr, sum_ptr, stat_ptr, out_ptr, queries, chunks,
             GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
             PARTS: tl.constexpr):  # fmt: skip
    """Partials of one row and query head in order, PARTS at once, then the gate; stored."""
    dim = tl.arange(0, D)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate_at = (row * (2 * KV_HEADS * GROUP + 2 * KV_HEADS) + KV_HEADS * GROUP + 2 * KV_HEADS) * D
    gate = tl.load(projected_ptr + gate_at + head * D + dim).to(tl.float32)
    parts = own // CHUNK + 1
    query = (head // GROUP) * queries + row * GROUP + head % GROUP
    top = float("-inf")
    mass = 0.0
    total = tl.zeros([D], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        there = part < parts
        place = part * (KV_HEADS * queries) + query
        peaks = tl.load(stat_ptr + place, mask=there, other=float("-inf"))
        stats = stat_ptr + chunks * KV_HEADS * queries
        masses = tl.load(stats + place, mask=there, other=0.0)
        sums = tl.load(sum_ptr + place[:, None] * D + dim[None, :], mask=there[:, None], other=0.0)
        higher = tl.maximum(top, tl.max(peaks, 0))
        fall = tl.exp2((top - higher) * LOG2_E)
        weights = tl.exp2((peaks - higher) * LOG2_E)
        mass = mass * fall + tl.sum(weights * masses, 0)
        total = total * fall + tl.sum(weights[:, None] * sums, 0)
        top = higher
    rounded = (total / mass).to(dtype).to(tl.float32)
    opened = tl.sigmoid(gate).to(dtype).to(tl.float32)
    out = (rounded * opened).to(dtype)
    tl.store(out_ptr + (row * (KV_HEADS * GROUP) + head) * D + dim, out)


@triton.jit(do_not_specialize=["count", "queries", "slots", "chunks", "steps", "stride", "padded"])
def tail_kernel(
    q_ptr,
    projected_ptr,
    key_ptr,
    value_ptr,
    length_ptr,
    depth_ptr,  # int32 [rows]
    path_ptr,  # int32 [rows, steps]
    sum_ptr,
    stat_ptr,
    out_ptr,  # [rows, heads, d]
    count,  # rows that are not padding; the others get zeros
    queries,
    slots,
    chunks,
    steps,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    FIRST: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    ROW_STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    seats_ptr=None,  # int32 [R], or None for one request
    stride=None,  # rows of d from a seat's keys and values to the next's
    padded=None,  # rows of a request
):
    """One program: one row and key head, from the last full block of the prefix to the output.

    The last chunk is resumed from what `prefix_kernel` left of it.
    """
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
        q_ptr = part(q_ptr, request, padded, KV_HEADS * GROUP * D)
        projected_ptr, out_ptr = _rows(projected_ptr, out_ptr, request, padded, GROUP, KV_HEADS, D)
        sum_ptr, stat_ptr = _partials(sum_ptr, stat_ptr, request, queries, chunks, KV_HEADS, D)
    if row >= count:
        _zero(out_ptr + (row * KV_HEADS + head) * GROUP * D, GROUP, D)
        return
    length = tl.load(length_ptr)
    own = length + tl.load(depth_ptr + row)
    full = length // BLOCK * BLOCK
    query = row * GROUP + tl.arange(0, TILE)
    live = query < row * GROUP + GROUP
    q = _queries(q_ptr, head, query, live, GROUP, KV_HEADS, D)
    chunk = full // CHUNK
    resumed = live & (full > chunk * CHUNK)
    place = (chunk * KV_HEADS + head) * queries + query
    peak = tl.load(stat_ptr + place, mask=resumed, other=float("-inf"))
    mass = tl.load(stat_ptr + chunks * KV_HEADS * queries + place, mask=resumed, other=0.0)
    sums = sum_ptr + place[:, None] * D + tl.arange(0, D)[None, :]
    total = tl.load(sums, mask=resumed[:, None], other=0.0)
    _tail(q, peak, mass, total, row, own, length, full, head, query, live, key_ptr, value_ptr,
          path_ptr, sum_ptr, stat_ptr, queries, slots, chunks, steps, KV_HEADS, D, FIRST,
          TILE, BLOCK, CHUNK, ROW_STAGES, PRECISION)  # fmt: skip
    tl.debug_barrier()  # what follows reads what other threads stored
    for g in range(GROUP):
        _combine(row, head * GROUP + g, own, projected_ptr, sum_ptr, stat_ptr, out_ptr, queries,
                 chunks, GROUP, KV_HEADS, D, CHUNK, PARTS)  # fmt: skip


@triton.jit(do_not_specialize=["count", "queries", "chunks", "padded"])
def combine_kernel(
    projected_ptr,
    length_ptr,
    depth_ptr,  # int32 [rows]
    sum_ptr,
    stat_ptr,
    out_ptr,  # [rows, heads, d]
    count,  # rows that are not padding; the others get zeros
    queries,
    chunks,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,  # partials added at once; decides the bits
    PDL: tl.constexpr,
    seats_ptr=None,  # int32 [R], or None for one request
    padded=None,  # rows of a request
):
    """One program: the output of one row and query head, after a prefix kernel with WALK."""
    await_front(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    if seats_ptr is not None:
        request = tl.program_id(2)
        seat = tl.load(seats_ptr + request)
        if seat < 0:
            return
        length_ptr += seat
        projected_ptr, out_ptr = _rows(projected_ptr, out_ptr, request, padded, GROUP, KV_HEADS, D)
        sum_ptr, stat_ptr = _partials(sum_ptr, stat_ptr, request, queries, chunks, KV_HEADS, D)
    if row >= count:
        _zero(out_ptr + (row * (KV_HEADS * GROUP) + head) * D, 1, D)
        return
    own = tl.load(length_ptr) + tl.load(depth_ptr + row)
    _combine(row, head, own, projected_ptr, sum_ptr, stat_ptr, out_ptr, queries, chunks, GROUP,
             KV_HEADS, D, CHUNK, PARTS)  # fmt: skip

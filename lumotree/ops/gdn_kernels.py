"""Triton kernels of the gated delta rule over a tree: a scan of walks, and updates in place.

`scan_kernel` walks paths of the tree from the pre-tree state and publishes nothing;
`update_kernel` is the native single-token update and, over a path and all layers, the replay.
Both are made of the same four functions on the same tile [dk, BV] of one head, with the same
warps and contraction policy. So a row gets the same bits from a scan, from the native chain and
from the replay, whatever else is in the launch and whichever walk computes it.

Contraction policy: an update is one `tl.fma` on a rounded product; in a reduction the compiler
may fuse each product into the running sum, which it does alike everywhere because the reduction
is one function (`_hold`). Launchers pass `enable_fp_fusion` and the gates check the bits.

Arithmetic (gated delta rule, arXiv 2412.06464, spelled as in lumotree.ops.reference):
  d = beta (v - decay S^T k),  o = decay S^T q + (q . k) d,  S' = decay S + k d^T.

Layouts: state float32 [heads, dk, dv], dv fastest, so that a thread keeps most of dk of a few
columns and the reduction needs few shuffles; query and key float32 [rows, key heads, dk], key
normalised, query normalised and scaled; v [rows, heads, dv]; decay = exp(g) and beta float32
[rows, heads]; overlap = q . k float32 [rows, key heads]; out [rows, heads, dv]. Value head h
reads key head h // (heads // key heads). With seats (lumotree.ops.seats) states have a leading
dimension of seats, paths and cut states one of requests, and rows stand request after request.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lumotree.ops.seats import part

# Flags of a visit in the low bits of its entry, below the row: see lumotree.ops.gdn_schedule.
EMIT = tl.constexpr(1)
ADVANCE = tl.constexpr(2)


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _hold(state, key, query):
    """S^T k and S^T q, [BV] each, of a tile [dk, BV]: the one reduction of every kernel here.

    Both at once, so that the two chains of shuffles overlap.
    """
    return tl.reduce((state * key[:, None], state * query[:, None]), 0, _add_two)


@triton.jit
def _value(held, v, decay, beta):
    """d = beta (v - decay S^T k), [BV], given S^T k."""
    return beta * tl.fma(held, -decay, v)


@triton.jit
def _read(held, overlap, written, decay):
    """o = decay S^T q + (q . k) d, [BV], given S^T q."""
    return tl.fma(written, overlap, held * decay)


@triton.jit
def _advance(state, key, written, decay):
    """S' = decay S + k d^T, [dk, BV]."""
    wide_key = tl.broadcast_to(key[:, None], state.shape)
    return tl.fma(wide_key, tl.broadcast_to(written[None, :], state.shape), state * decay)


@triton.jit
def _fetch(row, head, key_head, first, query_ptr, key_ptr, value_ptr, decay_ptr, beta_ptr,
           overlap_ptr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DK: tl.constexpr,
           DV: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """Operands of one row and head, as they lie in memory: nothing here waits for a load.

    Values come in two halves, interleaved: loads of fewer elements than threads take the layout
    of their use, which keeps a trip through shared memory out of the chain from row to row.
    """
    at = (row * KEY_HEADS + key_head) * DK + tl.arange(0, DK)
    key = tl.load(key_ptr + at)
    query = tl.load(query_ptr + at)
    half = (row * HEADS + head) * DV + first + 2 * tl.arange(0, BV // 2)
    even = tl.load(value_ptr + half)
    odd = tl.load(value_ptr + half + 1)
    decay = tl.load(decay_ptr + row * HEADS + head)
    beta = tl.load(beta_ptr + row * HEADS + head)
    overlap = tl.load(overlap_ptr + row * KEY_HEADS + key_head)
    return query, key, even, odd, decay, beta, overlap


@triton.jit
def _visit(state, query, key, even, odd, decay, beta, overlap, emit, out_ptr, BV: tl.constexpr):
    """d [BV] of a row from its parent's state, and its output, stored if `emit`."""
    v = tl.interleave(even.to(tl.float32), odd.to(tl.float32))
    held_key, held_query = _hold(state, key, query)
    written = _value(held_key, v, decay, beta)
    out = _read(held_query, overlap, written, decay)
    to = out_ptr + tl.arange(0, BV)
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=tl.full([BV], emit, tl.int1))
    return written


@triton.jit(do_not_specialize=["rows"])
def scan_kernel(
    state_ptr,  # float32 [heads, dk, dv], read only
    cut_ptr,  # float32 [cuts, heads, dk, dv], states handed from one launch to the next
    query_ptr,
    key_ptr,
    value_ptr,
    decay_ptr,
    beta_ptr,
    overlap_ptr,
    out_ptr,
    walk_ptr,  # int32 [walks, 6]: first visit, past the last, advances, source (-1: pre-tree),
    # and the entries of the first visit and the next, so that nothing waits for two tables
    visit_ptr,  # int32 [visits + 2, 2]: row << 2 | flags, cut slot to store to (-1: none)
    first_walk,
    seats_ptr,  # int32 [R], or None for one request
    seat_stride,  # elements from a seat's state to the next's
    cut_stride,  # elements from a request's cut states to the next's
    rows,  # of a request
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    CUT: tl.constexpr,  # whether any walk starts from, or stores, a cut state
    PDL: tl.constexpr,  # whether the launch may begin before the kernel in front of it ends
):
    """One program: one walk, one head, one tile of values; the tile stays in registers.

    A walk is a chain of advancing visits; before each, and after the last, stand visits that
    only read the state reached so far (leaves of the tree).
    """
    tiles: tl.constexpr = DV // BV
    head = tl.program_id(0) // tiles
    key_head = head // (HEADS // KEY_HEADS)
    first = (tl.program_id(0) % tiles) * BV
    dim = tl.arange(0, DK)
    tile = head * DK * DV + dim[:, None] * DV + (first + tl.arange(0, BV))[None, :]
    shift = 0
    if seats_ptr is not None:
        request = tl.program_id(2)
        seat = tl.load(seats_ptr + request)
        if seat < 0:
            return
        state_ptr = part(state_ptr, seat, seat_stride)
        if CUT:
            cut_ptr = part(cut_ptr, request, cut_stride)
        shift = request * rows << 2  # turns an entry of the table into one of this request's rows
    walk = walk_ptr + (first_walk + tl.program_id(1)) * 6
    visit = tl.load(walk)
    stop = tl.load(walk + 1)
    advances = tl.load(walk + 2)
    entry = tl.load(walk + 4) + shift
    next_entry = tl.load(walk + 5) + shift
    base = state_ptr
    if CUT:
        source = tl.load(walk + 3)
        if source >= 0:
            base = cut_ptr + source.to(tl.int64) * (HEADS * DK * DV)
    if PDL:
        # The state is older than the kernel in front, whose work are the operands; a cut state
        # may be its work too.
        gdc_launch_dependents()
        if CUT:
            gdc_wait()
    state = tl.load(base + tile)
    if PDL and not CUT:
        gdc_wait()
    # A visit's operands are loaded while the visit before it is computed.
    query, key, even, odd, decay, beta, dot = _fetch(
        entry >> 2, head, key_head, first, query_ptr, key_ptr, value_ptr, decay_ptr, beta_ptr,
        overlap_ptr, HEADS, KEY_HEADS, DK, DV, BV,
    )  # fmt: skip
    for _ in range(advances):
        while (entry & ADVANCE) == 0:
            after = tl.load(visit_ptr + visit * 2 + 4) + shift
            query1, key1, even1, odd1, decay1, beta1, dot1 = _fetch(
                next_entry >> 2, head, key_head, first, query_ptr, key_ptr, value_ptr, decay_ptr,
                beta_ptr, overlap_ptr, HEADS, KEY_HEADS, DK, DV, BV,
            )  # fmt: skip
            out = out_ptr + ((entry >> 2) * HEADS + head) * DV + first
            _visit(state, query, key, even, odd, decay, beta, dot, True, out, BV)
            query, key, even, odd, decay, beta, dot = query1, key1, even1, odd1, decay1, beta1, dot1
            entry, next_entry = next_entry, after
            visit += 1
        after = tl.load(visit_ptr + visit * 2 + 4) + shift
        query1, key1, even1, odd1, decay1, beta1, dot1 = _fetch(
            next_entry >> 2, head, key_head, first, query_ptr, key_ptr, value_ptr, decay_ptr,
            beta_ptr, overlap_ptr, HEADS, KEY_HEADS, DK, DV, BV,
        )  # fmt: skip
        out = out_ptr + ((entry >> 2) * HEADS + head) * DV + first
        emit = (entry & EMIT) != 0
        written = _visit(state, query, key, even, odd, decay, beta, dot, emit, out, BV)
        state = _advance(state, key, written, decay)
        if CUT:
            slot = tl.load(visit_ptr + visit * 2 + 1)
            if slot >= 0:
                tl.store(cut_ptr + slot.to(tl.int64) * (HEADS * DK * DV) + tile, state)
        query, key, even, odd, decay, beta, dot = query1, key1, even1, odd1, decay1, beta1, dot1
        entry, next_entry = next_entry, after
        visit += 1
    while visit < stop:
        after = tl.load(visit_ptr + visit * 2 + 4) + shift
        query1, key1, even1, odd1, decay1, beta1, dot1 = _fetch(
            next_entry >> 2, head, key_head, first, query_ptr, key_ptr, value_ptr, decay_ptr,
            beta_ptr, overlap_ptr, HEADS, KEY_HEADS, DK, DV, BV,
        )  # fmt: skip
        out = out_ptr + ((entry >> 2) * HEADS + head) * DV + first
        _visit(state, query, key, even, odd, decay, beta, dot, True, out, BV)
        query, key, even, odd, decay, beta, dot = query1, key1, even1, odd1, decay1, beta1, dot1
        entry, next_entry = next_entry, after
        visit += 1


@triton.jit(do_not_specialize=["path_stride", "count_stride", "request_rows"])
def update_kernel(
    state_ptr,  # float32 [layers, heads, dk, dv], advanced in place
    query_ptr,  # [rows, key heads, dk], read only if READ
    key_ptr,  # [layers, rows, key heads, dk]
    value_ptr,  # [layers, rows, heads, dv]
    decay_ptr,  # [layers, rows, heads]
    beta_ptr,  # [layers, rows, heads]
    overlap_ptr,  # [rows, key heads], read only if READ
    out_ptr,  # [rows, heads, dv], written only if READ
    path_ptr,  # int32 [count + 1 or more]: rows from the root; one entry past the last is read
    count_ptr,  # int32 [1]
    rows,  # of a layer
    seats_ptr,  # int32 [R], or None for one request
    seat_stride,  # elements from a seat's states to the next's
    path_stride,  # from a request's path to the next's
    count_stride,
    request_rows,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    READ: tl.constexpr,
):
    """The native update along a path: one token and layer with READ, the replay without."""
    tiles: tl.constexpr = DV // BV
    head = tl.program_id(0) // tiles
    key_head = head // (HEADS // KEY_HEADS)
    first = (tl.program_id(0) % tiles) * BV
    layer = tl.program_id(1)
    dim = tl.arange(0, DK)
    tile = head * DK * DV + dim[:, None] * DV + (first + tl.arange(0, BV))[None, :]
    root = 0  # first row of the request
    if seats_ptr is not None:
        request = tl.program_id(2)
        seat = tl.load(seats_ptr + request)
        if seat < 0:
            return
        state_ptr = part(state_ptr, seat, seat_stride)
        path_ptr += request * path_stride
        count_ptr += request * count_stride
        root = request * request_rows
        layer = layer.to(tl.int64)  # the records of all requests may pass 2^31 elements
    state_ptr += layer.to(tl.int64) * (HEADS * DK * DV)
    key_ptr += layer * rows * (KEY_HEADS * DK)
    value_ptr += layer * rows * (HEADS * DV)
    decay_ptr += layer * rows * HEADS
    beta_ptr += layer * rows * HEADS
    count = tl.load(count_ptr)
    row = tl.load(path_ptr) + root
    state = tl.load(state_ptr + tile)
    if not READ:
        query_ptr, overlap_ptr = key_ptr, decay_ptr  # fetched alike, never used
    query, key, even, odd, decay, beta, dot = _fetch(
        row, head, key_head, first, query_ptr, key_ptr, value_ptr, decay_ptr, beta_ptr,
        overlap_ptr, HEADS, KEY_HEADS, DK, DV, BV,
    )  # fmt: skip
    for i in range(count):
        next_row = tl.load(path_ptr + i + 1) + root
        query1, key1, even1, odd1, decay1, beta1, dot1 = _fetch(
            next_row, head, key_head, first, query_ptr, key_ptr, value_ptr, decay_ptr, beta_ptr,
            overlap_ptr, HEADS, KEY_HEADS, DK, DV, BV,
        )  # fmt: skip
        out = out_ptr + (row * HEADS + head) * DV + first
        written = _visit(state, query, key, even, odd, decay, beta, dot, READ, out, BV)
        state = _advance(state, key, written, decay)
        query, key, even, odd, decay, beta, dot = query1, key1, even1, odd1, decay1, beta1, dot1
        row = next_row
    tl.store(state_ptr + tile, state)

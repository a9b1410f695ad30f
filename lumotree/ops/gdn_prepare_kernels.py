"""Triton kernels around the GDN scan: operands before it, the gated norm after, conv histories.

`prepare_kernel` serves tree rows (taps from a static gather table) and runs of prompt tokens
(taps are the tokens before) through the same functions: causal convolution, SiLU, L2 norm,
gates. `finish_kernel` is the gated RMSNorm; `history_kernel` advances the conv histories.

Arithmetic: GatedDeltaNet of lumotree.model.layers, spelled in lumotree.ops.reference (conv_taps,
inverse_norm, DeltaGates, gated_rms_norm), rounded to the model dtype where that rounds. A sum
over a head has one shape of tile per launch, whatever the row count, and launchers switch
contraction off, so that a row's bits are its own.

Column order of a projected row: qkv (query heads, key heads, value heads) | z | b | a.

With seats (lumotree.ops.seats) histories have a leading dimension of seats, paths one of requests;
rows stand request after request, `padded` of them each in `projected` and `out`, `rows` elsewhere.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lumotree.ops.seats import part


@triton.jit
def _silu(x):
    """x sigmoid(x) in float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _log1p(x):
    """log(1 + x) for x >= 0, right for small x too (Kahan's correction of the rounded sum)."""
    grown = 1.0 + x
    small = grown == 1.0
    return tl.where(small, x, tl.log(grown) * (x / tl.where(small, 1.0, grown - 1.0)))


@triton.jit
def _weights(weight_ptr, first, CONV: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Weights of D channels, a float32 [D] for each tap."""
    taps = ()
    for tap in tl.static_range(WIDTH):
        taps = taps + (tl.load(weight_ptr + tap * CONV + first + tl.arange(0, D)),)
    return taps


@triton.jit
def _mix(
    weights,
    row,  # int [T]
    live,  # int1 [T]
    first,
    projected_ptr,
    conv_ptr,
    gather_ptr,
    stride,
    CONV: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Convolution and SiLU of D channels: float32 [T, D], and the newest inputs [T, D].

    Taps are added in order, oldest first; the sum and the SiLU are rounded to the model dtype.
    """
    dtype = projected_ptr.dtype.element_ty
    channel = (first + tl.arange(0, D))[None, :]
    total = tl.zeros([row.shape[0], D], tl.float32)
    newest = tl.zeros([row.shape[0], D], dtype)
    for tap in tl.static_range(WIDTH):
        if GATHER:
            source = tl.load(gather_ptr + row * WIDTH + tap, mask=live, other=0)
        else:
            source = row + tap
        old = source < WIDTH - 1
        before = conv_ptr + source[:, None] * CONV + channel
        here = projected_ptr + (source - (WIDTH - 1)).to(tl.int64)[:, None] * stride + channel
        kept = tl.load(before, mask=(live & old)[:, None], other=0.0)
        fresh = tl.load(here, mask=(live & (source >= WIDTH - 1))[:, None], other=0.0)
        newest = tl.where(old[:, None], kept, fresh)
        total += newest.to(tl.float32) * weights[tap][None, :]
    return _silu(total.to(dtype).to(tl.float32)).to(dtype).to(tl.float32), newest


@triton.jit
def _place(row, live, head, row_stride, head_stride, D: tl.constexpr):
    """Offsets and mask [T, D] of one head of [rows, heads, D] with any strides."""
    at = row.to(tl.int64)[:, None] * row_stride + head * head_stride + tl.arange(0, D)[None, :]
    return at, live[:, None] & (tl.arange(0, D) >= 0)[None, :]


@triton.jit
def _put(ptr, value, row, live, head, row_stride, head_stride, D: tl.constexpr):
    """Stores [T, D] of one head where `_place` says, in the dtype that lies there.

    A function, because the compiler refuses a name that has one width in a branch (DK) and
    another in its else (DV); the interpreter does not mind.
    """
    at, mask = _place(row, live, head, row_stride, head_stride, D)
    tl.store(ptr + at, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "padded"])
def prepare_kernel(
    projected_ptr,  # [rows or more, conv + values + 2 heads], model dtype
    conv_ptr,  # [width - 1, conv], model dtype: the layer's history, read only
    gather_ptr,  # int32 [rows, width] into history ++ rows, read only if GATHER
    weight_ptr,  # float32 [width, conv]
    rate_ptr,  # float32 [heads]: -exp(A_log)
    bias_ptr,  # float32 [heads]: dt_bias
    query_ptr,
    key_ptr,
    value_ptr,
    decay_ptr,
    beta_ptr,
    overlap_ptr,
    record_ptr,  # [rows, conv], model dtype, written only if GATHER
    rows,
    stride,  # of a projected row
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    gate_row,
    gate_head,
    overlap_row,
    overlap_head,
    l2_eps,
    scale,
    seats_ptr,  # int32 [R], or None for one request
    seat_stride,  # elements from a seat's history to the next's
    padded,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    GATHER: tl.constexpr,  # taps from the table and inputs kept; else a run of tokens
    LOG: tl.constexpr,  # the log decay g instead of exp(g)
    T: tl.constexpr,  # rows of a program
    PDL: tl.constexpr,  # whether the launch may begin before the kernel in front of it ends
):
    """One program: T rows of one key head (its query and its key) or of one value head."""
    CONV: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    dtype = projected_ptr.dtype.element_ty
    slot = tl.program_id(0)
    row = tl.program_id(1) * T + tl.arange(0, T)
    live = row < rows
    to = row  # where its operands are written
    if seats_ptr is not None:
        request = tl.program_id(2)
        seat = tl.load(seats_ptr + request)
        if seat < 0:
            return
        conv_ptr = part(conv_ptr, seat, seat_stride)
        projected_ptr = part(projected_ptr, request, padded * stride)
        to += request * rows
    if PDL:
        gdc_launch_dependents()
    if slot < KEY_HEADS:
        first = slot * DK
        second = (KEY_HEADS + slot) * DK
        query_weights = _weights(weight_ptr, first, CONV, DK, WIDTH)
        key_weights = _weights(weight_ptr, second, CONV, DK, WIDTH)
        if PDL:  # weights are static, everything else may be the work of the kernel in front
            gdc_wait()
        query, query_input = _mix(
            query_weights, row, live, first, projected_ptr, conv_ptr, gather_ptr, stride,
            CONV, DK, WIDTH, GATHER,
        )  # fmt: skip
        key, key_input = _mix(
            key_weights, row, live, second, projected_ptr, conv_ptr, gather_ptr, stride,
            CONV, DK, WIDTH, GATHER,
        )  # fmt: skip
        query = query * (tl.rsqrt(tl.sum(query * query, 1) + l2_eps) * scale)[:, None]
        key = key * tl.rsqrt(tl.sum(key * key, 1) + l2_eps)[:, None]
        _put(query_ptr, query, to, live, slot, query_row, query_head, DK)
        _put(key_ptr, key, to, live, slot, key_row, key_head, DK)
        dot = to.to(tl.int64) * overlap_row + slot * overlap_head
        tl.store(overlap_ptr + dot, tl.sum(query * key, 1), mask=live)
        if GATHER:
            _put(record_ptr, query_input, to, live, slot, CONV, DK, DK)
            _put(record_ptr + KEY_HEADS * DK, key_input, to, live, slot, CONV, DK, DK)
    else:
        head = slot - KEY_HEADS
        first = 2 * KEY_HEADS * DK + head * DV
        weights = _weights(weight_ptr, first, CONV, DV, WIDTH)
        rate = tl.load(rate_ptr + head)
        bias = tl.load(bias_ptr + head)
        if PDL:
            gdc_wait()
        gate = projected_ptr + row.to(tl.int64) * stride + CONV + HEADS * DV + head
        b = tl.load(gate, mask=live, other=0.0).to(tl.float32)
        a = tl.load(gate + HEADS, mask=live, other=0.0).to(tl.float32)
        value, value_input = _mix(
            weights, row, live, first, projected_ptr, conv_ptr, gather_ptr, stride,
            CONV, DV, WIDTH, GATHER,
        )  # fmt: skip
        _put(value_ptr, value, to, live, head, value_row, value_head, DV)
        beta = (1.0 / (1.0 + tl.exp(-b))).to(dtype).to(tl.float32)
        step = a + bias
        # Beyond 20 softplus(x) is x in float32, and exp(x) soon overflows.
        soft = tl.where(step > 20.0, step, _log1p(tl.exp(tl.minimum(step, 20.0))))
        decay = soft * rate
        if not LOG:
            decay = tl.exp(decay)
        gate_at = to.to(tl.int64) * gate_row + head * gate_head
        tl.store(decay_ptr + gate_at, decay, mask=live)
        tl.store(beta_ptr + gate_at, beta, mask=live)
        if GATHER:
            _put(record_ptr + 2 * KEY_HEADS * DK, value_input, to, live, head, CONV, DV, DV)


@triton.jit(do_not_specialize=["rows", "padded"])
def finish_kernel(
    read_ptr,  # float32 [rows, heads, dv]: what the recurrence read
    projected_ptr,  # z of head h, dim i at column first + h dv + i
    scale_ptr,  # float32 [dv]: sqrt(dv) times the norm's weight
    eps_ptr,  # float32 [1]: dv times the norm's epsilon
    out_ptr,  # [padded rows, heads dv], model dtype
    rows,
    padded,
    stride,  # of a projected row
    first,
    read_row,
    read_head,
    seats_ptr,  # int32 [R], or None for one request
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    T: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: T rows of one head. Rows past `rows` are zero."""
    head = tl.program_id(0)
    row = tl.program_id(1) * T + tl.arange(0, T)
    live = row < rows
    if seats_ptr is not None:
        request = tl.program_id(2)
        if tl.load(seats_ptr + request) < 0:
            return
        read_ptr = part(read_ptr, request, rows * read_row)
        projected_ptr = part(projected_ptr, request, padded * stride)
        out_ptr = part(out_ptr, request, padded, HEADS * DV)
    if PDL:
        gdc_launch_dependents()
    scale = tl.load(scale_ptr + tl.arange(0, DV))
    eps = tl.load(eps_ptr)
    if PDL:
        gdc_wait()
    at, mask = _place(row, live, head, read_row, read_head, DV)
    x = tl.load(read_ptr + at, mask=mask, other=0.0)
    at, mask = _place(row, live, head, stride, DV, DV)
    z = tl.load(projected_ptr + first + at, mask=mask, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 1) + eps)[:, None] * scale[None, :] * _silu(z)
    normed = tl.where(live[:, None], normed, 0.0)
    _put(out_ptr, normed, row, row < padded, head, HEADS * DV, DV, DV)


@triton.jit(do_not_specialize=["tokens", "path_stride", "count_stride", "rows"])
def history_kernel(
    conv_ptr,  # [layers, width - 1, conv], model dtype, advanced in place
    record_ptr,  # [layers, rows, conv with any row stride]
    path_ptr,  # int32 [count or more], rows from the root, read only if PATH
    count_ptr,  # int32 [1], read only if PATH
    tokens,  # rows of a run, if not PATH
    layer_stride,
    row_stride,
    seats_ptr,  # int32 [R], or None for one request
    seat_stride,  # elements from a seat's histories to the next's
    path_stride,  # from a request's path to the next's
    count_stride,
    rows,  # of a request
    CONV: tl.constexpr,
    WIDTH: tl.constexpr,
    PATH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK channels of one layer; the last width - 1 of history ++ rows."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = channel < CONV
    slot = tl.arange(0, triton.next_power_of_2(WIDTH - 1))[:, None]
    kept = slot < WIDTH - 1
    if seats_ptr is not None:
        request = tl.program_id(2)
        seat = tl.load(seats_ptr + request)
        if seat < 0:
            return
        conv_ptr = part(conv_ptr, seat, seat_stride)
        record_ptr = part(record_ptr, request, rows * row_stride)
        path_ptr += request * path_stride
        count_ptr += request * count_stride
    conv_ptr += tl.program_id(1).to(tl.int64) * ((WIDTH - 1) * CONV)
    record_ptr += tl.program_id(1).to(tl.int64) * layer_stride
    count = tokens
    if PATH:
        count = tl.load(count_ptr)
    source = count + slot
    old = source < WIDTH - 1
    row = source - (WIDTH - 1)
    if PATH:
        row = tl.load(path_ptr + row, mask=kept & (row >= 0), other=0)
    before = tl.load(conv_ptr + source * CONV + channel, mask=kept & old & inside, other=0.0)
    fresh = tl.load(
        record_ptr + row.to(tl.int64) * row_stride + channel,
        mask=kept & (source >= WIDTH - 1) & inside,
        other=0.0,
    )
    # Old rows move within the block: all of them must be read before any is written.
    tl.debug_barrier()
    value = tl.where(old, before, fresh)
    tl.store(conv_ptr + slot * CONV + channel, value, mask=kept & inside)

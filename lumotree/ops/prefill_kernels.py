"""Triton kernels for long runs of prompt tokens: delta rule, attention, element-wise parts.

Chunked gated delta rule (arXiv 2412.06464), one chunk of C tokens and one head, with
f = cumsum(g), D_ij = exp(f_i - f_j) for i >= j, and S the state before the chunk:
  A = strict lower part of (beta K K^T) * D,   T = (I + A)^-1 diag(beta),   P = (Q K^T) * D,
  X = T (V - exp(f) K S)              what the tokens write,
  O = exp(f) Q S + P X,               S' = exp(f_C) S + K^T (exp(f_C - f) X).
`delta_local_kernel` makes T and P of all chunks at once; `delta_walk_kernel` goes through the
chunks with S^T in registers, so that S^T and X^T enter the products from there.

Row i of every result sums over rows 0 .. i and exact zeros, in one order: a row's bits depend
neither on later rows nor on the length of the run.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter multiplies the bit patterns of bfloat16; there, rounded operands stay float32.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2_E = tl.constexpr(1.4426950408889634)
# Rows of the diagonal blocks that are inverted first.
BLOCK = tl.constexpr(16)


@triton.jit
def _product(a, b):
    """a @ b of operands of one dtype, summed in float32; float32 operands to about 2^-21."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _inverse(a, C: tl.constexpr, OPERAND: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular float32 [C, C].

    Diagonal blocks by the doubling product (I - d)(I + d^2)(I + d^4)(I + d^8) in float32: powers
    of a block of 16 stay small, those of the whole could cancel. Blocks are then merged,
    (I + d + e)^-1 = t - t e t for t = (I + d)^-1 and e below the diagonal blocks, which works
    on bounded numbers and may be rounded like the result.
    """
    count: tl.constexpr = C // BLOCK
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    block_row = tl.arange(0, count)[:, None, None, None]
    block_column = tl.arange(0, count)[None, None, :, None]
    split = tl.reshape(a, (count, BLOCK, count, BLOCK))
    d = tl.sum(tl.where(block_row == block_column, split, 0.0), axis=2)
    inner = tl.arange(0, BLOCK)
    unit = (inner[:, None] == inner[None, :]).to(tl.float32)
    t = unit[None, :, :] - d
    d = _product(d, d)
    t += _product(t, d)
    d = _product(d, d)
    t += _product(t, d)
    d = _product(d, d)
    t += _product(t, d)
    wide = tl.broadcast_to(tl.expand_dims(t, 2), (count, BLOCK, count, BLOCK))
    whole = tl.reshape(tl.where(block_row == block_column, wide, 0.0), (C, C))
    size = BLOCK
    for _ in tl.static_range(2):
        # Of each pair of blocks, what lies below both.
        below = (row // (2 * size) == column // (2 * size)) & (row // size != column // size)
        e = tl.where(below, a, 0.0).to(OPERAND)
        rounded = whole.to(OPERAND)
        whole -= _product(_product(rounded, e).to(OPERAND), rounded)
        size *= 2
    return whole


@triton.jit
def delta_local_kernel(
    query_ptr,  # OPERAND [n, key heads, dk], normalised and scaled
    key_ptr,  # OPERAND [n, key heads, dk], normalised
    g_ptr,  # float32 [n, heads], log decay
    beta_ptr,  # float32 [n, heads]
    solve_ptr,  # out OPERAND [heads, chunks, C, C]: T
    local_ptr,  # out OPERAND [heads, chunks, C, C]: P
    decay_ptr,  # out float32 [heads, chunks, 2, C]: exp(f), exp(f_C - f)
    n,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    C: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program: one chunk and GROUP value heads that read one key head."""
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    key_head = tl.program_id(1) * GROUP // (HEADS // KEY_HEADS)
    operand: tl.constexpr = solve_ptr.dtype.element_ty
    place = tl.arange(0, C)
    token = chunk * C + place
    inside = token < n
    at = (token[:, None] * KEY_HEADS + key_head) * DK + tl.arange(0, DK)[None, :]
    key = tl.load(key_ptr + at, mask=inside[:, None], other=0.0)
    query = tl.load(query_ptr + at, mask=inside[:, None], other=0.0)
    key_key = _product(key, tl.trans(key))
    query_key = _product(query, tl.trans(key))
    row, column = place[:, None], place[None, :]
    square = row * C + column
    for r in range(GROUP):
        head = tl.program_id(1) * GROUP + r
        # Past the end: decay 1 and beta 0 leave the state alone.
        g = tl.load(g_ptr + token * HEADS + head, mask=inside, other=0.0)
        beta = tl.load(beta_ptr + token * HEADS + head, mask=inside, other=0.0)
        fall = tl.cumsum(g, 0)
        last = tl.sum(tl.where(place == C - 1, fall, 0.0), axis=0)
        tile = head * chunks + chunk
        tl.store(decay_ptr + tile * 2 * C + place, tl.exp(fall))
        tl.store(decay_ptr + tile * 2 * C + C + place, tl.exp(last - fall))
        between = tl.exp(tl.where(row >= column, fall[:, None] - fall[None, :], 0.0))
        local = tl.where(row >= column, query_key * between, 0.0)
        tl.store(local_ptr + tile.to(tl.int64) * (C * C) + square, local.to(operand))
        a = tl.where(row > column, key_key * between * beta[:, None], 0.0)
        solve = _inverse(a, C, operand) * beta[None, :]
        tl.store(solve_ptr + tile.to(tl.int64) * (C * C) + square, solve.to(operand))


@triton.jit
def delta_walk_kernel(
    query_ptr,  # OPERAND [n, key heads, dk]
    key_ptr,  # OPERAND [n, key heads, dk]
    value_ptr,  # [n, heads, dv], rows value_stride apart
    solve_ptr,  # OPERAND [heads, chunks, C, C]
    local_ptr,  # OPERAND [heads, chunks, C, C]
    decay_ptr,  # float32 [heads, chunks, 2, C]
    state_ptr,  # float32 [heads, dk, dv], advanced in place
    out_ptr,  # [n, heads, dv]
    n,
    chunks,
    value_stride,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: one head, one tile of values, all chunks in turn."""
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    operand: tl.constexpr = key_ptr.dtype.element_ty
    column = tl.program_id(0) * BV + tl.arange(0, BV)
    dim = tl.arange(0, DK)
    place = tl.arange(0, C)
    square = place[:, None] * C + place[None, :]
    tile = head * DK * DV + dim[None, :] * DV + column[:, None]
    state = tl.load(state_ptr + tile)
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        token = chunk * C + place
        inside = (token < n)[:, None]
        at = (token[:, None] * KEY_HEADS + key_head) * DK + dim[None, :]
        key = tl.load(key_ptr + at, mask=inside, other=0.0)
        query = tl.load(query_ptr + at, mask=inside, other=0.0)
        at = token.to(tl.int64)[:, None] * value_stride + head * DV + column[None, :]
        value = tl.load(value_ptr + at, mask=inside, other=0.0)
        block = head * chunks + chunk
        solve = tl.load(solve_ptr + block.to(tl.int64) * (C * C) + square)
        local = tl.load(local_ptr + block.to(tl.int64) * (C * C) + square)
        grown = tl.load(decay_ptr + block * 2 * C + place)
        left = tl.load(decay_ptr + block * 2 * C + C + place)
        keep = tl.load(decay_ptr + block * 2 * C + C - 1)
        rounded = state.to(operand)
        held = _product(rounded, tl.trans(key)) * grown[None, :]
        rest = tl.trans(value).to(tl.float32) - held
        written = _product(rest.to(operand), tl.trans(solve))
        out = _product(rounded, tl.trans(query)) * grown[None, :]
        out += _product(written.to(operand), tl.trans(local))
        state = state * keep + _product((written * left[None, :]).to(operand), key)
        at = (token.to(tl.int64)[:, None] * HEADS + head) * DV + column[None, :]
        tl.store(out_ptr + at, tl.trans(out).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(state_ptr + tile, state)


@triton.jit
def _attend(
    q, top, mass, total, key_ptr, value_ptr, low, high, position, stop, first,
    D: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Adds the keys low .. high, in blocks of BN, to the running softmax (top, mass, total)."""
    dim = tl.arange(0, D)[None, :]
    for block in tl.range(low, high, BN, num_stages=STAGES):
        column = block + tl.arange(0, BN)
        at = column[:, None] * D + dim
        if MASKED:  # slots past the run may hold anything
            key = tl.load(key_ptr + at, mask=(column < stop)[:, None], other=0.0)
            value = tl.load(value_ptr + at, mask=(column < stop)[:, None], other=0.0)
        else:
            key = tl.load(key_ptr + at)
            value = tl.load(value_ptr + at)
        scores = _product(q, tl.trans(key))
        if MASKED:
            scores = tl.where(column[None, :] <= position[:, None], scores, float("-inf"))
        if FIRST:
            seen = (column >= first)[None, :] | (position < first)[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * LOG2_E)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * LOG2_E - shift[:, None])
        shrink = tl.exp2(top - shift)
        mass = mass * shrink + tl.sum(weights, 1)
        total = total * shrink[:, None]
        if INTERPRETED:
            total += _product(weights.to(value.dtype), value)
        else:
            total = tl.dot(weights.to(value.dtype), value, total, input_precision="tf32x3")
        top = higher
    return top, mass, total


@triton.jit
def attention_kernel(
    q_ptr,  # [n, heads, d], scaled
    key_ptr,  # [kv heads, slots, d]
    value_ptr,  # [kv heads, slots, d]
    gate_ptr,  # [n, heads d], rows gate_stride apart, read only if GATE
    out_ptr,  # [n, heads, d]
    n,
    start,  # position of the first row
    slots,
    first,  # keys before it are seen by rows before it only
    gate_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    FIRST: tl.constexpr,
    GATE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: BM rows of one query head over all their keys, in blocks of absolute slots.

    A block past a row's position adds exact zeros, so a row's bits do not depend on the run.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    head = tl.program_id(1)
    base = (head // (HEADS // KV_HEADS)).to(tl.int64) * slots * D
    row = block * BM + tl.arange(0, BM)
    dim = tl.arange(0, D)
    at = (row.to(tl.int64)[:, None] * HEADS + head) * D + dim[None, :]
    q = tl.load(q_ptr + at, mask=(row < n)[:, None], other=0.0)
    position = start + row
    stop = start + n
    low = (start + block * BM) // BN * BN  # up to here every row sees every key
    high = tl.minimum(start + block * BM + BM, stop)
    top = tl.full([BM], float("-inf"), tl.float32)
    mass = tl.zeros([BM], tl.float32)
    total = tl.zeros([BM, D], tl.float32)
    top, mass, total = _attend(q, top, mass, total, key_ptr + base, value_ptr + base, 0, low,
                               position, stop, first, D, BN, False, FIRST, STAGES)  # fmt: skip
    top, mass, total = _attend(q, top, mass, total, key_ptr + base, value_ptr + base, low, high,
                               position, stop, first, D, BN, True, FIRST, STAGES)  # fmt: skip
    out = (total / mass[:, None]).to(out_ptr.dtype.element_ty)
    if GATE:
        gate_at = row.to(tl.int64)[:, None] * gate_stride + head * D + dim[None, :]
        gate = tl.load(gate_ptr + gate_at, mask=(row < n)[:, None], other=0.0)
        opened = (1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))).to(gate.dtype)
        out = (out.to(tl.float32) * opened.to(tl.float32)).to(out.dtype)
    tl.store(out_ptr + at, out, mask=(row < n)[:, None])


@triton.jit
def swiglu_kernel(
    gate_up_ptr,  # [n, 2 F]
    out_ptr,  # [n, F]
    F,
    BLOCK: tl.constexpr,
):
    """silu(gate) * up of BLOCK columns of one row; rounded where `reference.swiglu` rounds."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(gate_up_ptr + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * F + F + column, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * F + column, (silu * up).to(dtype), mask=inside)

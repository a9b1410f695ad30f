"""Triton kernels of the compact (WY) verifiers; equations in lumotree.verifiers.compact.

One program: one head and one tile of BV values; rows padded to a power of two. Operands of the
large products are rounded to bfloat16. (The same kernel through 3xTF32 spills thousands of
registers, so the float32 verifiers are batched torch products.)
"""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter multiplies the bit patterns of bfloat16; there, rounded operands stay float32.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _product(a, b):
    """a @ b of operands rounded to bfloat16, summed in float32."""
    low_a, low_b = a.to(tl.bfloat16), b.to(tl.bfloat16)
    if INTERPRETED:
        return tl.dot(low_a.to(tl.float32), low_b.to(tl.float32))
    return tl.dot(low_a, low_b)


@triton.jit
def _committed(state, key_ptr, u_ptr, decay_ptr, path_ptr, count_ptr, head, key_head, column,
               HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
               LENGTH: tl.constexpr):  # fmt: skip
    """S_n = e^{c_n} S_0 + sum_j e^{c_n - c_j} k_j u_j^T over the accepted rows."""
    step = tl.arange(0, LENGTH)
    dim = tl.arange(0, DK)
    live = step < tl.load(count_ptr)
    row = tl.load(path_ptr + step, mask=live, other=0)
    log = tl.log(tl.load(decay_ptr + row * HEADS + head, mask=live, other=1.0))
    later = step[None, :] > step[:, None]
    after = tl.sum(tl.where(later, log[None, :], 0.0), axis=1)
    at = (row[:, None] * KEY_HEADS + key_head) * DK + dim[None, :]
    key = tl.load(key_ptr + at, mask=live[:, None], other=0.0).to(tl.float32)
    at = (row[:, None] * HEADS + head) * DV + column[None, :]
    u = tl.load(u_ptr + at, mask=live[:, None], other=0.0).to(tl.float32)
    added = _product(tl.trans(key * tl.exp(after)[:, None]), u)
    return state * tl.exp(tl.sum(log, axis=0)) + added


@triton.jit
def solve_kernel(
    state_ptr,  # float32 [heads, dk, dv]; written only with COMMIT
    query_ptr,  # float32 [rows, key heads, dk]
    key_ptr,
    value_ptr,  # [rows, heads, dv]
    decay_ptr,  # float32 [rows, heads]
    beta_ptr,
    mask_ptr,  # int8 [rows, rows]: ancestors, the row itself included
    out_ptr,  # float32 [rows, heads, dv]
    kept_key_ptr,  # [rows, key heads, dk], factors kept for the publication
    kept_u_ptr,  # [rows, heads, dv]
    kept_decay_ptr,  # float32 [rows, heads]
    commit_key_ptr,  # the same of the last accepted path
    commit_u_ptr,
    commit_decay_ptr,
    commit_path_ptr,  # int32: rows of the commit factors
    commit_count_ptr,
    rows,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    COMMIT: tl.constexpr,
    LENGTH: tl.constexpr,
):
    tiles: tl.constexpr = DV // BV
    head = tl.program_id(0) // tiles
    key_head = head // (HEADS // KEY_HEADS)
    column = (tl.program_id(0) % tiles) * BV + tl.arange(0, BV)
    dim = tl.arange(0, DK)
    row = tl.arange(0, ROWS)
    real = row < rows
    tile = head * DK * DV + dim[:, None] * DV + column[None, :]
    state = tl.load(state_ptr + tile)
    if COMMIT:
        state = _committed(state, commit_key_ptr, commit_u_ptr, commit_decay_ptr,
                           commit_path_ptr, commit_count_ptr, head, key_head, column, HEADS,
                           KEY_HEADS, DK, DV, LENGTH)  # fmt: skip
        tl.store(state_ptr + tile, state)

    wide = (row[:, None] * KEY_HEADS + key_head) * DK + dim[None, :]
    key = tl.load(key_ptr + wide, mask=real[:, None], other=0.0)
    query = tl.load(query_ptr + wide, mask=real[:, None], other=0.0)
    decay = tl.load(decay_ptr + row * HEADS + head, mask=real, other=1.0)
    beta = tl.load(beta_ptr + row * HEADS + head, mask=real, other=0.0)
    both = real[:, None] & real[None, :]
    mask = tl.load(mask_ptr + row[:, None] * rows + row[None, :], mask=both, other=0) != 0
    total = tl.sum(tl.where(mask, tl.log(decay)[None, :], 0.0), axis=1)
    fall = tl.where(mask, tl.exp(total[:, None] - total[None, :]), 0.0)
    system = beta[:, None] * fall * _product(key, tl.trans(key))
    system = tl.where(row[:, None] > row[None, :], system, 0.0)
    read = fall * _product(query, tl.trans(key))

    at = (row[:, None] * HEADS + head) * DV + column[None, :]
    v = tl.load(value_ptr + at, mask=real[:, None], other=0.0).to(tl.float32)
    whole = tl.exp(total)[:, None]
    rhs = beta[:, None] * (v - whole * _product(key, state))
    base = whole * _product(query, state)
    # (I + A)^-1 = (I - A)(I + A^2)(I + A^4)..., finite because A is nilpotent; in TF32, which is
    # finer than the operands.
    inverse = tl.where(row[:, None] == row[None, :], 1.0, -system)
    power = system
    for i in tl.static_range(5):
        if (2 << i) <= DEPTH:
            power = tl.dot(power, power, input_precision="tf32")
            inverse += tl.dot(inverse, power, input_precision="tf32")
    u = tl.dot(inverse, rhs, input_precision="tf32")
    tl.store(kept_u_ptr + at, u.to(kept_u_ptr.dtype.element_ty), mask=real[:, None])
    tl.store(out_ptr + at, base + _product(read, u), mask=real[:, None])
    if tl.program_id(0) % tiles == 0:
        tl.store(kept_decay_ptr + row * HEADS + head, decay, mask=real)
        if head % (HEADS // KEY_HEADS) == 0:
            tl.store(kept_key_ptr + wide, key.to(kept_key_ptr.dtype.element_ty),
                     mask=real[:, None])  # fmt: skip


@triton.jit
def commit_kernel(
    state_ptr,  # float32 [layers, heads, dk, dv], in place
    key_ptr,  # [layers, rows, key heads, dk]
    u_ptr,  # [layers, rows, heads, dv]
    decay_ptr,  # [layers, rows, heads]
    path_ptr,
    count_ptr,
    rows,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    LENGTH: tl.constexpr,
    PRODUCT: tl.constexpr,  # one product (fused update), else row after row (short replay)
):
    tiles: tl.constexpr = DV // BV
    head = tl.program_id(0) // tiles
    key_head = head // (HEADS // KEY_HEADS)
    column = (tl.program_id(0) % tiles) * BV + tl.arange(0, BV)
    dim = tl.arange(0, DK)
    layer = tl.program_id(1)
    state_ptr += layer.to(tl.int64) * (HEADS * DK * DV)
    key_ptr += layer * rows * (KEY_HEADS * DK)
    u_ptr += layer * rows * (HEADS * DV)
    decay_ptr += layer * rows * HEADS
    tile = head * DK * DV + dim[:, None] * DV + column[None, :]
    state = tl.load(state_ptr + tile)
    if PRODUCT:
        state = _committed(state, key_ptr, u_ptr, decay_ptr, path_ptr, count_ptr, head, key_head,
                           column, HEADS, KEY_HEADS, DK, DV, LENGTH)  # fmt: skip
    else:
        for i in range(tl.load(count_ptr)):
            row = tl.load(path_ptr + i)
            key = tl.load(key_ptr + (row * KEY_HEADS + key_head) * DK + dim).to(tl.float32)
            u = tl.load(u_ptr + (row * HEADS + head) * DV + column).to(tl.float32)
            decay = tl.load(decay_ptr + row * HEADS + head)
            state = state * decay + key[:, None] * u[None, :]
    tl.store(state_ptr + tile, state)

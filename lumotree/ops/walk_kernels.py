"""Triton kernels of the acceptance walk, and of what the draft head takes from its path.

Definition: lumotree.sampling.accept_walk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lumotree.ops.seats import part
from lumotree.ops.select_kernels import follow


@triton.jit
def _carried(row, rows, parent_ptr, tokens_ptr, active_ptr, sampled_ptr):
    """Whether each row's draft is its parent's sample (the root: yes), and its parent."""
    parent = tl.load(parent_ptr + row, mask=row < rows, other=-2)
    active = tl.load(active_ptr + row, mask=row < rows, other=0) != 0
    token = tl.load(tokens_ptr + row, mask=row < rows, other=-1)
    wanted = tl.load(sampled_ptr + parent, mask=parent >= 0, other=-2)
    return (parent == -1) | (active & (parent >= 0) & (token == wanted)), parent


@triton.jit(do_not_specialize=["rows", "length"])
def walk_kernel(
    parent_ptr,  # int32 [rows], -1 for row 0
    depth_ptr,  # int32 [rows]
    ancestor_ptr,  # uint8 [rows, rows]: whether the column is on the row's root path
    tokens_ptr,  # int32 [rows]
    active_ptr,  # uint8 [rows]
    sampled_ptr,  # int32 [rows]
    fallback_ptr,  # int32 [rows]
    counts_ptr,  # int32 [vocab]: emitted tokens are counted in
    result_ptr,  # int32: count, pending, flag, 0, path rows
    seats_ptr,  # int32 [requests], or None for one request
    padded,  # rows of a request in tokens and active
    stride,  # of a request in sampled and result
    vocab,
    rows,
    length,  # entries of the path
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Acceptance without a walk: a row is on the path when every row above it is, and it carries
    its parent's sample, and no earlier sibling does.

    A row on the path that the host has to sample: nothing is accepted or counted, flag is 1.
    One program a request; counts have one place a seat.
    """
    follow(PDL)
    if seats_ptr is not None:
        request = tl.program_id(0)
        seat = tl.load(seats_ptr + request)
        if seat < 0:
            return
        tokens_ptr += request * padded
        active_ptr += request * padded
        sampled_ptr += request * stride
        fallback_ptr += request * rows
        counts_ptr = part(counts_ptr, seat, vocab)
        result_ptr += request * stride
    row = tl.arange(0, ROWS)
    depth = tl.load(depth_ptr + row, mask=row < rows, other=-1)
    sampled = tl.load(sampled_ptr + row, mask=row < rows, other=0)
    token = tl.load(tokens_ptr + row, mask=row < rows, other=0)
    fallback = tl.load(fallback_ptr + row, mask=row < rows, other=0)
    carried, parent = _carried(row, rows, parent_ptr, tokens_ptr, active_ptr, sampled_ptr)
    twin = (parent[:, None] == parent[None, :]) & (row[:, None] < row[None, :])
    taken = tl.sum((twin & carried[:, None]).to(tl.int32), 0)
    missed = (taken > 0) | (carried == 0)
    inside = (row < rows)[:, None] & (row < rows)[None, :]
    above = tl.load(ancestor_ptr + row[:, None] * rows + row[None, :], mask=inside, other=0) != 0
    off = tl.sum((above & missed[None, :]).to(tl.int32), 1)
    on = (off == 0) & (row < rows)

    count = tl.sum(on.to(tl.int32), 0)
    flag = tl.sum((on & (fallback != 0)).to(tl.int32), 0) > 0
    last = on & (depth == count - 1)
    pending = tl.sum(tl.where(last, sampled, 0), 0)
    emitted = on & (row > 0) & (flag == 0)
    tl.atomic_add(counts_ptr + token, 1, mask=emitted, sem="relaxed")
    tl.atomic_add(
        counts_ptr + tl.where(last, sampled, 0), 1, mask=last & (flag == 0), sem="relaxed"
    )

    level = tl.arange(0, LENGTH)
    here = (on & (flag == 0))[:, None] & (depth[:, None] == level[None, :])
    path = tl.sum(tl.where(here, row[:, None], 0), 0)
    tl.store(result_ptr + 4 + level, path, mask=level < length)
    tl.store(result_ptr, tl.where(flag, 0, count))
    tl.store(result_ptr + 1, pending)
    tl.store(result_ptr + 2, flag.to(tl.int32))


@triton.jit
def take_kernel(
    result_ptr,  # int32, as walk_kernel leaves it
    hidden_ptr,  # [rows, width]
    tokens_ptr,  # int32 [rows]
    hidden_to_ptr,  # [height + 1, width]
    tokens_to_ptr,  # int32 [height + 1]
    count_to_ptr,  # int32 [1]
    seats_ptr,  # int32 [requests], or None for one request
    padded,  # rows of a request in hidden and tokens
    stride,  # of a request in result
    steps,  # places of a seat in hidden_to and tokens_to
    width,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK columns of the hidden row of one place of the path.

    With seats, what is taken has one place a seat.
    """
    follow(PDL)
    place = tl.program_id(1)
    if seats_ptr is not None:
        request = tl.program_id(2)
        seat = tl.load(seats_ptr + request)
        if seat < 0:
            return
        result_ptr += request * stride
        hidden_ptr = part(hidden_ptr, request * padded, width)
        tokens_ptr += request * padded
        hidden_to_ptr = part(hidden_to_ptr, seat * steps, width)
        tokens_to_ptr += seat * steps
        count_to_ptr += seat
    count = tl.load(result_ptr)
    row = tl.load(result_ptr + 4 + place)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    hidden = tl.load(hidden_ptr + row * width + column, mask=column < width, other=0.0)
    tl.store(hidden_to_ptr + place * width + column, hidden, mask=column < width)
    if tl.program_id(0) == 0:
        after = tl.load(result_ptr + 5 + place)
        token = tl.load(tokens_ptr + after)
        pending = tl.load(result_ptr + 1)
        tl.store(tokens_to_ptr + place, tl.where(place == count - 1, pending, token))
        if place == 0:
            tl.store(count_to_ptr, count)

"""Triton kernels of selection: draft candidates and sampling of rows.

`best_kernel` and `merge_kernel` give argmax and ordered top-3 in one pass over the logits.
`scan_kernel` and `draw_kernel` are lumotree.sampling.sample_rows on the device: parameters are
read from a tensor, so that one captured graph serves every request.

How a row's candidates are found without a sort: the vocabulary is dealt out in tiles of COLUMNS
ids to parts, and a group is one column of a part. The k-th largest maximum of some groups taken
together is a bound that at least k tokens reach, and rarely many more. Only groups that reach it
are read again. Every
filter then works on values and on sums of integers, as sampling.py explains, so no order of
candidates, and no order of programs, changes a bit. Launchers switch contraction off: penalties
are rounded products, then differences.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lumotree.ops.seats import part

COLUMNS = tl.constexpr(32)
# Orders below every logit, -inf included, and above every one.
LOWEST = tl.constexpr(-(2**31))
HIGHEST = tl.constexpr(2**31 - 1)

# Words of a sampling block, int64; fractions are bit patterns of float64.
GREEDY = tl.constexpr(0)
TOP_K = tl.constexpr(1)
SUPPORTED = tl.constexpr(2)
START = tl.constexpr(3)
PENALISED = tl.constexpr(4)
SCALE = tl.constexpr(5)
TOP_P = tl.constexpr(6)
LOG_MIN_P = tl.constexpr(7)
PRESENCE = tl.constexpr(8)
FREQUENCY = tl.constexpr(9)
SHRINK = tl.constexpr(10)
GROW = tl.constexpr(11)
WORDS = tl.constexpr(12)

# A count of tokens above a sum of masses: 256 masses of at most 2^34 need 43 bits.
COUNT_SHIFT = tl.constexpr(43)
COUNTED = tl.constexpr(2**43)


@triton.jit
def follow(PDL: tl.constexpr):
    """Waits for the kernel in front, if the launch may begin before that one ends."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _order(x):
    """int32 that sorts like float32 x: -0 equals 0, NaN is above everything."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x != x, bits * 0 + HIGHEST, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _live(order, ids, live):
    """`order` of ids below `live`, LOWEST for the others."""
    return tl.where(ids < live, order, ids * 0 + LOWEST)


@triton.jit
def _pack(order, ids):
    """int64 that sorts by order, then by falling id."""
    return (order.to(tl.int64) << 32) | (ids ^ HIGHEST).to(tl.int64)


@triton.jit
def best_kernel(
    logits_ptr,  # [rows, vocab], any float type
    part_ptr,  # int64 [rows, parts, 3]
    vocab,
    live,
    stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the best three of BLOCK ids of a row, packed."""
    follow(PDL)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(1).to(tl.int64) * stride + ids
    x = tl.load(logits_ptr + at, mask=ids < vocab, other=0.0).to(tl.float32)
    packed = _pack(_live(_order(x), ids, live), ids)
    nothing = _pack(ids * 0 + LOWEST, ids)
    to = part_ptr + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * 3
    for i in tl.static_range(3):
        best = tl.max(packed, 0)
        tl.store(to + i, best)
        packed = tl.where(packed == best, nothing, packed)


@triton.jit
def merge_kernel(
    part_ptr,  # int64 [rows, parts 3]
    found_ptr,  # int32 [rows, 4]: argmax, best three
    entries,
    stride,  # of a row found
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the best three of a row's parts."""
    follow(PDL)
    row = tl.program_id(0)
    entry = tl.arange(0, BLOCK)
    nothing = _pack(entry * 0 + LOWEST, entry)
    packed = tl.load(part_ptr + row * entries + entry, mask=entry < entries, other=0)
    packed = tl.where(entry < entries, packed, nothing)
    for i in tl.static_range(3):
        best = tl.max(packed, 0)
        token = (best & HIGHEST).to(tl.int32) ^ HIGHEST
        if i == 0:
            tl.store(found_ptr + row * stride, token)
        tl.store(found_ptr + row * stride + 1 + i, token)
        packed = tl.where(packed == best, nothing, packed)


@triton.jit
def _real(words_ptr, word):
    return tl.load(words_ptr + word).to(tl.float64, bitcast=True)


@triton.jit
def _penalise(
    x, ids, inside, own, row, depth, words_ptr, counts_ptr, seen_ptr, paths_ptr, tokens_ptr
):  # fmt: skip
    """sampling._penalise of logits at `ids`; the first `own` tokens of the row's path count too.

    A penalty that is off multiplies by 1 or subtracts 0, which changes no bit.
    """
    count = tl.load(counts_ptr + ids, mask=inside, other=0)
    for i in tl.range(own, loop_unroll_factor=4):
        below = tl.load(paths_ptr + row * depth + i)
        token = tl.load(tokens_ptr + tl.maximum(below, 0))
        count += ((ids == token) & (below >= 0)).to(tl.int32)
    seen = (tl.load(seen_ptr + ids, mask=inside, other=0) != 0) | (count > 0)
    shrink = _real(words_ptr, SHRINK).to(tl.float32)
    grow = _real(words_ptr, GROW).to(tl.float32)
    x = tl.where(seen, x * tl.where(x > 0, shrink, grow), x)
    x = x - count.to(tl.float32) * _real(words_ptr, FREQUENCY).to(tl.float32)
    return x - (count > 0).to(tl.float32) * _real(words_ptr, PRESENCE).to(tl.float32)


@triton.jit
def _inputs(request, seat, logits_ptr, words_ptr, counts_ptr, seen_ptr, tokens_ptr, padded, vocab,
            stride):  # fmt: skip
    """A request's own logits, words, counts, seen and tokens."""
    return (
        part(logits_ptr, request * padded, stride),
        part(words_ptr, seat, WORDS),
        part(counts_ptr, seat, vocab),
        part(seen_ptr, seat, vocab),
        part(tokens_ptr, request, padded),
    )


@triton.jit(do_not_specialize=["depth"])
def scan_kernel(
    logits_ptr,  # [rows, vocab], any float type
    group_ptr,  # int32 [rows, parts COLUMNS]: order of each group's largest processed value
    union_ptr,  # int32 [rows, parts COLUMNS / TOGETHER]: the same of neighbouring groups
    words_ptr,  # int64 [12], a sampling block
    counts_ptr,  # int32 [vocab]
    seen_ptr,  # uint8 [vocab]
    paths_ptr,  # int32 [rows, depth]: rows on the row's own path below the root, -1 padded
    tokens_ptr,  # int32 [rows]
    seats_ptr,  # int32 [requests], or None for one request
    padded,  # rows of a request in logits and tokens
    vocab,
    live,
    stride,
    parts,
    depth,
    TILES: tl.constexpr,
    TOGETHER: tl.constexpr,
    PATHS: tl.constexpr,  # the greatest depth, a power of two
    PDL: tl.constexpr,
):
    """One program: one part of one row. Tiles t = part, part + parts, ... are its own.

    With seats, words, counts and seen have one place a seat, all else one a request.
    """
    follow(PDL)
    own_part = tl.program_id(0)
    row = tl.program_id(1)
    if seats_ptr is not None:
        request = tl.program_id(2)
        seat = tl.load(seats_ptr + request)
        if seat < 0:
            return
        logits_ptr, words_ptr, counts_ptr, seen_ptr, tokens_ptr = _inputs(
            request, seat, logits_ptr, words_ptr, counts_ptr, seen_ptr, tokens_ptr, padded, vocab,
            stride,
        )  # fmt: skip
        entries = request * tl.num_programs(1) * parts * COLUMNS
        group_ptr += entries
        union_ptr += entries // TOGETHER
    tile = tl.arange(0, TILES) * parts + own_part
    ids = tile[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = ids < vocab
    at = row.to(tl.int64) * stride + ids
    x = tl.load(logits_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if tl.load(words_ptr + PENALISED) != 0:
        level = tl.arange(0, PATHS)
        below = tl.load(paths_ptr + row * depth + level, mask=level < depth, other=-1)
        token = tl.load(tokens_ptr + below, mask=below >= 0, other=-1)
        mine = (token >= 0) & ((token // COLUMNS) % parts == own_part)
        own = depth * tl.max(mine.to(tl.int32), 0)
        x = _penalise(
            x, ids, inside, own, row, depth, words_ptr, counts_ptr, seen_ptr, paths_ptr,
            tokens_ptr,
        )  # fmt: skip
    x = x * _real(words_ptr, SCALE).to(tl.float32)
    group = tl.max(_live(_order(x), ids, live), 0)
    tl.store(group_ptr + (row * parts + own_part) * COLUMNS + tl.arange(0, COLUMNS), group)
    UNIONS: tl.constexpr = COLUMNS // TOGETHER
    union = tl.max(tl.reshape(group, [UNIONS, TOGETHER]), 1)
    tl.store(union_ptr + (row * parts + own_part) * UNIONS + tl.arange(0, UNIONS), union)


@triton.jit
def _kth(order_ptr, entries, k, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The k-th largest of int32 order[entries]: the least with fewer than k above it."""
    entry = tl.arange(0, SIZE)
    order = tl.load(order_ptr + entry, mask=entry < entries, other=LOWEST)
    above = tl.zeros([SIZE], tl.int32)
    for start in range(0, entries, BLOCK):
        other = start + tl.arange(0, BLOCK)
        their = tl.load(order_ptr + other, mask=other < entries, other=LOWEST)
        above += tl.sum((their[None, :] > order[:, None]).to(tl.int32), 1)
    return tl.min(tl.where(above < k, order, entry * 0 + HIGHEST), 0)


@triton.jit
def _mass(value, top):
    """Probability relative to the top in units of 2^-34, a whole number, int64."""
    mass = tl.exp((value - top).to(tl.float64)) * 17179869184.0
    # Adding and taking away 2^52 rounds to the nearest integer.
    return ((mass + 4503599627370496.0) - 4503599627370496.0).to(tl.int64)


@triton.jit
def _gumbel(start, position, ids):
    """sampling.gumbel_noise: float32, a pure function of seed (hashed), position and id."""
    x = ids.to(tl.int64) * (-0x61C8864680B583EB) + (position * (-0x2E4AB5CD2E6D12FD) + start)
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * (-0x40A7B892E31B1A47)
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * (-0x6B2FB644ECCEEE15)
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    # u = (top 52 bits + 1/2) / 2^52; every step up to the logarithm is exact.
    u = ((x >> 12).to(tl.float64) + 2251799813685248.0 + 0.5) * (2.0**-52)
    return (-tl.log(-tl.log(u))).to(tl.float32)


@triton.jit(do_not_specialize=["depth"])
def draw_kernel(
    logits_ptr,
    group_ptr,
    union_ptr,
    words_ptr,
    counts_ptr,
    seen_ptr,
    paths_ptr,
    tokens_ptr,
    depth_ptr,  # int32 [rows]
    length_ptr,  # integer [1]: materialised tokens; row i lies at length + depth[i]
    chosen_ptr,  # int32 [rows, CHOSEN], scratch: groups to read again, valid from the start
    value_ptr,  # float32 [rows, FOUND], scratch: candidates
    id_ptr,  # int32 [rows, FOUND], scratch
    sampled_ptr,  # int32 [rows]
    fallback_ptr,  # int32 [rows]: 1 where the host has to sample
    seats_ptr,  # int32 [requests], or None for one request
    padded,  # rows of a request in logits and tokens
    sampled_stride,  # of a request
    vocab,
    live,
    stride,
    parts,
    depth,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,  # parts COLUMNS, padded to a power of two
    UNIONS: tl.constexpr,  # unions of groups, padded likewise
    TOGETHER: tl.constexpr,
    CHOSEN: tl.constexpr,
    FOUND: tl.constexpr,
    BATCH: tl.constexpr,  # groups read at once
    BLOCK: tl.constexpr,  # compared with all others at once
    PDL: tl.constexpr,
):
    """One program: the token that one row emits."""
    follow(PDL)
    row = tl.program_id(0)
    if seats_ptr is not None:
        request = tl.program_id(1)
        seat = tl.load(seats_ptr + request)
        if seat < 0:
            return
        logits_ptr, words_ptr, counts_ptr, seen_ptr, tokens_ptr = _inputs(
            request, seat, logits_ptr, words_ptr, counts_ptr, seen_ptr, tokens_ptr, padded, vocab,
            stride,
        )  # fmt: skip
        length_ptr += seat
        sampled_ptr += request * sampled_stride
        before = request * tl.num_programs(0)
        fallback_ptr += before
        group_ptr += before * parts * COLUMNS
        union_ptr += before * parts * COLUMNS // TOGETHER
        chosen_ptr += before * CHOSEN
        value_ptr += before * FOUND
        id_ptr += before * FOUND
    greedy = tl.load(words_ptr + GREEDY) != 0
    penalised = tl.load(words_ptr + PENALISED) != 0
    scale = _real(words_ptr, SCALE).to(tl.float32)
    k = tl.minimum(tl.load(words_ptr + TOP_K), live).to(tl.int32)

    group = tl.arange(0, GROUPS)
    groups = parts * COLUMNS
    order = tl.load(group_ptr + row * groups + group, mask=group < groups, other=LOWEST)
    unions = groups // TOGETHER
    bound = _kth(union_ptr + row * unions, unions, k, UNIONS, BLOCK)
    reached = (order >= bound) & (order > LOWEST)
    place = tl.cumsum(reached.to(tl.int32), 0) - 1
    # A group with a NaN counts as more than there is room for.
    chosen = tl.sum(reached.to(tl.int32) + (order == HIGHEST).to(tl.int32) * CHOSEN, 0)
    broken = chosen > CHOSEN
    tl.store(chosen_ptr + row * CHOSEN + place, group, mask=reached & (place < CHOSEN))
    tl.debug_barrier()

    found = tl.full([], 0, tl.int32)
    chosen = tl.minimum(chosen, CHOSEN)
    column = tl.arange(0, TILES)[None, :] * (parts * COLUMNS)
    for batch in range((chosen + BATCH - 1) // BATCH):
        entry = batch * BATCH + tl.arange(0, BATCH)
        which = tl.load(chosen_ptr + row * CHOSEN + entry, mask=entry < chosen, other=0)
        ids = which[:, None] + column
        inside = (entry < chosen)[:, None] & (ids < live)
        at = row.to(tl.int64) * stride + ids
        x = tl.load(logits_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if penalised:
            x = _penalise(
                x, ids, inside, depth, row, depth, words_ptr, counts_ptr, seen_ptr, paths_ptr,
                tokens_ptr,
            )  # fmt: skip
        x = x * scale
        # A value of -inf never wins against a finite one.
        keep = inside & (_order(x) >= bound) & (x > float("-inf"))
        taken = tl.reshape(keep.to(tl.int32), [BATCH * TILES])
        to = row * FOUND + found + tl.cumsum(taken, 0) - 1
        fits = (taken != 0) & (to < (row + 1) * FOUND)
        tl.store(value_ptr + to, tl.reshape(x, [BATCH * TILES]), mask=fits)
        tl.store(id_ptr + to, tl.reshape(ids, [BATCH * TILES]), mask=fits)
        found += tl.sum(taken, 0)
    broken = broken | (found > FOUND)
    found = tl.minimum(found, FOUND)
    tl.debug_barrier()

    entry = tl.arange(0, FOUND)
    at = row * FOUND + entry
    value = tl.load(value_ptr + at, mask=entry < found, other=float("-inf"))
    ids = tl.load(id_ptr + at, mask=entry < found, other=HIGHEST)
    top = tl.max(value, 0)
    broken = broken | (found == 0) | (top == float("inf"))
    score = value
    kept = entry < found
    if not greedy and not broken:
        above = tl.zeros([FOUND], tl.int64)
        for start in range(0, found, BLOCK):
            other = start + tl.arange(0, BLOCK)
            their = tl.load(
                value_ptr + row * FOUND + other, mask=other < found, other=float("-inf")
            )
            weight = (_mass(their, top) + COUNTED)[None, :]
            above += tl.sum(tl.where(their[None, :] > value[:, None], weight, 0), 1)
        kept = kept & ((above >> COUNT_SHIFT) < k)
        total = tl.sum(tl.where(kept, _mass(value, top), 0), 0)
        more_likely = above & (COUNTED - 1)
        kept = kept & (more_likely.to(tl.float64) < total.to(tl.float64) * _real(words_ptr, TOP_P))
        kept = kept & (value >= top + _real(words_ptr, LOG_MIN_P).to(tl.float32))
        position = tl.load(length_ptr).to(tl.int64) + 1 + tl.load(depth_ptr + row)
        score = value + _gumbel(tl.load(words_ptr + START), position, ids)
    score = tl.where(kept, score, float("-inf"))
    token = tl.min(tl.where(kept & (score == tl.max(score, 0)), ids, ids * 0 + HIGHEST), 0)
    broken = broken | (tl.load(words_ptr + SUPPORTED) == 0)
    tl.store(sampled_ptr + row, tl.where(token < live, token, 0))
    tl.store(fallback_ptr + row, broken.to(tl.int32))

"""Launches around the GDN scan: operands of rows, gated norm of outputs, conv histories.

Shapes speak for themselves: a projected row is qkv | z | b | a, the heads and their widths are
those of the operands that are written. With seats (lumotree.ops.seats) a launch serves R requests
of one tree, and each gets the bits that it has alone.
"""

from __future__ import annotations

from torch import Tensor

from lumotree.ops.gdn import Operands
from lumotree.ops.gdn_prepare_kernels import finish_kernel, history_kernel, prepare_kernel
from lumotree.ops.reference import DeltaGates, Norm, conv_taps, inverse_norm, wide

# Rows and warps of a program: single rows spread a decode step over the device, blocks of
# prompt rows find the taps they share in the nearest cache.
ROW, RUN = (1, 1), (16, 4)
HISTORY_BLOCK = 512


def prepare(
    projected: Tensor,
    conv: Tensor,
    gather: Tensor,
    weight: Tensor,
    gates: DeltaGates,
    l2_eps: float,
    scale: float,
    into: Operands,
    record: Tensor,
    early: bool = False,
    seats: Tensor | None = None,
    padded: int | None = None,
) -> None:
    """Operands of a step's rows in one layer, and the conv inputs that publication needs.

    projected [count or more, conv + values + 2 heads] in the model dtype; conv
    [width - 1, conv], the layer's history; gather int32 [count, width], a row's taps in
    history ++ rows, oldest first; weight float32 [width, conv]. Writes `into` (rows = count,
    any row and head strides) and record [count, conv]. `scale` multiplies queries. early: the
    launch may begin before the kernel in front of it ends.

    With seats int32 [R]: projected [R * padded or more, ...], conv [N, width - 1, conv] at any
    stride of a seat; `into` and record have R * count rows.
    """
    fixed = (weight, gates, l2_eps, scale)
    _prepare(projected, conv, gather, *fixed, into, record, gather.shape[0], early, seats, padded)


def define(
    taps: Tensor,
    b_a: Tensor,
    weight: Tensor,
    gates: DeltaGates,
    l2_eps: float,
    scale: float,
    like: Operands,
) -> tuple[Operands, Tensor]:
    """What `prepare` computes, in plain torch: new operands shaped as `like`, and the log decay.

    taps [count, width, conv] gathered inputs, oldest first; b_a [count, 2 heads].
    """
    count, key_heads, dk = like.key.shape
    mixed = conv_taps(taps, weight)
    widths = (key_heads * dk, key_heads * dk, mixed.shape[1] - 2 * key_heads * dk)
    query, key, value = mixed.split_with_sizes(widths, 1)
    query, key = (wide(x).view(count, key_heads, dk) for x in (query, key))
    eps = weight.new_full((1,), l2_eps)
    query = query * (inverse_norm(query, eps) * scale)
    key = key * inverse_norm(key, eps)
    log_decay, beta = gates(b_a)
    overlap = (query * key).sum(-1)
    value = value.view_as(like.value)
    return Operands(query, key, value, log_decay.exp(), beta, overlap), log_decay


def prepare_run(
    projected: Tensor,
    conv: Tensor,
    weight: Tensor,
    gates: DeltaGates,
    l2_eps: float,
    scale: float,
    into: Operands,
) -> None:
    """Operands of a run of prompt tokens: as `prepare`, but `into.decay` takes the log decay g.

    A token's taps are the tokens before it, and the history before those. The history stays as
    it is: `advance_conv` moves it.
    """
    rows = into.query.shape[0]
    _prepare(projected, conv, None, weight, gates, l2_eps, scale, into, None, rows, False)


def _prepare(
    projected: Tensor,
    conv: Tensor,
    gather: Tensor | None,
    weight: Tensor,
    gates: DeltaGates,
    l2_eps: float,
    scale: float,
    into: Operands,
    record: Tensor | None,
    rows: int,
    early: bool,
    seats: Tensor | None = None,
    padded: int | None = None,
) -> None:
    (_, key_heads, dk), (_, heads, dv) = into.key.shape, into.value.shape
    run = gather is None
    block, warps = RUN if run else ROW
    requests, (seat,) = _axis(seats, conv)
    prepare_kernel[(key_heads + heads, -(-rows // block), requests)](
        projected,
        conv,
        projected if run else gather,
        weight,
        gates.a_neg,
        gates.bias[heads:],
        into.query,
        into.key,
        into.value,
        into.decay,
        into.beta,
        into.overlap,
        projected if run else record,
        rows,
        projected.stride(0),
        *into.query.stride()[:2],
        *into.key.stride()[:2],
        *into.value.stride()[:2],
        *into.decay.stride(),
        *into.overlap.stride(),
        l2_eps,
        scale,
        seats,
        seat,
        padded,
        HEADS=heads,
        KEY_HEADS=key_heads,
        DK=dk,
        DV=dv,
        WIDTH=weight.shape[0],
        GATHER=not run,
        LOG=run,
        T=block,
        PDL=early,
        num_warps=warps,
        enable_fp_fusion=False,
        **({"launch_pdl": True} if early else {}),
    )


def _axis(seats: Tensor | None, *indexed: Tensor) -> tuple[int, tuple[int | None, ...]]:
    """How many requests there are, and the strides of their seats or parts of `indexed`."""
    if seats is None:
        return 1, (None,) * len(indexed)
    return seats.numel(), tuple(x.stride(0) for x in indexed)


def finish(
    read: Tensor,
    projected: Tensor,
    norm: Norm,
    out: Tensor,
    early: bool = False,
    seats: Tensor | None = None,
) -> Tensor:
    """Gated RMSNorm of what the recurrence read: `out` [padded, heads dv] in the model dtype.

    read float32 [count, heads, dv]; projected [count or more, ...] holds the gate z after qkv
    and before b and a. Rows of `out` past count become zero.

    With seats int32 [R]: read [R * count, ...], out [R * padded, ...], projected as many rows or
    more; rows past count of each request become zero.
    """
    total, heads, dv = read.shape
    requests, _ = _axis(seats)
    rows, padded = total // requests, out.shape[0] // requests
    # By the rows of one request: the tile decides the bits.
    block, warps = ROW if padded <= 128 else RUN
    finish_kernel[(heads, -(-padded // block), requests)](
        read,
        projected,
        norm.scale,
        norm.eps,
        out,
        rows,
        padded,
        projected.stride(0),
        projected.shape[1] - 2 * heads - heads * dv,
        *read.stride()[:2],
        seats,
        HEADS=heads,
        DV=dv,
        T=block,
        PDL=early,
        num_warps=warps,
        enable_fp_fusion=False,
        **({"launch_pdl": True} if early else {}),
    )
    return out


def publish_conv(
    conv: Tensor, records: Tensor, path: Tensor, count: Tensor, seats: Tensor | None = None
) -> None:
    """All layers' conv histories along the accepted path, in place, one launch.

    conv [layers, width - 1, channels], records [layers, rows, channels] as `prepare` keeps
    them; path int32, rows from the root, count int32 [1] of them; count 0 changes nothing.

    With seats int32 [R]: conv [N, layers, ...] at any stride of a seat, records [layers, R * rows,
    ...], path [R, length], count [R] at any strides of a request.
    """
    _advance(conv, records, path, count, 0, seats)


def advance_conv(conv: Tensor, projected: Tensor, tokens: int) -> None:
    """One layer's history [width - 1, channels] after a run of `tokens` projected rows."""
    _advance(conv[None], projected[None], None, None, tokens)


def _advance(
    conv: Tensor,
    records: Tensor,
    path: Tensor | None,
    count: Tensor | None,
    tokens: int,
    seats: Tensor | None = None,
) -> None:
    layers, kept, channels = conv.shape[-3:]
    requests, strides = _axis(seats, conv, path, count)
    history_kernel[(-(-channels // HISTORY_BLOCK), layers, requests)](
        conv,
        records,
        conv if path is None else path,
        conv if count is None else count,
        tokens,
        records.stride(0),
        records.stride(1),
        seats,
        *strides,
        records.shape[1] // requests,
        CONV=channels,
        WIDTH=kept + 1,
        PATH=path is not None,
        BLOCK=HISTORY_BLOCK,
        num_warps=4,
    )

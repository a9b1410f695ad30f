"""Long runs of prompt tokens on a device: launches of the kernels in `prefill_kernels`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from lumotree.ops.attention_cache_kernels import prepare_kernel
from lumotree.ops.device import limits_of
from lumotree.ops.prefill_kernels import (
    attention_kernel,
    delta_local_kernel,
    delta_walk_kernel,
    swiglu_kernel,
)
from lumotree.ops.reference import DELTA_CHUNK, Norm

# Shared memory kept free for the layout changes of a kernel, bytes.
SPARE_BYTES = 4096
SWIGLU_BLOCK = 1024


@dataclass(frozen=True)
class DeltaLaunch:
    """How the delta rule runs; block and stages change no bit.

    block: value columns a program of the walk holds. stages: chunks in flight. group: value
    heads per program of the local kernel.
    """

    block: int = 64
    stages: int = 3
    group: int = 1
    local_warps: int = 4


@dataclass(frozen=True)
class AttentionLaunch:
    """Query rows and keys of a block, warps, key blocks in flight. keys decides the bits."""

    rows: int
    keys: int
    warps: int
    stages: int


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the delta rule rounds operands of its products to, for a model dtype.

    float16 for bfloat16 models: keys are normalised, solutions bounded and decays at most 1, so
    its range suffices, and it has eight times bfloat16's precision at the same speed.
    """
    return torch.float32 if dtype == torch.float32 else torch.float16


def choose_delta(dk: int, dv: int, dtype: torch.dtype, device: torch.device) -> DeltaLaunch:
    """As many chunks in flight as shared memory holds; float32 tiles are half as wide."""
    wide = dtype == torch.float32
    size = torch.finfo(operand_dtype(dtype)).bits // 8
    chunk = 2 * DELTA_CHUNK * (dk + DELTA_CHUNK) * size
    room = (limits_of(device).shared - SPARE_BYTES) // chunk
    return DeltaLaunch(
        block=min(32 if wide else 64, dv), stages=max(1, min(1 if wide else 3, room))
    )


def choose_attention(d: int, dtype: torch.dtype, device: torch.device) -> AttentionLaunch:
    """The largest blocks whose queries, keys and values fit in shared memory."""
    if dtype == torch.float32:
        return AttentionLaunch(32, 32, 4, 1)
    limit = limits_of(device).shared - SPARE_BYTES
    for launch in (AttentionLaunch(128, 64, 8, 2), AttentionLaunch(64, 64, 4, 1)):
        if 2 * d * (launch.rows + 2 * launch.keys * launch.stages) <= limit:
            return launch
    return AttentionLaunch(64, 32, 4, 1)


def delta_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    out: Tensor | None = None,
    launch: DeltaLaunch | None = None,
) -> Tensor:
    """Gated delta rule over a run of n >= 1 tokens; `state` is advanced in place.

    query, key [n, key heads, dk], normalised, queries scaled, best in `operand_dtype`; value
    [n, heads, dv] in the model dtype (rows may be strided); g (log decay) and beta float32
    [n, heads]; state float32 [heads, dk, dv]. Returns [n, heads, dv] in value's dtype, or `out`
    [n, heads, dv] in its own. g, beta, state and out are contiguous. Definition:
    `reference.delta_chunk`.
    """
    n, heads, dv = value.shape
    key_heads, dk = key.shape[1:]
    operand = operand_dtype(value.dtype)
    query, key = query.to(operand).contiguous(), key.to(operand).contiguous()
    launch = launch or choose_delta(dk, dv, value.dtype, value.device)
    if out is None:
        out = value.new_empty(n, heads, dv)
    chunks = -(-n // DELTA_CHUNK)
    solve = key.new_empty(heads, chunks, DELTA_CHUNK, DELTA_CHUNK)
    local = torch.empty_like(solve)
    decay = state.new_empty(heads, chunks, 2, DELTA_CHUNK)
    shape = dict(HEADS=heads, KEY_HEADS=key_heads, DK=dk, C=DELTA_CHUNK)
    delta_local_kernel[(chunks, heads // launch.group)](
        query,
        key,
        g,
        beta,
        solve,
        local,
        decay,
        n,
        GROUP=launch.group,
        **shape,
        num_warps=launch.local_warps,
        num_stages=1,
    )
    delta_walk_kernel[(dv // launch.block, heads)](
        query,
        key,
        value,
        solve,
        local,
        decay,
        state,
        out,
        n,
        chunks,
        value.stride(0),
        DV=dv,
        BV=launch.block,
        STAGES=launch.stages,
        **shape,
        num_warps=4,
    )
    return out


def prepare_attention(
    projected: Tensor,
    norm: Norm,
    rope: Tensor,
    partner: Tensor,
    start: int,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Norm and rotation of a run's queries and keys; its keys and values into the cache.

    projected [n, q | k | v | gate] of positions start .. start + n - 1, in the model dtype and
    contiguous; norm over [heads + kv heads, d]; rope [positions, 2, d] and partner int64 [d] as
    in `reference.rope_table` and `rope_partner`; keys, values [kv heads, slots, d]. Returns q
    [n, heads, d], scaled. The kernel is that of a verification step, so the bits are too.
    """
    n, d = projected.shape[0], partner.numel()
    kv_heads, slots, _ = keys.shape
    heads = projected.shape[1] // (2 * d) - kv_heads
    place = torch.arange(start, start + n, dtype=torch.int32, device=projected.device)
    q = projected.new_empty(n, heads, d)
    prepare_kernel[(n, heads + 2 * kv_heads)](
        projected,
        norm.scale,
        norm.eps,
        rope,
        partner,
        torch.zeros_like(place[:1]),
        place,
        place,
        q,
        keys,
        values,
        n,
        slots,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=d,
        PDL=False,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return q


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    first: int = 0,
    gate: Tensor | None = None,
    launch: AttentionLaunch | None = None,
) -> Tensor:
    """Causal attention of positions start .. start + n - 1 over keys 0 .. start + n - 1.

    q [n, heads, d] in the model dtype, already scaled; keys, values [kv heads, slots, d] in the
    model dtype, slots >= start + n (what lies past the run is not read); keys before `first`
    are not seen, except by rows before it; gate [n, heads d] (rows may be strided): the result
    is multiplied by its sigmoid. Returns [n, heads, d] in q's dtype. Definition:
    `reference.prefill_attention`. A row's bits do not depend on the run it stands in.
    """
    n, heads, d = q.shape
    kv_heads, slots, _ = keys.shape
    launch = launch or choose_attention(d, q.dtype, q.device)
    q = q.contiguous()
    out = torch.empty_like(q)
    attention_kernel[(-(-n // launch.rows), heads)](
        q,
        keys,
        values,
        q if gate is None else gate,
        out,
        n,
        start,
        slots,
        first,
        0 if gate is None else gate.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=d,
        BM=launch.rows,
        BN=launch.keys,
        FIRST=first > 0,
        GATE=gate is not None,
        STAGES=launch.stages,
        num_warps=launch.warps,
    )
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """[n, 2 F] contiguous -> silu(first half) * second half, [n, F], as `reference.swiglu`."""
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(n, width)
    swiglu_kernel[(triton.cdiv(width, SWIGLU_BLOCK), n)](
        gate_up, out, width, BLOCK=SWIGLU_BLOCK, num_warps=4
    )
    return out

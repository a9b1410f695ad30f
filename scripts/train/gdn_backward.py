"""A torch stand-in for one backward kernel of flash-linear-attention.

Triton 3.4 to 3.7.0 miscompiles the gated ``chunk_bwd_dqkwg`` on Hopper, and fla-core refuses to run
it there. This is the same arithmetic in batched matrix products, for rows of equal length that is a
multiple of the chunk and as many key heads as value heads.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    w: Tensor,
    g: Tensor,
    dv: Tensor,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dw and dg.

    q, k, v, do, dv, w [B, T, H, D]; h, dh [B, N, H, K, V]; g [B, T, H] in powers of two.
    """
    kind = q.dtype
    q, k, v, do, dv = (x.unflatten(1, (-1, chunk)).transpose(2, 3) for x in (q, k, v, do, dv))
    g = g.float().unflatten(1, (-1, chunk)).transpose(2, 3)[..., None]
    last = g[..., -1:, :]
    h, dh = h.to(kind), dh.to(kind)
    ends = (h.float() * dh.float()).sum((-2, -1)) * last[..., 0, 0].exp2()
    dq = (do @ h.mT).float() * g.exp2() * scale
    dk = (v @ dh.mT).float() * (last - g).exp2()
    ends = ends + (dk * k.float()).sum((-2, -1))
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    ds = torch.where(lower, (do @ v.mT).float() * (g - g.mT).exp2() * scale, 0.0).to(kind)
    dq = dq + (ds @ k).float()
    dk = dk + (ds.mT @ q).float()
    dw = -(dv.to(kind) @ h.mT)
    dg = (dq * q.float()).sum(-1) - (dk * k.float()).sum(-1)
    dg = torch.cat((dg[..., :-1], dg[..., -1:] + ends[..., None]), -1)
    return tuple(
        x.transpose(2, 3).flatten(1, 2) for x in (dq.to(kind), dk.to(kind), dw.to(w.dtype), dg)
    )


def install() -> None:
    """Make the chunk rule use ``gradients``, compiled."""
    from fla.ops.gated_delta_rule import chunk as module

    compiled = torch.compile(gradients, dynamic=False)

    def chunk_bwd_dqkwg(
        q, k, v, do, h, dh, w=None, g=None, dv=None, scale=None, chunk_size=64, **rest
    ):
        if (
            rest.get("state_v_first")
            or rest.get("cu_seqlens") is not None
            or q.shape[2] != v.shape[2]
            or q.shape[1] % chunk_size
        ):
            raise NotImplementedError("equal heads and whole chunks only")
        return tuple(
            x.contiguous() for x in compiled(q, k, v, do, h, dh, w, g, dv, scale, chunk_size)
        )

    module.chunk_bwd_dqkwg = chunk_bwd_dqkwg

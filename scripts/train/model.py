"""The network in plain functions over a flat dictionary of parameters, named as in the checkpoint.

Arithmetic of the Qwen3.5 text family: three gated-delta-net layers and one full-attention layer,
twice, and a multi-token-prediction block. Pieces between the two sequence kernels are compiled once
each and shared by all layers. CUDA uses the chunk kernel of flash-linear-attention; CPU uses the
torch chunk form of transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Params = dict[str, Tensor]
EPS = 1e-6
CHAIN = 4  # own keys a draft step can hold: depth five at most


@dataclass(frozen=True)
class Shape:
    """Sizes of the embedded model."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 8
    every: int = 4
    mlp: int = 768
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 256
    rotary: int = 64
    theta: float = 1e7
    gdn_heads: int = 2
    gdn_dim: int = 128
    conv: int = 4

    def full(self, layer: int) -> bool:
        """Whether this layer is full attention."""
        return (layer + 1) % self.every == 0


def parameter_shapes(s: Shape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint."""
    d, key, width = s.hidden, s.gdn_heads * s.gdn_dim, s.heads * s.head_dim
    block = {
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
        "mlp.gate_proj.weight": (s.mlp, d),
        "mlp.up_proj.weight": (s.mlp, d),
        "mlp.down_proj.weight": (d, s.mlp),
    }
    full = block | {
        "self_attn.q_proj.weight": (2 * width, d),
        "self_attn.k_proj.weight": (s.kv_heads * s.head_dim, d),
        "self_attn.v_proj.weight": (s.kv_heads * s.head_dim, d),
        "self_attn.o_proj.weight": (d, width),
        "self_attn.q_norm.weight": (s.head_dim,),
        "self_attn.k_norm.weight": (s.head_dim,),
    }
    linear = block | {
        "linear_attn.in_proj_qkv.weight": (3 * key, d),
        "linear_attn.in_proj_z.weight": (key, d),
        "linear_attn.in_proj_b.weight": (s.gdn_heads, d),
        "linear_attn.in_proj_a.weight": (s.gdn_heads, d),
        "linear_attn.conv1d.weight": (3 * key, 1, s.conv),
        "linear_attn.A_log": (s.gdn_heads,),
        "linear_attn.dt_bias": (s.gdn_heads,),
        "linear_attn.norm.weight": (s.gdn_dim,),
        "linear_attn.out_proj.weight": (d, key),
    }
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (s.vocab, d),
        "model.norm.weight": (d,),
    }
    for i in range(s.layers):
        out |= {f"model.layers.{i}.{k}": v for k, v in (full if s.full(i) else linear).items()}
    out |= {
        "mtp.fc.weight": (d, 2 * d),
        "mtp.norm.weight": (d,),
        "mtp.pre_fc_norm_embedding.weight": (d,),
        "mtp.pre_fc_norm_hidden.weight": (d,),
    }
    return out | {f"mtp.layers.0.{k}": v for k, v in full.items()}


def initial(s: Shape, seed: int) -> Params:
    """Random float32 parameters."""
    rng = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in parameter_shapes(s).items():
        if name.endswith("linear_attn.norm.weight"):
            value = torch.ones(shape)
        elif name.endswith("norm.weight") or "norm_" in name:
            value = torch.zeros(shape)
        elif name.endswith("A_log"):
            value = torch.empty(shape).uniform_(1, 8, generator=rng).log()
        elif name.endswith("dt_bias"):
            step = torch.exp(
                torch.empty(shape).uniform_(math.log(1e-3), math.log(1e-1), generator=rng)
            )
            value = step + torch.log(-torch.expm1(-step))
        elif name.endswith("conv1d.weight"):
            value = torch.empty(shape).uniform_(-0.5, 0.5, generator=rng)
        else:
            last = any(
                name.endswith(k) for k in ("o_proj.weight", "out_proj.weight", "down_proj.weight")
            )
            std = 0.02 if "embed" in name else (0.2 if last else 0.6) / math.sqrt(shape[-1])
            value = torch.randn(shape, generator=rng) * std
        out[name] = value
    return out


def norm(x: Tensor, w: Tensor) -> Tensor:
    """Zero-centred RMS norm in float32."""
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS) * (1 + w.float())).to(x.dtype)


def mlp(x: Tensor, w_norm: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Residual SwiGLU."""
    y = norm(x, w_norm)
    return x + F.linear(
        F.silu(F.linear(y, gate.to(x.dtype))) * F.linear(y, up.to(x.dtype)), down.to(x.dtype)
    )


def gdn_in(
    x: Tensor,
    w_norm: Tensor,
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    conv: Tensor,
    a_log: Tensor,
    dt: Tensor,
    before: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Norm, projections, convolution and gates; also the raw rows the next convolution needs."""
    y, t = norm(x, w_norm), x.dtype
    raw = F.linear(y, qkv.to(t))
    width = conv.shape[-1]
    padded = F.pad(raw, (0, 0, width - 1, 0)) if before is None else torch.cat((before, raw), 1)
    mixed = sum(padded[:, i : i + raw.shape[1]] * conv[:, 0, i].to(t) for i in range(width))
    q, k, v = F.silu(mixed).unflatten(-1, (3, -1, 128)).unbind(2)
    beta = F.linear(y, b.to(t)).sigmoid()
    g = -a_log.float().exp() * F.softplus(F.linear(y, a.to(t)).float() + dt.float())
    return (
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        g,
        beta,
        F.linear(y, z.to(t)),
        padded[:, -(width - 1) :],
    )


def gdn_out(x: Tensor, o: Tensor, z: Tensor, w: Tensor, out: Tensor, *rest: Tensor) -> Tensor:
    """Gated output norm, projection, residual, then the MLP."""
    y = o.float()
    y = (
        y
        * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
        * w.float()
        * F.silu(z.float().view(y.shape))
    )
    return mlp(x + F.linear(y.flatten(-2).to(x.dtype), out.to(x.dtype)), *rest)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first dimensions, NeoX halves. x is [batch, length, heads, dim]."""
    n = cos.shape[-1]
    turn, keep = x[..., :n], x[..., n:]
    half = torch.cat((-turn[..., n // 2 :], turn[..., : n // 2]), -1)
    return torch.cat((turn * cos + half * sin, keep), -1)


def attn_in(
    x: Tensor,
    w_norm: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    qn: Tensor,
    kn: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key and value as [batch, heads, length, dim], and the output gate."""
    y, t, dim = norm(x, w_norm), x.dtype, qn.shape[0]
    q, gate = F.linear(y, wq.to(t)).unflatten(-1, (-1, 2 * dim)).chunk(2, -1)
    k = F.linear(y, wk.to(t)).unflatten(-1, (-1, dim))
    v = F.linear(y, wv.to(t)).unflatten(-1, (-1, dim))
    c, s = cos[:, None].to(t), sin[:, None].to(t)
    q, k = rotate(norm(q, qn), c, s), rotate(norm(k, kn), c, s)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate.flatten(-2)


def attn_out(x: Tensor, o: Tensor, gate: Tensor, out: Tensor, *rest: Tensor) -> Tensor:
    """Gate, projection, residual, then the MLP. o is [batch, heads, length, dim]."""
    y = o.transpose(1, 2).flatten(-2) * gate.sigmoid()
    return mlp(x + F.linear(y, out.to(x.dtype)), *rest)


def fuse(emb: Tensor, h: Tensor, ne: Tensor, nh: Tensor, fc: Tensor) -> Tensor:
    """Input of the prediction block: embedding first, hidden state second."""
    return F.linear(torch.cat((norm(emb, ne), norm(h, nh)), -1), fc.to(h.dtype))


def hard_loss(h: Tensor, emb: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of every position."""
    logits = F.linear(h, emb.to(h.dtype)).float()
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(
        target.shape
    )


def soft_loss(m: Tensor, h: Tensor, emb: Tensor, hard: float) -> tuple[Tensor, Tensor]:
    """Loss against the trunk's distribution plus ``hard`` times against its choice; agreement."""
    student = F.linear(m, emb.to(m.dtype)).float().log_softmax(-1)
    teacher = F.linear(h, emb.to(h.dtype)).float()
    best = teacher.argmax(-1, keepdim=True)
    loss = -(teacher.softmax(-1) * student).sum(-1) - hard * student.gather(-1, best).squeeze(-1)
    return loss, (student.argmax(-1, keepdim=True) == best).squeeze(-1)


def chain_attention(
    q: Tensor, k1: Tensor, v1: Tensor, ks: Tensor, vs: Tensor, live: Tensor
) -> Tensor:
    """Attention of a deeper draft step: first-depth keys up to its position, then its own chain.

    q [B, H, L, D]; k1, v1 [B, 1, L, D] of depth 1; ks, vs [CHAIN, B, 1, L, D], of which
    ``live`` [CHAIN] count.
    """
    q = q * q.shape[-1] ** -0.5
    length = q.shape[2]
    scores = (q @ k1.transpose(-1, -2)).float()
    mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~mask, float("-inf"))
    own = (q[None] * ks).float().sum(-1).movedim(0, -1).masked_fill(~live, float("-inf"))
    p = torch.cat((scores, own), -1).softmax(-1).to(q.dtype)
    return p[..., :length] @ v1 + (p[..., length:, None] * vs.movedim(0, 3)).sum(3)


class Net:
    """Forward passes over a parameter dictionary."""

    def __init__(self, params: Params, shape: Shape, compiled: bool = False) -> None:
        self.p, self.s = params, shape
        self.cuda = params["model.norm.weight"].is_cuda
        wrap = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self.gdn_in, self.gdn_out, self.attn_in, self.attn_out = map(
            wrap, (gdn_in, gdn_out, attn_in, attn_out)
        )
        self.fuse, self.hard_loss, self.soft_loss = map(wrap, (fuse, hard_loss, soft_loss))
        self.norm, self.chain_attention = map(wrap, (norm, chain_attention))
        if self.cuda:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule
            from gdn_backward import install

            install()
        else:
            from transformers.models.qwen3_5.modeling_qwen3_5 import (
                torch_chunk_gated_delta_rule as rule,
            )
        self.rule = rule

    def named(self, prefix: str, *names: str) -> list[Tensor]:
        """Parameters of one block."""
        return [self.p[f"{prefix}.{n}"] for n in names]

    def mlp_of(self, prefix: str) -> list[Tensor]:
        """The tensors that close every block."""
        return self.named(
            prefix,
            "post_attention_layernorm.weight",
            "mlp.gate_proj.weight",
            "mlp.up_proj.weight",
            "mlp.down_proj.weight",
        )

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Token embeddings in the compute type."""
        return F.embedding(ids, self.p["model.embed_tokens.weight"]).to(dtype)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine rows for integer positions, float32."""
        power = (
            torch.arange(0, self.s.rotary, 2, device=positions.device, dtype=torch.float)
            / self.s.rotary
        )
        angle = positions.float()[:, None] / self.s.theta**power
        angle = torch.cat((angle, angle), -1)
        return angle.cos(), angle.sin()

    def gdn_weights(self, prefix: str) -> list[Tensor]:
        """Arguments of gdn_in after x."""
        return self.named(
            prefix,
            "input_layernorm.weight",
            *(
                f"linear_attn.{n}"
                for n in (
                    "in_proj_qkv.weight",
                    "in_proj_z.weight",
                    "in_proj_b.weight",
                    "in_proj_a.weight",
                    "conv1d.weight",
                    "A_log",
                    "dt_bias",
                )
            ),
        )

    def attn_weights(self, prefix: str) -> list[Tensor]:
        """Arguments of attn_in between x and the rotary rows."""
        return self.named(
            prefix,
            "input_layernorm.weight",
            *(f"self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")),
        )

    def full_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention; keys and values are repeated for the query heads."""
        heads = q.shape[1]
        k, v = k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def layers(self, ids: Tensor, dtype: torch.dtype, keep: bool = False) -> tuple[Tensor, list]:
        """Hidden states before the final norm; with ``keep`` also the states for decoding."""
        x = self.embed(ids, dtype)
        cos, sin = self.rope(torch.arange(ids.shape[1], device=ids.device))
        states = []
        for i in range(self.s.layers):
            at = f"model.layers.{i}"
            if self.s.full(i):
                q, k, v, gate = self.attn_in(x, *self.attn_weights(at), cos, sin)
                o = self.full_attention(q, k, v)
                x = self.attn_close(at, x, o, gate)
                states.append((k, v) if keep else None)
            else:
                q, k, v, g, beta, z, last = self.gdn_in(x, *self.gdn_weights(at))
                o, state = self.rule(
                    q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, output_final_state=keep
                )
                x = self.gdn_close(at, x, o, z)
                states.append((last.clone(), state) if keep else None)
        return x, states

    def attn_close(self, at: str, x: Tensor, o: Tensor, gate: Tensor) -> Tensor:
        """Second half of an attention block."""
        return self.attn_out(x, o, gate, self.p[f"{at}.self_attn.o_proj.weight"], *self.mlp_of(at))

    def gdn_close(self, at: str, x: Tensor, o: Tensor, z: Tensor) -> Tensor:
        """Second half of a gated-delta-net block."""
        names = "linear_attn.norm.weight", "linear_attn.out_proj.weight"
        return self.gdn_out(x, o, z, *self.named(at, *names), *self.mlp_of(at))

    def trunk(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Hidden states after the final norm."""
        return self.norm(self.layers(ids, dtype)[0], self.p["model.norm.weight"])

    def predict(self, h: Tensor, ids: Tensor, depth: int) -> list[Tensor]:
        """Outputs (after mtp.norm) of ``depth`` chained prediction steps at every position of h.

        ids holds at least ``depth`` tokens more than h has rows: step k at row p reads ids[p + k].
        """
        length, at, outs = h.shape[1], "mtp.layers.0", []
        k1 = v1 = None
        ks: list[Tensor] = []
        vs: list[Tensor] = []
        for step in range(depth):
            emb = self.embed(ids[:, step + 1 : step + 1 + length], h.dtype)
            x = self.fuse(
                emb,
                h,
                *self.named(
                    "mtp", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "fc.weight"
                ),
            )
            cos, sin = self.rope(torch.arange(length, device=h.device) + step)
            q, k, v, gate = self.attn_in(x, *self.attn_weights(at), cos, sin)
            if step == 0:
                k1, v1 = k, v
                o = self.full_attention(q, k, v)
            else:
                ks.append(k)
                vs.append(v)
                empty = [torch.zeros_like(k)] * (CHAIN - step)
                live = torch.arange(CHAIN, device=h.device) < step
                o = self.chain_attention(
                    q, k1, v1, torch.stack(ks + empty), torch.stack(vs + empty), live
                )
            x = self.attn_close(at, x, o, gate)
            h = self.norm(x, self.p["mtp.norm.weight"])
            outs.append(h)
        return outs

"""Decoder layers over rows. What a row may see is not their business: `rows` knows.

`rows` is a TreeRows (one verification step) or a PrefillRows (a run of prompt tokens); both
offer `angles`, `conv`, `delta` and `attend`. Arithmetic and tensor names are those of the
published Qwen3.5 text models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lumotree.model.config import ModelConfig
from lumotree.ops import reference as ops

# Reads a tensor by its name below the layer's prefix, with its expected shape.
Take = Callable[[str, tuple[int, ...]], Tensor]


class Rows(Protocol):
    """How the rows of one forward see the state. n counts padding rows too."""

    angles: Tensor  # [n, 2, rotary_dim / 2] float32

    def conv(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """[n, channels] inputs of a GDN layer -> [n, channels] after the causal convolution."""

    def delta(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Gated delta rule in float32: q, k, v [n, heads, d], g, beta [n, heads] -> [n, heads, dv]."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, d] scaled float32, k and v [n, kv_heads, d] -> [n, heads, d] float32."""


class GatedDeltaNet:
    """Linear-attention mixer; `layer` counts the GDN layers only."""

    def __init__(self, config: ModelConfig, layer: int, take: Take) -> None:
        h, heads = config.hidden_size, config.linear_num_value_heads
        self.config, self.layer = config, layer
        parts = (("qkv", config.conv_dim), ("z", config.value_dim), ("b", heads), ("a", heads))
        self.widths = [width for _, width in parts]
        self.in_proj = ops.pack_linear(
            torch.cat([take(f"in_proj_{name}.weight", (width, h)) for name, width in parts])
        )
        conv = take("conv1d.weight", (config.conv_dim, 1, config.conv_kernel))
        self.conv_weight = conv[:, 0].t().float().contiguous()
        self.a_neg = -take("A_log", (heads,)).float().exp()
        self.dt_bias = take("dt_bias", (heads,)).float()
        self.norm = take("norm.weight", (config.linear_value_head_dim,))
        self.out_proj = ops.pack_linear(take("out_proj.weight", (h, config.value_dim)))

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        config, n = self.config, x.shape[0]
        qkv, z, b, a = ops.linear(x, self.in_proj).split(self.widths, dim=-1)
        mixed = rows.conv(self.layer, qkv, self.conv_weight).float()
        qk, v = mixed.split((2 * config.key_dim, config.value_dim), dim=-1)
        qk = ops.l2_norm(qk.view(n, 2, config.linear_num_key_heads, config.linear_key_head_dim))
        ratio = config.linear_num_value_heads // config.linear_num_key_heads
        if ratio > 1:  # value head j reads key head j // ratio
            qk = qk.repeat_interleave(ratio, dim=2)
        g, beta = ops.delta_gates(a, b, self.a_neg, self.dt_bias)
        v = v.view(n, config.linear_num_value_heads, config.linear_value_head_dim)
        out = rows.delta(
            self.layer, qk[:, 0] * config.linear_key_head_dim**-0.5, qk[:, 1], v, g, beta
        )
        gated = ops.gated_rms_norm(out, z.reshape(v.shape), self.norm, config.rms_norm_eps)
        return ops.linear(gated.flatten(1), self.out_proj)


class Attention:
    """Gated full attention; `layer` counts the full-attention layers only."""

    def __init__(self, config: ModelConfig, layer: int, take: Take) -> None:
        h, d = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.config, self.layer = config, layer
        parts = (("q", 2 * heads * d), ("k", kv_heads * d), ("v", kv_heads * d))
        self.widths = [width for _, width in parts]
        self.qkv_proj = ops.pack_linear(
            torch.cat([take(f"{name}_proj.weight", (width, h)) for name, width in parts])
        )
        self.q_norm = 1 + take("q_norm.weight", (d,)).float()
        self.k_norm = 1 + take("k_norm.weight", (d,)).float()
        self.o_proj = ops.pack_linear(take("o_proj.weight", (h, heads * d)))

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        config, n, d = self.config, x.shape[0], self.config.head_dim
        q_gate, k, v = ops.linear(x, self.qkv_proj).split(self.widths, dim=-1)
        q, gate = q_gate.view(n, config.num_attention_heads, 2 * d).split(d, dim=-1)
        q = ops.rope(ops.rms_norm(q, self.q_norm, config.rms_norm_eps), rows.angles)
        k = k.view(n, config.num_key_value_heads, d)
        k = ops.rope(ops.rms_norm(k, self.k_norm, config.rms_norm_eps), rows.angles)
        v = v.view(n, config.num_key_value_heads, d)
        out = rows.attend(self.layer, q.float() * d**-0.5, k, v).to(x.dtype)
        return ops.linear((out * torch.sigmoid(gate)).flatten(1), self.o_proj)


class MLP:
    def __init__(self, config: ModelConfig, take: Take) -> None:
        shape = (config.intermediate_size, config.hidden_size)
        self.gate_up = ops.pack_linear(
            torch.cat([take(f"{name}_proj.weight", shape) for name in ("gate", "up")])
        )
        self.down = ops.pack_linear(take("down_proj.weight", shape[::-1]))

    def __call__(self, x: Tensor) -> Tensor:
        return ops.linear(ops.swiglu(ops.linear(x, self.gate_up)), self.down)


class DecoderLayer:
    """Pre-norm residual block: mixer, then MLP."""

    def __init__(self, config: ModelConfig, kind: str, index: int, take: Take) -> None:
        shape = (config.hidden_size,)
        self.eps = config.rms_norm_eps
        self.input_norm = 1 + take("input_layernorm.weight", shape).float()
        self.post_norm = 1 + take("post_attention_layernorm.weight", shape).float()
        name, mixer = {
            "linear_attention": ("linear_attn.", GatedDeltaNet),
            "full_attention": ("self_attn.", Attention),
        }[kind]
        self.mixer = mixer(config, index, lambda part, shape: take(name + part, shape))
        self.mlp = MLP(config, lambda part, shape: take("mlp." + part, shape))

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        x = x + self.mixer(ops.rms_norm(x, self.input_norm, self.eps), rows)
        return x + self.mlp(ops.rms_norm(x, self.post_norm, self.eps))

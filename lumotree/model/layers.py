"""Decoder layers over rows. What a row may see is not their business: `rows` knows.

`rows` is a TreeRows (one verification step) or a PrefillRows (a run of prompt tokens); both
offer `angles`, `conv`, `delta` and `attend`. Arithmetic and tensor names are those of the
published Qwen3.5 text models.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lumotree.model.config import ModelConfig
from lumotree.ops import reference as ops

# Inside the root of the L2 norm of GDN queries and keys.
L2_EPS = 1e-6


class Take(Protocol):
    """Reads a tensor by its name below a prefix, with its expected shape.

    Weights of matrix products are cast to the model dtype (None); what enters float32
    arithmetic is taken in float32, since checkpoints store some of it wider than the rest.
    """

    def __call__(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Tensor: ...


def below(take: Take, prefix: str) -> Take:
    """`take` for names below `prefix`."""
    return lambda name, shape, dtype=None: take(prefix + name, shape, dtype)


class Rows(Protocol):
    """How the rows of one forward see the state. n counts padding rows too."""

    angles: ops.RopeAngles
    count: int  # rows that are not padding; the recurrent part of a layer runs on these alone

    def conv(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """[count, channels] inputs of a GDN layer -> the same after the causal convolution."""

    def delta(self, layer: int, query_key: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Gated delta rule in float32, [count, heads, dv].

        query_key [count, heads, 2, dk], v [count, heads, dv], log decay g and rate beta
        [count, heads].
        """

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, d] scaled float32, k and v [n, kv_heads, d] -> [n, heads, d] float32."""


class GatedDeltaNet:
    """Linear-attention mixer, added to the residual; `layer` counts the GDN layers only."""

    def __init__(self, config: ModelConfig, layer: int, take: Take) -> None:
        h, heads = config.hidden_size, config.linear_num_value_heads
        self.config, self.layer = config, layer
        parts = (("qkv", config.conv_dim), ("z", config.value_dim), ("b", heads), ("a", heads))
        self.widths = (config.conv_dim, config.value_dim, 2 * heads)
        self.in_proj = ops.pack_linear(
            torch.cat([take(f"in_proj_{name}.weight", (width, h)) for name, width in parts])
        )
        conv = take("conv1d.weight", (config.conv_dim, 1, config.conv_kernel), torch.float32)
        self.conv_weight = conv[:, 0].t().contiguous()
        self.gates = ops.DeltaGates(
            take("A_log", (heads,), torch.float32), take("dt_bias", (heads,), torch.float32)
        )
        norm = take("norm.weight", (config.linear_value_head_dim,), torch.float32)
        self.norm = ops.Norm.of(norm, config.rms_norm_eps)
        self.out_proj = ops.pack_linear(take("out_proj.weight", (h, config.value_dim)))
        # Queries carry the 1 / sqrt(dk) of the published model, keys do not.
        scale = torch.tensor([config.linear_key_head_dim**-0.5, 1.0], device=conv.device)
        self.qk_scale = scale[:, None, None]
        self.l2_eps = self.conv_weight.new_full((1,), L2_EPS)

    def __call__(self, x: Tensor, residual: Tensor, rows: Rows) -> Tensor:
        config, n = self.config, rows.count
        heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
        qkv, z, b_a = ops.linear(x, self.in_proj)[:n].split_with_sizes(self.widths, -1)
        mixed = ops.wide(rows.conv(self.layer, qkv, self.conv_weight))
        qk, v = mixed.split_with_sizes((2 * config.key_dim, config.value_dim), -1)
        qk = qk.view(n, 2, key_heads, config.linear_key_head_dim)
        inverse = ops.inverse_norm(qk, self.l2_eps).mul_(self.qk_scale)
        # Written head by head at once: the recurrence wants a head's query and key together.
        by_head = qk.new_empty(n, key_heads, 2, config.linear_key_head_dim)
        qk = torch.mul(qk.transpose(1, 2), inverse.transpose(1, 2), out=by_head)
        if heads > key_heads:  # value head j reads key head j // ratio
            qk = qk.repeat_interleave(heads // key_heads, dim=1)
        g, beta = self.gates(b_a)
        out = rows.delta(self.layer, qk, v.view(n, heads, config.linear_value_head_dim), g, beta)
        z = z.reshape(n, heads, config.linear_value_head_dim)
        gated = ops.gated_rms_norm(out, z, self.norm).flatten(1)
        return ops.linear_add(residual, ops.pad_rows(gated, x.shape[0]), self.out_proj)


class Attention:
    """Gated attention, added to the residual; `layer` counts the full-attention layers only."""

    def __init__(self, config: ModelConfig, layer: int, take: Take) -> None:
        h, d = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.config, self.layer = config, layer
        # Published order is [query | gate] per head; here queries and keys lie side by side, so
        # that one norm and one rotation serve both.
        q_gate = take("q_proj.weight", (2 * heads * d, h)).view(heads, 2, d, h)
        parts = (
            q_gate[:, 0].reshape(heads * d, h),
            take("k_proj.weight", (kv_heads * d, h)),
            take("v_proj.weight", (kv_heads * d, h)),
            q_gate[:, 1].reshape(heads * d, h),
        )
        self.in_proj = ops.pack_linear(torch.cat(parts))
        norms = [1 + take(f"{name}_norm.weight", (d,), torch.float32) for name in "qk"]
        # The published scores are scaled by 1 / sqrt(d): here the queries are, with their norm.
        scales = [norms[0].expand(heads, d) * d**-0.5, norms[1].expand(kv_heads, d)]
        self.qk_norm = ops.Norm.of(torch.cat(scales), config.rms_norm_eps)
        self.partner = ops.rope_partner(d, config.rotary_dim, norms[0].device)
        self.o_proj = ops.pack_linear(take("o_proj.weight", (h, heads * d)))

    def __call__(self, x: Tensor, residual: Tensor, rows: Rows) -> Tensor:
        config, n, d = self.config, x.shape[0], self.config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        both = ops.linear(x, self.in_proj)
        widths = ((heads + kv_heads) * d, kv_heads * d, heads * d)
        qk, v, gate = both.split_with_sizes(widths, -1)
        qk = ops.rms_norm(qk.view(n, heads + kv_heads, d), self.qk_norm)
        q, k = ops.rope(qk, rows.angles, self.partner).split_with_sizes((heads, kv_heads), 1)
        out = rows.attend(self.layer, ops.wide(q), k, v.view(n, kv_heads, d))
        gated = ops.narrow(out, x.dtype).flatten(1) * torch.sigmoid(gate)
        return ops.linear_add(residual, gated, self.o_proj)


class MLP:
    def __init__(self, config: ModelConfig, take: Take) -> None:
        shape = (config.intermediate_size, config.hidden_size)
        self.gate_up = ops.pack_linear(
            torch.cat([take(f"{name}_proj.weight", shape) for name in ("gate", "up")])
        )
        self.down = ops.pack_linear(take("down_proj.weight", shape[::-1]))

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        return ops.linear_add(residual, ops.swiglu(ops.linear(x, self.gate_up)), self.down)


class DecoderLayer:
    """Pre-norm residual block: mixer, then MLP."""

    def __init__(self, config: ModelConfig, kind: str, index: int, take: Take) -> None:
        shape = (config.hidden_size,)

        def norm(part: str) -> ops.Norm:
            weight = take(f"{part}_layernorm.weight", shape, torch.float32)
            return ops.Norm.of(1 + weight, config.rms_norm_eps)

        self.input_norm, self.post_norm = norm("input"), norm("post_attention")
        name, mixer = {
            "linear_attention": ("linear_attn.", GatedDeltaNet),
            "full_attention": ("self_attn.", Attention),
        }[kind]
        self.mixer = mixer(config, index, below(take, name))
        self.mlp = MLP(config, below(take, "mlp."))

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        x = self.mixer(ops.rms_norm(x, self.input_norm), x, rows)
        return self.mlp(ops.rms_norm(x, self.post_norm), x)

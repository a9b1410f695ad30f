"""Decoder layers over rows. What a row may see is not their business: `rows` knows.

`rows` is one verification step or a run of prompt tokens; both offer `delta` and `attend`.
Arithmetic and tensor names are those of the published Qwen3.5 text models.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lumotree.model.config import ModelConfig
from lumotree.ops import reference as ops
from lumotree.ops.table import Table

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

    def delta(self, mixer: GatedDeltaNet, projected: Tensor) -> Tensor:
        """What a GDN layer hands to its output projection, [n, value_dim], given its inputs'
        projection [n, conv_dim + value_dim + 2 heads]."""

    def attend(self, mixer: Attention, projected: Tensor) -> Tensor:
        """The same of an attention layer, [n, heads * d], given its q | k | v | gate."""


class GatedDeltaNet:
    """Linear-attention mixer; `layer` counts the GDN layers only.

    The methods are the arithmetic around the recurrence, on rows that are not padding.
    """

    def __init__(self, config: ModelConfig, layer: int, take: Take, table: Table) -> None:
        h, heads = config.hidden_size, config.linear_num_value_heads
        self.config, self.layer = config, layer
        parts = (("qkv", config.conv_dim), ("z", config.value_dim), ("b", heads), ("a", heads))
        self.widths = (config.conv_dim, config.value_dim, 2 * heads)
        self.in_proj = table.pack(
            torch.cat([take(f"in_proj_{name}.weight", (width, h)) for name, width in parts])
        )
        conv = take("conv1d.weight", (config.conv_dim, 1, config.conv_kernel), torch.float32)
        self.conv_weight = conv[:, 0].t().contiguous()
        self.gates = ops.DeltaGates(
            take("A_log", (heads,), torch.float32), take("dt_bias", (heads,), torch.float32)
        )
        norm = take("norm.weight", (config.linear_value_head_dim,), torch.float32)
        self.norm = ops.Norm.of(norm, config.rms_norm_eps)
        self.out_proj = table.pack(take("out_proj.weight", (h, config.value_dim)))
        # Queries carry the 1 / sqrt(dk) of the published model, keys do not.
        scale = torch.tensor([config.linear_key_head_dim**-0.5, 1.0], device=conv.device)
        self.qk_scale = scale[:, None, None]
        self.l2_eps = self.conv_weight.new_full((1,), L2_EPS)

    def mix(self, projected: Tensor, rows: Rows) -> Tensor:
        return rows.delta(self, projected)

    def split(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Convolution inputs [n, conv_dim], output gate z [n, value_dim], b and a [n, 2 heads]."""
        return projected.split_with_sizes(self.widths, -1)

    def operands(self, mixed: Tensor, b_a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Convolved rows [n, conv_dim] -> what the recurrence takes, float32.

        query and key [n, heads, 2, dk], v [n, heads, dv], log decay g and rate beta [n, heads].
        """
        config, n = self.config, mixed.shape[0]
        heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
        qk, v = ops.wide(mixed).split_with_sizes((2 * config.key_dim, config.value_dim), -1)
        qk = qk.view(n, 2, key_heads, config.linear_key_head_dim)
        inverse = ops.inverse_norm(qk, self.l2_eps).mul_(self.qk_scale)
        # Written head by head at once: the recurrence wants a head's query and key together.
        by_head = qk.new_empty(n, key_heads, 2, config.linear_key_head_dim)
        qk = torch.mul(qk.transpose(1, 2), inverse.transpose(1, 2), out=by_head)
        if heads > key_heads:  # value head j reads key head j // ratio
            qk = qk.repeat_interleave(heads // key_heads, dim=1)
        g, beta = self.gates(b_a)
        return qk, v.view(n, heads, config.linear_value_head_dim), g, beta

    def finish(self, out: Tensor, z: Tensor) -> Tensor:
        """Gated norm of the recurrence's float32 output [n, heads, dv]; [n, value_dim]."""
        return ops.gated_rms_norm(out, z.reshape(out.shape), self.norm).flatten(1)


class Attention:
    """Gated attention; `layer` counts the full-attention layers only."""

    def __init__(self, config: ModelConfig, layer: int, take: Take, table: Table) -> None:
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
        self.widths = ((heads + kv_heads) * d, kv_heads * d, heads * d)
        self.in_proj = table.pack(torch.cat(parts))
        norms = [1 + take(f"{name}_norm.weight", (d,), torch.float32) for name in "qk"]
        # The published scores are scaled by 1 / sqrt(d): here the queries are, with their norm.
        scales = [norms[0].expand(heads, d) * d**-0.5, norms[1].expand(kv_heads, d)]
        self.qk_norm = ops.Norm.of(torch.cat(scales), config.rms_norm_eps)
        self.partner = ops.rope_partner(d, config.rotary_dim, norms[0].device)
        self.out_proj = table.pack(take("o_proj.weight", (h, heads * d)))

    def mix(self, projected: Tensor, rows: Rows) -> Tensor:
        return rows.attend(self, projected)

    def operands(self, projected: Tensor, angles: ops.RopeAngles) -> tuple[Tensor, ...]:
        """Queries [n, heads, d] and keys [n, kv_heads, d], normed and rotated, values, gates."""
        config, n, d = self.config, projected.shape[0], self.config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        qk, v, gate = projected.split_with_sizes(self.widths, -1)
        qk = ops.rms_norm(qk.view(n, heads + kv_heads, d), self.qk_norm)
        q, k = ops.rope(qk, angles, self.partner).split_with_sizes((heads, kv_heads), 1)
        return q, k, v.view(n, kv_heads, d), gate

    @staticmethod
    def finish(out: Tensor, gate: Tensor) -> Tensor:
        """out [n, heads, d] times sigmoid(gate) [n, heads * d], in the gate's dtype."""
        return ops.narrow(out, gate.dtype).flatten(1) * torch.sigmoid(gate)


class MLP:
    def __init__(self, config: ModelConfig, take: Take, table: Table) -> None:
        shape = (config.intermediate_size, config.hidden_size)
        self.gate_up = table.pack(
            torch.cat([take(f"{name}_proj.weight", shape) for name in ("gate", "up")])
        )
        self.down = table.pack(take("down_proj.weight", shape[::-1]))


class DecoderLayer:
    """Pre-norm residual block: mixer, then MLP."""

    def __init__(
        self, config: ModelConfig, kind: str, index: int, take: Take, table: Table
    ) -> None:
        shape = (config.hidden_size,)

        def norm(part: str) -> ops.Norm:
            weight = take(f"{part}_layernorm.weight", shape, torch.float32)
            return ops.Norm.of(1 + weight, config.rms_norm_eps)

        self.table = table
        self.input_norm, self.post_norm = norm("input"), norm("post_attention")
        name, mixer = {
            "linear_attention": ("linear_attn.", GatedDeltaNet),
            "full_attention": ("self_attn.", Attention),
        }[kind]
        self.mixer = mixer(config, index, below(take, name), table)
        self.mlp = MLP(config, below(take, "mlp."), table)

    def __call__(self, x: Tensor, normed: Tensor, rows: Rows, after: ops.Norm):
        """Residual stream [n, hidden] and its `input_norm` -> the stream and its `after` norm."""
        table, mixer, mlp = self.table, self.mixer, self.mlp
        mixed = mixer.mix(table.linear(normed, mixer.in_proj), rows)
        x, normed = table.linear_add_norm(x, mixed, mixer.out_proj, self.post_norm)
        inner = table.linear_swiglu(normed, mlp.gate_up)
        return table.linear_add_norm(x, inner, mlp.down, after)

"""A run of prompt tokens on a device; the torch definition is lumotree.model.rows.PrefillRows."""

from __future__ import annotations

import torch
from torch import Tensor

from lumotree.model.layers import L2_EPS, Attention, GatedDeltaNet
from lumotree.ops import gdn_prepare, prefill
from lumotree.ops.gdn import Geometry, Operands
from lumotree.state import HybridState, KVCache


class RunRows:
    """Prompt tokens at positions start .. start + n - 1; advances the state in place.

    The caller adds n to `state.length` once every layer has run.
    """

    def __init__(
        self,
        cache: KVCache,
        start: int,
        count: int,
        rope: Tensor,
        state: HybridState | None = None,
        first: int = 0,
    ) -> None:
        self.cache, self.state, self.start, self.first = cache, state, start, first
        self.count, self.rope = count, rope
        self.operands: Operands | None = None  # every layer's in turn

    def delta(self, mixer: GatedDeltaNet, projected: Tensor) -> Tensor:
        if self.operands is None:
            geometry = Geometry.of(mixer.config)
            self.operands = Operands.empty(
                geometry,
                self.count,
                projected.dtype,
                projected.device,
                keys=prefill.operand_dtype(projected.dtype),
            )
        into, conv = self.operands, self.state.conv[mixer.layer]
        gdn_prepare.prepare_run(
            projected,
            conv,
            mixer.conv_weight,
            mixer.gates,
            L2_EPS,
            mixer.config.linear_key_head_dim**-0.5,
            into,
        )
        gdn_prepare.advance_conv(conv, projected, self.count)
        read = torch.empty(into.value.shape, device=projected.device)
        state = self.state.recurrent[mixer.layer]
        prefill.delta_chunk(
            into.query, into.key, into.value, into.decay, into.beta, state, out=read
        )
        out = projected.new_empty(self.count, mixer.config.value_dim)
        return gdn_prepare.finish(read, projected, mixer.norm, out)

    def attend(self, mixer: Attention, projected: Tensor) -> Tensor:
        keys, values = self.cache.keys[mixer.layer], self.cache.values[mixer.layer]
        q = prefill.prepare_attention(
            projected, mixer.qk_norm, self.rope, mixer.partner, self.start, keys, values
        )
        gate = projected[:, -q.shape[1] * q.shape[2] :]
        return prefill.prefill_attention(q, keys, values, self.start, self.first, gate).flatten(1)

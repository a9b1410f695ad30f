"""Rows of a step on fixed buffers: the layers' view of the state, in Triton kernels.

The torch definition of the same view is lumotree.model.rows.TreeRows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lumotree.model.hybrid import HybridModel
from lumotree.model.layers import L2_EPS, Attention, GatedDeltaNet
from lumotree.model.rows import TreeIndex
from lumotree.ops import gdn_prepare
from lumotree.ops.attention import TreeAttention
from lumotree.ops.gdn import Geometry, Operands, Path
from lumotree.state import HybridState, KVCache, StateBuffers
from lumotree.tree import TreeDescriptor
from lumotree.verifiers import verifier_class


class AttentionRows:
    """Rows that attention alone sees: those of the draft head, and a part of StepRows.

    cache holds the keys and values of the layers, length int32 [1] the prefix; keys before
    `first` do not exist. With seats (lumotree.ops.seats) cache and length have seats in front,
    and rows are those of all requests.
    """

    def __init__(
        self,
        model: HybridModel,
        tree: TreeDescriptor,
        padded: int,
        cache: KVCache,
        length: Tensor,
        first: int = 0,
        stock: bool = False,
        seats: Tensor | None = None,
    ) -> None:
        config = model.config
        self.rope, self.cache, self.length = model.rope, cache, length
        self.first, self.seats = first, seats
        self.attention = TreeAttention(
            tree,
            padded,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            model.dtype,
            model.device,
            seats=seats,
        )
        self.chunks = -(-cache.slots // self.attention.launch.chunk)
        self.attention_of = self.attention.attend_stock if stock else self.attention.attend

    def of_layer(self, surface: Tensor, layer: int) -> Tensor:
        """One layer of a surface [layers, ...], of every seat where there are seats."""
        return surface[layer] if self.seats is None else surface[:, layer]

    def attend(self, mixer: Attention, projected: Tensor) -> Tensor:
        keys = self.of_layer(self.cache.keys, mixer.layer)
        values = self.of_layer(self.cache.values, mixer.layer)
        q = self.attention.prepare(
            projected, mixer.qk_norm, self.rope, mixer.partner, self.length, keys, values
        )
        return self.attention_of(q, projected, keys, values, self.length, self.chunks, self.first)


class StepRows(AttentionRows):
    """Rows of a verification step; `publish` advances the state along a path on the device."""

    def __init__(
        self,
        model: HybridModel,
        state: HybridState | StateBuffers,
        tree: TreeDescriptor,
        padded: int,
        length: Tensor,
        verify: str,
        stock: bool = False,
        inline: bool = False,
        seats: Tensor | None = None,
    ) -> None:
        super().__init__(model, tree, padded, state.kv, length, stock=stock, seats=seats)
        config, device, count = model.config, model.device, len(tree)
        self.state, self.padded, self.inline = state, padded, inline
        # A kernel may begin before the one in front of it ends: all wait before they read its work.
        self.early = self.attention.launch.early
        self.geometry = Geometry.of(config)
        named = {} if seats is None else {"seats": seats}
        self.verifier = verifier_class(verify)(tree, self.geometry, device, model.dtype, **named)
        self.rows = count * self.attention.requests
        g, width = self.geometry, config.conv_kernel
        history = [TreeIndex.history(path, width) for path in tree.root_paths]
        self.gather = torch.tensor(history, dtype=torch.int32, device=device)
        self.records = torch.empty(
            g.layers, self.rows, config.conv_dim, dtype=model.dtype, device=device
        )
        self.scratch = Operands.empty(g, self.rows, model.dtype, device)

    def delta(self, mixer: GatedDeltaNet, projected: Tensor) -> Tensor:
        layer = mixer.layer
        into = self.verifier.destination(layer, self.scratch)
        if self.inline:
            self._inline(mixer, projected, into)
        else:
            gdn_prepare.prepare(
                projected,
                self.of_layer(self.state.conv, layer),
                self.gather,
                mixer.conv_weight,
                mixer.gates,
                L2_EPS,
                self.geometry.dk**-0.5,
                into,
                self.records[layer],
                self.early,
                self.seats,
                self.padded,
            )
        read = self.verifier.verify(layer, self.state.recurrent, into)
        out = projected.new_empty(projected.shape[0], self.geometry.heads * self.geometry.dv)
        return gdn_prepare.finish(read, projected, mixer.norm, out, self.early, self.seats)

    def _inline(self, mixer: GatedDeltaNet, projected: Tensor, into: Operands) -> None:
        """The operands by plain torch operations, one by one: the variant operands=inline."""
        count, conv_dim = self.gather.shape[0], mixer.conv_weight.shape[1]
        inputs = projected[:count, :conv_dim]
        self.records[mixer.layer].copy_(inputs)
        taps = torch.cat((self.state.conv[mixer.layer], inputs))[self.gather]
        made, _ = gdn_prepare.define(
            taps,
            projected[:count, -2 * self.geometry.heads :],
            mixer.conv_weight,
            mixer.gates,
            L2_EPS,
            self.geometry.dk**-0.5,
            into,
        )
        into.copy_(made)

    def publish(self, path: Path) -> None:
        """Every surface of the state along `path`; `length` is the caller's to advance."""
        state = self.state
        self.verifier.publish(state.recurrent, path)
        gdn_prepare.publish_conv(state.conv, self.records, path.rows, path.count, self.seats)
        self.attention.move(state.kv.keys, state.kv.values, path.rows, path.count, self.length)

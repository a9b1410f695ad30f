"""The hybrid trunk and its MTP head, built from tensors taken by name."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lumotree.errors import CheckpointError, LumoTreeError
from lumotree.model.config import ModelConfig
from lumotree.model.drafter import Drafter, NarrowDrafter
from lumotree.model.layers import DecoderLayer, Rows, Take, below
from lumotree.model.source import ModelSource, Weights
from lumotree.ops import reference as ops
from lumotree.ops.table import Table, has_kernels, table_for
from lumotree.state import HybridState, StateBuffers
from lumotree.tree import MAX_ROWS

# Rope positions made at load; longer requests reserve more, up to the model's context.
FIRST_POSITIONS = 8192
# Prompts are computed in runs that start at multiples of this many positions, so that a prefix
# taken from a snapshot has the bits of one computed afresh. Products on a GPU want long runs.
PREFILL_CHUNK = 256
DEVICE_PREFILL_CHUNK = 4096


class HybridModel:
    """Embedding, decoder layers, final norm, lm_head, and `mtp` when the checkpoint has one."""

    def __init__(
        self, config: ModelConfig, checkpoint: Weights, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.rope: Tensor | None = None

        def take(name: str, shape: tuple[int, ...], exact: torch.dtype | None = None) -> Tensor:
            return checkpoint.take(name, shape).to(device=device, dtype=exact or dtype)

        trunk, h = checkpoint.trunk, config.hidden_size
        self.table = table = table_for(device)
        # Keys and values as attention reads them; see KVCache.
        self.kernels = has_kernels(device)
        self.kv_dtype = dtype if self.kernels else torch.float32
        self.prefill_chunk = DEVICE_PREFILL_CHUNK if self.kernels else PREFILL_CHUNK
        self.embedding = take(f"{trunk}embed_tokens.weight", (config.vocab_size, h))
        seen = dict.fromkeys(config.layer_types, 0)
        self.layers: list[DecoderLayer] = []
        for i, kind in enumerate(config.layer_types):
            here = below(take, f"{trunk}layers.{i}.")
            self.layers.append(DecoderLayer(config, kind, seen[kind], here, table))
            seen[kind] += 1
        norm = 1 + take(f"{trunk}norm.weight", (h,), torch.float32)
        self.norm = ops.Norm.of(norm, config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.lm_head = table.pack(
            self.embedding if tied else take("lm_head.weight", (config.vocab_size, h))
        )
        self.mtp = MTPHead(config, below(take, "mtp."), table) if checkpoint.has_mtp() else None
        self._narrow: NarrowDrafter | None = None
        self.reserve(min(config.max_position_embeddings, FIRST_POSITIONS))

    def reserve(self, positions: int) -> None:
        """Makes `rope` cover `positions` and what a tree may reach past them."""
        needed = positions + MAX_ROWS
        if self.rope is None or self.rope.shape[0] < needed:
            config = self.config
            self.rope = ops.rope_table(
                needed,
                config.head_dim,
                config.rotary_dim,
                config.rope_theta,
                self.dtype,
                self.device,
            )

    def new_state(self, capacity: int, mtp: bool) -> HybridState:
        """An empty state slot of `capacity` positions; `mtp`: with room for the draft head."""
        return HybridState(self.new_buffers(capacity, mtp))

    def new_buffers(self, capacity: int, mtp: bool, seats: int | None = None) -> StateBuffers:
        """The room of such a slot, or of one a seat."""
        return StateBuffers.empty(
            self.config, capacity, self.dtype, self.device, mtp, self.kv_dtype, seats
        )

    @classmethod
    def load(
        cls,
        source: ModelSource,
        dtype: torch.dtype,
        device: torch.device,
        max_context: int | None = None,
    ) -> HybridModel:
        """Loads what `open_source` found. Raises CheckpointError naming file, field or tensor.

        max_context: positions in place of those that the config declares.
        """
        config = source.config
        if max_context is not None:
            config = replace(config, max_position_embeddings=max_context)
        try:
            return cls(config, source.weights(device, dtype), dtype, device)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise CheckpointError(
                f"{source.name} does not fit the memory of {device}",
                "lumotree doctor shows what fits",
            ) from error

    def drafter(self, weights: str = "model") -> Drafter:
        """What drafts with one of DRAFT_WEIGHTS; the narrow ones are made once, on demand.

        Raises LumoTreeError where the device has no such numbers or no memory for them: half of
        what the heads take, all of it where there are no kernels.
        """
        if weights == "model":
            return self
        if self._narrow is None:
            try:
                self._narrow = NarrowDrafter(self)
            except (torch.OutOfMemoryError, MemoryError) as error:
                raise LumoTreeError(
                    f"{self.device} has no memory for draft weights in 8 bits",
                    f"leave draft_weights={weights} out",
                ) from error
        return self._narrow

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.embedding.index_select(0, token_ids)

    def forward(self, token_ids: Tensor, rows: Rows) -> Tensor:
        """[n] token ids -> [n, hidden] after the final norm, in the model dtype."""
        return self.stream(token_ids, rows)[1]

    def stream(self, token_ids: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """The residual stream after the last layer, and its final norm, [n, hidden] each."""
        x = self.embed(token_ids)
        normed = self.table.rms_norm(x, self.layers[0].input_norm)
        after = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for layer, norm in zip(self.layers, after, strict=True):
            x, normed = layer(x, normed, rows, norm)
        return x, normed

    def draft_forward(self, token_ids: Tensor, hidden: Tensor, rows: Rows) -> Tensor:
        """One pass of the MTP head: [n] tokens and [n, hidden] of the positions before them."""
        return self.mtp(self.embed(token_ids), hidden, rows)

    def logits(self, hidden: Tensor, vocab: int | None = None, head=None) -> Tensor:
        """[n, hidden] after the final norm -> float32 [n, vocab], of the first `vocab` ids.

        head: a packed output head in place of the model's.
        """
        head = self.lm_head if head is None else head
        if vocab is not None and vocab < self.config.vocab_size:
            head = self.table.first(head, vocab)
        return self.table.linear(hidden, head).float()


class MTPHead:
    """Multi-token-prediction head: fc over (embedding, hidden), one attention layer, norm.

    x = fc([norm_e(E[token p]), norm_h(h_{p-1})]), then the layer and `mtp.norm`. h_{p-1} is the
    target's hidden AFTER its final norm; in recursion it is this head's own normed output.
    The result predicts token p + 1 through the shared lm_head.
    """

    def __init__(self, config: ModelConfig, take: Take, table: Table) -> None:
        h = config.hidden_size

        def norm(name: str) -> ops.Norm:
            return ops.Norm.of(1 + take(f"{name}.weight", (h,), torch.float32), config.rms_norm_eps)

        self.norm_embedding = norm("pre_fc_norm_embedding")
        self.norm_hidden = norm("pre_fc_norm_hidden")
        self.norm = norm("norm")
        self.table = table
        self.fc = table.pack(take("fc.weight", (h, 2 * h)))
        self.layer = DecoderLayer(config, "full_attention", 0, below(take, "layers.0."), table)

    def __call__(self, embedded: Tensor, hidden: Tensor, rows: Rows) -> Tensor:
        norm, layer = self.table.rms_norm, self.layer
        both = torch.cat((norm(embedded, self.norm_embedding), norm(hidden, self.norm_hidden)), -1)
        x = self.table.linear(both, self.fc)
        return layer(x, norm(x, layer.input_norm), rows, self.norm)[1]

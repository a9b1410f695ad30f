"""The persistent state of one request, S(m) = (R, C, K), and its continuation boundary.

All surfaces describe the same `length` m: the recurrent matrices R, the convolution histories
C, the attention keys and values K, and the draft head's own keys and values. The pending token
b (emitted, not yet consumed by a target forward) belongs to the decoder; (S(m), b) is the
continuation boundary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lumotree.model.config import ModelConfig


@dataclass
class KVCache:
    """Keys and values of a stack of attention layers, [layers, kv_heads, slots, head_dim], or of
    several seats, with a dimension of those in front.

    float32 for the torch operations, whatever the model dtype: its values are widened once here
    and not at every step. Kernels read the model dtype.
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        layers: int,
        slots: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        lead: tuple[int, ...] = (),
    ) -> KVCache:
        shape = (*lead, layers, config.num_key_value_heads, slots, config.head_dim)
        keys = torch.empty(shape, dtype=dtype, device=device)
        return cls(keys, torch.empty_like(keys))

    @property
    def slots(self) -> int:
        return self.keys.shape[-2]

    def write(self, layer: int, slots: Tensor | slice, keys: Tensor, values: Tensor) -> None:
        """Stores [n, kv_heads, head_dim] rows at `slots`; a value that is not finite becomes 0.

        A draft row that overflowed would otherwise reach its siblings as 0 * inf. Its own hidden
        row is not finite all the same.
        """
        values = values.transpose(0, 1).nan_to_num(0.0, 0.0, 0.0)
        self.keys[layer][:, slots] = keys.transpose(0, 1).to(self.keys.dtype)
        self.values[layer][:, slots] = values.to(self.values.dtype)

    def move(self, source: Tensor, start: int) -> None:
        """Copies the slots `source` of every layer to start, start + 1, ... (read before write)."""
        stop = start + source.numel()
        for side in (self.keys, self.values):
            side[:, :, start:stop] = side[:, :, source]

    def clone_prefix(self, length: int) -> KVCache:
        return KVCache(self.keys[:, :, :length].clone(), self.values[:, :, :length].clone())

    def restore_prefix(self, saved: KVCache) -> None:
        length = saved.slots
        self.keys[:, :, :length] = saved.keys
        self.values[:, :, :length] = saved.values


@dataclass(frozen=True)
class Snapshot:
    """All surfaces at `length` tokens of `token_ids`: either all of them or no snapshot."""

    token_ids: tuple[int, ...]
    recurrent: Tensor
    conv: Tensor
    kv: KVCache
    mtp_kv: KVCache | None
    mtp_hidden: Tensor

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        caches = [self.kv] if self.mtp_kv is None else [self.kv, self.mtp_kv]
        tensors = [self.recurrent, self.conv, self.mtp_hidden]
        tensors += [side for cache in caches for side in (cache.keys, cache.values)]
        return sum(t.numel() * t.element_size() for t in tensors)


@dataclass
class StateBuffers:
    """Room for the surfaces of one state of `capacity` tokens, or of one a seat.

    recurrent: float32 [linear layers, value heads, dk, dv]. conv: model dtype
    [linear layers, width - 1, channels], oldest input first. kv: every full-attention layer.
    mtp_kv: the draft head's one layer; its slot p belongs to the pair (token p, hidden of
    p - 1), so slot 0 does not exist and is never seen. With seats, all have them in front.
    """

    recurrent: Tensor
    conv: Tensor
    kv: KVCache
    mtp_kv: KVCache | None
    hidden_size: int

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        mtp: bool,
        kv_dtype: torch.dtype = torch.float32,
        seats: int | None = None,
    ) -> StateBuffers:
        lead = () if seats is None else (seats,)
        recurrent = (
            config.num_linear_layers,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )
        conv = (config.num_linear_layers, config.conv_kernel - 1, config.conv_dim)

        def cache(layers: int) -> KVCache:
            return KVCache.empty(config, layers, capacity, device, kv_dtype, lead)

        return cls(
            torch.empty(*lead, *recurrent, device=device),
            torch.empty(*lead, *conv, dtype=dtype, device=device),
            cache(config.num_full_layers),
            cache(1) if mtp else None,
            config.hidden_size,
        )

    @property
    def caches(self) -> list[KVCache]:
        return [self.kv] if self.mtp_kv is None else [self.kv, self.mtp_kv]

    @property
    def nbytes(self) -> int:
        sides = (side for cache in self.caches for side in (cache.keys, cache.values))
        tensors = [self.recurrent, self.conv, *sides]
        return sum(t.numel() * t.element_size() for t in tensors)

    def seat(self, seat: int) -> StateBuffers:
        """Views of one seat's surfaces."""

        def of(cache: KVCache | None) -> KVCache | None:
            return cache and KVCache(cache.keys[seat], cache.values[seat])

        return StateBuffers(
            self.recurrent[seat], self.conv[seat], of(self.kv), of(self.mtp_kv), self.hidden_size
        )


class HybridState:
    """State of one request, reused from request to request after `reset`; see StateBuffers.

    mtp_hidden: final-normed hidden rows of the last positions before `length` whose successors
    have no draft-head slot yet.
    """

    def __init__(self, buffers: StateBuffers) -> None:
        self.buffers = buffers
        self.recurrent, self.conv = buffers.recurrent, buffers.conv
        self.kv, self.mtp_kv = buffers.kv, buffers.mtp_kv
        self.capacity, self.hidden_size = buffers.kv.slots, buffers.hidden_size
        self.reset()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that stay."""
        return self.buffers.nbytes

    def reset(self) -> None:
        """Back to the empty prefix. Keys and values past `length` are never read, so they stay."""
        self.length = 0
        self.recurrent.zero_()
        self.conv.zero_()
        if self.mtp_kv is not None:  # slot 0 weighs nothing, but 0 * NaN would count
            self.mtp_kv.keys[:, :, 0] = 0.0
            self.mtp_kv.values[:, :, 0] = 0.0
        self.mtp_hidden = self.conv.new_empty(0, self.hidden_size)

    def snapshot(self, token_ids: tuple[int, ...]) -> Snapshot:
        """Copies every surface. Raises ValueError unless `token_ids` are the materialised ones."""
        if len(token_ids) != self.length:
            raise ValueError(f"{len(token_ids)} tokens cannot name a state of {self.length}")
        return Snapshot(
            token_ids=token_ids,
            recurrent=self.recurrent.clone(),
            conv=self.conv.clone(),
            kv=self.kv.clone_prefix(self.length),
            mtp_kv=None if self.mtp_kv is None else self.mtp_kv.clone_prefix(self.length),
            mtp_hidden=self.mtp_hidden.clone(),
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Every surface from the snapshot, or ValueError and nothing changed."""
        if (snapshot.mtp_kv is None) != (self.mtp_kv is None):
            raise ValueError("snapshot and state differ in having a draft head")
        if snapshot.length > self.capacity:
            raise ValueError(f"{snapshot.length} tokens do not fit {self.capacity} slots")
        self.reset()
        self.recurrent.copy_(snapshot.recurrent)
        self.conv.copy_(snapshot.conv)
        self.kv.restore_prefix(snapshot.kv)
        if self.mtp_kv is not None:
            self.mtp_kv.restore_prefix(snapshot.mtp_kv)
        self.mtp_hidden = snapshot.mtp_hidden.clone()
        self.length = snapshot.length

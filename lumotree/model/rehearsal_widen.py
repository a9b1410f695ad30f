"""Weights of a wide model that computes what a small one does, made on the device as asked for.

Dead parts are random and compute real values; `rehearsal_layout` says why they change nothing.
Their spread is that of the small model's own weights, so a dead unit's output before it cancels
has the size of a live one's. Random numbers depend on seed, device type and tensor name alone.

The last residual channel carries a small constant from the embedding to the final norm. Rows of
lm_head past the small vocabulary are its own rows plus a large negative weight there, so each
stays below the row it repeats, whatever the hidden state and in any arithmetic.
"""

from __future__ import annotations

import hashlib
import re

import torch
from torch import Tensor

from lumotree.errors import CheckpointError
from lumotree.model.checkpoint import Checkpoint
from lumotree.model.config import ModelConfig
from lumotree.model.names import TRUNK, tensor_shapes
from lumotree.model.rehearsal_layout import DEAD, Layout, Units

# The constant's energy is 1e-7 of a small model's, so no norm feels it; each scale is a power
# of two minus what a norm adds, exact in bfloat16.
CONSTANT = 2.0**-10
CONSTANT_GAIN = 7.0
# MTP: part of the normed embedding's constant, about six times CONSTANT, that its stream keeps.
CONSTANT_KEPT = 2.0**-3
PENALTY = -(2.0**20)

_LAYER = re.compile(r"(?:model\.|mtp\.)layers\.(\d+)\.(.+)")


class WidenedWeights:
    """Weights by name as `Checkpoint` offers them, on `device`: matrices in `dtype`, vectors and
    convolutions in float32."""

    trunk = TRUNK

    def __init__(
        self,
        source: Checkpoint,
        small: ModelConfig,
        wide: ModelConfig,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.layout = Layout.of(small, wide)
        self.source, self.seed, self.device, self.dtype = source, seed, device, dtype
        self._read_before: dict[str, Tensor] = {}
        self._small_shapes = tensor_shapes(small, source.has_mtp())
        self._shapes = tensor_shapes(wide, source.has_mtp())

    def has_mtp(self) -> bool:
        return self.source.has_mtp()

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Tensor `name` on the device. Raises CheckpointError for a name or shape it lacks."""
        if self._shapes.get(name) != shape:
            raise CheckpointError(f"the rehearsal has no tensor {name} of shape {shape}")
        found = _LAYER.fullmatch(name)
        if found is None:
            return self._outside(name)
        if name.startswith("mtp."):
            return self._in_layer(name, name, found[2], live=True)
        layer = int(found[1])
        template = f"{TRUNK}layers.{self.layout.template(layer)}.{found[2]}"
        return self._in_layer(name, template, found[2], self.layout.layers[layer] != DEAD)

    def _outside(self, name: str) -> Tensor:
        """Embedding, lm_head, final norms and the entrance of the MTP head."""
        constant, ratio = self.layout.residual.constant, self.layout.residual.ratio
        if name == f"{TRUNK}embed_tokens.weight":
            return self._embedding(name)
        if name == "lm_head.weight":
            return self._lm_head(name)
        if name == "mtp.fc.weight":
            return self._fc(name)
        norm = self._norm(name)
        if name in (f"{TRUNK}norm.weight", "mtp.norm.weight"):
            if self.layout.wide.tie_word_embeddings:
                # The tied rows carry the amplitudes once more: their squares add up to `ratio`.
                norm = (1 + norm) / ratio - 1
            norm[constant] = CONSTANT_GAIN
        elif name == "mtp.pre_fc_norm_embedding.weight":
            norm[constant] = 0.0
        return norm

    def _in_layer(self, name: str, template: str, part: str, live: bool) -> Tensor:
        layout = self.layout
        if part.endswith("layernorm.weight"):
            return self._norm(template)
        kinds = {
            "linear_attn.in_proj_qkv.weight": (layout.key_heads,) * 2 + (layout.value_heads,),
            "linear_attn.conv1d.weight": (layout.key_heads,) * 2 + (layout.value_heads,),
            "linear_attn.in_proj_z.weight": (layout.value_heads,),
            "linear_attn.in_proj_b.weight": (layout.value_heads,),
            "linear_attn.in_proj_a.weight": (layout.value_heads,),
            "linear_attn.A_log": (layout.value_heads,),
            "linear_attn.dt_bias": (layout.value_heads,),
            "linear_attn.out_proj.weight": (layout.value_heads,),
            "self_attn.q_proj.weight": (layout.heads,),
            "self_attn.k_proj.weight": (layout.kv_heads,),
            "self_attn.v_proj.weight": (layout.kv_heads,),
            "self_attn.o_proj.weight": (layout.heads,),
            "mlp.gate_proj.weight": (layout.mlp,),
            "mlp.up_proj.weight": (layout.mlp,),
            "mlp.down_proj.weight": (layout.mlp,),
        }.get(part)
        if kinds is None:  # a norm within a head
            return self._read(template).float()
        kinds = tuple(units if live else units.dead() for units in kinds)
        if part.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            return self._out(name, template, kinds[0])
        if part.endswith(("A_log", "dt_bias")):
            return self._gate(name, template, kinds[0])
        if part.endswith("conv1d.weight"):
            return self._conv(name, template, kinds)
        return self._in(name, template, kinds)

    def _read(self, name: str) -> Tensor:
        if name not in self._read_before:
            tensor = self.source.take(name, self._small_shapes[name])
            self._read_before[name] = tensor.to(self.device)
        return self._read_before[name]

    def _random(self, name: str, shape: tuple[int, ...], spread: float) -> Tensor:
        """Normal values on the bfloat16 grid, so that they are the same in every dtype."""
        generator = torch.Generator(self.device)
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:7], "big"))
        drawn = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return drawn.normal_(0.0, spread, generator=generator).to(self.dtype)

    def _norm(self, name: str) -> Tensor:
        """A norm of the stream; it takes the constant out."""
        norm = self._read(name).float().repeat(self.layout.residual.ratio)
        norm[self.layout.residual.constant] = -1.0
        return norm

    def _embedding(self, name: str) -> Tensor:
        small, residual = self._read(name), self.layout.residual
        vocab, tokens = self.layout.wide.vocab_size, small.shape[0]
        weight = self._random(name, (vocab, residual.wide), _spread(small))
        weight[:tokens] = 0
        for place, amplitude, _ in residual.copies():
            weight[:tokens, place] = small.to(self.dtype) * amplitude
        weight[:, residual.constant] = CONSTANT
        if self.layout.wide.tie_word_embeddings:
            dead = torch.arange(tokens, vocab, device=self.device) % tokens
            for place, _, _ in residual.copies():
                weight[tokens:, place] = weight[:tokens, place][dead]
            weight[tokens:, residual.constant] = PENALTY
        return weight

    def _lm_head(self, name: str) -> Tensor:
        tied = self.layout.small.tie_word_embeddings
        small = self._read(f"{TRUNK}embed_tokens.weight" if tied else name)
        residual, tokens = self.layout.residual, small.shape[0]
        shape = (self.layout.wide.vocab_size, residual.wide)
        weight = self._random(name, shape, _spread(small) / residual.ratio**0.5)
        repeated = small.to(self.dtype)[torch.arange(shape[0], device=self.device) % tokens]
        self._read_copies(weight, repeated)
        weight[:, residual.constant] = 0
        weight[tokens:, residual.constant] = PENALTY
        return weight

    def _fc(self, name: str) -> Tensor:
        """[wide, 2 wide]: halves read the normed embedding and the normed hidden row."""
        small, residual = self._read(name), self.layout.residual
        halves = []
        for half, own in enumerate(small.to(self.dtype).split(residual.small, 1)):
            weight = self._random(f"{name} {half}", (residual.wide,) * 2, _spread(small))
            # Whatever reads dead channels may be random: they hold nothing.
            for place, _, _ in residual.copies():
                weight[:, place] = 0
            weight[:, residual.constant] = 0
            for place, amplitude, _ in residual.copies():
                self._read_copies(weight[place], own * amplitude)
            halves.append(weight)
        constant = residual.constant
        for weight in halves:
            weight[constant] = 0
        halves[0][constant, constant] = CONSTANT_KEPT
        return torch.cat(halves, 1)

    def _read_copies(self, rows: Tensor, own: Tensor) -> None:
        """Rows [n, wide] of an input projection take what `own` [n, small] reads."""
        for place, amplitude, share in self.layout.residual.copies():
            torch.mul(own, share / amplitude, out=rows[:, place])

    def _in(self, name: str, template: str, kinds: tuple[Units, ...]) -> Tensor:
        """[units * width, wide] of each kind, one after the other."""
        small, residual = self._read(template), self.layout.residual
        spread = _spread(small) / residual.ratio**0.5
        parts = []
        for kind, (units, own) in enumerate(zip(kinds, self._split(small, kinds), strict=True)):
            width = own.shape[1]
            drawn = self._random(f"{name} {kind}", (len(units), width, residual.wide), spread)
            first = torch.tensor(units.first, device=self.device)
            weight = drawn[first] if list(units.first) != list(range(len(units))) else drawn
            if units.live:
                here, there = torch.tensor(units.live, device=self.device).unbind(1)
                rows = weight[here].flatten(0, 1)
                self._read_copies(rows, own.to(self.dtype)[there].flatten(0, 1))
                weight[here] = rows.view(-1, width, residual.wide)
            parts.append(weight.flatten(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _out(self, name: str, template: str, units: Units) -> Tensor:
        """[wide, units * width]; twins share or cancel, the constant's row stays zero."""
        small, residual = self._read(template), self.layout.residual
        own = small.to(self.dtype).view(residual.small, units.small, -1)
        weight = self._random(name, (residual.wide, len(units), own.shape[2]), _spread(small))
        first, sign = torch.tensor([units.first, units.sign], device=self.device)
        weight = weight.index_select(1, first).mul_(sign[:, None])
        if units.live:
            here, there = torch.tensor(units.live, device=self.device).unbind(1)
            weight[:, here] = 0
            for place, amplitude, _ in residual.copies():
                weight[place, here] = own[:, there] * (amplitude / 2)
        weight[residual.constant] = 0
        return weight.flatten(1)

    def _conv(self, name: str, template: str, kinds: tuple[Units, ...]) -> Tensor:
        """[channels, 1, taps] float32: the taps of every head of each kind."""
        small = self._read(template).float()
        parts = []
        for kind, (units, own) in enumerate(zip(kinds, self._split(small, kinds), strict=True)):
            shape = (len(units), *own.shape[1:])
            drawn = self._random(f"{name} {kind}", shape, _spread(small)).float()
            taps = drawn[torch.tensor(units.first, device=self.device)]
            for unit, source in units.live:
                taps[unit] = own[source]
            parts.append(taps.flatten(0, 1))
        return torch.cat(parts)

    def _gate(self, name: str, template: str, units: Units) -> Tensor:
        """A_log or dt_bias, float32 [value heads]: a dead head takes that of some live one.

        Both come from the same head of the same layer, so that the decay is one that occurs.
        """
        own, part = self._read(template).float(), name.rsplit(".", 1)[1]
        layers = [i for i, k in enumerate(self.layout.small.layer_types) if k.startswith("linear")]
        every = torch.cat(
            [self._read(f"{TRUNK}layers.{i}.linear_attn.{part}").float() for i in layers]
        )
        lot = self._random(name.removesuffix(part) + "gates", (len(units),), 1.0).float()
        chosen = (lot * 1e3).long().remainder(every.numel())
        gate = every[chosen][torch.tensor(units.first, device=self.device)]
        for unit, source in units.live:
            gate[unit] = own[source]
        return gate

    def _split(self, small: Tensor, kinds: tuple[Units, ...]) -> list[Tensor]:
        """Rows of a small matrix by kind and unit, [units, width, ...] each."""
        config = self.layout.small
        widths = [small.shape[0] // kinds[0].small]
        if len(kinds) > 1:  # queries, keys and values of a GDN layer
            widths = [config.linear_key_head_dim] * 2 + [config.linear_value_head_dim]
        parts = small.split([u.small * width for u, width in zip(kinds, widths, strict=True)])
        return [p.view(u.small, -1, *p.shape[1:]) for p, u in zip(parts, kinds, strict=True)]


def _spread(weight: Tensor) -> float:
    return weight.float().std().item()

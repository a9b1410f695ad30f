"""Where a small model lies inside a wide one: residual channels, units and their twins, layers.

Residual stream: channel i of the small model is carried by several wide channels, copy c of it
times an amplitude a_c. Amplitudes are powers of two with sum a_c^2 = wide / small, so the mean
square of the wide stream is that of the small one: every RMSNorm keeps its weight and its
epsilon, and scaled bfloat16 weights stay exact. All other channels are dead: they hold zero, but
for the last, which holds a constant.

Units (heads, MLP channels) come in twins with the same input weights, so with the same values.
Twins of a live unit share its output, half each; those of a dead unit write it with opposite
signs.
"""

from __future__ import annotations

from dataclasses import dataclass

from lumotree.errors import CheckpointError
from lumotree.model.config import ModelConfig

DEAD = -1


@dataclass(frozen=True)
class Residual:
    """`small` channels inside `wide`; copy c of channel i is wide channel c * small + i."""

    small: int
    wide: int

    def __post_init__(self) -> None:
        if self.wide % self.small or len(self.amplitudes) * self.small >= self.wide:
            raise CheckpointError(
                f"hidden size {self.wide} leaves no dead channel beside copies of {self.small}",
                "widen to a multiple such as 4, 5, 8, 10, 16 or 20 times",
            )

    @property
    def ratio(self) -> int:
        return self.wide // self.small

    @property
    def amplitudes(self) -> tuple[float, ...]:
        """a_c: the fewest powers of two whose squares add up to the ratio, largest first."""
        found, rest = [], self.ratio
        while rest:
            power = (rest.bit_length() - 1) // 2
            found.append(2.0**power)
            rest -= 4**power
        return tuple(found)

    @property
    def shares(self) -> tuple[float, ...]:
        """The part of an input projection that reads copy c, powers of two with sum 1."""
        last = len(self.amplitudes) - 1
        return tuple(2.0 ** -min(c + 1, last) for c in range(last + 1))

    @property
    def constant(self) -> int:
        """The channel that holds a constant."""
        return self.wide - 1

    def copies(self) -> list[tuple[slice, float, float]]:
        """Wide channels, amplitude and share of every copy."""
        return [
            (slice(c * self.small, (c + 1) * self.small), amplitude, share)
            for c, (amplitude, share) in enumerate(zip(self.amplitudes, self.shares, strict=True))
        ]


@dataclass(frozen=True)
class Units:
    """Units of one kind in one wide layer.

    small: how many the small model has. source: which of these is behind each, or DEAD. first:
    the unit whose random input weights it shares. sign: what the output columns of a dead one
    are multiplied by; a live one's are halves of its source's.
    """

    small: int
    source: tuple[int, ...]
    first: tuple[int, ...]
    sign: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.source)

    @property
    def live(self) -> list[tuple[int, int]]:
        """(wide unit, small unit) of every live one."""
        return [(unit, source) for unit, source in enumerate(self.source) if source != DEAD]

    def dead(self) -> Units:
        """The same places in a layer where nothing is live."""
        return Units(self.small, (DEAD,) * len(self), self.first, self.sign)

    @classmethod
    def twins(cls, small: int, source: list[int], partner: list[int]) -> Units:
        """`partner[u]` is the twin of u; of a dead pair the first writes +, the second -."""
        first = [min(unit, other) for unit, other in enumerate(partner)]
        sign = [1 if unit == one else -1 for unit, one in enumerate(first)]
        return cls(small, tuple(source), tuple(first), tuple(sign))


@dataclass(frozen=True)
class Layout:
    """Small and wide config with every map between them. Raises CheckpointError if too narrow."""

    small: ModelConfig
    wide: ModelConfig
    residual: Residual
    mlp: Units
    heads: Units
    kv_heads: Units
    key_heads: Units
    value_heads: Units
    layers: tuple[int, ...]  # the small layer that stands at each wide layer, or DEAD

    @classmethod
    def of(cls, small: ModelConfig, wide: ModelConfig) -> Layout:
        for name in ("head_dim", "linear_key_head_dim", "linear_value_head_dim", "conv_kernel"):
            if getattr(small, name) != getattr(wide, name):
                raise CheckpointError(f"a rehearsal keeps {name}: {getattr(small, name)}")
        if wide.tie_word_embeddings and not small.tie_word_embeddings:
            raise CheckpointError("tie_word_embeddings: untied weights cannot be widened to tied")
        key_heads = _adjacent(
            small.linear_num_key_heads, wide.linear_num_key_heads, "linear_num_key_heads"
        )
        return cls(
            small,
            wide,
            Residual(small.hidden_size, wide.hidden_size),
            _adjacent(small.intermediate_size, wide.intermediate_size, "intermediate_size"),
            _query_heads(small, wide),
            _alone(small.num_key_value_heads, wide.num_key_value_heads),
            key_heads,
            _value_heads(small, wide, key_heads),
            place_layers(small.layer_types, wide.layer_types),
        )

    def template(self, layer: int) -> int:
        """The small layer whose statistics and norms wide layer `layer` takes."""
        if self.layers[layer] != DEAD:
            return self.layers[layer]
        kind = self.wide.layer_types[layer]
        placed = [i for i, source in enumerate(self.layers) if source != DEAD]
        alike = [i for i in placed if self.wide.layer_types[i] == kind]
        return self.layers[min(alike, key=lambda i: abs(i - layer))]


def place_layers(small: tuple[str, ...], wide: tuple[str, ...]) -> tuple[int, ...]:
    """Small layers in order on wide layers of the same kind, spread over the depth.

    Raises CheckpointError when `wide` has no such sequence of kinds.
    """
    latest, bound = [], len(wide)
    for kind in reversed(small):
        bound = max((i for i in range(bound) if wide[i] == kind), default=-1)
        if bound < 0:
            raise CheckpointError(f"{len(wide)} layers do not hold the {len(small)} to be widened")
        latest.insert(0, bound)
    found, before = [DEAD] * len(wide), -1
    for i, kind in enumerate(small):
        ideal = max(before + 1, i * len(wide) // len(small))
        fitting = (j for j in range(ideal, latest[i] + 1) if wide[j] == kind)
        before = next(fitting, latest[i])
        found[before] = i
    return tuple(found)


def _adjacent(small: int, wide: int, name: str) -> Units:
    """Twins side by side: units 2 i and 2 i + 1."""
    if wide < 2 * small or wide % 2:
        raise CheckpointError(f"{name} {wide} is not even or less than twice {small}")
    source = [unit // 2 if unit < 2 * small else DEAD for unit in range(wide)]
    return Units.twins(small, source, [unit ^ 1 for unit in range(wide)])


def _alone(small: int, wide: int) -> Units:
    """Units whose readers cancel, so that they need no twins."""
    source = [unit if unit < small else DEAD for unit in range(wide)]
    return Units.twins(small, source, list(range(wide)))


def _query_heads(small: ModelConfig, wide: ModelConfig) -> Units:
    """Twins side by side within the group of a key head."""
    few, many = (c.num_attention_heads // c.num_key_value_heads for c in (small, wide))
    if many < 2 * few or many % 2 or wide.num_key_value_heads < small.num_key_value_heads:
        raise CheckpointError(
            f"num_attention_heads / num_key_value_heads {many} is not even or less than twice {few}"
        )
    source = []
    for head in range(wide.num_attention_heads):
        group, place = divmod(head, many)
        live = group < small.num_key_value_heads and place < 2 * few
        source.append(group * few + place // 2 if live else DEAD)
    partner = [head ^ 1 for head in range(wide.num_attention_heads)]
    return Units.twins(small.num_attention_heads, source, partner)


def _value_heads(small: ModelConfig, wide: ModelConfig, key_heads: Units) -> Units:
    """Value head j reads key head j // ratio: twins lie at the same place of twin key heads."""
    few, many = (c.linear_num_value_heads // c.linear_num_key_heads for c in (small, wide))
    if many < few:
        raise CheckpointError(f"{many} value heads a key head are fewer than {few}")
    source, partner = [], []
    for head in range(wide.linear_num_value_heads):
        key_head, place = divmod(head, many)
        behind = key_heads.source[key_head]
        source.append(behind * few + place if behind != DEAD and place < few else DEAD)
        partner.append((key_head ^ 1) * many + place)
    return Units.twins(small.linear_num_value_heads, source, partner)

"""Where a small model lies in a wide one: what makes widening exact holds for every geometry."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lumotree.errors import CheckpointError
from lumotree.model.rehearsal import PREFIX, SHAPES, RehearsalSource
from lumotree.model.rehearsal_layout import DEAD, Layout, Residual, place_layers

KINDS = ("linear_attention",) * 3 + ("full_attention",)


@given(st.integers(2, 64), st.integers(1, 40))
def test_amplitudes_keep_the_mean_square_and_shares_add_up(ratio, small):
    try:
        residual = Residual(small, small * ratio)
    except CheckpointError:
        assert ratio in (2, 3)  # two or three copies of amplitude 1 leave no channel over
        return
    assert sum(a * a for a in residual.amplitudes) == ratio
    assert sum(residual.shares) == 1
    assert len(residual.shares) == len(residual.amplitudes)
    powers = [2.0**i for i in range(-8, 8)]
    assert {*residual.amplitudes, *residual.shares} <= set(powers)
    assert all(place.stop <= residual.constant for place, _, _ in residual.copies())


@pytest.mark.parametrize("shape", SHAPES)
def test_units_of_every_geometry_are_live_halves_or_cancelling_pairs(shape):
    source = RehearsalSource(PREFIX + shape)
    layout = Layout.of(source.small, source.config)
    for units in (layout.mlp, layout.heads, layout.key_heads, layout.value_heads):
        counts = Counter(units.source)
        assert all(counts[small] == 2 for small in range(units.small))
        pairs = {}
        for unit, first in enumerate(units.first):
            pairs.setdefault(first, []).append(unit)
        for pair in pairs.values():
            assert [units.sign[u] for u in pair] == [1, -1]
            assert len({units.source[u] for u in pair}) == 1
    ratio = source.config.linear_num_value_heads // source.config.linear_num_key_heads
    for head, first in enumerate(layout.value_heads.first):
        keys = layout.key_heads
        assert keys.first[head // ratio] == keys.first[first // ratio]
        if layout.value_heads.source[head] != DEAD:
            assert keys.source[head // ratio] != DEAD
    group = source.config.num_attention_heads // source.config.num_key_value_heads
    for head, first in enumerate(layout.heads.first):
        assert head // group == first // group


@pytest.mark.parametrize("shape", SHAPES)
def test_live_layers_keep_kind_and_order_and_reach_over_the_depth(shape):
    source = RehearsalSource(PREFIX + shape)
    small, wide = source.small.layer_types, source.config.layer_types
    placed = Layout.of(source.small, source.config).layers
    live = [(i, s) for i, s in enumerate(placed) if s != DEAD]
    assert [s for _, s in live] == list(range(len(small)))
    assert all(wide[i] == small[s] for i, s in live)
    gaps = [b - a for (a, _), (b, _) in zip(live, live[1:], strict=False)]
    assert max(gaps) <= 2 * len(wide) / len(small) + 1
    assert wide == KINDS * (len(wide) // 4)


@given(st.lists(st.sampled_from(KINDS[2:]), min_size=1, max_size=20), st.data())
def test_a_subsequence_of_kinds_is_always_placed(wide, data):
    chosen = data.draw(st.sets(st.integers(0, len(wide) - 1), min_size=1))
    small = tuple(wide[i] for i in sorted(chosen))
    placed = place_layers(small, tuple(wide))
    assert [s for s in placed if s != DEAD] == list(range(len(small)))
    assert all(wide[i] == small[s] for i, s in enumerate(placed) if s != DEAD)


def test_a_shape_too_narrow_is_refused_by_name():
    source = RehearsalSource("rehearsal:tiny")
    for field, value in (
        ("intermediate_size", 1024),
        ("linear_num_key_heads", 3),
        ("head_dim", 128),
        ("hidden_size", 512),
        ("layer_types", KINDS),
    ):
        with pytest.raises(CheckpointError) as caught:
            Layout.of(source.small, replace(source.config, **{field: value}))
        assert any(word in str(caught.value) for word in (field, "hidden size", "layers"))


def test_untied_weights_are_not_widened_to_tied_ones():
    source = RehearsalSource("rehearsal:0.8b")
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        Layout.of(replace(source.small, tie_word_embeddings=False), source.config)


def test_an_unknown_shape_names_the_known_ones():
    with pytest.raises(CheckpointError, match="rehearsal:27b"):
        RehearsalSource("rehearsal:70b")

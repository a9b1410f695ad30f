"""Widening of small random models: the same function, with live dead parts."""

from dataclasses import dataclass, replace

import pytest
import torch

from lumotree.model.checkpoint import Checkpoint
from lumotree.model.config import ModelConfig
from lumotree.model.hybrid import HybridModel
from lumotree.model.names import TRUNK, tensor_shapes
from lumotree.model.rehearsal_layout import DEAD
from lumotree.model.rehearsal_widen import WidenedWeights
from lumotree.model.rows import PrefillRows
from lumotree.state import HybridState
from tests.tiny import Geometry, save_tiny

CPU = torch.device("cpu")
KINDS = ("linear_attention", "linear_attention", "full_attention")
TOKENS = torch.tensor([5, 0, 96, 41, 41, 7, 88, 13, 2, 60, 33])

# Hidden 32 times 4, 5, 8, 10 and 20; two to three value heads a key head; tied and untied.
WIDE = {
    "times 4, tied": dict(hidden_size=128, tie_word_embeddings=True),
    "times 5, untied": dict(hidden_size=160, vocab_size=131, linear_num_value_heads=18),
    "times 8, tied, no vocabulary over": dict(
        hidden_size=256, vocab_size=97, tie_word_embeddings=True, num_key_value_heads=4
    ),
    "times 10, tied": dict(hidden_size=320, tie_word_embeddings=True),
    "times 20, untied, fewer dead layers": dict(
        hidden_size=640, layer_types=("linear_attention", "full_attention", *KINDS)
    ),
}
BASE = dict(
    vocab_size=120,
    intermediate_size=112,
    layer_types=(*KINDS, *KINDS),
    num_attention_heads=16,
    num_key_value_heads=2,
    linear_num_key_heads=6,
    linear_num_value_heads=12,
    tie_word_embeddings=False,
)


@dataclass
class Pass:
    """A prompt's logits, its draft head's at depth 1 and 2, and the state after it."""

    logits: torch.Tensor
    drafts: list[torch.Tensor]
    state: HybridState
    stream: torch.Tensor


@torch.no_grad()
def forward(model: HybridModel, tokens: torch.Tensor = TOKENS) -> Pass:
    n = tokens.numel()
    state = model.new_state(n + 1, mtp=True)
    stream, hidden = model.stream(tokens, PrefillRows(state.kv, 0, n, model.rope, state))
    drafts, before = [], hidden
    for _ in range(2):
        rows = PrefillRows(state.mtp_kv, 0, n, model.rope, first=1)
        shifted = torch.cat((torch.zeros_like(before[:1]), before[:-1]))
        before = model.draft_forward(tokens, shifted, rows)
        drafts.append(model.logits(before)[1:])  # slot 0 pairs the first token with no hidden row
    return Pass(model.logits(hidden), drafts, state, stream)


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    save_tiny(folder, Geometry(layers=KINDS), dtype=torch.bfloat16)
    return folder


@pytest.fixture(params=WIDE, scope="module")
def pair(request, small_folder):
    """A small model and a wide one of it, with the weights the wide one was made from."""
    small = ModelConfig.from_folder(small_folder)
    wide = replace(small, **(BASE | WIDE[request.param]))
    weights = WidenedWeights(Checkpoint(small_folder), small, wide, 3, CPU, torch.float32)
    source = HybridModel(small, Checkpoint(small_folder), torch.float32, CPU)
    return source, HybridModel(wide, weights, torch.float32, CPU), weights


def near(ours, theirs, relative=2e-5):
    """Rounding of float32, with room for the depth of the model and for twins that cancel."""
    assert (ours - theirs).abs().max() <= relative * theirs.abs().max()


def test_the_wide_model_computes_the_small_ones_logits_and_drafts(pair):
    small, wide, _ = pair
    ours, theirs = forward(wide), forward(small)
    tokens = small.config.vocab_size
    near(ours.logits[:, :tokens], theirs.logits)
    for mine, its in zip(ours.drafts, theirs.drafts, strict=True):
        # Tied, the draft head's norm of a hidden row sees an epsilon that is ratio^2 as large.
        near(mine[:, :tokens], its, 1e-4 if wide.config.tie_word_embeddings else 2e-5)


def test_no_token_past_the_small_vocabulary_comes_near(pair):
    small, wide, _ = pair
    tokens = small.config.vocab_size
    found = forward(wide)
    for logits in (found.logits, *found.drafts):
        if wide.config.vocab_size > tokens:
            best = logits[:, :tokens].amax(-1)
            assert (logits[:, tokens:].amax(-1) < best - 60).all()


def test_dead_channels_stay_zero_and_the_constant_stays(pair):
    _, wide, weights = pair
    residual = weights.layout.residual
    stream = forward(wide).stream
    live = len(residual.amplitudes) * residual.small
    assert stream[:, :live].abs().mean() > 0.1
    assert stream[:, live : residual.constant].abs().max() < 1e-5
    assert (stream[:, residual.constant] == stream[0, residual.constant]).all()
    assert stream[0, residual.constant] > 0


def test_dead_heads_have_states_of_the_size_of_live_ones_and_twins_agree(pair):
    _, wide, weights = pair
    units, state = weights.layout.value_heads, forward(wide).state.recurrent
    size = state.pow(2).mean((-1, -2)).sqrt()
    kinds = wide.config.layer_types
    placed = [s for s, k in zip(weights.layout.layers, kinds, strict=True) if "linear" in k]
    dead = torch.tensor([s == DEAD for s in units.source])
    some = [i for i, source in enumerate(placed) if source != DEAD]
    assert len(some) < len(placed)
    live = size[some][:, ~dead].mean()
    for sizes in (size[some][:, dead], size[[i for i in range(len(placed)) if i not in some]]):
        assert (sizes > 0).all()
        assert live / 10 < sizes.mean() < live * 10
    first = state[:, list(units.first)]
    assert (state - first).abs().max() <= 1e-6 * state.abs().max()


def test_weights_of_twins_are_equal_and_dead_outputs_cancel_exactly(pair):
    _, wide, weights = pair
    shapes, layout = tensor_shapes(wide.config, mtp=True), weights.layout

    def take(name):
        return weights.take(name, shapes[name])

    mtp = "mtp.layers.0."
    dead = layout.layers.index(DEAD)
    for prefix, source in ((f"{TRUNK}layers.{dead}.", DEAD), (mtp, 0)):
        units = layout.mlp.dead() if source == DEAD else layout.mlp
        gate, down = take(f"{prefix}mlp.gate_proj.weight"), take(f"{prefix}mlp.down_proj.weight")
        assert torch.equal(gate, gate[list(units.first)])
        # A dead layer reads no channel in vain: no weight of it is zero.
        assert (gate != 0).float().mean() > 0.99
        pairs = down[:, ::2] + down[:, 1::2]
        cancels = torch.tensor([s == DEAD for s in units.source[::2]])
        assert (pairs[:, cancels] == 0).all() and (down[:, ::2][:, cancels] != 0).any()
        assert (pairs[:, ~cancels] != 0).any() or source == DEAD


def test_every_matrix_is_exact_in_bfloat16(pair):
    """A bfloat16 model then runs the very weights of the float32 one."""
    small, wide, weights = pair
    narrow = WidenedWeights(
        weights.source, small.config, wide.config, weights.seed, CPU, torch.bfloat16
    )
    for name, shape in tensor_shapes(wide.config, mtp=True).items():
        full, half = weights.take(name, shape), narrow.take(name, shape)
        assert torch.equal(full, half.float()), name
        if len(shape) == 2:
            assert half.dtype == torch.bfloat16


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(pair):
    small, wide, weights = pair
    name, shape = f"{TRUNK}layers.0.mlp.up_proj.weight", (112, wide.config.hidden_size)
    for seed, same in ((weights.seed, True), (weights.seed + 1, False)):
        again = WidenedWeights(
            weights.source, small.config, wide.config, seed, CPU, torch.float32
        ).take(name, shape)
        assert torch.equal(again, weights.take(name, shape)) == same


def test_a_model_takes_exactly_the_named_tensors(pair):
    _, wide, weights = pair
    taken = {}

    class Noting:
        trunk = weights.trunk
        has_mtp = staticmethod(weights.has_mtp)

        def take(self, name, shape):
            taken[name] = shape
            return weights.take(name, shape)

    HybridModel(wide.config, Noting(), torch.float32, CPU)
    assert taken == tensor_shapes(wide.config, mtp=True)

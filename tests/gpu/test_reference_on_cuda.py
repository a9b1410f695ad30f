"""The torch reference on a CUDA device: same arithmetic as on the CPU, within rounding."""

from __future__ import annotations

import pytest
import torch

from lumotree.engine import DecoderConfig, Engine
from lumotree.model.rows import PrefillRows, TreeRows
from lumotree.request import SamplingParams
from lumotree.state import HybridState, StateBuffers
from lumotree.tree import tree_from_name

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PREFIX = 300


@torch.inference_mode()
def tree_step(engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a hydra27 step after a random prefix, and the recurrent state it publishes."""
    model = engine.model
    ids = torch.randint(model.config.vocab_size, (PREFIX + 32,), generator=torch.Generator())
    ids = ids.to(model.device)
    state = HybridState(StateBuffers.empty(model.config, 512, model.dtype, model.device, False))
    for start in range(0, PREFIX, 256):
        piece = ids[start : min(start + 256, PREFIX)]
        rows = PrefillRows(state.kv, start, piece.numel(), model.rope, state)
        model.forward(piece, rows)
        state.length += piece.numel()
    tree = tree_from_name("hydra27")
    index = engine.runner.index(tree)
    rows = TreeRows(index, state.kv, state.length, model.rope, state)
    tokens = engine.runner.token_ids(ids[PREFIX:].tolist(), index.padded)
    hidden = model.forward(tokens, rows)
    rows.publish(list(tree.root_paths[22]), hidden)
    return model.logits(hidden)[: len(tree)].cpu(), state.recurrent.cpu()


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 6e-2)])
def test_a_tree_step_agrees_with_the_cpu(dtype: str, bound: float) -> None:
    wanted = tree_step(Engine.load(dtype="float32", device="cpu"))
    found = tree_step(Engine.load(dtype=dtype, device="cuda"))
    for want, got in zip(wanted, found, strict=True):
        assert torch.isfinite(got).all()
        assert (got - want).abs().max() <= bound * want.abs().max()


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_arms_agree_wherever_the_probe_says_that_bits_are_equal(temperature: float) -> None:
    engine = Engine.load(dtype="float32", device="cuda", rows="matched")
    prompt = engine.tokenizer.encode_chat([{"role": "user", "content": "def add(a, b):\n"}], None)
    params = SamplingParams(temperature=temperature, max_tokens=96, ignore_eos=True)
    outputs = [
        engine.decoder(config).generate(prompt, params).token_ids
        for config in (
            DecoderConfig("root", 0, False),
            DecoderConfig("chain-5", 5, False),
            DecoderConfig(),
        )
    ]
    assert all(len(output) == 96 for output in outputs)
    if engine.description()["equal_bits"]:
        assert outputs[0] == outputs[1] == outputs[2]
    else:  # rounding may decide a near tie; the start of the text must still be the same
        assert outputs[0][:8] == outputs[1][:8] == outputs[2][:8]

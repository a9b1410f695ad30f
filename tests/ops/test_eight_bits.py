"""Draft weights in 8 bits: how far they are from the weights, and what they leave alone."""

from __future__ import annotations

import pytest
import torch

from lumotree.decoder import DecoderConfig
from lumotree.engine import Engine
from lumotree.errors import LumoTreeError
from lumotree.model import hybrid
from lumotree.ops import eight_bits
from lumotree.ops.eight_bits import Scaled
from lumotree.request import SamplingParams


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_are_within_half_a_unit_of_their_row(monkeypatch, dtype):
    monkeypatch.setattr(eight_bits, "BLOCK", 4)  # several blocks, the last one short
    weight = torch.randn(10, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3] *= 1e-6
    weight[4] *= 1e6
    weight[5] = 0
    before = weight.clone()
    narrow = Scaled.of(weight)
    assert torch.equal(weight, before)
    wide = narrow.wide(torch.float32)
    # Three bits behind the leading one; below 2^-6 of 448 times the scale, steps of equal size.
    bound = (weight.float().abs() / 16).clamp_min(narrow.scale[:, None] * 2.0**-10)
    assert ((wide - weight.float()).abs() <= bound * 1.01).all()
    assert torch.equal(wide[5], torch.zeros(33))
    assert torch.equal(narrow.first(4).wide(torch.float32), wide[:4])


def test_no_memory_for_them_is_a_sentence(monkeypatch):
    def full(model):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(hybrid, "NarrowDrafter", full)
    with pytest.raises(LumoTreeError, match="no memory for draft weights in 8 bits"):
        Engine.load("embedded").decoder(DecoderConfig(draft_weights="fp8"))


def test_answers_are_the_same_and_so_are_the_weights():
    engine = Engine.load("embedded")
    heads = engine.model.lm_head.clone(), engine.model.mtp.fc.clone()
    prompt = engine.tokenizer.encode("def total(items):\n    return sum(items)\n" * 8)
    params = SamplingParams(max_tokens=48, seed=3, ignore_eos=True)
    made = {
        weights: engine.decoder(DecoderConfig(draft_weights=weights)).generate(prompt, params)
        for weights in ("model", "fp8")
    }
    assert made["fp8"].token_ids == made["model"].token_ids
    assert made["fp8"].accepted_by_source.get("mtp", 0) > 0 or made["fp8"].steps < 40
    assert torch.equal(engine.model.lm_head, heads[0])
    assert torch.equal(engine.model.mtp.fc, heads[1])
    assert not torch.equal(engine.model.drafter("fp8").lm_head, heads[0])
    with pytest.raises(LumoTreeError, match="draft_weights 'int3'.*"):
        engine.decoder(DecoderConfig(draft_weights="int3"))

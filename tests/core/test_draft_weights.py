"""Drafts with weights in 8 bits: the same answers, and the model's own weights left alone."""

from __future__ import annotations

import pytest
import torch

from lumotree.decoder import DecoderConfig
from lumotree.engine import Engine
from lumotree.errors import LumoTreeError
from lumotree.model import hybrid
from lumotree.request import SamplingParams


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
    assert made["fp8"].accepted_by_source["spine"] > 0
    assert abs(made["fp8"].steps - made["model"].steps) <= max(2, made["model"].steps // 5)
    assert torch.equal(engine.model.lm_head, heads[0])
    assert torch.equal(engine.model.mtp.fc, heads[1])
    assert not torch.equal(engine.model.drafter("fp8").lm_head, heads[0])
    for passes in (0, 5):
        with pytest.raises(LumoTreeError, match="draft_weights 'int3'.*use model, fp8"):
            engine.decoder(DecoderConfig(passes=passes, draft_weights="int3"))

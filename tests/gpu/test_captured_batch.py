"""Requests in the seats of one captured batch: each answers what it answers alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lumotree.decoder import DecoderConfig
from lumotree.engine import Engine
from lumotree.errors import LumoTreeError, RequestError
from lumotree.prefix import PrefixStore
from lumotree.request import SamplingParams
from lumotree.serve.slots import make_slots
from tests.core.beside import decode_together, facts, noted_fill, rounds_of_all, run_alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CONTEXT = 1200
ARMS = {
    "ar": DecoderConfig("root", 0, False),
    "mtp-5": DecoderConfig("chain-5", 5, False),
    "suffix": DecoderConfig("chain-7", 0, True),
    "lumotree": DecoderConfig(),
    "passes 3/5": DecoderConfig(first_passes=3),
    "reduced vocabulary": DecoderConfig(draft_vocab=1024),
    "drafts in 8 bits": DecoderConfig(draft_weights="fp8"),
}
SAMPLINGS = [
    dict(temperature=0.0),
    dict(temperature=0.6, top_p=0.95, top_k=20, presence_penalty=1.0, seed=3),
    dict(temperature=0.8, top_k=0, seed=5),  # sampled on the host
    dict(temperature=1.3, top_k=40, min_p=0.02, repetition_penalty=1.1, seed=4),
]


@pytest.fixture(scope="module")
def engine():
    return Engine.load("embedded", device="cuda")


def requests(engine, count):
    text = engine.tokenizer.encode("def total(items):\n    return sum(items)\n" * 60)
    prompts = [text[: 3 + 61 * i % 800] for i in range(count)]
    samplings = [
        SamplingParams(max_tokens=5 + 13 * i % 60, ignore_eos=True, **SAMPLINGS[i % 4])
        for i in range(count)
    ]
    return prompts, samplings


def seats(engine, config, count, round_rows=0):
    """Whole trees, unless rounds are to be cut: then steps depend on who else is there."""
    config = replace(config, round_rows=round_rows)
    return make_slots(engine, config, count, CONTEXT, PrefixStore()).batch


@pytest.mark.parametrize("count", [2, 5, 16])
@pytest.mark.parametrize("config", ARMS.values(), ids=ARMS)
def test_every_request_answers_what_it_answers_alone(engine, config, count):
    """Sizes with a graph of their own and without; 16 trees have more rows than one tile."""
    prompts, samplings = requests(engine, count)
    single = engine.decoder(config)
    alone = [facts(single.generate(p, s)) for p, s in zip(prompts, samplings, strict=True)]
    assert decode_together(seats(engine, config, count), prompts, samplings) == alone


@pytest.mark.parametrize("count", [2, 5, 16, 24])
@pytest.mark.parametrize("name", ["lumotree", "passes 3/5"])
def test_rounds_of_fewer_rows_answer_the_same(engine, name, count, monkeypatch):
    """What they draft is what a tree of those rows drafts alone."""
    from lumotree.captured import batch as batch_module
    from lumotree.captured import decoder as decoder_module

    noted, drafts = noted_fill()
    monkeypatch.setattr(decoder_module, "fill", noted)
    monkeypatch.setattr(batch_module, "fill", noted)
    prompts, samplings = requests(engine, count)
    samplings = [replace(params, max_tokens=40) for params in samplings]
    least = 12 if count == 2 else 6
    single = engine.decoder(replace(ARMS[name], tree=f"chain-{least - 1}"))
    alone = [run_alone(single, p, s)[0] for p, s in zip(prompts, samplings, strict=True)]
    batch = seats(engine, ARMS[name], count, round_rows=32)
    most = {size: len(captured.tree) for size, captured in batch.rounds.items()}
    assert most[1] == 28 and most[2] == 12 and most[count] == least
    answers = [run.tokens[run.prompt_tokens :] for run in alone]
    assert [made[0] for made in decode_together(batch, prompts, samplings)] == answers
    for run, whole in zip(rounds_of_all(batch, prompts, samplings), alone, strict=True):
        made, wanted = drafts[run.suffix], drafts[whole.suffix]
        both = min(len(made), len(wanted))
        assert both > 1 and made[:both] == wanted[:both]


def test_seats_are_used_again(engine):
    prompts, samplings = requests(engine, 3)
    batch = seats(engine, DecoderConfig(), 3)
    first = decode_together(batch, prompts, samplings)
    turned = decode_together(batch, prompts[::-1], samplings[::-1])
    assert turned == first[::-1] and decode_together(batch, prompts, samplings) == first


def test_matched_rows_too(engine):
    matched = Engine.load("embedded", device="cuda", rows="matched")
    prompts, samplings = requests(matched, 4)
    single = matched.decoder(DecoderConfig())
    alone = [facts(single.generate(p, s)) for p, s in zip(prompts, samplings, strict=True)]
    assert decode_together(seats(matched, DecoderConfig(), 4), prompts, samplings) == alone


@torch.inference_mode()
def test_phases_are_booked(engine):
    prompts, samplings = requests(engine, 2)
    batch = seats(engine, DecoderConfig(), 2)
    run, state = batch.decoders[0].begin(prompts[1], samplings[1])
    while run.finish_reason is None:
        batch.decoders[0].step(run, state)
    phases = batch.decoders[0].finish(run).phases_ms
    assert all(phases[name] > 0 for name in ("draft", "verify", "select", "publish"))


def test_what_does_not_fit_is_refused(engine):
    with pytest.raises(LumoTreeError, match="560 rows, more than the 512"):
        seats(engine, DecoderConfig(), 20)
    with pytest.raises(LumoTreeError, match="no kernels for this arm"):
        seats(engine, DecoderConfig(verify="weaver"), 2)
    batch = seats(engine, ARMS["ar"], 2)
    with pytest.raises(RequestError, match="a seat has 1200"):
        batch.decoders[0].begin([1] * 1190, SamplingParams(max_tokens=20))

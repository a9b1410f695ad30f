"""The captured decoder on a GPU: equal bits, equal tokens, every option, fallbacks."""

from __future__ import annotations

import pytest
import torch

from lumotree.decoder import Decoder, DecoderConfig
from lumotree.engine import Engine
from lumotree.request import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
AR = DecoderConfig("root", 0, False)
TEXT = "def total(items):\n    result = 0\n    for item in items:\n        result += item\n"


@pytest.fixture(scope="module")
def engine():
    return Engine.load("embedded", device="cuda")


@pytest.fixture(scope="module")
def prompt(engine):
    return engine.tokenizer.encode(TEXT * 8)


def params(**options) -> SamplingParams:
    return SamplingParams(max_tokens=96, ignore_eos=True, **options)


SAMPLINGS = {
    "greedy": dict(temperature=0.0),
    "protocol": dict(temperature=0.6, top_p=0.95, top_k=20, presence_penalty=1.0, seed=3),
    "hot": dict(temperature=1.3, top_k=40, min_p=0.02, repetition_penalty=1.1, seed=4),
    "no top-k, so sampled on the host": dict(temperature=0.8, top_p=0.9, top_k=0, seed=5),
}


def test_equal_bits_hold(engine):
    assert engine.row_multiple == 1


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(
    "config",
    [
        DecoderConfig(),
        DecoderConfig("chain-5", 5, False),
        DecoderConfig("chain-7", 0, True),
        DecoderConfig(selection="separate"),
        DecoderConfig(operands="inline"),
        DecoderConfig(first_passes=3),
        DecoderConfig(draft_vocab=1024),
        DecoderConfig(draft_weights="fp8"),
        DecoderConfig("-1,0,0,1,1,3,2,6", 3),
        DecoderConfig(verify="native-path"),
    ],
    ids=str,
)
def test_tokens_are_those_of_autoregressive_decoding(engine, prompt, config, sampling):
    wanted = engine.decoder(AR).generate(prompt, params(**sampling))
    made = engine.decoder(config).generate(prompt, params(**sampling))
    assert made.token_ids == wanted.token_ids
    assert made.steps <= wanted.steps


@pytest.mark.parametrize(
    "name", ["torch-node", "tree-wy", "weaver", "weaver-fp32", "specla", "bole"]
)
def test_every_verifier_decodes(engine, prompt, name):
    """Those that round otherwise may part from the native text, but not at once."""
    wanted = engine.decoder(AR).generate(prompt, params(temperature=0.0)).token_ids
    made = engine.decoder(DecoderConfig(verify=name)).generate(prompt, params(temperature=0.0))
    assert made.token_ids[:8] == wanted[:8]


def test_stock_attention_decodes(engine, prompt):
    wanted = engine.decoder(AR).generate(prompt, params(temperature=0.0)).token_ids
    config = DecoderConfig(attention="stock")
    assert (
        engine.decoder(config).generate(prompt, params(temperature=0.0)).token_ids[:8] == wanted[:8]
    )


@pytest.mark.parametrize("config", [AR, DecoderConfig()], ids=["ar", "lumotree"])
def test_phases_are_booked(engine, prompt, config):
    made = engine.decoder(config).generate(prompt, params())
    phases = made.phases_ms
    assert all(phases[name] > 0 for name in ("verify", "select", "publish"))
    assert (phases["draft"] > 0) == (config != AR)
    assert sum(phases.values()) <= (made.e2e_s - made.ttft_s) * 1e3 * 1.02


def test_requests_do_not_mark_each_other(engine, prompt):
    """One slot serves requests of many lengths and samplings in turn."""
    decoder = engine.decoder(DecoderConfig())
    for sampling in SAMPLINGS.values():
        for cut in (len(prompt), 5, 130):
            fresh = engine.decoder(DecoderConfig())
            made = decoder.generate(prompt[:cut], params(**sampling))
            assert made.token_ids == fresh.generate(prompt[:cut], params(**sampling)).token_ids


def test_captured_text_agrees_with_the_torch_reference(engine, prompt):
    """Not bit for bit (the reference sums in another order): the first tokens, greedy."""
    cpu = Engine.load("embedded", device="cpu", dtype="bfloat16")
    assert type(cpu.decoder(AR)) is Decoder
    wanted = cpu.decoder(AR).generate(prompt, params(temperature=0.0)).token_ids
    made = engine.decoder(AR).generate(prompt, params(temperature=0.0)).token_ids
    assert made[:8] == wanted[:8]


def test_drafts_are_those_of_the_torch_reference(engine, prompt):
    """Verification hides a bad draft, so acceptance is compared: depth by depth, near enough."""
    cpu = Engine.load("embedded", device="cpu", dtype="bfloat16")
    config = DecoderConfig("chain-5", 5, False)
    wanted = cpu.decoder(config).generate(prompt, params(temperature=0.0))
    made = engine.decoder(config).generate(prompt, params(temperature=0.0))
    assert abs(made.steps - wanted.steps) <= max(2, wanted.steps // 5)


def test_a_waiting_commit_does_not_reach_the_next_request(engine, prompt):
    decoder = engine.decoder(DecoderConfig(verify="tree-wy"))
    first = decoder.generate(prompt, params(temperature=0.0)).token_ids
    decoder.generate(prompt[:40], params(temperature=0.0))
    assert decoder.generate(prompt, params(temperature=0.0)).token_ids == first


def test_a_slot_grows_and_prefixes_come_back(engine, prompt):
    """A prompt past the first capacity makes new graphs; a conversation restores its prefix."""
    long = (prompt * (5000 // len(prompt) + 1))[:5000]
    decoder = engine.decoder(DecoderConfig())
    wanted = [
        engine.decoder(AR).generate(p, params(**SAMPLINGS["protocol"])).token_ids
        for p in (prompt, long, [*long, *prompt])
    ]
    made = [
        decoder.generate(p, params(**SAMPLINGS["protocol"]), conversation="one")
        for p in (prompt, long, [*long, *prompt])
    ]
    assert [m.token_ids for m in made] == wanted
    assert made[-1].prefix_reused_tokens == engine.model.prefill_chunk


def test_a_request_left_in_the_middle_marks_nothing(engine, prompt):
    decoder = engine.decoder(DecoderConfig())
    run, state = decoder.begin(prompt, params(temperature=0.0))
    decoder.step(run, state)
    made = decoder.generate(prompt, params(**SAMPLINGS["protocol"])).token_ids
    assert made == engine.decoder(AR).generate(prompt, params(**SAMPLINGS["protocol"])).token_ids

"""Requests beside each other in one forward answer what they answer alone."""

from types import SimpleNamespace

import pytest
import torch

from lumotree.batch import Active, Batch, probe_rows
from lumotree.engine import DecoderConfig
from lumotree.request import SamplingParams
from tests.core.beside import decode_together, facts

ARMS = {
    "ar": DecoderConfig("root", 0, False),
    "mtp-3": DecoderConfig("chain-3", 3, False),
    "lumotree": DecoderConfig(),
    "stops early": DecoderConfig(first_passes=1),
    "reduced vocabulary": DecoderConfig("chain-5", 4, False, draft_vocab=900),
}
PROMPTS = [[7 * i % 4000 for i in range(n)] for n in (3, 262, 40, 7, 90)]
SAMPLINGS = [
    SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=30, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=14, seed=2, temperature=1.2, top_k=0, ignore_eos=True),
    SamplingParams(max_tokens=1, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=22, seed=4, repetition_penalty=1.2, ignore_eos=True),
]


@pytest.fixture
def speaking(engines):
    engine = engines("speaking")
    if engine.row_multiple is None:
        pytest.skip("no row multiple gives equal bits here")
    return engine


@pytest.mark.parametrize("config", ARMS.values(), ids=ARMS.keys())
def test_every_request_answers_what_it_answers_alone(speaking, config, monkeypatch):
    alone = [
        facts(speaking.decoder(config).generate(prompt, params))
        for prompt, params in zip(PROMPTS, SAMPLINGS, strict=True)
    ]
    batch = Batch([speaking.decoder(config) for _ in PROMPTS])
    if batch.together == 1:
        pytest.skip("products of more rows have other bits here")
    forwards, forward = [], type(speaking.model).forward

    def counted(self, ids, rows):
        forwards.append(len(getattr(rows, "parts", [0])))
        return forward(self, ids, rows)

    monkeypatch.setattr(type(speaking.model), "forward", counted)
    assert decode_together(batch, PROMPTS, SAMPLINGS) == alone
    assert max(forwards) == min(batch.together, 4)  # one of the five ends with its prompt


def test_a_round_is_cut_where_bits_would_change(speaking):
    batch = Batch([speaking.decoder(ARMS["mtp-3"]) for _ in PROMPTS])
    batch.together, rounds = 2, []
    whole = batch._round
    batch._round = lambda active: rounds.append(len(active)) or whole(active)
    made = decode_together(batch, PROMPTS, SAMPLINGS)
    assert max(rounds) == 2
    assert made[1] == facts(speaking.decoder(ARMS["mtp-3"]).generate(PROMPTS[1], SAMPLINGS[1]))


@pytest.mark.parametrize("limit", [None, 12, 8])
def test_the_probe_finds_up_to_how_many_rows_bits_hold(speaking, limit, monkeypatch):
    """A table whose products change a bit above `limit` rows."""
    model, table = speaking.model, speaking.model.table

    def linear(x, packed):
        out = table.linear(x, packed)
        return out if limit is None or x.shape[0] <= limit else torch.nextafter(out, out + 1)

    changed = SimpleNamespace(
        linear=linear, linear_swiglu=table.linear_swiglu, linear_add_norm=table.linear_add_norm
    )
    before = probe_rows(model, 4, range(8, 25, 4))
    monkeypatch.setattr(model, "table", changed)
    assert probe_rows(model, 4, range(8, 25, 4)) == min(before, limit or before)
    if limit is not None:
        assert probe_rows(model, 4, [8, 24]) == 8


def test_a_verifier_that_holds_one_request_takes_turns(speaking):
    config = DecoderConfig(verify="native-path")
    batch = Batch([speaking.decoder(config) for _ in range(2)])
    assert batch.together == 1
    alone = facts(speaking.decoder(config).generate(PROMPTS[2], SAMPLINGS[1]))
    made = decode_together(batch, [PROMPTS[2]] * 2, [SAMPLINGS[1]] * 2)
    assert made == [alone, alone]


def test_what_the_probe_has_no_time_for_is_not_claimed(speaking):
    assert probe_rows(speaking.model, 4, [8, 12, 16], seconds=0.0) <= 12


def test_a_fault_of_one_request_is_its_own(speaking):
    """Sampling fails for one of three; the others go on with the tokens they have alone."""
    config = ARMS["mtp-3"]
    prompts, samplings = PROMPTS[:3], SAMPLINGS[:3]
    wanted = [
        speaking.decoder(config).generate(p, s).token_ids
        for p, s in zip(prompts, samplings, strict=True)
    ]
    batch = Batch([speaking.decoder(config) for _ in prompts])
    active = [
        Active(decoder, *decoder.begin(p, s))
        for decoder, p, s in zip(batch.decoders, prompts, samplings, strict=True)
    ]

    def broken(*given):
        raise torch.OutOfMemoryError("no room for one row")

    batch.decoders[1].sample = broken
    failed = batch.step(active)
    assert list(failed) == [1] and isinstance(failed[1], torch.OutOfMemoryError)
    going = [active[0], active[2]]
    while going := [a for a in going if a.run.finish_reason is None]:
        assert not batch.step(going)
    assert [active[i].run.output for i in (0, 2)] == [wanted[0], wanted[2]]

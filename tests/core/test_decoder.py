"""Arms differ in speed and in nothing else; requests end where they must."""

import time

import pytest
import torch

from lumotree.engine import DecoderConfig, Engine
from lumotree.errors import CheckpointError, LumoTreeError, RequestError
from lumotree.request import SOURCES, SamplingParams
from lumotree.text import StreamDecoder
from lumotree.tree import tree_from_name
from tests.core.support import AR, Scripted, decode, plain, prefill, random_tokens
from tests.tiny import save_speaking

FORK = "-1,0,0,0,1,1,2,4,4,6,7,9"
COMB = "-1,0,1,2,3,0,1,2,3,4,4"
HYDRA = DecoderConfig("hydra27", 5, True)
ARMS = {
    **{f"mtp-{k}": DecoderConfig(f"chain-{k}", k, False) for k in (1, 3, 5, 7)},
    **{f"hydra27, {p} passes": DecoderConfig("hydra27", p, True) for p in range(6)},
    "hydra27 without suffix": DecoderConfig("hydra27", 5, False),
    "root-only hydra27": DecoderConfig("hydra27", 0, False),
    "chain of 9 on 2 passes": DecoderConfig("chain-9", 2, True),
    "fork": DecoderConfig(FORK, 3, True),
    "comb": DecoderConfig(COMB, 5, True),
}
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, presence_penalty=0.0, ignore_eos=True),
    "protocol": SamplingParams(seed=11, ignore_eos=True),
    "all penalties": SamplingParams(
        temperature=0.8,
        top_k=0,
        min_p=0.02,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        repetition_penalty=1.15,
        seed=12,
        ignore_eos=True,
    ),
    "greedy with penalties": SamplingParams(
        temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.2, ignore_eos=True
    ),
}
each_params = pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())


def with_length(params: SamplingParams, max_tokens: int, **changes) -> SamplingParams:
    fields = {name: getattr(params, name) for name in SamplingParams.names()}
    return SamplingParams(**fields | {"max_tokens": max_tokens} | changes)


@pytest.fixture
def speaking(engines):
    engine = engines("speaking")
    if engine.row_multiple is None:
        pytest.skip("no row multiple gives equal bits here, so a tie may part the arms")
    return engine


# The same tokens


@pytest.fixture(scope="module")
def expected(engines):
    """What the autoregressive arm emits, per model and parameters."""
    made = {}

    def get(model, params, rows="natural"):
        if (model, params, rows) not in made:
            prompt = REPEATING if model == "speaking" else CODE
            decoder = engines(model, rows=rows).decoder(AR)
            made[model, params, rows] = decoder.generate(prompt, params)
        return made[model, params, rows]

    return get


REPEATING = random_tokens(1, 12, 4000) * 4
CODE = random_tokens(2, 90, 4000)


@each_params
@pytest.mark.parametrize("config", ARMS.values(), ids=ARMS.keys())
def test_every_arm_emits_the_same_tokens(speaking, expected, config, params):
    params = with_length(params, 32)
    wanted = expected("speaking", params)
    made = speaking.decoder(config).generate(REPEATING, params)
    assert made.token_ids == wanted.token_ids
    assert made.text == wanted.text
    assert made.completion_tokens == wanted.completion_tokens == 32


@each_params
@pytest.mark.parametrize("right", [0.5, 0.8, 1.0])
@pytest.mark.parametrize("tree", ["chain-7", "hydra27", FORK, COMB])
def test_accepted_drafts_do_not_change_the_tokens(speaking, expected, tree, right, params):
    """Drafts that are often right take every kind of path through the tree."""
    params = with_length(params, 32)
    wanted = expected("speaking", params)
    decoder = Scripted(speaking, DecoderConfig(tree, 5, True), wanted.token_ids, right)
    made = decoder.generate(REPEATING, params)
    assert made.token_ids == wanted.token_ids
    assert sum(made.accepted_by_depth) > 8


@pytest.mark.parametrize("rows", ["natural", "matched"])
@pytest.mark.parametrize("name", ["greedy", "protocol"])
@pytest.mark.parametrize("arm", ["mtp-1", "mtp-5", "hydra27, 5 passes", "hydra27, 0 passes"])
def test_every_arm_emits_the_same_tokens_on_the_embedded_model(engines, expected, arm, name, rows):
    engine = engines("embedded", rows=rows)
    if engine.row_multiple is None:
        pytest.skip("no row multiple gives equal bits here, so a tie may part the arms")
    params = with_length(PARAMS[name], 24)
    wanted = expected("embedded", params, rows)
    made = engine.decoder(ARMS[arm]).generate(CODE, params)
    assert made.token_ids == wanted.token_ids


def test_seeds_belong_to_requests(speaking):
    decoder = speaking.decoder(HYDRA)
    one, two, again = (
        decoder.generate(REPEATING, with_length(PARAMS["all penalties"], 16, seed=seed)).token_ids
        for seed in (1, 2, 1)
    )
    assert one == again != two


def test_interleaved_requests_of_two_decoders_do_not_meet(speaking):
    params = plain(20)
    prompts = [random_tokens(seed, 30, 4000) for seed in (3, 4)]
    wanted = [speaking.decoder(AR).generate(p, params).token_ids for p in prompts]
    decoders = [speaking.decoder(HYDRA), speaking.decoder(DecoderConfig("chain-3", 3, False))]
    runs = [d.begin(p, params) for d, p in zip(decoders, prompts, strict=True)]
    while any(run.finish_reason is None for run, _ in runs):
        for decoder, (run, state) in zip(decoders, runs, strict=True):
            if run.finish_reason is None:
                decoder.step(run, state)
    assert [run.output for run, _ in runs] == wanted


# Right drafts


@pytest.mark.parametrize("tree", ["chain-1", "chain-3", "chain-7", "hydra27", COMB])
def test_drafts_that_are_always_right_give_depth_plus_one_tokens_a_step(speaking, tree):
    depth = max(tree_from_name(tree).depth)
    script = speaking.decoder(AR).generate(REPEATING, plain(1 + 4 * (depth + 1))).token_ids
    decoder = Scripted(speaking, DecoderConfig(tree, 5, False), script)
    made = decoder.generate(REPEATING, plain(1 + 4 * (depth + 1)))
    assert made.token_ids == script
    assert made.steps == 4
    # The last step's bonus token is beyond the script, so its draft row cannot be right.
    assert made.accepted_by_depth == [4] * depth


def test_counts_add_up(speaking):
    params = plain(60)
    script = speaking.decoder(AR).generate(REPEATING, params).token_ids
    bursts = []
    decoder = Scripted(speaking, DecoderConfig("hydra27", 5, True), script, 0.7)
    made = decoder.generate(REPEATING, params, on_tokens=lambda ids, _: bursts.append(ids))
    accepted = sum(made.accepted_by_depth)
    assert accepted == sum(made.accepted_by_source.values())
    assert set(made.accepted_by_source) <= set(SOURCES)
    assert made.accepted_by_depth == sorted(made.accepted_by_depth, reverse=True)
    assert made.accepted_by_depth[0] <= made.steps
    by_depth = [0] * (max(decoder.tree.depth) + 1)
    for count, depth in zip(made.accepted_by_row, decoder.tree.depth, strict=True):
        by_depth[depth] += count
    assert by_depth[: 1 + len(made.accepted_by_depth)] == [made.steps, *made.accepted_by_depth]
    missing = 1 + made.steps + accepted - made.completion_tokens
    assert missing in (0, 1), "a run cut by max_tokens may lack its pending token, nothing else"
    assert [len(burst) for burst in bursts][0] == 1
    assert len([burst for burst in bursts if burst]) == made.steps + 1
    assert [token for burst in bursts for token in burst] == made.token_ids
    assert made.prompt_tokens == len(REPEATING)
    assert 0 < made.ttft_s <= made.e2e_s
    decode_ms = 1e3 * (made.e2e_s - made.ttft_s)
    assert sum(made.phases_ms.values()) == pytest.approx(decode_ms, rel=0.25, abs=5)


def test_suffix_and_rescue_rows_are_counted_under_their_own_source(speaking):
    """A prompt that repeats and a model that copies it: the suffix alone must be accepted."""
    params = plain(40)
    answer = speaking.decoder(AR).generate(REPEATING, params).token_ids
    prompt = [*REPEATING, *answer[:1], *answer, *REPEATING[-8:]]
    made = speaking.decoder(DecoderConfig("chain-7", 0, True)).generate(prompt, params)
    assert set(made.accepted_by_source) <= {"suffix"}
    assert made.token_ids == speaking.decoder(AR).generate(prompt, params).token_ids


# Where requests end


@pytest.fixture(scope="module")
def reference(engines):
    return engines("speaking").decoder(AR).generate(REPEATING, PARAMS_LONG)


PARAMS_LONG = with_length(PARAMS["protocol"], 48)


def both_arms(engine, script, params):
    """The autoregressive answer and one whose every draft is right, with its bursts."""
    plain_answer = engine.decoder(AR).generate(REPEATING, params)
    bursts = []
    tree = Scripted(engine, DecoderConfig("hydra27", 5, True), script)
    answer = tree.generate(REPEATING, params, on_tokens=lambda *burst: bursts.append(burst))
    assert [token for ids, _ in bursts for token in ids] == answer.token_ids
    assert "".join(text for _, text in bursts) == answer.text
    assert answer.token_ids == plain_answer.token_ids
    assert answer.text == plain_answer.text
    assert answer.completion_tokens == plain_answer.completion_tokens
    assert answer.finish_reason == plain_answer.finish_reason
    return answer


@pytest.mark.parametrize("limit", [1, 2, 5, 12, 13, 14, 20, 25, 26])
def test_max_tokens_inside_an_accepted_run(speaking, reference, limit):
    answer = both_arms(speaking, reference.token_ids, with_length(PARAMS_LONG, limit))
    assert answer.token_ids == reference.token_ids[:limit]
    assert answer.completion_tokens == limit
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("place", [0, 1, 2, 7, 12, 13, 20, 30])
def test_end_of_text_inside_an_accepted_run(speaking, reference, monkeypatch, place):
    """The end token is counted, as servers count it, and not shown."""
    end = reference.token_ids[place]
    first = reference.token_ids.index(end)
    monkeypatch.setattr(speaking.tokenizer, "eos_ids", frozenset({end}))
    params = with_length(PARAMS_LONG, 48, ignore_eos=False)
    answer = both_arms(speaking, reference.token_ids, params)
    assert answer.token_ids == reference.token_ids[:first]
    assert answer.completion_tokens == first + 1
    assert answer.finish_reason == "stop"
    ignored = both_arms(speaking, reference.token_ids, PARAMS_LONG)
    assert ignored.token_ids == reference.token_ids


@pytest.mark.parametrize("place", [1, 4, 9, 15, 22, 33])
@pytest.mark.parametrize("size", [1, 3], ids=["one character", "over tokens"])
def test_stop_string_inside_an_accepted_run(speaking, reference, place, size):
    before = len(speaking.tokenizer.decode(reference.token_ids[:place]))
    stop = reference.text[before : before + size]
    if "\ufffd" in stop or len(stop) < size:
        pytest.skip("no whole characters at this place")
    at = reference.text.index(stop)
    answer = both_arms(speaking, reference.token_ids, with_length(PARAMS_LONG, 48, stop=(stop,)))
    assert answer.text == reference.text[:at]
    assert answer.finish_reason == "stop"
    # The tokens shown end with the one that completed the stop string.
    shown = speaking.tokenizer.decode(answer.token_ids)
    assert stop in shown and stop not in speaking.tokenizer.decode(answer.token_ids[:-1])
    assert answer.completion_tokens == len(answer.token_ids)


def test_streamed_pieces_joined_are_the_text(speaking, reference):
    bursts, stream = [], StreamDecoder(speaking.tokenizer)
    made = speaking.decoder(HYDRA).generate(
        REPEATING, PARAMS_LONG, on_tokens=lambda *burst: bursts.append(burst)
    )
    pieces = [stream.push(token) for ids, _ in bursts for token in ids]
    assert "".join([*pieces, stream.finish()]) == made.text
    assert "".join(text for _, text in bursts) == made.text
    assert made.text == speaking.tokenizer.decode(made.token_ids) == reference.text


@pytest.mark.parametrize("left", [1, 2, 7, 12, 13])
def test_the_end_of_the_context_is_a_length(speaking, left):
    prompt = random_tokens(5, speaking.max_context - left, 4000)
    wanted = speaking.decoder(AR).generate(prompt, plain(50))
    assert wanted.completion_tokens == left and wanted.finish_reason == "length"
    decoder = Scripted(speaking, HYDRA, wanted.token_ids)
    made = decoder.generate(prompt, plain(50))
    assert made.token_ids == wanted.token_ids
    assert made.completion_tokens == left and made.finish_reason == "length"


# Refusals


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        pytest.param([], "empty", id="empty"),
        pytest.param([1] * 4096, "4096", id="too long"),
        pytest.param([1, 4096], "4096 is outside", id="id past the vocabulary"),
        pytest.param([-1, 2], "-1 is outside", id="negative id"),
    ],
)
def test_prompts_that_cannot_run(engines, prompt, said):
    decoder = engines("speaking").decoder(AR)
    with pytest.raises(RequestError, match=said):
        decoder.generate(prompt, plain(4))
    assert decoder.generate([1, 2, 3], plain(4)).completion_tokens == 4


def test_an_arm_that_drafts_needs_a_draft_head(tmp_path):
    save_speaking(tmp_path, mtp=False)
    engine = Engine.load(str(tmp_path), device="cpu")
    assert not engine.has_mtp and not engine.description()["has_mtp"]
    with pytest.raises(CheckpointError, match="mtp"):
        engine.decoder(DecoderConfig("chain-1", 1, False))
    wanted = engine.decoder(AR).generate(REPEATING, plain(12)).token_ids
    without = engine.decoder(DecoderConfig("hydra27", 0, True))
    assert without.generate(REPEATING, plain(12)).token_ids == wanted


@pytest.mark.parametrize(
    "option", [{"dtype": "float16"}, {"device": "tpu"}, {"rows": "packed"}], ids=str
)
def test_unknown_engine_options_are_named(option):
    with pytest.raises(LumoTreeError, match=f"{next(iter(option))} '"):
        Engine.load(**option)


def test_margin_is_the_gap_of_the_step_that_follows(speaking):
    """The gap that explains a divergence is that of the decoded logits, up to rounding."""
    answer = speaking.decoder(AR).generate(REPEATING, plain(6)).token_ids
    state, logits = prefill(speaking.model, REPEATING)
    top = decode(speaking.model, speaking.runner, state, answer[:5])[-1].topk(2)
    assert top.indices[0] == answer[5]
    margin = speaking.margin(REPEATING, answer[:5], plain(6))
    assert margin == pytest.approx(float(top.values[0] - top.values[1]), abs=1e-3)


def test_a_slow_callback_is_charged_to_no_phase(speaking):
    made = speaking.decoder(HYDRA).generate(
        REPEATING, plain(12), on_tokens=lambda *_: time.sleep(0.05)
    )
    timed = sum(ms for name, ms in made.phases_ms.items() if name != "other")
    assert made.phases_ms["other"] >= 50 * (made.steps - 1) > 0
    assert timed < 1e3 * made.e2e_s


def test_a_state_that_does_not_fit_is_a_request_error(speaking, monkeypatch):
    decoder = speaking.decoder(HYDRA)

    def full(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("lumotree.model.hybrid.HybridModel.new_state", full)
    with pytest.raises(RequestError, match="no memory for the state of"):
        decoder.generate(REPEATING, plain(4))
    monkeypatch.undo()
    assert decoder.generate(REPEATING, plain(4)).completion_tokens == 4

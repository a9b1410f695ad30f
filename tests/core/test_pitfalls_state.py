"""State faults seen in the field, numbered as in the list they come from; one test each."""

import random

import pytest
import torch

from lumotree.draft import mtp
from lumotree.engine import DecoderConfig
from lumotree.model.hybrid import HybridModel
from lumotree.model.runner import RowRunner
from lumotree.model.source import open_source
from lumotree.tree import tree_from_name
from tests.core.support import (
    AR,
    Scripted,
    assert_same_bits,
    decode,
    generate_with_state,
    plain,
    poison,
    prefill,
    random_tokens,
    relative,
    surfaces,
    tree_of,
    verify,
)
from tests.tiny import Geometry, oracle_logits, save_tiny

HYDRA = tree_from_name("hydra27")
ACTIVE, _ = HYDRA.restrict(HYDRA.default_active)
ARMS = {
    "ar": AR,
    "mtp-3": DecoderConfig("chain-3", 3, False),
    "lumotree": DecoderConfig("hydra27", 5, True),
}
HEAD = ("mtp keys", "mtp values")
each_arm = pytest.mark.parametrize("config", ARMS.values(), ids=ARMS.keys())


def random_trees(count, seed=0):
    choose = random.Random(seed)
    trees = []
    for _ in range(count):
        reach = choose.choice([1, 2, 4, 32])
        rows = choose.randint(2, 32)
        trees.append(
            tree_of([-1, *(choose.randrange(max(0, i - reach), i) for i in range(1, rows))])
        )
    return trees


# 1


@pytest.mark.parametrize("empty", [1.0, 0.5], ids=["every step", "every other step"])
def test_1_a_step_with_zero_drafts_is_an_ordinary_step(engines, empty):
    engine = engines("speaking")
    prompt, params = random_tokens(1, 40, 4000), plain(60)
    reference, after, _ = generate_with_state(engine.decoder(ARMS["mtp-3"]), prompt, params)
    decoder = Scripted(
        engine, DecoderConfig("hydra27", 5, True), reference.token_ids, 0.7, (), empty
    )
    made, ours, _ = generate_with_state(decoder, prompt, params)
    assert made.token_ids == reference.token_ids
    if empty == 1.0:
        assert made.steps == 59 and not any(made.accepted_by_depth)
    elif engine.row_multiple is not None:
        shared = min(ours.length, after.length)
        assert torch.equal(ours.kv.keys[:, :, :shared], after.kv.keys[:, :, :shared])


# 2


def test_2_replay_publishes_the_conv_history_too(engines):
    engine = engines("tiny")
    model, runner = engine.model, engine.runner
    prompt, drafts = random_tokens(2, 20, 97), random_tokens(3, len(ACTIVE), 97)
    state, _ = prefill(model, prompt)
    before = state.snapshot(tuple(prompt))
    path = ACTIVE.root_paths[13]
    verify(model, runner, state, ACTIVE, drafts).publish(path)
    published = state.conv.clone()
    good = decode(model, runner, state, [5])

    text = [*prompt, *(drafts[row] for row in path)]
    whole, _ = prefill(model, text)
    assert relative(published, whole.conv) < 1e-4
    state.restore(before)
    decode(model, runner, state, text[20:])
    assert torch.equal(state.conv, published)
    state.conv.copy_(before.conv)
    stale = decode(model, runner, state, [5])
    assert relative(stale, good) > 1e-3, "a stale history would show"


# 3


def test_3_a_snapshot_restores_every_surface_into_a_poisoned_slot(engines):
    engine = engines("tiny")
    model, runner = engine.model, engine.runner
    prompt = random_tokens(4, 70, 97)
    state, _ = prefill(model, prompt)
    saved = state.snapshot(tuple(prompt))
    text = [*prompt, 7]
    drafts = mtp.draft(model, state, text, 5, runner)
    logits = decode(model, runner, state, [7, 8, 9])

    other = model.new_state(200, mtp=True)
    poison(other)
    other.restore(saved)
    assert_same_bits(other.snapshot(tuple(prompt)), saved)
    assert mtp.draft(model, other, text, 5, runner) == drafts
    assert torch.equal(decode(model, runner, other, [7, 8, 9]), logits)


def test_3_a_snapshot_does_not_change_with_the_state(engines):
    model = engines("tiny").model
    prompt = random_tokens(5, 30, 97)
    state, _ = prefill(model, prompt)
    saved = state.snapshot(tuple(prompt))
    kept = {name: tensor.clone() for name, tensor in surfaces(saved).items()}
    poison(state)
    for name, tensor in surfaces(saved).items():
        assert torch.equal(tensor, kept[name]), name


@pytest.mark.parametrize(
    ("capacity", "with_mtp"), [(20, True), (100, False)], ids=["too small", "no draft head"]
)
def test_3_a_snapshot_that_does_not_fit_changes_nothing(engines, capacity, with_mtp):
    model = engines("tiny").model
    state, _ = prefill(model, random_tokens(6, 30, 97))
    saved = state.snapshot(tuple(random_tokens(6, 30, 97)))
    prompt = random_tokens(7, 10, 97)
    other, _ = prefill(model, prompt, room=capacity - 10, draft_head=with_mtp)
    before = other.snapshot(tuple(prompt))
    with pytest.raises(ValueError):
        other.restore(saved)
    assert_same_bits(other.snapshot(tuple(prompt)), before)


def test_3_a_snapshot_names_exactly_the_materialised_tokens(engines):
    state, _ = prefill(engines("tiny").model, [1, 2, 3])
    with pytest.raises(ValueError):
        state.snapshot((1, 2))


# 4


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    """A checkpoint that amplifies rounding little, with its oracle's logits for 65 tokens."""
    folder = tmp_path_factory.mktemp("steady")
    oracle = save_tiny(folder, Geometry(hidden=48, key_dim=16, value_dim=16), seed=2, gain=0.5)
    model = HybridModel.load(open_source(str(folder)), torch.float32, torch.device("cpu"))
    tokens = random_tokens(8, 65, 97)
    return model, tokens, oracle_logits(oracle, tokens)


@pytest.mark.parametrize("length", range(1, 66))
def test_4_a_prompt_of_any_length_is_a_prompt(steady, length):
    model, tokens, theirs = steady
    state, whole = prefill(model, tokens[:length])
    assert relative(whole, theirs[:length]) < 1e-5
    pieces, logits = prefill(model, tokens[:length], chunk=7)
    assert relative(logits, theirs[:length]) < 1e-5
    stepped, _ = prefill(model, tokens[:1], room=80)
    if length > 1:
        runner = RowRunner(model, "natural", 4)
        assert relative(decode(model, runner, stepped, tokens[1:length]), theirs[1:length]) < 1e-5
    for other in (pieces, stepped):
        assert other.length == state.length
        assert relative(other.recurrent, state.recurrent) < 1e-5
        assert relative(other.conv, state.conv) < 1e-5


# 5


@each_arm
def test_5_a_poisoned_slot_gives_the_next_request_the_same_tokens(engines, config):
    engine = engines("speaking")
    params, prompt = plain(40), random_tokens(9, 50, 4000)
    fresh, wanted, _ = generate_with_state(engine.decoder(config), prompt, params)
    decoder = engine.decoder(config)
    for length in (5, 50, 300, 50):
        decoder.generate(random_tokens(length, length, 4000), params)
        poison(decoder._state)
        if decoder._state.mtp_hidden.numel():
            decoder._state.mtp_hidden.fill_(float("nan"))
        made, state, _ = generate_with_state(decoder, prompt, params)
        assert made.token_ids == fresh.token_ids
        assert made.accepted_by_depth == fresh.accepted_by_depth
        assert_same_bits(state, wanted)


# 6


@each_arm
@pytest.mark.parametrize("length", [200, 255, 256, 257, 258, 511, 512, 513, 700])
def test_6_a_reused_prefix_gives_the_same_tokens_and_bits(engines, config, length):
    engine = engines("speaking")
    params = plain(12, temperature=0.6, seed=3)
    first = random_tokens(10, length, 4000)
    with_reuse, without = engine.decoder(config), engine.decoder(config)
    answer = with_reuse.generate(first, params, conversation="talk")
    second = [*first, *answer.token_ids, *random_tokens(11, 300, 4000)]
    made, ours, _ = generate_with_state(with_reuse, second, params, "talk")
    fresh, theirs, _ = generate_with_state(without, second, params)
    assert made.prefix_reused_tokens == (length - 1) // 256 * 256
    assert fresh.prefix_reused_tokens == 0
    assert made.token_ids == fresh.token_ids
    assert made.accepted_by_depth == fresh.accepted_by_depth
    assert_same_bits(ours, theirs)
    third = [*second, *made.token_ids, 5]
    again, ours, _ = generate_with_state(with_reuse, third, params, "talk")
    fresh, theirs, _ = generate_with_state(without, third, params)
    assert again.prefix_reused_tokens == (len(second) - 1) // 256 * 256
    assert again.token_ids == fresh.token_ids
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("edited", [0, 100, 255])
def test_6_an_edited_conversation_is_computed_afresh(engines, edited):
    engine = engines("speaking")
    decoder, params = engine.decoder(ARMS["lumotree"]), plain(8)
    prompt = random_tokens(12, 400, 4000)
    decoder.generate(prompt, params, conversation="talk")
    changed = list(prompt)
    changed[edited] = (changed[edited] + 1) % 4000
    made = decoder.generate(changed, params, conversation="talk")
    assert made.prefix_reused_tokens == 0
    assert made.token_ids == engine.decoder(ARMS["lumotree"]).generate(changed, params).token_ids


def test_6_other_conversations_and_forgotten_ones_share_nothing(engines):
    decoder, params = engines("speaking").decoder(AR), plain(4)
    prompt = random_tokens(13, 300, 4000)
    decoder.generate(prompt, params, conversation="a")
    assert decoder.generate(prompt, params, conversation="b").prefix_reused_tokens == 0
    assert decoder.generate(prompt, params).prefix_reused_tokens == 0
    assert decoder.generate(prompt, params, conversation="a").prefix_reused_tokens == 256
    decoder.reset()
    assert decoder.generate(prompt, params, conversation="a").prefix_reused_tokens == 0


def test_6_a_prompt_that_ends_where_the_snapshot_does_is_computed_afresh(engines):
    """Its last token must be run to know what follows."""
    decoder, params = engines("speaking").decoder(AR), plain(4)
    prompt = random_tokens(14, 300, 4000)
    decoder.generate(prompt, params, conversation="a")
    short = decoder.generate(prompt[:256], params, conversation="a")
    assert short.prefix_reused_tokens == 0
    assert (
        short.token_ids == engines("speaking").decoder(AR).generate(prompt[:256], params).token_ids
    )


# 7


@pytest.mark.parametrize(
    "params",
    [plain(400), plain(400, temperature=0.6, presence_penalty=1.0, seed=5)],
    ids=["greedy", "sampled"],
)
def test_7_a_long_continuation_over_random_trees_equals_autoregressive(engines, params):
    engine = engines("speaking")
    prompt = random_tokens(15, 230, 4000)
    reference, theirs, _ = generate_with_state(engine.decoder(AR), prompt, params)
    decoder = Scripted(
        engine, DecoderConfig("hydra27", 5, False), reference.token_ids, 0.7, random_trees(40), 0.1
    )
    made, ours, _ = generate_with_state(decoder, prompt, params)
    assert made.token_ids == reference.token_ids
    assert made.steps < 250 and sum(made.accepted_by_depth) > 150
    # Both states end within one accepted run of each other: compare the shared positions.
    shared = min(ours.length, theirs.length)
    if engine.row_multiple is not None:
        assert torch.equal(ours.kv.keys[:, :, :shared], theirs.kv.keys[:, :, :shared])
        assert torch.equal(ours.kv.values[:, :, :shared], theirs.kv.values[:, :, :shared])


# 8


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("end", [0, 1, 6, 13, 22, 27])
def test_8_poison_in_every_rejected_row_is_never_published(engines, end, value):
    engine = engines("tiny")
    model, runner = engine.model, engine.runner
    prompt, drafts = random_tokens(16, 45, 97), random_tokens(17, len(ACTIVE), 97)
    state, _ = prefill(model, prompt)
    before = state.snapshot(tuple(prompt))
    path = ACTIVE.root_paths[end]
    text = (*prompt, *(drafts[row] for row in path))
    results = []
    for planted in (False, True):
        state.restore(before)
        step = verify(model, runner, state, ACTIVE, drafts)
        if planted:
            off = [row for row in range(len(ACTIVE)) if row not in path]
            places = [step.rows.index.scan_place[row] for row in off]
            for record in step.rows.records:
                for part in record:
                    part[places] = value
            history = state.conv.shape[1]
            for inputs in step.rows.conv_inputs:
                inputs[[history + row for row in off]] = value
            slots = [len(prompt) + ACTIVE.slots[row] for row in off]
            for side in (state.kv.keys, state.kv.values):
                side[:, :, slots] = value
            step.hidden[off] = value
        step.publish(path)
        mtp.refill(model, state, (*text, 3), runner)
        published = state.snapshot(text)
        # What is left in the cache must not reach the steps after it either.
        following = verify(model, runner, state, tree_of([-1, 0, 0]), [3, 4, 5]).logits
        results.append((published, following))
    assert_same_bits(results[1][0], results[0][0])
    assert torch.equal(results[1][1], results[0][1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38], ids=str)
@pytest.mark.parametrize("model_name", ["tiny", "embedded"])
def test_8_a_draft_token_without_finite_logits_harms_only_its_own_subtree(
    engines, model_name, value
):
    engine = engines(model_name)
    model, runner = engine.model, engine.runner
    prompt, drafts = random_tokens(18, 45, 90), random_tokens(19, len(ACTIVE), 90)
    for bad in (3, 5, 7):
        drafts[bad] = 95
    state, _ = prefill(model, prompt)
    before = state.snapshot(tuple(prompt))
    healthy = [row for row in range(len(ACTIVE)) if not {3, 5, 7} & set(ACTIVE.root_paths[row])]
    path = ACTIVE.root_paths[max(healthy)]
    text = (*prompt, *(drafts[row] for row in path))
    clean = verify(model, runner, state, ACTIVE, drafts)
    clean.publish(path)
    wanted = state.snapshot(text)
    state.restore(before)
    embedding = model.embedding
    try:
        model.embedding = embedding.clone()
        model.embedding[95] = value
        step = verify(model, runner, state, ACTIVE, drafts)
        step.publish(path)
    finally:
        model.embedding = embedding
    assert torch.equal(step.logits[healthy], clean.logits[healthy])
    # The draft head has not read the path yet: its slots still hold the poison of `prefill`.
    assert_same_bits(state.snapshot(text), wanted, skip=HEAD)


def test_8_padding_rows_reach_nobody(engines):
    """Padding carries token 0: even a broken embedding of it must stay unseen."""
    engine = engines("tiny", rows="matched")
    model, runner = engine.model, engine.runner
    state, _ = prefill(model, random_tokens(20, 30, 97)[:29])
    clean = verify(model, runner, state, tree_of([-1, 0, 0]), [3, 4, 5]).logits
    embedding = model.embedding
    try:
        model.embedding = embedding.clone()
        model.embedding[0] = float("nan")
        step = verify(model, runner, state, tree_of([-1, 0, 0]), [3, 4, 5])
        step.publish([0, 2])
    finally:
        model.embedding = embedding
    assert torch.equal(step.logits, clean)
    published = surfaces(state.snapshot((1,) * 31))
    assert all(published[name].isfinite().all() for name in published if name not in HEAD)

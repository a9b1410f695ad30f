"""Alone, in a crowd, and after eviction and restore: the same tokens, request by request."""

import os
import queue
import random
import time

import pytest
import torch

from lumotree.decoder import prefill
from lumotree.engine import DecoderConfig
from lumotree.prefix import PrefixStore
from lumotree.request import SamplingParams
from lumotree.serve.metrics import Metrics
from lumotree.serve.scheduler import Done, Job, Scheduler, Tokens
from lumotree.serve.slots import SCOPE, make_slots
from lumotree.text import StreamDecoder

CONTEXT = 1100
# A long run, such as LUMOTREE_TEST_REQUESTS=200, takes minutes.
COUNT = int(os.environ.get("LUMOTREE_TEST_REQUESTS", "8"))
ARMS = {
    "ar": DecoderConfig("root", 0, False),
    "mtp-3": DecoderConfig("chain-3", 3, False),
    "lumotree": DecoderConfig(),
}


def requests(count, seed=0):
    """Prompts that share beginnings of several chunks and differ after them, in mixed order."""
    draw = random.Random(seed)
    stems = [[draw.randrange(4000) for _ in range(n)] for n in (270, 530, 800)]
    made = []
    for number in range(count):
        stem = draw.choice(stems)
        prompt = stem[: draw.choice([30, 260, 300, len(stem)])]
        prompt = prompt + [draw.randrange(4000) for _ in range(draw.randrange(1, 6))]
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.6, 1.2]),
            top_k=draw.choice([0, 20]),
            presence_penalty=draw.choice([0.0, 1.0]),
            seed=number,
            max_tokens=draw.randrange(1, 10),
            ignore_eos=True,
        )
        made.append((prompt, params))
    return made


def scheduler_of(engine, config, active, store):
    slots = make_slots(engine, config, active, CONTEXT, store)
    scheduler = Scheduler(slots, queue=10_000, metrics=Metrics())
    scheduler.start()
    return scheduler


def serve(scheduler, work, logprobs=None):
    """Token ids and generations of all requests, submitted at once."""
    inboxes = []
    for prompt, params in work:
        inboxes.append(queue.SimpleQueue())
        deadline = time.monotonic() + 3600
        scheduler.submit([Job(prompt, params, inboxes[-1].put, deadline, logprobs)])
    found = []
    for inbox in inboxes:
        ids, text, entries = [], "", []
        while isinstance(what := inbox.get(timeout=600), Tokens):
            ids += what.ids
            text += what.text
            entries += what.logprobs
        assert isinstance(what, Done), what
        assert what.generation.token_ids == ids and what.generation.text == text
        found.append((tuple(ids), what.generation, entries))
    return found


def tokens_of(found):
    return [ids for ids, _, _ in found]


@pytest.fixture
def run():
    """run(engine, config, active, store, work): what a scheduler of its own answers."""
    started = []

    def go(engine, config, active, store, work, **more):
        scheduler = scheduler_of(engine, config, active, store)
        started.append(scheduler)
        return serve(scheduler, work, **more)

    yield go
    for scheduler in started:
        scheduler.stop()
        scheduler.join(10)


@pytest.mark.parametrize("config", ARMS.values(), ids=ARMS.keys())
def test_alone_in_a_crowd_and_after_eviction(speaking, run, config):
    work = requests(COUNT)
    decoder = speaking.decoder(config)
    alone = [tuple(decoder.generate(prompt, params).token_ids) for prompt, params in work]
    crowd_store = PrefixStore()
    crowd = run(speaking, config, 8, crowd_store, work)
    assert tokens_of(crowd) == alone
    assert crowd_store.counts.hits > 0
    small = PrefixStore(budget_bytes=crowd_store.nbytes // 3)
    evicted = run(speaking, config, 3, small, [*work, *reversed(work)])
    assert tokens_of(evicted) == [*alone, *reversed(alone)]
    assert small.counts.evicted > 0 and small.counts.hits > 0
    assert small.nbytes <= small.budget


def test_a_poisoned_slot_does_not_show(speaking, run):
    """Buffers full of NaN between requests, with and without a restored prefix."""
    config, work, store = ARMS["lumotree"], requests(6, seed=4), PrefixStore()
    wanted = tokens_of(run(speaking, config, 2, PrefixStore(), work))
    slots = make_slots(speaking, config, 1, CONTEXT, store)
    (slot,) = slots
    for _ in range(2):
        for index, (prompt, params) in enumerate(work):
            state = slot.decoder.reserve(CONTEXT)
            with torch.inference_mode():
                for tensor in (state.recurrent, state.conv, state.mtp_hidden, *sides(state)):
                    tensor.fill_(float("nan"))
            slot.open(prompt, params, None)
            while not slot.prompt_done:
                slot.advance_prompt()
            while not slot.finished:
                slots.step([slot])
            assert tuple(slot.result().token_ids) == wanted[index]
            slot.close()
    assert store.counts.hits > 0


def sides(state):
    return [side for cache in (state.kv, state.mtp_kv) for side in (cache.keys, cache.values)]


def test_a_hit_saves_the_work_and_says_so(speaking, run):
    prompt = [draw % 4000 for draw in range(7, 1007)]
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    store = PrefixStore()
    work = [(prompt, params), ([*prompt, 1, 2], params), (prompt[:300] + [5] * 9, params)]
    found = [run(speaking, ARMS["ar"], 1, store, [each])[0][1] for each in work]
    chunk = speaking.model.prefill_chunk
    whole = (len(prompt) - 1) // chunk * chunk
    assert [g.prefix_reused_tokens for g in found] == [0, whole, 0]
    assert store.counts.saved >= 2 and SCOPE in store._roots


def test_slots_that_do_not_fit_are_refused_at_the_start(speaking, monkeypatch):
    from lumotree.errors import LumoTreeError
    from lumotree.serve import slots

    monkeypatch.setattr(slots, "free_bytes", lambda device: 1 << 20)
    with pytest.raises(LumoTreeError, match="MiB are free") as caught:
        make_slots(speaking, ARMS["ar"], 2, CONTEXT, PrefixStore())
    assert "--active" in caught.value.hint


@pytest.mark.parametrize("config", ARMS.values(), ids=ARMS.keys())
def test_log_probabilities_are_the_model_s(speaking, run, config):
    """Against a prefill of prompt and answer, position by position."""
    prompt, params = requests(1)[0][0], SamplingParams(max_tokens=6, ignore_eos=True, seed=2)
    ((ids, _, entries),) = run(speaking, config, 1, PrefixStore(), [(prompt, params)], logprobs=3)
    assert [entry.token_id for entry in entries] == list(ids)
    for place, entry in enumerate(entries):
        tokens = [*prompt, *ids[:place]]
        state = speaking.model.new_state(len(tokens), mtp=False)
        with torch.inference_mode():
            logits = speaking.model.logits(prefill(speaking.model, state, tokens))[0]
        wanted = logits.double().log_softmax(-1)
        assert entry.logprob == pytest.approx(wanted[entry.token_id].item(), abs=1e-4)
        best = wanted.topk(3)
        assert [i for i, _ in entry.top] == best.indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_stop_strings_hold_in_a_crowd(speaking, run):
    prompt, params = requests(1)[0][0], SamplingParams(max_tokens=40, ignore_eos=True)
    ((ids, whole, _),) = run(speaking, ARMS["ar"], 1, PrefixStore(), [(prompt, params)])
    text = whole.text
    stop = next(text[i : i + 2] for i in range(4, len(text)) if text.count(text[i : i + 2]) == 1)
    stopped = SamplingParams(max_tokens=40, ignore_eos=True, stop=(stop,))
    found = run(speaking, ARMS["lumotree"], 4, PrefixStore(), [(prompt, stopped)] * 5)
    assert {g.text for _, g, _ in found} == {text[: text.index(stop)]}
    decoder = StreamDecoder(speaking.tokenizer, (stop,))
    assert "".join(map(decoder.push, found[0][0])) == text[: text.index(stop)]

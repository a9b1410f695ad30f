"""The prefix store: what comes back is what was saved, within the budget, and nothing leaks."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lumotree import prefix
from lumotree.model.config import ModelConfig
from lumotree.prefix import PrefixStore, worth_saving
from lumotree.state import HybridState, StateBuffers
from tests.tiny import Geometry

CHUNK, SLOTS = 3, 16
DEVICE = torch.device("cpu")
CONFIG = ModelConfig.from_dict(json.loads(Geometry().config().to_json_string(use_diff=False)))


def empty(mtp=True):
    state = HybridState(StateBuffers.empty(CONFIG, SLOTS, torch.float32, DEVICE, mtp))
    for cache in caches(state):
        cache.keys.fill_(float("nan"))
        cache.values.fill_(float("nan"))
    return state


def caches(state):
    return [state.kv] if state.mtp_kv is None else [state.kv, state.mtp_kv]


def fill(state, tokens):
    """Every surface as a function of the tokens before it, which no other prefix shares."""
    state.reset()
    for place in range(len(tokens)):
        value = mark(tokens[: place + 1])
        for number, cache in enumerate(caches(state)):
            cache.keys[:, :, place] = value + number
            cache.values[:, :, place] = -value - number
    state.recurrent.fill_(mark(tokens))
    state.conv.fill_(mark(tokens) + 0.5)
    state.mtp_hidden = torch.full((1, CONFIG.hidden_size), mark(tokens))
    state.length = len(tokens)
    return state


def mark(tokens):
    return float(sum((token + 1) * 7**place for place, token in enumerate(tokens)) % 2**24)


def check(state, tokens):
    """Bit for bit the state of these tokens."""
    assert state.length == len(tokens)
    wanted = fill(empty(state.mtp_kv is not None), tokens)
    assert torch.equal(state.recurrent, wanted.recurrent)
    assert torch.equal(state.conv, wanted.conv)
    assert torch.equal(state.mtp_hidden, wanted.mtp_hidden)
    for got, right in zip(caches(state), caches(wanted), strict=True):
        assert torch.equal(got.keys[:, :, : len(tokens)], right.keys[:, :, : len(tokens)])
        assert torch.equal(got.values[:, :, : len(tokens)], right.values[:, :, : len(tokens)])


def measured(store):
    """Bytes of everything that the store can still reach."""
    total, left = 0, list(store._roots.values())
    while left:
        node = left.pop()
        total += node.cache_bytes + (node.point.nbytes if node.point else 0)
        left += node.children.values()
    return total


def test_a_saved_prefix_comes_back():
    store, tokens = PrefixStore(), [1, 2, 3, 4, 5, 6]
    assert store.save("s", tokens, fill(empty(), tokens), CHUNK)
    state = fill(empty(), [9] * 5)
    assert store.restore("s", [*tokens, 7], state, CHUNK) == 6
    check(state, tokens)
    assert (store.counts.queries, store.counts.hits, len(store)) == (1, 1, 1)


@pytest.mark.parametrize(
    ("scope", "prompt"),
    [
        ("s", [1, 2, 3]),  # no token would be left to compute
        ("s", [1, 2]),
        ("s", [1, 9, 3, 4]),
        ("t", [1, 2, 3, 4]),
        (None, [1, 2, 3, 4]),
    ],
)
def test_no_hit_leaves_a_state_that_was_reset(scope, prompt):
    store = PrefixStore()
    store.save("s", [1, 2, 3], fill(empty(), [1, 2, 3]), CHUNK)
    state = fill(empty(), [5] * 4)
    assert store.restore(scope, prompt, state, CHUNK) == 0
    assert state.length == 0 and not state.recurrent.any() and not state.conv.any()
    assert len(state.mtp_hidden) == 0


def test_the_longest_prefix_wins_and_chunks_are_shared():
    store, long = PrefixStore(), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    store.save("s", long[:3], fill(empty(), long[:3]), CHUNK)
    alone = store.nbytes
    store.save("s", long, fill(empty(), long), CHUNK)
    assert store.nbytes == measured(store) < 4 * alone
    other = [*long[:6], 0, 0, 0, 0]
    state = empty()
    assert store.restore("s", other, state, CHUNK) == 3  # 6 tokens are known, a state of 3 is
    check(state, long[:3])
    assert store.restore("s", [*long, 1], state, CHUNK) == 9
    check(state, long)


def test_what_was_saved_does_not_change_with_the_state():
    store, tokens = PrefixStore(), [1, 2, 3]
    state = fill(empty(), tokens)
    store.save("s", tokens, state, CHUNK)
    fill(state, [8, 8, 8])
    again = empty()
    store.restore("s", [1, 2, 3, 4], again, CHUNK)
    check(again, tokens)
    fill(again, [7, 7, 7])
    third = empty()
    store.restore("s", [1, 2, 3, 4], third, CHUNK)
    check(third, tokens)


def test_a_state_between_chunks_or_of_other_tokens_is_refused():
    store = PrefixStore()
    for tokens, held in (([1, 2], [1, 2]), ([1, 2, 3], [1, 2]), ([], [])):
        with pytest.raises(ValueError):
            store.save("s", tokens, fill(empty(), held), CHUNK)
    store.save("s", [1, 2, 3], fill(empty(mtp=False), [1, 2, 3]), CHUNK)
    with pytest.raises(ValueError, match="draft head"):
        store.restore("s", [1, 2, 3, 4], empty(), CHUNK)


def test_one_over_the_budget_is_not_kept():
    store = PrefixStore(budget_bytes=100)
    assert not store.save("s", [1, 2, 3], fill(empty(), [1, 2, 3]), CHUNK)
    assert (store.nbytes, len(store), measured(store)) == (0, 0, 0)


def test_without_a_budget_nothing_is_copied(monkeypatch):
    monkeypatch.setattr(prefix, "_copy", None)  # not to be called
    store = PrefixStore(budget_bytes=0)
    assert not store.save("s", [1, 2, 3], fill(empty(), [1, 2, 3]), CHUNK)


@pytest.mark.parametrize("copies", range(5))
def test_memory_that_ends_in_the_middle_leaves_nothing_counted(monkeypatch, copies):
    store, tokens = PrefixStore(), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    store.save("s", tokens[:3], fill(empty(), tokens[:3]), CHUNK)
    before, left = store.nbytes, [copies]

    def ending(make):
        def wrapped(*args):
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError
            return make(*args)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(prefix, "_copy", ending(prefix._copy))
        patch.setattr(prefix.Point, "of", ending(prefix.Point.of))
        for scope in "st":
            left[0] = copies  # two new nodes of two caches each, then the point
            with pytest.raises(torch.OutOfMemoryError):
                store.save(scope, tokens, fill(empty(), tokens), CHUNK)
    assert store.nbytes == measured(store) == before
    assert (len(store), list(store._roots), store.counts.saved) == (1, ["s"], 1)


def test_the_least_recently_used_goes_first():
    one = PrefixStore()
    one.save("s", [1, 2, 3], fill(empty(), [1, 2, 3]), CHUNK)
    store = PrefixStore(budget_bytes=2 * one.nbytes)
    for first in (1, 2):
        store.save("s", [first, 2, 3], fill(empty(), [first, 2, 3]), CHUNK)
    assert store.restore("s", [1, 2, 3, 4], empty(), CHUNK) == 3  # used: 2 is now the oldest
    store.save("s", [3, 2, 3], fill(empty(), [3, 2, 3]), CHUNK)
    found = [store.restore("s", [first, 2, 3, 4], empty(), CHUNK) for first in (1, 2, 3)]
    assert found == [3, 0, 3] and store.counts.evicted == 1


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=13)
STEPS = st.lists(
    st.tuples(st.sampled_from(["save", "restore", "clear"]), st.sampled_from("ab"), PROMPTS),
    max_size=25,
)


@settings(deadline=None, max_examples=25)
@given(STEPS, st.integers(0, 12))
def test_any_life_of_a_store(steps, budget):
    """Hits are right, bytes are counted, the budget holds, whatever is saved and evicted."""
    unit = PrefixStore()
    unit.save("s", [0] * CHUNK, fill(empty(), [0] * CHUNK), CHUNK)
    store = PrefixStore(budget_bytes=budget * unit.nbytes // 2)
    known: dict[str, set[tuple]] = {"a": set(), "b": set()}
    state = empty()
    for what, scope, prompt in steps:
        if what == "save":
            tokens = prompt[: len(prompt) // CHUNK * CHUNK]
            if tokens:
                kept = store.save(scope, tokens, fill(state, tokens), CHUNK)
                known[scope].add(tuple(tokens))
                assert kept == (store.restore(scope, [*tokens, 5], state, CHUNK) == len(tokens))
        elif what == "restore":
            length = store.restore(scope, prompt, state, CHUNK)
            assert length < len(prompt)
            if length:
                assert tuple(prompt[:length]) in known[scope]
                check(state, prompt[:length])
        else:
            store.clear()
        assert store.nbytes == measured(store) <= store.budget
        if len(store) == 0:
            assert store.nbytes == 0 and not store._roots


END = frozenset([0])


@pytest.mark.parametrize(
    ("prompt", "places"),
    [
        ([1] * 3, []),  # the last token is always computed
        ([1] * 4, [3]),
        ([1] * 10, [9]),
        ([1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1], [3, 18, 21]),
        ([1, 0, 1, 1, 1, 1, 0, 1], [6]),
    ],
)
def test_where_prompts_are_saved(prompt, places):
    assert worth_saving(prompt, END, CHUNK) == tuple(places)

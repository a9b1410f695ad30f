"""The suffix automaton against brute force."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lumotree.draft.suffix import SuffixAutomaton, SuffixMatch, budget

tokens = st.lists(st.integers(0, 2), max_size=40)


def brute_force(history: list[int], extra: list[int], limit: int) -> SuffixMatch:
    text = history + extra
    for length in range(len(text), 0, -1):
        suffix = text[len(text) - length :]
        for end in range(length, len(history)):  # an end at len(history) has nothing after it
            if history[end - length : end] == suffix:
                copied: list[int] = []
                while len(copied) < limit:
                    copied.append((text + copied)[end + len(copied)])
                return SuffixMatch(length, copied)
    return SuffixMatch(0, [])


@given(tokens, st.lists(st.integers(0, 3), max_size=6), st.integers(0, 8))
def test_lookup_is_brute_force(history, extra, limit):
    assert SuffixAutomaton(history).lookup(extra, limit) == brute_force(history, extra, limit)


@given(st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=6))
def test_growing_online_is_building_at_once(pieces):
    grown, history = SuffixAutomaton(), []
    for piece in pieces:
        grown.extend(piece)
        history += piece
        assert len(grown) == len(history)
        assert grown.lookup([], 8) == brute_force(history, [], 8)
        assert grown.lookup([1, 0], 8) == brute_force(history, [1, 0], 8)


@given(tokens, tokens)
def test_lookup_changes_nothing(history, extra):
    automaton, twin = SuffixAutomaton(history), SuffixAutomaton(history)
    automaton.lookup(extra, 5)
    automaton.extend(extra)
    twin.extend(extra)
    assert vars(automaton) == vars(twin)


def test_the_first_end_is_continued_not_the_last():
    assert SuffixAutomaton([1, 2, 8, 1, 2, 9, 1, 2]).lookup([], 3) == (2, [8, 1, 2])


def test_a_repeating_text_goes_on_past_its_end():
    loop = [1, 2, 3, 4, 5, 6] * 3
    assert SuffixAutomaton(loop).lookup([1, 2, 3, 4, 5], 8) == (17, [6, 1, 2, 3, 4, 5, 6, 1])


def test_nothing_for_an_empty_history():
    assert SuffixAutomaton().lookup([], 4) == (0, [])
    assert SuffixAutomaton().lookup([5], 4) == (0, [])
    assert SuffixAutomaton([5]).lookup([5], 4) == (0, [])
    assert SuffixAutomaton([5, 6]).lookup([5], 4) == (1, [6, 5, 6, 5])


def test_a_token_never_seen_ends_the_match():
    assert SuffixAutomaton([1, 2, 3, 1, 2]).lookup([9], 4) == (0, [])
    assert SuffixAutomaton([1, 2, 3, 1, 2]).lookup([9, 1], 4) == (1, [2, 3, 1, 2])


@pytest.mark.parametrize(
    ("length", "capacity", "expected"),
    [(0, 9, 0), (1, 9, 0), (2, 9, 8), (3, 9, 9), (5, 3, 3), (2, 0, 0)],
)
def test_budget(length, capacity, expected):
    assert budget(length, capacity) == expected


def test_budget_with_another_minimum():
    assert budget(2, 27, minimum=3) == 0
    assert budget(1, 27, minimum=1) == 4


def test_work_is_linear_in_the_history():
    """Counts states, not seconds: at most two per token whatever the text."""
    for period in (1, 2, 3, 997):
        automaton = SuffixAutomaton(i * i % period for i in range(8192))
        assert len(automaton._length) <= 2 * 8192


def test_a_long_prompt_is_indexed_in_a_blink():
    history = [(i * 7919 + i // 50) % 4096 for i in range(8192)]
    started = time.perf_counter()
    SuffixAutomaton(history)
    # Measured 6 ms for 8,192 tokens and 16 MiB for 32,768; the bound allows a busy machine.
    assert time.perf_counter() - started < 0.5

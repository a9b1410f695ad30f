"""Predictions from reach: every part of a tree keeps its drafters, and simulation agrees."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumotree.draft.plan import draft_plan, fill
from lumotree.draft.suffix import SuffixAutomaton
from lumotree.tree import tree_from_name
from replay.costmodel import CostModel
from replay.prediction import Reach, candidates, drafters, parts, predict, prune

HYDRA = tree_from_name("hydra27")
COST = CostModel(10.0, 5.0, 0.5, 0.1, 0.2, 0.01, 5)


def reach(passes, seed=0, decay=0.7):
    """A reach that falls from parent to child, as any recorded one does."""
    draw = random.Random(seed)
    fed = drafters(HYDRA, passes)
    values, active = [1.0], [1.0]
    for row in range(1, len(HYDRA)):
        share = decay * draw.random() if row not in HYDRA.spine else decay
        on = row in fed
        values.append(values[HYDRA.parents[row]] * share if on else 0.0)
        active.append(1.0 if on else 0.0)
    return Reach("hydra27", passes, True, 100, tuple(values), tuple(active))


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([0, 1, 3, 5, 7]), st.integers(0, 10**6))
def test_parts_grow_by_reach_and_are_closed_under_parents(passes, seed):
    measured = reach(passes, seed)
    before = {0}
    for rows in parts(measured):
        assert before <= set(rows) and len(rows) <= len(before) + 1
        assert all(HYDRA.parents[row] in rows for row in rows[1:])
        before = set(rows)
    assert before == {0, *drafters(HYDRA, passes)}


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([0, 1, 3, 5, 7]), st.data())
def test_a_part_drafts_what_the_whole_tree_drafts_in_its_rows(passes, data):
    """The premise of the prediction, on the real drafting code."""
    drop = data.draw(st.sets(st.integers(1, len(HYDRA) - 1), max_size=25))
    fed = drafters(HYDRA, passes)
    rows = [0]
    for row in range(1, len(HYDRA)):
        if row in fed and row not in drop and HYDRA.parents[row] in rows:
            rows.append(row)
    name, needed, _ = prune(HYDRA, rows, passes)
    if name is None:
        return
    part = tree_from_name(name)
    text = [data.draw(st.integers(0, 3)) for _ in range(40)]
    tops = [tuple(data.draw(st.permutations([0, 1, 2, 3]))[:3]) for _ in range(passes)]
    guesses = [(top[0], top) for top in tops]
    whole = fill(draft_plan(HYDRA, passes), text[-1], guesses, SuffixAutomaton(text))
    small = fill(draft_plan(part, needed), text[-1], guesses[:needed], SuffixAutomaton(text))
    for place, row in enumerate(sorted(rows)):
        if small.active[place]:
            assert whole.active[row] and whole.tokens[row] == small.tokens[place]
        else:
            # A shorter tail asks its match for fewer tokens, never for others.
            assert not whole.active[row]


def test_the_tokens_of_a_part_are_the_sum_of_its_reach():
    measured = reach(5)
    rows = (0, 1, 2, 4)
    found = predict(measured, rows, COST)
    assert found.tokens_per_step == pytest.approx(sum(measured.reach[row] for row in rows))
    assert (found.passes, found.rows, found.suffix) == (2, 4.0, False)
    assert found.ms_per_step == pytest.approx(10 + 2 * 5 + 4 * 0.5)
    assert tree_from_name(found.tree).parents == (-1, 0, 0, 1)


def test_what_is_no_part_is_not_predicted():
    assert predict(reach(5), (0, 4), COST) is None  # its parent is missing
    assert prune(HYDRA, (0, 1, 3), 5)[0] is None  # the second runner-up would become the first
    # Without row 4 the rescue below row 2 is the deepest path: it would become the spine.
    assert prune(HYDRA, (0, 1, 2, 7, 12), 5)[0] is None
    assert prune(HYDRA, range(3), 5)[0] == "-1,0,0"
    assert prune(tree_from_name("chain-7"), range(4), 7) == ("chain-3", 3, False)


def test_costs_decide_between_wide_and_narrow():
    """Free rows want the whole tree; dear rows want a chain; dear passes want few of them."""
    measured = [reach(p) for p in (1, 3, 5)]
    free = CostModel(10.0, 0.01, 0.0, 0.1, 0.2, 0.01, 5)
    assert candidates(measured, free)[0].rows == max(sum(r.active) for r in measured)
    dear = CostModel(10.0, 0.01, 20.0, 0.1, 0.2, 0.01, 5)
    assert candidates(measured, dear)[0].tree in ("root", "chain-1")
    passes = CostModel(10.0, 500.0, 0.0, 0.1, 0.2, 0.01, 5)
    assert candidates(measured, passes)[0].passes == 0


def test_candidates_are_sorted_and_distinct():
    found = candidates([reach(5), reach(3)], COST)
    rates = [c.tok_s for c in found]
    assert rates == sorted(rates, reverse=True)
    keys = [(c.tree, c.passes, c.suffix) for c in found]
    assert len(keys) == len(set(keys)) and ("root", 0, False) in keys

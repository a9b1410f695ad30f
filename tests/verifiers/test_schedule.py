"""Walks over trees: every row once, from its parent's state, whatever the tree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lumotree.ops.gdn_schedule import SCHEDULES, Schedule, Visit, Walk, plan
from lumotree.tree import TreeDescriptor, tree_from_name


def hydra27() -> TreeDescriptor:
    tree = tree_from_name("hydra27")
    return tree.restrict(tree.default_active)[0]


@st.composite
def trees(draw, most: int = 12) -> TreeDescriptor:
    rows = draw(st.integers(1, most))
    parents = (-1, *(draw(st.integers(0, row - 1)) for row in range(1, rows)))
    return TreeDescriptor("drawn", parents, (True,) * rows)


@given(tree=trees(), name=st.sampled_from(SCHEDULES))
def test_every_row_is_visited_from_its_parents_state(tree, name):
    plan(tree, name).check(tree)


@given(tree=trees(), name=st.sampled_from(SCHEDULES))
def test_tables_say_what_the_walks_say(tree, name):
    schedule = plan(tree, name)
    walks, visits = schedule.tables()
    assert len(visits) == sum(len(walk.visits) for walk in schedule.walks) + 2
    for line, walk in zip(walks, schedule.walks, strict=True):
        start, stop, advances, source, first, _ = line
        assert stop - start == len(walk.visits) and source == walk.source
        assert advances == sum(visits[i][0] >> 1 & 1 for i in range(start, stop))
        assert first == visits[start][0]


def test_leaves_beside_the_spine_cost_less_than_paths():
    cost = {name: sum(walk.cost for walk in plan(hydra27(), name).walks) for name in SCHEDULES}
    assert cost == {"split": 111, "fine": 120, "twigs": 96, "paths": 180, "cut": 90, "store": 112}


def test_recomputing_schedules_hand_nothing_over():
    for name in ("split", "fine", "twigs", "paths"):
        schedule = plan(hydra27(), name)
        assert schedule.cuts == 0 and len(schedule.launches) == 1
    assert plan(hydra27(), "cut").cuts == 5


def test_a_row_at_the_wrong_state_is_refused():
    tree = tree_from_name("-1,0,1")
    visits = (Visit(0, True, False), Visit(1, True, True), Visit(2, True, True))
    with pytest.raises(ValueError, match="row 1 visited at the state of -1"):
        Schedule("broken", ((Walk(visits),),), 0).check(tree)


def test_an_unknown_schedule_names_the_known_ones():
    with pytest.raises(ValueError, match="split, fine, twigs"):
        plan(hydra27(), "spiral")

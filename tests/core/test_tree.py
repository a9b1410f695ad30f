"""The tree descriptor and the draft plan: deployed numbers, integrity, random trees."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumotree.draft.plan import draft_plan, fill
from lumotree.draft.suffix import SuffixAutomaton
from lumotree.errors import LumoTreeError
from lumotree.request import SOURCES
from lumotree.tree import SchedulePath, TreeDescriptor, tree_from_name
from tests.core.support import parent_lists, tree_of

HYDRA = tree_from_name("hydra27")


# The deployed geometry


def test_hydra27_has_27_drafts_at_the_deployed_depths():
    assert len(HYDRA) == 32
    assert [row for row in range(32) if not HYDRA.default_active[row]] == [18, 23, 25, 27]
    assert sum(HYDRA.default_active) == 28
    active_depths = [HYDRA.depth[row] for row in range(32) if HYDRA.default_active[row]]
    assert [active_depths.count(d) for d in range(12)] == [1, 3, 5, 5, 4, 4, 1, 1, 1, 1, 1, 1]


def test_hydra27_spine():
    assert HYDRA.spine == (0, 1, 4, 9, 14, 19, 24, 26, 28, 29, 30, 31)


def test_hydra27_schedule_has_two_levels_and_a_critical_path_of_twelve():
    level0 = [path for path in HYDRA.schedule if path.level == 0]
    level1 = {(path.parent, path.rows) for path in HYDRA.schedule if path.level == 1}
    assert level0 == [SchedulePath(0, -1, (0, 1, 4, 9, 14))]
    assert len(HYDRA.schedule) == 12
    assert level1 == {
        (14, (19, 24, 26, 28, 29, 30, 31)),
        (0, (2, 7, 12, 17, 22)),
        (0, (3, 8, 13, 18, 23, 25, 27)),
        *((1, (row,)) for row in (5, 6)),
        *((4, (row,)) for row in (10, 11)),
        *((9, (row,)) for row in (15, 16)),
        *((14, (row,)) for row in (20, 21)),
    }
    assert len(level0[0].rows) + max(len(rows) for _, rows in level1) == 12


def test_hydra27_draft_roles():
    plan = draft_plan(HYDRA, 5)
    assert plan.mtp == ((1, 2, 3), (4, 5, 6), (9, 10, 11), (14, 15, 16), (19, 20, 21))
    assert plan.tail == (24, 26, 28, 29, 30, 31)
    assert set(plan.rescues) == {(2, 7, 12, 17, 22), (3, 8, 13)}
    roles = [row for rows in (*plan.mtp, plan.tail) for row in rows]
    roles += [row for chain in plan.rescues for row in chain[1:]]
    assert sorted([0, *roles]) == [row for row in range(32) if HYDRA.default_active[row]]


@pytest.mark.parametrize("passes", range(6))
def test_fewer_passes_leave_the_rest_of_the_spine_to_the_suffix(passes):
    plan = draft_plan(HYDRA, passes)
    assert [rows[0] for rows in plan.mtp] == list(HYDRA.spine[1 : passes + 1])
    assert plan.tail == HYDRA.spine[passes + 1 :]


def test_root_and_chains():
    assert tree_from_name("root").parents == (-1,)
    assert tree_from_name("root").spine == (0,)
    for k in (1, 3, 5, 7):
        chain = tree_from_name(f"chain-{k}")
        assert chain.parents == tuple(range(-1, k))
        assert chain.schedule == (SchedulePath(0, -1, tuple(range(k + 1))),)
        assert chain.slots == tuple(range(k + 1))


def test_heavy_child_ties_go_to_the_lowest_row():
    assert tree_of([-1, 0, 0, 1, 2]).spine == (0, 1, 3)
    assert tree_of([-1, 0, 0, 2]).spine == (0, 2, 3)


# Integrity


@pytest.mark.parametrize(
    "name",
    [
        "",
        "hydra",
        "chain-",
        "chain-x",
        "0",
        "-1,-1",
        "-1,1",
        "-1,0,5",
        "-1,0,",
        "-1,a",
        "chain-256",
    ],
)
def test_a_name_that_is_no_tree_is_refused(name):
    with pytest.raises(LumoTreeError):
        tree_from_name(name)


@pytest.mark.parametrize(
    ("parents", "active", "said"),
    [
        pytest.param((), (), "root", id="no rows"),
        pytest.param((0,), (True,), "root", id="no root"),
        pytest.param((-1, 1), (True, True), "row 1 has parent 1", id="own parent"),
        pytest.param((-1, 2, 0), (True,) * 3, "row 1 has parent 2", id="parent comes later"),
        pytest.param((-1, -1), (True, True), "row 1 has parent -1", id="two roots"),
        pytest.param((-1, 0, 1), (True, False, True), "row 2 hangs below", id="below inactive"),
        pytest.param((-1, *[0] * 256), (True,) * 257, "257 rows", id="too many rows"),
    ],
)
def test_check_names_the_broken_row(parents, active, said):
    with pytest.raises(LumoTreeError, match=said):
        TreeDescriptor("broken", parents, active).check()


def test_check_finds_slots_that_are_no_permutation():
    tree = tree_of([-1, 0, 1])
    broken = replace(tree, name="broken")
    broken.__dict__["slots"] = (0, 1, 1)
    with pytest.raises(LumoTreeError):
        broken.check()


def test_restrict_needs_rows_closed_under_parent():
    tree = tree_of([-1, 0, 1])
    with pytest.raises(ValueError, match="closed under parent"):
        tree.restrict((True, False, True))
    with pytest.raises(ValueError, match="closed under parent"):
        tree.restrict((False, False, False))


# Random trees


@settings(max_examples=150)
@given(parents=parent_lists(64))
def test_random_descriptor_keeps_its_promises(parents):
    tree = tree_of(parents)
    tree.check()
    rows = range(len(tree))
    for row in rows:
        path = tree.root_paths[row]
        assert path[0] == 0 and path[-1] == row and len(path) == tree.depth[row] + 1
        assert all(
            tree.parents[below] == above for above, below in zip(path, path[1:], strict=False)
        )
        slots = [tree.slots[r] for r in path]
        assert slots == sorted(slots), "path order is slot order"
    assert sorted(tree.slots) == list(rows)
    assert [tree.slots[row] for row in tree.spine] == list(range(len(tree.spine)))
    assert tree.depth[tree.spine[-1]] == max(tree.depth)


@settings(max_examples=150)
@given(parents=parent_lists(64))
def test_random_schedule_starts_every_path_from_an_earlier_export(parents):
    tree = tree_of(parents)
    level = {row: path.level for path in tree.schedule for row in path.rows}
    assert sorted(level) == list(range(len(tree)))
    for path in tree.schedule:
        assert tree.parents[path.rows[0]] == path.parent
        assert all(tree.parents[b] == a for a, b in zip(path.rows, path.rows[1:], strict=False))
        if path.parent >= 0:
            assert level[path.parent] == path.level - 1
        else:
            assert path.rows[0] == 0


@settings(max_examples=150)
@given(parents=parent_lists(48), data=st.data())
def test_restrict_keeps_the_shape_among_the_kept_rows(parents, data):
    tree = tree_of(parents)
    wanted = data.draw(st.lists(st.booleans(), min_size=len(tree), max_size=len(tree)))
    active = [True]
    for row in range(1, len(tree)):
        active.append(wanted[row] and active[tree.parents[row]])
    small, kept = tree.restrict(tuple(active))
    small.check()
    assert list(kept) == [row for row, on in enumerate(active) if on]
    for row, old in enumerate(kept):
        assert [kept[r] for r in small.root_paths[row]] == list(tree.root_paths[old])


# Filling


@settings(max_examples=250)
@given(
    parents=parent_lists(32),
    passes=st.integers(0, 6),
    text=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    use_suffix=st.booleans(),
    data=st.data(),
)
def test_fill_proposes_no_token_twice_under_a_parent(parents, passes, text, use_suffix, data):
    tree = tree_of(parents)
    plan = draft_plan(tree, passes)
    candidates = []
    for _ in range(data.draw(st.integers(0, len(plan.mtp)))):
        ordered = data.draw(st.permutations(range(5)))[:3]
        # argmax and top-k break ties differently, so the best need not be the first of the three.
        candidates.append((data.draw(st.integers(0, 4)), ordered))
    suffix = SuffixAutomaton(text) if use_suffix else None
    proposal = fill(plan, text[-1], candidates, suffix)

    assert proposal.active[0] and proposal.tokens[0] == text[-1] and proposal.source[0] is None
    for row in range(len(tree)):
        active = [child for child in tree.children[row] if proposal.active[child]]
        assert proposal.active[row] or not active, "active rows are closed under parent"
        tokens = [proposal.tokens[child] for child in active]
        assert len(set(tokens)) == len(tokens), "no two siblings carry the same token"
        if row:
            assert (proposal.source[row] in SOURCES) == proposal.active[row]
    sourced = {row for rows in plan.mtp[: len(candidates)] for row in rows}
    if use_suffix:
        sourced |= {*plan.tail, *(row for chain in plan.rescues for row in chain)}
    assert {row for row in range(1, len(tree)) if proposal.active[row]} <= sourced
    for (spine, *_), (best, _) in zip(plan.mtp, candidates, strict=False):
        assert proposal.tokens[spine] == best and proposal.source[spine] == "spine"


def test_the_spine_takes_the_argmax_and_the_runner_ups_the_rest_in_order():
    plan = draft_plan(HYDRA, 5)
    proposal = fill(plan, 9, [(7, [5, 7, 6]), (1, [2, 3, 4])], None)
    assert [proposal.tokens[row] for row in (1, 2, 3)] == [7, 5, 6]
    assert [proposal.tokens[row] for row in (4, 5, 6)] == [1, 2, 3]
    assert sum(proposal.active) == 7


def test_rows_below_a_short_match_stay_inactive():
    """Budget: four drafts per matched token, so a match of two fills eight of eleven rows."""
    plan = draft_plan(tree_from_name("chain-11"), 0)
    proposal = fill(plan, 2, [], SuffixAutomaton([1, 2, 3, 1, 2]))
    drafts = [t for t, on in zip(proposal.tokens, proposal.active, strict=True) if on][1:]
    assert drafts == [3, 1, 2, 3, 1, 2, 3, 1]
    assert proposal.source[1:9] == ["suffix"] * 8


def test_rescue_follows_the_runner_up_and_not_the_spine():
    text = [1, 2, 8, 3, 4, 5, 6, 1, 2]
    plan = draft_plan(HYDRA, 5)
    candidates = [(7, [7, 8, 9]), *[(0, [0, 10, 11])] * 4]
    proposal = fill(plan, 2, candidates, SuffixAutomaton(text))
    assert proposal.tokens[2] == 8
    assert [proposal.tokens[row] for row in (7, 12, 17, 22)] == [3, 4, 5, 6]
    assert proposal.source[7] == "rescue"
    assert not proposal.active[8], "runner-up 3 has no match"

"""Rows that rounds of several requests keep."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from arms.spec import MAX_ROUND_ROWS, parse_arm  # noqa: E402
from lumotree.captured.batch import _cut, most_seats, row_counts  # noqa: E402
from lumotree.decoder import DecoderConfig  # noqa: E402
from lumotree.draft.plan import draft_plan, fill  # noqa: E402
from lumotree.draft.suffix import SuffixAutomaton  # noqa: E402
from lumotree.model.drafter import DRAFT_WEIGHTS  # noqa: E402
from lumotree.ops.linear import MAX_STEP_ROWS  # noqa: E402
from lumotree.tree import tree_from_name  # noqa: E402


class Rows:
    """A runner's rule for row counts."""

    def __init__(self, least: int) -> None:
        self.least = least

    def padded(self, rows: int) -> int:
        return max(rows, self.least)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (DecoderConfig(), {1: 28, 2: 12, 3: 10, 4: 8, 5: 6, 16: 6}),
        (DecoderConfig(passes=3), {1: 28, 2: 12, 4: 8, 8: 4, 16: 4}),
        (DecoderConfig(round_rows=64), {1: 28, 2: 28, 4: 12, 8: 8, 16: 6}),
        (DecoderConfig(round_rows=0), {1: 28, 16: 28}),
        (DecoderConfig(round_rows=1), {1: 28, 2: 6}),
        (DecoderConfig("chain-5", 5, False), {1: 6, 16: 6}),
        (DecoderConfig("chain-7", 0, True), {1: 8, 16: 8}),
        (DecoderConfig(suffix=False), {1: 28, 2: 6, 16: 6}),
        (DecoderConfig("root", 0, False), {1: 1, 16: 1}),
    ],
    ids=str,
)
def test_a_round_has_as_many_rows_of_each_as_fit(config, sizes):
    assert {size: sum(_cut(config, Rows(1), size)) for size in sizes} == sizes


def test_rows_that_cost_the_same_are_kept():
    """Where every step is padded to 32 rows a cut saves nothing."""
    assert sum(_cut(DecoderConfig(), Rows(32), 8)) == 28


def test_rows_of_rounds_and_how_many_seats_they_allow():
    plain, rows = DecoderConfig(), Rows(1)
    assert row_counts(plain, rows, 16) == [28, 32, 48, 96]
    assert row_counts(plain, rows, 1) == [28]
    # Trees larger than what start-up probes: its rows first, then every count above them.
    assert row_counts(DecoderConfig("chain-40", 5), rows, 4) == [32, 41]
    assert [most_seats(plain, rows, n) for n in (27, 28, 32, 512)] == [0, 2, 5, 85]
    whole = DecoderConfig(round_rows=0)
    assert row_counts(whole, rows, 4) == [28, 56, 112] and most_seats(whole, rows, 512) == 18


def test_cuts_are_trees_of_rows_in_use():
    for name in ("root", "hydra27", "chain-5", "-1,0,0,1,1,3"):
        tree = tree_from_name(name)
        for passes in (0, 1, 3, 5):
            cuts = draft_plan(tree, passes).cuts
            assert cuts[0] == tree.default_active
            for before, after in zip(cuts, cuts[1:], strict=False):
                assert 1 < sum(after) < sum(before)
                assert all(b for b, a in zip(before, after, strict=True) if a)
                tree.restrict(after)  # raises where a row hangs in the air


@given(length=st.integers(2, 60), ids=st.integers(2, 4), passes=st.integers(0, 5), data=st.data())
def test_a_plan_within_a_cut_fills_its_rows_as_the_whole_one_does(length, ids, passes, data):
    tree = tree_from_name(data.draw(st.sampled_from(["hydra27", "chain-7", "-1,0,1,2,0,3"])))
    plan = draft_plan(tree, passes)
    numbers = st.integers(0, ids - 1)
    tokens = data.draw(st.lists(numbers, min_size=length, max_size=length))
    suffix = SuffixAutomaton()
    suffix.extend(tokens)
    best = data.draw(st.lists(st.permutations(range(5)), min_size=5, max_size=5))
    candidates = [(order[0], order[:3]) for order in best[:passes]]
    whole = fill(plan, tokens[-1], candidates, suffix)
    for cut in plan.cuts:
        less = fill(plan.within(cut), tokens[-1], candidates, suffix)
        assert less.active == [a and kept for a, kept in zip(whole.active, cut, strict=True)]
        for row in range(len(tree)):
            if less.active[row]:
                assert less.tokens[row] == whole.tokens[row]
                assert less.source[row] == whole.source[row]
    assert fill(plan.within(plan.cuts[0]), tokens[-1], candidates, suffix) == whole


def test_arm_options_know_what_the_decoder_takes():
    """The grammar of arms needs neither torch nor Triton, so it has these of its own."""
    assert MAX_ROUND_ROWS == MAX_STEP_ROWS
    for weights in DRAFT_WEIGHTS:
        assert parse_arm(f"lumotree:draft_weights={weights}").values()["draft_weights"] == weights

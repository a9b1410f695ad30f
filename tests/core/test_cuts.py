"""Rows that rounds of several requests keep."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from lumotree.captured.batch import _cut  # noqa: E402
from lumotree.decoder import DecoderConfig  # noqa: E402
from lumotree.draft.plan import Proposal, draft_plan  # noqa: E402
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
        (DecoderConfig(), {1: 28, 2: 12, 3: 6, 4: 6, 5: 6, 16: 6}),
        (DecoderConfig(passes=3), {1: 28, 2: 12, 4: 4, 8: 4, 16: 4}),
        (DecoderConfig(round_rows=64), {1: 28, 2: 28, 4: 12, 8: 6, 16: 6}),
        (DecoderConfig(round_rows=0), {1: 28, 16: 28}),
        (DecoderConfig(round_rows=1), {1: 28, 2: 6}),
        (DecoderConfig("chain-5", 5, False), {1: 6, 16: 6}),
        (DecoderConfig("chain-7", 0, True), {1: 8, 16: 8}),
        (DecoderConfig("root", 0, False), {1: 1, 16: 1}),
    ],
    ids=str,
)
def test_a_round_has_as_many_rows_of_each_as_fit(config, sizes):
    assert {size: sum(_cut(config, Rows(1), size)) for size in sizes} == sizes


def test_rows_that_cost_the_same_are_kept():
    """Where every step is padded to 32 rows a cut saves nothing."""
    assert sum(_cut(DecoderConfig(), Rows(32), 8)) == 28


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


def test_a_dropped_row_has_no_source():
    proposal = Proposal.root_only(tree_from_name("chain-3"), 7)
    proposal.put(1, 5, "spine")
    proposal.drop(1)
    assert proposal.active == [True, False, False, False] and proposal.source[1] is None

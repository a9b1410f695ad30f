"""Which drafter feeds which row: read off the tree's shape, the same rule for every tree.

Along the spine (the heavy path) the first `passes` rows come from the MTP head, each with up
to two runner-ups among its siblings; deeper spine rows are the suffix tail. The chain below a
runner-up is its rescue, fed by a suffix lookup that starts with the runner-up's token. For
hydra27 this rule gives the deployed assignment of the LumoTree paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lumotree.draft.suffix import SuffixAutomaton, budget
from lumotree.tree import TreeDescriptor

RUNNER_UPS = 2
# A lookup beside MTP drafts competes with nothing, but a match below this is mostly chance.
MIN_MATCH = 2


@dataclass(frozen=True)
class DraftPlan:
    """Rows by source. mtp[d] is the spine row of depth d + 1 followed by its runner-up rows."""

    tree: TreeDescriptor
    mtp: tuple[tuple[int, ...], ...]
    tail: tuple[int, ...]
    rescues: tuple[tuple[int, ...], ...]  # runner-up row, then the chain below it

    @property
    def cuts(self) -> tuple[tuple[bool, ...], ...]:
        """Masks of ever fewer rows: all that are used, the path to the end of the tail, and that
        with ever less of the tail, down to its MTP rows; without such rows, which alone are
        sure to draft, the whole path is the least."""
        path = (0, *(rows[0] for rows in self.mtp), *self.tail)
        masks = [self.tree.default_active]
        for count in range(len(path), len(self.mtp) if self.mtp else len(path) - 1, -1):
            mask = tuple(row in path[:count] for row in range(len(self.tree)))
            if sum(mask) < sum(masks[-1]):
                masks.append(mask)
        return tuple(masks)

    def within(self, cut: Sequence[bool]) -> DraftPlan:
        """The same of fewer rows: those of one of `cuts`."""

        def kept(rows: Sequence[int]) -> tuple[int, ...]:
            return tuple(row for row in rows if cut[row])

        rescues = (chain for chain in map(kept, self.rescues) if len(chain) > 1)
        mtp = tuple(kept(rows) for rows in self.mtp)
        return DraftPlan(self.tree, mtp, kept(self.tail), tuple(rescues))


@dataclass
class Proposal:
    """Draft tokens of one step. tokens[0] is the pending token; inactive rows carry none.

    source[i] is one of request.SOURCES, None for the root and for inactive rows.
    """

    tree: TreeDescriptor
    tokens: list[int]
    active: list[bool]
    source: list[str | None]

    @classmethod
    def root_only(cls, tree: TreeDescriptor, pending: int) -> Proposal:
        n = len(tree)
        return cls(tree, [pending] + [0] * (n - 1), [True] + [False] * (n - 1), [None] * n)

    def put(self, row: int, token: int, source: str) -> None:
        self.tokens[row], self.active[row], self.source[row] = token, True, source


@lru_cache(maxsize=64)
def draft_plan(tree: TreeDescriptor, passes: int) -> DraftPlan:
    """The rows each drafter fills in `tree` when the MTP head runs at most `passes` passes."""

    def usable(rows: Sequence[int]) -> tuple[int, ...]:
        return tuple(row for row in rows if tree.default_active[row])

    spine = usable(tree.spine[1:])
    mtp, rescues = [], []
    for row in spine[:passes]:
        siblings = [s for s in usable(tree.children[tree.parents[row]]) if s != row]
        mtp.append((row, *siblings[:RUNNER_UPS]))
        for runner_up in siblings[:RUNNER_UPS]:
            chain = [runner_up]
            while (child := tree.heavy_child[chain[-1]]) >= 0 and tree.default_active[child]:
                chain.append(child)
            if len(chain) > 1:
                rescues.append(tuple(chain))
    return DraftPlan(tree, tuple(mtp), spine[len(mtp) :], tuple(rescues))


def fill(
    plan: DraftPlan,
    pending: int,
    candidates: Sequence[tuple[int, Sequence[int]]],
    suffix: SuffixAutomaton | None,
) -> Proposal:
    """Puts the drafters' tokens into rows.

    candidates[d] is the MTP head's (argmax, ordered best tokens) at depth d + 1. `suffix`
    holds the request's tokens up to the pending one. A row without a source stays inactive,
    and no two siblings carry the same token: either would dead-end the walk.
    """
    proposal = Proposal.root_only(plan.tree, pending)
    spine_tokens = []
    for (row, *runner_ups), (best, ordered) in zip(plan.mtp, candidates, strict=False):
        proposal.put(row, best, "spine")
        spine_tokens.append(best)
        others = [token for token in ordered if token != best]
        for sibling, token in zip(runner_ups, others, strict=False):
            proposal.put(sibling, token, "runner-up")
    if suffix is None:
        return proposal
    if len(spine_tokens) == len(plan.mtp):
        _copy(proposal, plan.tail, suffix, spine_tokens, "suffix")
    for runner_up, *chain in plan.rescues:
        if proposal.active[runner_up]:
            # Depth-1 runner-ups follow the pending token; deeper ones follow the spine to them.
            above = spine_tokens[: plan.tree.depth[runner_up] - 1]
            extra = [*above, proposal.tokens[runner_up]]
            _copy(proposal, chain, suffix, extra, "rescue")
    return proposal


def _copy(
    proposal: Proposal,
    rows: Sequence[int],
    suffix: SuffixAutomaton,
    extra: Sequence[int],
    source: str,
) -> None:
    if not rows:
        return
    match = suffix.lookup(extra, len(rows))
    allowed = budget(match.length, len(rows), MIN_MATCH)
    for row, token in zip(rows, match.tokens[:allowed], strict=False):
        proposal.put(row, token, source)

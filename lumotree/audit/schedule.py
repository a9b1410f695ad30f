"""Forced cycles: which tree is verified, which path is accepted, which token follows.

Tokens of accepted rows come from a script (a text that goes on after the prefix), so that the
model sees what it was made for; all other rows carry random tokens, no two siblings the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from lumotree.draft.plan import Proposal
from lumotree.tree import TreeDescriptor

# The kinds of a cycle. principal: the whole spine, then a bonus token. correction: the spine is
# left half way. branch: off the spine. deep: the longest path off the spine. rejected: all drafts
# are. root: there are no drafts. random: any path of a random part of the tree.
KINDS = ("principal", "correction", "branch", "deep", "rejected", "root", "random")
SCHEDULES = {
    "a": ("principal", "correction", "branch", "root", "deep", "random", "root"),
    "b": ("deep", "rejected", "branch", "principal", "root", "correction", "root"),
    "c": ("random", "branch", "random", "correction", "random", "principal", "root"),
}


@dataclass(frozen=True)
class Cycle:
    """tokens: those the cycle materialises, root first. path: their rows in the proposal's tree.
    pending: the token that follows."""

    kind: str
    proposal: Proposal
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    pending: int


def forced_cycles(
    kinds: Sequence[str], tree: TreeDescriptor, script: Sequence[int], vocab: int, seed: int
) -> list[Cycle]:
    """One cycle per kind; script[0] is the first pending token.

    Raises ValueError when the script is too short: len(tree) tokens a cycle are always enough.
    """
    choose = random.Random(seed)
    cycles, at = [], 0
    for kind in kinds:
        active = _active(kind, tree, choose)
        path = _path(kind, tree, active, choose)
        if at + len(path) >= len(script):
            raise ValueError(
                f"a script of {len(script)} tokens is too short for {len(kinds)} cycles"
            )
        tokens = tuple(script[at : at + len(path)])
        pending = script[at + len(path)]
        proposal = _proposal(tree, active, path, tokens, pending, vocab, choose)
        cycles.append(Cycle(kind, proposal, path, tokens, pending))
        at += len(path)
    return cycles


def _active(kind: str, tree: TreeDescriptor, choose: random.Random) -> list[bool]:
    if kind == "root":
        return [True] + [False] * (len(tree) - 1)
    active = list(tree.default_active)
    if kind == "random":
        for row in range(1, len(tree)):
            active[row] = active[row] and active[tree.parents[row]] and choose.random() < 0.85
    return active


def _path(
    kind: str, tree: TreeDescriptor, active: Sequence[bool], choose: random.Random
) -> tuple[int, ...]:
    rows = [row for row in range(len(tree)) if active[row]]
    spine = tree.spine
    off = [row for row in rows if row not in spine] or list(spine[1:]) or [0]
    if kind in ("root", "rejected"):
        return (0,)
    if kind == "principal":
        return spine
    if kind == "correction":
        return spine[: max(1, len(spine) // 2)]
    if kind == "deep":
        return tree.root_paths[max(off, key=lambda row: (tree.depth[row], -row))]
    if kind == "branch":
        # Below the first depth: rows and slots then differ in more than one place.
        inner = [row for row in off if tree.depth[row] > 1 and not tree.children[row]]
        return tree.root_paths[choose.choice(inner or off)]
    return tree.root_paths[choose.choice(rows)]


def _proposal(
    tree: TreeDescriptor,
    active: Sequence[bool],
    path: Sequence[int],
    tokens: Sequence[int],
    pending: int,
    vocab: int,
    choose: random.Random,
) -> Proposal:
    proposal = Proposal.root_only(tree, tokens[0])
    forced = dict(zip(path, tokens, strict=True))
    for parent in range(len(tree)):
        children = [row for row in tree.children[parent] if active[row]]
        taken = {forced[row] for row in children if row in forced}
        if parent == path[-1]:
            taken.add(pending)  # the pending token is one that no child carries
        for row in children:
            token = forced.get(row)
            while token is None or (row not in forced and token in taken):
                token = choose.randrange(vocab)
            taken.add(token)
            proposal.put(row, token, "spine")
    return proposal

"""Faults of publication: the path that the state follows, and the surfaces that follow it.

Planted at the places that publish: the rows that a decoder verified, and `PathScan`, the verifier
that the component audit takes apart. Where a state must have followed another path,
publication really runs along that path, is taken back, and runs again along the right one; then
the surfaces of the first run are put in place. So nothing here depends on how a state is
advanced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lumotree.audit.faults.base import Fault, Mutation, replaced, replaced_captured
from lumotree.model.rows import TreeRows
from lumotree.ops.gdn import Path
from lumotree.state import HybridState
from lumotree.tree import TreeDescriptor
from lumotree.verifiers.path_scan import PathScan

# The path the state shall follow, given tree, true path and the path of the step before; None
# where this step has no other.
Alter = Callable[[TreeDescriptor, list[int], list[int] | None], list[int] | None]


def published(of_rows, of_verifier=None) -> list[AbstractContextManager]:
    """Patches of `publish` of a decoder's rows, in plain and in captured steps; of PathScan."""
    patches = [replaced(TreeRows, "publish", of_rows)]
    patches += replaced_captured("_Rows", "publish", of_rows)
    if of_verifier is not None:
        patches.append(replaced(PathScan, "publish", of_verifier))
    return patches


def tree_of(rows) -> TreeDescriptor:
    """The tree that a decoder's rows were verified in."""
    return rows.index.tree if isinstance(rows, TreeRows) else rows.decoder.active_tree


class Before:
    """The surfaces that publication advances, to take it back. The tree's own slots included."""

    def __init__(self, rows) -> None:
        state = rows.state
        self.rows, self.state = rows, state
        self.window = slice(rows.prefix, rows.prefix + len(tree_of(rows)))
        self.recurrent, self.conv = state.recurrent.clone(), state.conv.clone()
        self.keys = state.kv.keys[:, :, self.window].clone()
        self.values = state.kv.values[:, :, self.window].clone()
        self.mtp_hidden, self.length = state.mtp_hidden, state.length

    def restore(self) -> None:
        state = self.state
        state.recurrent.copy_(self.recurrent)
        state.conv.copy_(self.conv)
        state.kv.keys[:, :, self.window] = self.keys
        state.kv.values[:, :, self.window] = self.values
        state.mtp_hidden, state.length = self.mtp_hidden, self.length
        if not isinstance(self.rows, TreeRows):  # captured steps keep the length on the device
            self.rows.decoder.request.length.fill_(self.length)


def followed(alter: Alter, surfaces: Sequence[str]):
    """Patches after which `surfaces` ("recurrent", "conv") have followed the altered path."""

    def patches(mutation: Mutation) -> list[AbstractContextManager]:
        previous: list[list[int] | None] = [None]

        def other_path(tree: TreeDescriptor, path: list[int]) -> list[int] | None:
            found = alter(tree, path, previous[0])
            previous[0] = list(path)
            return found

        def of_rows(publish):
            def wrapped(rows, path: list[int], hidden: Tensor) -> None:
                if mutation.inside or rows.state is None:
                    return publish(rows, path, hidden)
                wrong = other_path(tree_of(rows), path)
                if wrong is None:
                    return publish(rows, path, hidden)
                mutation.inside = True
                try:
                    before = Before(rows)
                    publish(rows, wrong, hidden)
                    kept = {name: getattr(rows.state, name).clone() for name in surfaces}
                    before.restore()
                    publish(rows, path, hidden)
                    mutation.count += _put(rows.state, kept)
                finally:
                    mutation.inside = False

            return wrapped

        def of_verifier(publish):
            def wrapped(verifier: PathScan, recurrent: Tensor, path: Path) -> None:
                if not mutation.inside and "recurrent" in surfaces:
                    rows = path.rows[: int(path.count)].tolist()
                    wrong = other_path(verifier.tree, rows)
                    if wrong is not None:
                        mutation.count += 1
                        path = Path.of(verifier.tree, tuple(wrong), path.rows.device)
                publish(verifier, recurrent, path)

            return wrapped

        return published(of_rows, of_verifier)

    return patches


def kept_back(surface: str):
    """Patches after which `surface` is what it was before publication."""

    def patches(mutation: Mutation) -> list[AbstractContextManager]:
        def of_rows(publish):
            def wrapped(rows, path: list[int], hidden: Tensor) -> None:
                if mutation.inside or rows.state is None:
                    return publish(rows, path, hidden)
                mutation.inside = True
                try:
                    kept = {surface: getattr(rows.state, surface).clone()}
                    publish(rows, path, hidden)
                    mutation.count += _put(rows.state, kept)
                finally:
                    mutation.inside = False

            return wrapped

        def of_verifier(publish):
            def wrapped(verifier: PathScan, recurrent: Tensor, path: Path) -> None:
                if mutation.inside or surface != "recurrent":
                    return publish(verifier, recurrent, path)
                mutation.count += 1

            return wrapped

        return published(of_rows, of_verifier)

    return patches


def swapped_rings(mutation: Mutation) -> list[AbstractContextManager]:
    """The first two layers' states change places, advance, and change back: each has then taken
    the other's operands."""

    def swap(recurrent: Tensor) -> None:
        recurrent[:2] = recurrent[:2].flip(0)

    def of_rows(publish):
        def wrapped(rows, path: list[int], hidden: Tensor) -> None:
            ours = not mutation.inside and rows.state is not None and len(rows.state.recurrent) > 1
            if not ours:
                return publish(rows, path, hidden)
            mutation.inside = True
            try:
                swap(rows.state.recurrent)
                publish(rows, path, hidden)
                swap(rows.state.recurrent)
                mutation.count += 1
            finally:
                mutation.inside = False

        return wrapped

    def of_verifier(publish):
        def wrapped(verifier: PathScan, recurrent: Tensor, path: Path) -> None:
            if mutation.inside or len(recurrent) < 2:
                return publish(verifier, recurrent, path)
            mutation.count += 1
            swap(recurrent)
            publish(verifier, recurrent, path)
            swap(recurrent)

        return wrapped

    return published(of_rows, of_verifier)


def rows_for_slots(mutation: Mutation) -> list[AbstractContextManager]:
    """Keys and values are taken from the slot with the row's number, not from the row's slot."""

    def of_rows(publish):
        def wrapped(rows, path: list[int], hidden: Tensor) -> None:
            slots = tree_of(rows).slots
            if rows.state is None or all(slots[row] == row for row in path):
                return publish(rows, path, hidden)
            mutation.count += 1
            before = Before(rows)
            publish(rows, path, hidden)
            kv, place = rows.state.kv, slice(before.length, before.length + len(path))
            for side, saved in ((kv.keys, before.keys), (kv.values, before.values)):
                side[:, :, place] = saved[:, :, path]

        return wrapped

    return published(of_rows)


def _put(state: HybridState, kept: dict[str, Tensor]) -> int:
    """Overwrites surfaces; 1 when that changed a bit."""
    changed = 0
    for name, value in kept.items():
        here = getattr(state, name)
        changed |= not torch.equal(here, value)
        here.copy_(value)
    return int(changed)


def sibling(tree: TreeDescriptor, path: list[int], previous: list[int] | None) -> list[int] | None:
    """The path to the next sibling of the last row; of the deepest row that has one."""
    for depth in range(len(path) - 1, 0, -1):
        others = [row for row in tree.children[path[depth - 1]] if row != path[depth]]
        if others:
            return [*path[:depth], others[0], *path[depth + 1 :]]
    return None


def one_row_more(tree: TreeDescriptor, path: list[int], previous: list[int] | None) -> list[int]:
    """The path and the row that would follow it, or the last row again where none does."""
    return [*path, *(tree.children[path[-1]] or path[-1:])[:1]]


def stale(tree: TreeDescriptor, path: list[int], previous: list[int] | None) -> list[int] | None:
    """The path of the step before, as far as this tree has its rows."""
    if previous is None:
        return None
    kept = [row for row in previous if row < len(tree)]
    return None if kept == path else kept


FAULTS = (
    Fault(
        "no conv gather",
        "conv history",
        "continuation",
        "Publication leaves the convolution history as it was.",
        kept_back("conv"),
    ),
    Fault(
        "no replay",
        "GDN state",
        "continuation",
        "Publication leaves the recurrent state as it was.",
        kept_back("recurrent"),
    ),
    Fault(
        "wrong KV remap",
        "new KV",
        "continuation",
        "Keys and values are remapped by row number instead of slot number.",
        rows_for_slots,
    ),
    Fault(
        "sibling state",
        "GDN state",
        "continuation",
        "The published recurrent state has gone through a sibling of an accepted row.",
        followed(sibling, ("recurrent",)),
    ),
    Fault(
        "swapped rings",
        "GDN state",
        "continuation",
        "Two layers replay each other's operands.",
        swapped_rings,
    ),
    Fault(
        "stale graph buffer",
        "GDN state",
        "continuation",
        "The replay reads the accepted path of the step before.",
        followed(stale, ("recurrent",)),
    ),
    Fault(
        "pending token materialised",
        "GDN state, conv history",
        "continuation",
        "Recurrent state and convolution history take in the token after the accepted path.",
        followed(one_row_more, ("recurrent", "conv")),
    ),
    Fault(
        "padded row advances state",
        "GDN state",
        "continuation",
        "The replay goes on into the padding of the path buffer, which names row 0.",
        followed(lambda tree, path, previous: [*path, 0], ("recurrent",)),
    ),
)

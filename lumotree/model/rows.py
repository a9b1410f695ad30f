"""What rows see: tree rows of one verification step, or a run of prompt tokens.

TreeRows reads the persistent state and changes none of it; it records what publication needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lumotree.ops import reference as ops
from lumotree.state import HybridState, KVCache
from lumotree.tree import TreeDescriptor


@dataclass(frozen=True)
class ScanStep:
    """One step of the path-parallel scan: the rows at the same place of their paths.

    Rows lie at [start, stop) of scan order. Their parents' states are the pre-tree state
    (`parents` None on the first step), exported states by index (`parents` a tensor), or the
    states written by the step before (`carried`, from that scan-order offset). The first
    `kept` rows have children, so their states are written.
    """

    start: int
    stop: int
    kept: int
    parents: Tensor | None = None
    carried: int | None = None


class TreeIndex:
    """Index tensors of one descriptor, made once: gathers, masks, slots and the scan's steps."""

    def __init__(self, tree: TreeDescriptor, padded: int, width: int, device: torch.device) -> None:
        n = len(tree)
        self.tree, self.padded = tree, padded

        def tensor(values, dtype=torch.long) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        # Padding rows copy the root's view, so that they stay finite; nobody reads them.
        paths = [*tree.root_paths, *[(0,)] * (padded - n)]
        self.depth = tensor([len(path) - 1 for path in paths])
        self.slots = tensor(tree.slots)
        hidden = torch.ones(padded, n, dtype=torch.bool)
        for row, path in enumerate(paths):
            hidden[row, [tree.slots[r] for r in path]] = False
        self.hidden = hidden.to(device)
        self.slot_depth = [0] * n
        for row, slot in enumerate(tree.slots):
            self.slot_depth[slot] = tree.depth[row]
        self.conv_gather = tensor([self.history(path, width) for path in paths])
        order, steps = _scan_plan(tree)
        self.steps = [
            ScanStep(start, stop, kept, None if parents is None else tensor(parents), carried)
            for start, stop, kept, parents, carried in steps
        ]
        in_order = order == list(range(n))
        self.order = None if in_order else tensor(order)
        self.inverse = None if in_order else torch.argsort(self.order)

    @staticmethod
    def history(path: tuple[int, ...], width: int) -> list[int]:
        """Indices of a row's last `width` conv inputs in [history (width - 1), tree rows]."""
        before = list(range(width - 1))
        return (before + [width - 1 + row for row in path])[-width:]


def _scan_plan(tree: TreeDescriptor):
    """Rows in scan order, and per step (start, stop, kept, parents, carried)."""
    order: list[int] = []
    steps = []
    for level in range(tree.schedule[-1].level + 1):
        paths = [path for path in tree.schedule if path.level == level]
        # Longest first, then those whose last state is exported: states to write are a prefix.
        paths.sort(key=lambda p: (-len(p.rows), not tree.children[p.rows[-1]]))
        carried = None
        for j in range(len(paths[0].rows)):
            here = [path for path in paths if len(path.rows) > j]
            start = len(order)
            order += [path.rows[j] for path in here]
            kept = sum(1 for path in here if tree.children[path.rows[j]])
            parents = None
            if j == 0 and level > 0:
                parents = [order.index(path.parent) for path in here]
            steps.append((start, len(order), kept, parents, carried))
            carried = start
    return order, steps


class TreeRows:
    """One verification step over `index.tree`, `index.padded` rows, on top of `prefix` tokens.

    `first` is the first key that exists (1 in the draft head's cache).
    """

    def __init__(
        self,
        index: TreeIndex,
        cache: KVCache,
        prefix: int,
        rope: Tensor,
        state: HybridState | None = None,
        first: int = 0,
    ) -> None:
        self.index, self.cache, self.prefix, self.first = index, cache, prefix, first
        self.state = state
        self.angles = rope[index.depth + prefix]
        self.write_slots = index.slots + prefix
        room = ops.KEY_BLOCK - prefix % ops.KEY_BLOCK
        later = [depth >= room for depth in index.slot_depth]
        self.later = torch.tensor(later, device=rope.device) if any(later) else None
        self.conv_inputs: list[Tensor] = []
        self.operands: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def conv(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        inputs = torch.cat((self.state.conv[layer], x))
        self.conv_inputs.append(inputs)
        return ops.conv_taps(inputs[self.index.conv_gather], weight)

    def delta(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        index, n = self.index, len(self.index.tree)
        operands = (torch.stack((k[:n], q[:n]), dim=2), v[:n], g[:n].exp(), beta[:n])
        self.operands.append(operands)
        if index.order is not None:
            operands = tuple(x[index.order] for x in operands)
        out = _scan(self.state.recurrent[layer], operands, index.steps)
        if index.inverse is not None:
            out = out[index.inverse]
        return F.pad(out, (0, 0, 0, 0, 0, index.padded - n))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = len(self.index.tree)
        stop = self.prefix + n
        self.cache.write(layer, self.write_slots, k[:n], v[:n])
        return ops.tree_attention(
            q,
            self.cache.keys[layer][:, :stop],
            self.cache.values[layer][:, :stop],
            self.prefix,
            self.index.hidden,
            self.later,
            self.first,
        )

    def publish(self, path: list[int], hidden: Tensor) -> None:
        """Advances the state along `path` (rows from the root) and nothing else.

        Replays the recorded operands through the native update from the pre-tree state,
        gathers the conv history, moves keys and values to their linear places, and keeps the
        path's rows of `hidden` [n, hidden size] for the draft head.
        """
        state = self.state
        rows = torch.tensor(path, device=hidden.device)
        replay(state.recurrent, self.operands, rows)
        if self.conv_inputs:
            width = state.conv.shape[1] + 1
            last = TreeIndex.history(tuple(path), width)[1:]
            state.conv.copy_(torch.stack([inputs[last] for inputs in self.conv_inputs]))
        slots = [self.index.tree.slots[row] for row in path]
        if slots != list(range(len(path))):
            self.cache.move(self.write_slots[rows], self.prefix)
        if state.mtp_kv is not None:
            state.mtp_hidden = torch.cat((state.mtp_hidden, hidden[rows]))
        state.length += len(path)


def _scan(state: Tensor, operands: tuple[Tensor, ...], steps: list[ScanStep]) -> Tensor:
    """Path-parallel gated delta rule, rows in scan order; `state` [heads, dk, dv] is only read."""
    key_query, v, decay, beta = operands
    n, heads, dv = v.shape
    out = torch.empty_like(v)
    cut = state.new_empty(max((s.start + s.kept for s in steps), default=0), *state.shape)
    for step in steps:
        here = slice(step.start, step.stop)
        count = step.stop - step.start
        if step.carried is not None:
            before = cut[step.carried : step.carried + count].flatten(0, 1)
        elif step.parents is not None:
            before = cut[step.parents].flatten(0, 1)
        else:
            before = state
        kq = key_query[here].flatten(0, 1)
        fall, rate = (x[here].reshape(-1, 1) for x in (decay, beta))
        written, read = ops.delta_read(before, kq, v[here].flatten(0, 1), fall, rate)
        out[here] = read.view(count, heads, dv)
        if step.kept:
            b = step.kept * heads
            after = cut[step.start : step.start + step.kept].flatten(0, 1)
            ops.delta_write(before[:b], kq[:b], written[:b], fall[:b], out=after)
    return out


def replay(recurrent: Tensor, operands: list[tuple[Tensor, ...]], rows: Tensor) -> None:
    """Native single-token updates of all layers along `rows`, in place.

    recurrent [layers, heads, dk, dv]; operands per layer (key_query, v, decay, beta), row first.
    """
    if not operands:
        return
    key_query, v, decay, beta = (
        torch.stack([layer[part][rows] for layer in operands], dim=1) for part in range(4)
    )
    state = recurrent.flatten(0, 1)
    for j in range(rows.numel()):
        kq, fall = key_query[j].flatten(0, 1), decay[j].reshape(-1, 1)
        written, _ = ops.delta_read(
            state, kq, v[j].flatten(0, 1), fall, beta[j].reshape(-1, 1)
        )
        ops.delta_write(state, kq, written, fall, out=state)


class PrefillRows:
    """A run of prompt tokens at positions start .. start + n - 1; advances the state in place.

    The caller adds n to `state.length` once every layer has run.
    """

    def __init__(
        self,
        cache: KVCache,
        start: int,
        count: int,
        rope: Tensor,
        state: HybridState | None = None,
        first: int = 0,
    ) -> None:
        self.cache, self.state, self.start, self.first = cache, state, start, first
        self.stop = start + count
        self.angles = rope[start : self.stop]

    def conv(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        history = self.state.conv[layer]
        inputs = torch.cat((history, x))
        width = history.shape[0] + 1
        taps = torch.stack([inputs[i : i + x.shape[0]] for i in range(width)], dim=1)
        history.copy_(inputs[inputs.shape[0] - width + 1 :])
        return ops.conv_taps(taps, weight)

    def delta(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        heads_first = (x.transpose(0, 1) for x in (q, k, v, g, beta))
        return ops.delta_chunk(*heads_first, self.state.recurrent[layer]).transpose(0, 1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, slice(self.start, self.stop), k, v)
        return ops.prefill_attention(
            q,
            self.cache.keys[layer][:, : self.stop],
            self.cache.values[layer][:, : self.stop],
            self.start,
            self.first,
        )

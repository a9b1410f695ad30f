"""What rows see: tree rows of one verification step, or a run of prompt tokens.

TreeRows reads the persistent state and changes none of it; it records what publication needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lumotree.model.layers import Attention, GatedDeltaNet, Rows
from lumotree.ops import reference as ops
from lumotree.ops.gdn import Operands, Path
from lumotree.state import HybridState, KVCache
from lumotree.tree import TreeDescriptor

if TYPE_CHECKING:
    from lumotree.model.hybrid import HybridModel
    from lumotree.verifiers.base import Verifier


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

    def __init__(
        self, tree: TreeDescriptor, padded: int, width: int, group: int, device: torch.device
    ) -> None:
        n = len(tree)
        self.tree, self.padded = tree, padded

        def tensor(values, dtype=torch.long) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        # Padding rows copy the root's view, so that they stay finite; nobody reads them.
        paths = [*tree.root_paths, *[(0,)] * (padded - n)]
        self.depth = tensor([len(path) - 1 for path in paths])
        self.slots = tensor(tree.slots)
        self.linear = tree.slots == tuple(range(n))
        hidden = torch.ones(padded, n, dtype=torch.bool)
        for row, path in enumerate(paths):
            hidden[row, [tree.slots[r] for r in path]] = False
        # One row per query: each row has `group` query heads on a key head.
        hidden = hidden.repeat_interleave(group, dim=0).to(device)
        self.hidden = hidden if n > 1 else None
        self.slot_depth = [0] * n
        for row, slot in enumerate(tree.slots):
            self.slot_depth[slot] = tree.depth[row]
        self.conv_gather = tensor([self.history(p, width) for p in tree.root_paths]).flatten()
        order, steps = _scan_plan(tree)
        self.steps = [
            ScanStep(start, stop, kept, None if parents is None else tensor(parents), carried)
            for start, stop, kept, parents, carried in steps
        ]
        in_order = order == list(range(n))
        self.order = None if in_order else tensor(order)
        self.inverse = None if in_order else torch.argsort(self.order)
        self.scan_place = {row: place for place, row in enumerate(order)}

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

    `first` is the first key that exists (1 in the draft head's cache). A `verifier` takes the
    place of the scan and its replay.
    """

    def __init__(
        self,
        index: TreeIndex,
        cache: KVCache,
        prefix: int,
        rope: Tensor,
        state: HybridState | None = None,
        first: int = 0,
        verifier: Verifier | None = None,
    ) -> None:
        if prefix + len(index.tree) > cache.slots:
            raise ValueError(f"{prefix} + {len(index.tree)} rows do not fit {cache.slots} slots")
        self.index, self.cache, self.prefix, self.first = index, cache, prefix, first
        self.state, self.count, self.verifier = state, len(index.tree), verifier
        self.angles = ops.rope_angles(rope.index_select(0, index.depth + prefix))
        self.write_slots = (
            slice(prefix, prefix + self.count) if index.linear else index.slots + prefix
        )
        room = ops.KEY_BLOCK - prefix % ops.KEY_BLOCK
        # Key blocks, counted from that of the root: most steps stay in it.
        blocks = [
            max(0, depth - room) // ops.KEY_BLOCK + (depth >= room) for depth in index.slot_depth
        ]
        self.later = None
        if deepest := max(blocks):
            block = torch.tensor(blocks, device=rope.device)
            self.later = block == torch.arange(1, deepest + 1, device=rope.device)[:, None]
        self.conv_inputs: list[Tensor] = []
        # Per GDN layer, rows in scan order: query and key, written value, decay.
        self.records: list[tuple[Tensor, Tensor, Tensor]] = []

    def delta(self, mixer: GatedDeltaNet, projected: Tensor) -> Tensor:
        qkv, z, b_a = mixer.split(projected[: self.count])
        mixed = self.conv(mixer.layer, qkv, mixer.conv_weight)
        out = self.scan(mixer.layer, *mixer.operands(mixed, b_a))
        return ops.pad_rows(mixer.finish(out, z), projected.shape[0])

    def conv(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """[count, channels] inputs -> the same after the causal convolution along each path."""
        inputs = torch.cat((self.state.conv[layer], x))
        self.conv_inputs.append(inputs)
        taps = inputs if self.count == 1 else inputs.index_select(0, self.index.conv_gather)
        return ops.conv_taps(taps.view(self.count, -1, x.shape[1]), weight)

    def scan(self, layer: int, query_key: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Gated delta rule along each path, [count, heads, dv]; takes `mixer.operands`."""
        index = self.index
        if self.verifier is not None:
            return self._verify(layer, query_key, v, g.exp(), beta)
        operands = (query_key, v, g.exp(), beta)
        if index.order is not None:
            operands = tuple(x.index_select(0, index.order) for x in operands)
        out, written = _scan(self.state.recurrent[layer], operands, index.steps)
        self.records.append((operands[0], written, operands[2]))
        return out if index.inverse is None else out.index_select(0, index.inverse)

    def _verify(
        self, layer: int, query_key: Tensor, v: Tensor, decay: Tensor, beta: Tensor
    ) -> Tensor:
        verifier = self.verifier
        heads = verifier.geometry.heads // verifier.geometry.key_heads
        query, key = query_key[:, ::heads].unbind(2)
        overlap = (query * key).sum(-1)
        given = Operands(query, key, v, decay, beta, overlap)
        return verifier.verify(layer, self.state.recurrent, verifier.place(layer, given))

    def attend(self, mixer: Attention, projected: Tensor) -> Tensor:
        q, k, v, gate = mixer.operands(projected, self.angles)
        layer, stop = mixer.layer, self.prefix + self.count
        self.cache.write(layer, self.write_slots, k[: self.count], v[: self.count])
        out = ops.tree_attention(
            ops.wide(q),
            self.cache.keys[layer][:, :stop],
            self.cache.values[layer][:, :stop],
            self.prefix,
            self.index.hidden,
            self.later,
            self.first,
        )
        return mixer.finish(out, gate)

    def publish(self, path: list[int], hidden: Tensor) -> None:
        """Advances the state along `path` (rows from the root) and nothing else.

        Replays the recorded updates from the pre-tree state, gathers the conv history, moves
        keys and values to their linear places, and keeps the path's rows of `hidden`
        [n, hidden size] for the draft head.
        """
        state = self.state
        count = len(path)
        in_line = path == list(range(count))
        rows = slice(count) if in_line else torch.tensor(path, device=hidden.device)
        if self.verifier is not None:
            self.verifier.publish(
                state.recurrent, Path.of(self.index.tree, tuple(path), hidden.device)
            )
            self.verifier.flush(state.recurrent)
        elif self.records:
            replay(state.recurrent, self.records, [self.index.scan_place[row] for row in path])
        if self.conv_inputs:
            width = state.conv.shape[1] + 1
            last = TreeIndex.history(tuple(path), width)[1:]
            state.conv.copy_(torch.stack(self.conv_inputs)[:, last])
        if [self.index.tree.slots[row] for row in path] != list(range(count)):
            self.cache.move(self.index.slots[rows] + self.prefix, self.prefix)
        if state.mtp_kv is not None:
            state.mtp_hidden = torch.cat((state.mtp_hidden, hidden[rows]))
        state.length += count


class JoinedRows:
    """Rows of several requests side by side: products take them all, and each part sees its own
    state alone. Part i has `parts[i].index.padded` rows.
    """

    def __init__(self, parts: Sequence[TreeRows]) -> None:
        self.parts = parts
        self.sizes = [part.index.padded for part in parts]

    def delta(self, mixer: GatedDeltaNet, projected: Tensor) -> Tensor:
        pieces = zip(self.parts, projected.split(self.sizes), strict=True)
        return torch.cat([part.delta(mixer, piece) for part, piece in pieces])

    def attend(self, mixer: Attention, projected: Tensor) -> Tensor:
        pieces = zip(self.parts, projected.split(self.sizes), strict=True)
        return torch.cat([part.attend(mixer, piece) for part, piece in pieces])


def joined(parts: Sequence[TreeRows]) -> Rows:
    return parts[0] if len(parts) == 1 else JoinedRows(parts)


def _scan(
    state: Tensor, operands: tuple[Tensor, ...], steps: list[ScanStep]
) -> tuple[Tensor, Tensor]:
    """Path-parallel gated delta rule; `state` [heads, dk, dv] is only read.

    Operands are those of `TreeRows.scan` with rows in scan order. Returns what each row reads
    and what it writes, [rows, heads, dv] each.
    """
    query_key, v, decay, beta = operands
    query_key, v = query_key.flatten(0, 1), v.flatten(0, 1)
    decay, beta = decay.view(-1, 1, 1), beta.view(-1, 1)
    overlap = (query_key[:, 0] * query_key[:, 1]).sum(-1, keepdim=True)
    heads = state.shape[0]
    kept = max(step.start + step.kept for step in steps)
    cut = state.new_empty(kept, *state.shape) if kept else None
    results = []
    for step in steps:
        if step.carried is not None:
            before = cut[step.carried : step.carried + step.stop - step.start].flatten(0, 1)
        elif step.parents is not None:
            before = cut.index_select(0, step.parents).flatten(0, 1)
        else:
            before = state
        here = [query_key, v, decay, beta, overlap]
        if len(steps) > 1:
            here = [x[step.start * heads : step.stop * heads] for x in here]
        qk, value, fall, rate, shared = here
        held = ops.delta_hold(before, qk, fall)
        written = ops.delta_value(held, value, rate)
        results.append((ops.delta_read(held, shared, written), written))
        if step.kept:
            b = step.kept * heads
            after = cut[step.start : step.start + step.kept].flatten(0, 1)
            ops.delta_write(before[:b], qk[:b], written[:b], fall[:b], out=after)
    if len(results) == 1:
        return tuple(side.view(operands[1].shape) for side in results[0])
    return tuple(torch.cat(side).view(operands[1].shape) for side in zip(*results, strict=True))


def replay(recurrent: Tensor, records: list[tuple[Tensor, ...]], places: list[int]) -> None:
    """The native update of all layers along a path, in place: S = decay S + k d^T, row by row.

    recurrent [layers, heads, dk, dv]; records per layer (query and key, written value d, decay)
    of `TreeRows`, `places` the path's rows in them. d is the value that the row computed from
    its parent's state in the scan, which is the state reached here, bit for bit.
    """
    rows = slice(len(places)) if places == list(range(len(places))) else places
    query_key, written, decay = (
        torch.stack([layer[part] for layer in records])[:, rows].transpose(0, 1).flatten(1, 2)
        for part in range(3)
    )
    state = recurrent.flatten(0, 1)
    for qk, value, fall in zip(query_key, written, decay[:, :, None, None], strict=True):
        ops.delta_write(state, qk, value, fall, out=state)


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
        self.stop, self.count = start + count, count
        self.angles = ops.rope_angles(rope[start : self.stop])

    def delta(self, mixer: GatedDeltaNet, projected: Tensor) -> Tensor:
        qkv, z, b_a = mixer.split(projected)
        mixed = self.conv(mixer.layer, qkv, mixer.conv_weight)
        query_key, v, g, beta = mixer.operands(mixed, b_a)
        heads_first = (x.transpose(0, 1) for x in (*query_key.unbind(2), v, g, beta))
        out = ops.delta_chunk(*heads_first, self.state.recurrent[mixer.layer])
        return mixer.finish(out.transpose(0, 1), z)

    def conv(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        history = self.state.conv[layer]
        inputs = torch.cat((history, x))
        width = history.shape[0] + 1
        taps = torch.stack([inputs[i : i + x.shape[0]] for i in range(width)], dim=1)
        history.copy_(inputs[inputs.shape[0] - width + 1 :])
        return ops.conv_taps(taps, weight)

    def attend(self, mixer: Attention, projected: Tensor) -> Tensor:
        q, k, v, gate = mixer.operands(projected, self.angles)
        layer = mixer.layer
        self.cache.write(layer, slice(self.start, self.stop), k, v)
        out = ops.prefill_attention(
            ops.wide(q),
            self.cache.keys[layer][:, : self.stop],
            self.cache.values[layer][:, : self.stop],
            self.start,
            self.first,
        )
        return mixer.finish(out, gate)


def prefill_rows(
    model: HybridModel,
    cache: KVCache,
    start: int,
    count: int,
    state: HybridState | None = None,
    first: int = 0,
) -> Rows:
    """Rows of a run of prompt tokens, in kernels where the model's device has them."""
    kind: type = PrefillRows
    if model.kernels:
        from lumotree.captured.prefill import RunRows

        kind = RunRows
    return kind(cache, start, count, model.rope, state, first)

"""Launches of the attention kernels for one tree: prepare, attend, move; and attention=stock.

`prepare_rows`, `attend_rows` and `move_rows` are the definitions in plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lumotree.errors import LumoTreeError
from lumotree.ops import reference as ops
from lumotree.ops.attention_kernels import (
    combine_kernel,
    move_kernel,
    prefix_kernel,
    prepare_kernel,
    tail_kernel,
)
from lumotree.tree import TreeDescriptor

# Shared memory of a block where no device says otherwise (the smallest since 2017).
SHARED_BYTES = 99 * 1024
# Partial results that are added at once; decides the bits.
COMBINED = 32
# Rows of keys or values that one program of the move holds at once.
MOVE_ROWS = 16


@dataclass(frozen=True)
class Launch:
    """Sizes of the attention kernels. `chunk` and `block` decide the bits: one pair per device.

    chunk, block: keys of a partial result and of a step of its online softmax. tile, warps,
    stages: queries, warps and loads in flight of a prefix program; 16 queries a warp keep the
    instruction shape, so a wider tile changes no bit. row_tile, row_warps, row_stages: the same
    for a row's tail. programs: how many run at once (the multiprocessors of the device). tma:
    blocks are loaded through tensor descriptors. early: kernels may start before the one in front
    ends (programmatic dependent launch).
    """

    chunk: int = 512
    block: int = 64
    tile: int = 64
    warps: int = 4
    stages: int = 2
    row_tile: int = 64
    row_warps: int = 4
    row_stages: int = 2
    programs: int = 132
    tma: bool = False
    early: bool = False

    def shared_bytes(self, head_dim: int, itemsize: int) -> int:
        """The most a program keeps in shared memory: its queries, and a block for every stage."""
        prefix = self.tile + 2 * self.stages * self.block
        row = self.row_tile + 2 * self.row_stages * self.block
        return head_dim * itemsize * max(prefix, row)


def choose(head_dim: int, queries: int, dtype: torch.dtype, device: torch.device) -> Launch:
    """The launch for a head size and query count; limits are read from the device.

    Stages go first when shared memory is short, then the block.
    """
    launch, limit = Launch(stages=3), SHARED_BYTES
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        limit, new = properties.shared_memory_per_block_optin, properties.major >= 9
        many = properties.multi_processor_count
        launch = replace(launch, programs=many, early=new, tma=new)
    while launch.shared_bytes(head_dim, dtype.itemsize) > limit and launch.block > 16:
        if launch.stages > 1:
            stages = launch.stages - 1
            launch = replace(launch, stages=stages, row_stages=min(stages, launch.row_stages))
        else:
            launch = replace(launch, block=launch.block // 2)
    return launch


class TreeAttention:
    """Attention of one tree's rows in one geometry; holds the tree's tables on the device.

    padded: rows of a step, the tree's first. Raises LumoTreeError for sizes no kernel takes.
    """

    def __init__(
        self,
        tree: TreeDescriptor,
        padded: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        launch: Launch | None = None,
    ) -> None:
        if head_dim & (head_dim - 1) or head_dim < 16:
            raise LumoTreeError(
                f"attention kernels take head_dim 16, 32, 64, ..., not {head_dim}",
                "use attention=stock",
            )
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.group, self.dtype = heads // kv_heads, dtype
        self.count, self.padded = len(tree), padded
        self.queries = self.count * self.group
        self.launch = launch or choose(head_dim, self.queries, dtype, device)
        if self.group > self.launch.row_tile:
            raise LumoTreeError(
                f"attention kernels take {self.launch.row_tile} query heads a key head,"
                f" not {self.group}",
                "use attention=stock",
            )
        self.steps = max(tree.depth) + 1

        def table(rows, width: int = 0) -> Tensor:
            # Padding rows copy the root's entries.
            rows = [*rows, *[rows[0]] * (padded - self.count)]
            if width:
                rows = [[*row, *[0] * (width - len(row))] for row in rows]
            return torch.tensor(rows, dtype=torch.int32, device=device)

        self.depth, self.slots = table(tree.depth), table(tree.slots)
        self.path = table([[tree.slots[r] for r in p] for p in tree.root_paths], self.steps)
        seen = torch.zeros(padded, self.count, dtype=torch.bool)
        for row, path in enumerate(self.path.tolist()):
            seen[row, path[: int(self.depth[row]) + 1]] = True
        self.seen = seen.to(device)
        self.shape = dict(GROUP=self.group, KV_HEADS=kv_heads, D=head_dim)
        self.precision = "ieee" if dtype == torch.float32 else "tf32"
        # No contraction but what is spelled: two kernels must round alike.
        self.options = dict(enable_fp_fusion=False)
        if self.launch.early:
            self.options["launch_pdl"] = True

    def prepare(
        self,
        projected: Tensor,
        norm: ops.Norm,
        rope: Tensor,
        partner: Tensor,
        length: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Norm and rotation of queries and keys; keys and values of real rows into the cache.

        projected [padded, q | k | v | gate], rope [positions, 2, d], partner int64 [d], length
        int32 [1] (the prefix m), keys and values [kv_heads, slots, d]. Returns q
        [padded, heads, d], scaled; row r's key and value go to slot m + slots[r].
        """
        q = projected.new_empty(self.padded, self.heads, self.head_dim)
        prepare_kernel[(self.padded, self.heads + 2 * self.kv_heads)](
            projected,
            norm.scale,
            norm.eps,
            rope,
            partner,
            length,
            self.depth,
            self.slots,
            q,
            keys,
            values,
            self.count,
            keys.shape[1],
            HEADS=self.heads,
            KV_HEADS=self.kv_heads,
            D=self.head_dim,
            PDL=self.launch.early,
            num_warps=1,
            **self.options,
        )
        return q

    def attend(
        self,
        q: Tensor,
        projected: Tensor,
        keys: Tensor,
        values: Tensor,
        length: Tensor,
        chunks: int,
        first: int = 0,
    ) -> Tensor:
        """Gated attention of every row over the prefix and its root path, [padded, heads * d].

        chunks: how many chunks to launch; the deepest row must lie in one of them, that is,
        length + depth < chunks * launch.chunk. Keys before position `first` do not exist.
        Padding rows get zeros. Takes what `prepare` took and returned.
        """
        partials = self.partials(chunks)
        walk = self.walks(chunks)
        self.attend_prefix(q, keys, values, length, partials, first, walk)
        if walk:
            return self.combine(projected, length, partials)
        return self.attend_tail(q, projected, keys, values, length, partials, first)

    def walks(self, chunks: int) -> bool:
        """Whether rows walk their last chunk beside the prefix, or resume what it left of it.

        The bits are the same; walking saves a launch where its programs find room.
        """
        programs = self.kv_heads * (chunks - 1 + self.count)
        return self.queries <= self.launch.tile and (
            self.count == 1 or programs <= self.launch.programs
        )

    def partials(self, chunks: int) -> tuple[Tensor, Tensor]:
        """Room for the partial results: stats [2, chunks, kv_heads, queries] and sums [..., d]."""
        shape = (chunks, self.kv_heads, self.queries)
        kind = dict(dtype=torch.float32, device=self.depth.device)
        return torch.empty(2, *shape, **kind), torch.empty(*shape, self.head_dim, **kind)

    def attend_prefix(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        length: Tensor,
        partials: tuple[Tensor, Tensor],
        first: int,
        walk: bool,
    ) -> None:
        """The full blocks of the prefix into `partials`; with `walk` all that a row sees."""
        stats, sums = partials
        launch, chunks = self.launch, sums.shape[0]
        tiles, rows = -(-self.queries // launch.tile), self.count if walk else 0
        lanes = (launch.programs // self.kv_heads - rows) // tiles
        lanes = max(1, min(lanes, chunks))
        tma = launch.tma and first == 0
        blocks = (keys, values)
        if tma:
            flat = [x.view(-1, self.head_dim) for x in blocks]
            shape = [launch.block, self.head_dim]
            blocks = [TensorDescriptor.from_tensor(x, shape) for x in flat]
        prefix_kernel[(tiles, self.kv_heads, rows + lanes)](
            q,
            keys,
            values,
            *blocks,
            length,
            self.depth,
            self.path,
            sums,
            stats,
            self.queries,
            keys.shape[1],
            chunks,
            self.steps,
            rows,
            lanes,
            **self.shape,
            FIRST=first,
            TILE=launch.tile,
            BLOCK=launch.block,
            CHUNK=launch.chunk,
            STAGES=launch.stages,
            ROW_STAGES=launch.row_stages,
            WALK=walk,
            TMA=tma,
            PRECISION=self.precision,
            PDL=launch.early,
            num_warps=launch.warps,
            **self.options,
        )

    def attend_tail(
        self,
        q: Tensor,
        projected: Tensor,
        keys: Tensor,
        values: Tensor,
        length: Tensor,
        partials: tuple[Tensor, Tensor],
        first: int,
    ) -> Tensor:
        """What follows the full blocks, row by row in path order; the output of `attend`."""
        stats, sums = partials
        launch = self.launch
        out = projected.new_empty(self.padded, self.heads * self.head_dim)
        tail_kernel[(self.padded, self.kv_heads)](
            q,
            projected,
            keys,
            values,
            length,
            self.depth,
            self.path,
            sums,
            stats,
            out,
            self.count,
            self.queries,
            keys.shape[1],
            sums.shape[0],
            self.steps,
            **self.shape,
            FIRST=first,
            TILE=launch.row_tile,
            BLOCK=launch.block,
            CHUNK=launch.chunk,
            ROW_STAGES=launch.row_stages,
            PARTS=COMBINED,
            PRECISION=self.precision,
            PDL=launch.early,
            num_warps=launch.row_warps,
            **self.options,
        )
        return out

    def combine(self, projected: Tensor, length: Tensor, partials: tuple[Tensor, Tensor]) -> Tensor:
        """The output of `attend` where rows walked."""
        stats, sums = partials
        out = projected.new_empty(self.padded, self.heads * self.head_dim)
        combine_kernel[(self.padded, self.heads)](
            projected,
            length,
            self.depth,
            sums,
            stats,
            out,
            self.count,
            self.queries,
            sums.shape[0],
            **self.shape,
            CHUNK=self.launch.chunk,
            PARTS=COMBINED,
            PDL=self.launch.early,
            num_warps=self.launch.row_warps,
            **self.options,
        )
        return out

    def attend_stock(
        self,
        q: Tensor,
        projected: Tensor,
        keys: Tensor,
        values: Tensor,
        length: Tensor,
        chunks: int,
        first: int = 0,
    ) -> Tensor:
        """`attend` by torch's scaled_dot_product_attention over all slots of the chunks.

        A mask hides what a row must not see, so unseen slots must hold finite values. Padding
        rows see what the root sees.
        """
        slots = min(chunks * self.launch.chunk, keys.shape[1])
        slot = torch.arange(slots, dtype=torch.int32, device=keys.device)
        column = slot - length
        in_tree = self.seen.index_select(1, column.clamp(0, self.count - 1))
        prefix = (column < 0) & (slot >= first)
        mask = in_tree & (column >= 0) & (column < self.count) | prefix
        # Query heads of a key head stand as rows beside each other: the cache is not repeated.
        by_head = q.view(self.padded, self.kv_heads, self.group, -1).transpose(0, 1)
        out = F.scaled_dot_product_attention(
            by_head.reshape(1, self.kv_heads, -1, self.head_dim),
            keys[None, :, :slots],
            values[None, :, :slots],
            attn_mask=mask.repeat_interleave(self.group, 0),
            scale=1.0,
        )
        out = out[0].unflatten(1, (self.padded, self.group)).transpose(0, 1).flatten(1)
        return out * torch.sigmoid(projected[:, -self.heads * self.head_dim :])

    def move(
        self, keys: Tensor, values: Tensor, path: Tensor, count: Tensor, length: Tensor
    ) -> None:
        """Keys and values of an accepted path to their linear places, in place.

        keys, values [layers, kv_heads, slots, d], contiguous; path int32 rows from the root,
        count int32 [1], length the prefix m. Slot m + slots[path[i]] goes to m + i, i < count.
        """
        layers, kv_heads, slots, d = keys.shape
        move_kernel[(layers * kv_heads, 2)](
            keys,
            values,
            path,
            count,
            self.slots,
            length,
            slots,
            D=d,
            ROWS=MOVE_ROWS,
            PDL=self.launch.early,
            num_warps=4,
            **self.options,
        )


def prepare_rows(
    attention: TreeAttention,
    projected: Tensor,
    norm: ops.Norm,
    rope: Tensor,
    partner: Tensor,
    length: int,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Definition of `TreeAttention.prepare`."""
    a = attention
    heads, d, n = a.heads + a.kv_heads, a.head_dim, a.count
    qk, v, _ = projected.split_with_sizes((heads * d, a.kv_heads * d, a.heads * d), -1)
    qk = ops.rms_norm(qk.view(a.padded, heads, d), norm)
    angles = ops.rope_angles(rope.index_select(0, a.depth + length))
    q, k = ops.rope(qk, angles, partner).split_with_sizes((a.heads, a.kv_heads), 1)
    slots = a.slots[:n].long() + length
    keys[:, slots] = k[:n].transpose(0, 1)
    v = v.view(a.padded, a.kv_heads, d)[:n]
    values[:, slots] = v.transpose(0, 1).nan_to_num(0.0, 0.0, 0.0)
    return q


def attend_rows(
    attention: TreeAttention,
    q: Tensor,
    projected: Tensor,
    keys: Tensor,
    values: Tensor,
    length: int,
    first: int = 0,
) -> Tensor:
    """Definition of `TreeAttention.attend`, softmax row by row in q's dtype (float64 to compare).

    Padding rows get zeros.
    """
    a = attention
    out = q.new_zeros(a.padded, a.heads, a.head_dim)
    for row in range(a.count):
        steps = a.path[row, : int(a.depth[row]) + 1].long() + length
        slots = torch.cat((torch.arange(first, length, device=q.device), steps))
        k, v = (x[:, slots].to(q.dtype).repeat_interleave(a.group, 0) for x in (keys, values))
        weights = torch.softmax((k @ q[row][..., None])[..., 0], -1)
        out[row] = (weights[:, None] @ v)[:, 0]
    gate = projected[:, -a.heads * a.head_dim :]
    return ops.narrow(out, gate.dtype).flatten(1) * torch.sigmoid(gate)


def move_rows(
    attention: TreeAttention, keys: Tensor, values: Tensor, path: list[int], length: int
) -> None:
    """Definition of `TreeAttention.move`."""
    source = attention.slots[path].long() + length
    for side in (keys, values):
        side[:, :, length : length + len(path)] = side[:, :, source]

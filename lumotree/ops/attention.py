"""Launches of the attention kernels for one tree: prepare, attend, move; and attention=stock.

Definitions in plain torch: lumotree.ops.attention_define.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lumotree.errors import LumoTreeError
from lumotree.ops import reference as ops
from lumotree.ops.attention_cache_kernels import move_kernel, prepare_kernel
from lumotree.ops.attention_kernels import combine_kernel, prefix_kernel, tail_kernel
from lumotree.ops.attention_launch import Launch, choose
from lumotree.tree import TreeDescriptor

# Partial results that are added at once; decides the bits.
COMBINED = 32
# Rows of keys or values that one program of the move holds at once.
MOVE_ROWS = 16


class TreeAttention:
    """Attention of one tree's rows in one geometry; holds the tree's tables on the device.

    padded: rows of a request's step, the tree's first. seats: int32 [R] on the device, to serve R
    requests at once whose states lie in those of N seats (lumotree.ops.seats); below 0 a request
    is nobody's, and its rows are left as they are. Without, R = 1 and states have no dimension N.
    A row's bits are the same either way. Raises LumoTreeError for sizes no kernel takes.
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
        seats: Tensor | None = None,
    ) -> None:
        if head_dim & (head_dim - 1) or head_dim < 16:
            raise LumoTreeError(
                f"attention kernels take head_dim 16, 32, 64, ..., not {head_dim}",
                "run with --device cpu",
            )
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.group, self.dtype = heads // kv_heads, dtype
        self.count, self.padded = len(tree), padded
        self.queries = self.count * self.group
        self.launch = launch or choose(head_dim, dtype, device)
        if self.group > self.launch.row_tile:
            raise LumoTreeError(
                f"attention kernels take {self.launch.row_tile} query heads a key head,"
                f" not {self.group}",
                "run with --device cpu",
            )
        self.steps = max(tree.depth) + 1
        self.seats, self.requests = seats, 1 if seats is None else seats.numel()
        self.seated = dict(seats_ptr=seats, padded=None if seats is None else padded)

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

        projected [R * padded, q | k | v | gate], request after request; rope [positions, 2, d],
        partner int64 [d]; length int32 [1] (the prefix m), with seats [N]; keys and values
        [kv_heads, slots, d], with seats [N, kv_heads, slots, d], seats apart by any multiple of
        d. Returns q [R * padded, heads, d], scaled; row r's key and value go to slot
        m + slots[r] of its seat.
        """
        q = projected.new_empty(self.requests * self.padded, self.heads, self.head_dim)
        prepare_kernel[(self.padded, self.heads + 2 * self.kv_heads, self.requests)](
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
            keys.shape[-2],
            HEADS=self.heads,
            KV_HEADS=self.kv_heads,
            D=self.head_dim,
            PDL=self.launch.early,
            stride=self.stride(keys, values),
            **self.seated,
            num_warps=1,
            **self.options,
        )
        return q

    def stride(self, keys: Tensor, values: Tensor) -> int | None:
        """Rows of d from a seat to the next. Raises ValueError for seats that kernels misread."""
        if self.seats is None:
            return None
        rows, rest = divmod(keys.stride(0), self.head_dim)
        alike = keys.shape == values.shape and keys.stride() == values.stride()
        if rest or not alike or not keys[0].is_contiguous():
            raise ValueError(
                "seats of keys and values must be contiguous, whole rows of d apart, and alike"
            )
        return rows

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
        """Gated attention of every row over the prefix and its root path, [R * padded, heads * d].

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
        programs = self.requests * self.kv_heads * (chunks - 1 + self.count)
        return self.queries <= self.launch.tile and (
            self.count == 1 or programs <= self.launch.programs
        )

    def partials(self, chunks: int) -> tuple[Tensor, Tensor]:
        """Room for the partial results: stats [R, 2, chunks, kv_heads, queries], and sums
        [R, chunks, kv_heads, queries, d]."""
        requests, shape = self.requests, (chunks, self.kv_heads, self.queries)
        kind = dict(dtype=torch.float32, device=self.depth.device)
        stats = torch.empty(requests, 2, *shape, **kind)
        return stats, torch.empty(requests, *shape, self.head_dim, **kind)

    def blocks(self, side: Tensor) -> TensorDescriptor:
        """Keys or values as rows of d in blocks; with seats from the first one to the last."""
        d = self.head_dim
        if self.seats is None:
            rows = side.view(-1, d)
        else:
            end = (side.shape[0] - 1) * side.stride(0) + side[0].numel()
            rows = side.as_strided((end // d, d), (d, 1))
        return TensorDescriptor.from_tensor(rows, [self.launch.block, d])

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
        launch, chunks = self.launch, sums.shape[1]
        tiles, rows = -(-self.queries // launch.tile), self.count if walk else 0
        heads = self.requests * self.kv_heads
        lanes = (launch.programs // heads - rows) // tiles
        lanes = max(1, min(lanes, chunks))
        stride = self.stride(keys, values)
        tma = launch.tma and first == 0
        blocks = [self.blocks(x) if tma else x for x in (keys, values)]
        prefix_kernel[(tiles, heads, rows + lanes)](
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
            keys.shape[-2],
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
            stride=stride,
            **self.seated,
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
        out = projected.new_empty(self.requests * self.padded, self.heads * self.head_dim)
        tail_kernel[(self.padded, self.kv_heads, self.requests)](
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
            keys.shape[-2],
            sums.shape[1],
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
            stride=self.stride(keys, values),
            **self.seated,
            num_warps=launch.row_warps,
            **self.options,
        )
        return out

    def combine(self, projected: Tensor, length: Tensor, partials: tuple[Tensor, Tensor]) -> Tensor:
        """The output of `attend` where rows walked."""
        stats, sums = partials
        out = projected.new_empty(self.requests * self.padded, self.heads * self.head_dim)
        combine_kernel[(self.padded, self.heads, self.requests)](
            projected,
            length,
            self.depth,
            sums,
            stats,
            out,
            self.count,
            self.queries,
            sums.shape[1],
            **self.shape,
            CHUNK=self.launch.chunk,
            PARTS=COMBINED,
            PDL=self.launch.early,
            **self.seated,
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
        rows see what the root sees. Raises ValueError with seats: it serves one request.
        """
        if self.seats is not None:
            raise ValueError("attend_stock serves one request: make it without seats")
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
        With seats keys and values have a dimension N in front, and path [R, ...] and count [R]
        hold a request's.
        """
        layers, kv_heads, slots, d = keys.shape[-4:]
        strides = {}
        if self.seats is not None:
            strides = dict(path_stride=path.stride(0), count_stride=count.stride(0))
        move_kernel[(layers * kv_heads, 2, self.requests)](
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
            seats_ptr=self.seats,
            stride=self.stride(keys, values),
            **strides,
            num_warps=4,
            **self.options,
        )

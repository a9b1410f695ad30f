"""What a GDN layer hands to its recurrence: geometry, operands of the rows, the accepted path."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lumotree.model.config import ModelConfig
from lumotree.tree import TreeDescriptor


@dataclass(frozen=True)
class Geometry:
    """Recurrent part of a model: GDN layers, value heads, key heads, head widths."""

    layers: int
    heads: int
    key_heads: int
    dk: int
    dv: int

    @classmethod
    def of(cls, config: ModelConfig) -> Geometry:
        return cls(
            config.num_linear_layers,
            config.linear_num_value_heads,
            config.linear_num_key_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )

    @property
    def state_bytes(self) -> int:
        """One layer's float32 state."""
        return 4 * self.heads * self.dk * self.dv


# Published Qwen3.5-family geometries; `tiny` is for tests.
GEOMETRIES = {
    "27b": Geometry(48, 48, 16, 128, 128),
    "9b": Geometry(24, 32, 16, 128, 128),
    "4b": Geometry(24, 32, 16, 128, 128),
    "2b": Geometry(18, 16, 16, 128, 128),
    "0.8b": Geometry(18, 16, 16, 128, 128),
    "tiny": Geometry(2, 4, 2, 32, 32),
}


@dataclass(frozen=True)
class Operands:
    """What one layer computes for its rows before the recurrence.

    query, key float32 [rows, key heads, dk], L2-normalised, query scaled by dk^-0.5; value
    [rows, heads, dv] in the model dtype; decay = exp(g) and beta float32 [rows, heads];
    overlap = q . k float32 [rows, key heads]. Value head h reads key head
    h // (heads // key heads).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor
    overlap: Tensor

    @classmethod
    def empty(
        cls,
        g: Geometry,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        keys: torch.dtype = torch.float32,
    ) -> Operands:
        """Room for the operands of `rows`; `keys` is the dtype of queries and keys."""

        def room(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(rows, *shape, dtype=kind, device=device)

        return cls(
            query=room(g.key_heads, g.dk, kind=keys),
            key=room(g.key_heads, g.dk, kind=keys),
            value=room(g.heads, g.dv, kind=dtype),
            decay=room(g.heads),
            beta=room(g.heads),
            overlap=room(g.key_heads),
        )

    def copy_(self, other: Operands) -> None:
        """Copies every part that does not lie here already."""
        for f in fields(self):
            here, given = getattr(self, f.name), getattr(other, f.name)
            if here.data_ptr() != given.data_ptr():
                here.copy_(given)

    def map(self, change) -> Operands:
        return Operands(**{f.name: change(getattr(self, f.name)) for f in fields(self)})


@dataclass(frozen=True)
class Path:
    """Accepted rows from the root, on the device: a captured publication reads them anew.

    rows int32 [length + 1], padded with row 0; count int32 [1]. Of R requests (lumotree.ops.seats):
    rows [R, length + 1] and count [R], views at any stride of a request; `live` and `last` are
    for one. The host list is for callers that publish without a graph.
    """

    rows: Tensor
    count: Tensor

    @classmethod
    def empty(cls, tree: TreeDescriptor, device: torch.device) -> Path:
        length = max(tree.depth) + 1
        return cls(
            torch.zeros(length + 1, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )

    @classmethod
    def of(cls, tree: TreeDescriptor, rows: tuple[int, ...], device: torch.device) -> Path:
        path = cls.empty(tree, device)
        path.rows[: len(rows)] = torch.tensor(rows, dtype=torch.int32, device=device)
        path.count.fill_(len(rows))
        return path

    def copy_(self, other: Path) -> None:
        self.rows.copy_(other.rows)
        self.count.copy_(other.count)

    @property
    def length(self) -> int:
        return self.rows.shape[-1] - 1

    def live(self) -> Tensor:
        """bool [length]: which of the padded rows are accepted."""
        return torch.arange(self.length, device=self.rows.device) < self.count

    def last(self) -> Tensor:
        """int64 [1]: the frontier, the deepest accepted row."""
        return self.rows.index_select(0, (self.count.long() - 1).clamp(min=0)).long()

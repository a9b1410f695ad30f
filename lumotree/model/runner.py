"""Row counts and index tensors: every forward of decode time goes through here.

Row mode `natural`: a step pays for its own active rows, padded to `multiple` rows, which is as
far as equal bits need on this machine. `matched`: every step
runs at the same row count (MATCHED_ROWS, or its own where a tree is larger).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lumotree.model.hybrid import HybridModel
from lumotree.model.rows import TreeIndex
from lumotree.tree import TreeDescriptor, tree_from_name

MATCHED_ROWS = 32
# Which rows are active differs from step to step; a wide tree has many such shapes.
MAX_INDICES = 1024


class RowRunner:
    """Pads rows and keeps the index tensors of the trees seen so far."""

    def __init__(self, model: HybridModel, mode: str, multiple: int) -> None:
        self.mode, self.multiple = mode, multiple
        config = model.config
        self._width = config.conv_kernel
        self._group = config.num_attention_heads // config.num_key_value_heads
        self._device = model.device
        self._indices: dict[tuple[TreeDescriptor, int], TreeIndex] = {}

    def padded(self, rows: int) -> int:
        """The row count of a step of so many rows of its own."""
        padded = -(-rows // self.multiple) * self.multiple
        return max(padded, MATCHED_ROWS) if self.mode == "matched" else padded

    def index(self, tree: TreeDescriptor | str) -> TreeIndex:
        """Index tensors of `tree` at the row count this mode gives it."""
        if isinstance(tree, str):
            tree = tree_from_name(tree)
        padded = self.padded(len(tree))
        key = (tree, padded)
        if key not in self._indices:
            if len(self._indices) >= MAX_INDICES:
                self._indices.clear()
            self._indices[key] = TreeIndex(tree, padded, self._width, self._group, self._device)
        return self._indices[key]

    def token_ids(self, tokens: Sequence[int], padded: int) -> Tensor:
        """int64 [padded]; padding rows carry token 0."""
        return torch.tensor(
            [*tokens, *[0] * (padded - len(tokens))], dtype=torch.long, device=self._device
        )

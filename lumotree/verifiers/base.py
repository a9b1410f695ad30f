"""The contract of a GDN verifier: verify a tree from a state it must not lose, publish a path.

A verifier sees one layer at a time, in order, as the decoder's layers are; `publish` then
advances the persistent states of all layers along the accepted path. Named buffers are whatever
it keeps from a layer's `verify` to `publish`, or reuses between layers; model activations (the
operands, the outputs) are nobody's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lumotree.ops.gdn import Geometry, Operands, Path
from lumotree.tree import TreeDescriptor

MIB = 2**20


class Verifier(ABC):
    """One method of verifying a tree; `tree` has no inactive rows.

    name: the row of the table and the value of `verify=`. title: who it is. policy: its
    numerical policy, one sentence. exact: whether it claims native bits.
    empty_path: whether `publish` of a path of count 0 leaves the states as they are.
    batched: whether it takes `seats` and serves several requests at once (lumotree.ops.seats).
    """

    name: ClassVar[str]
    title: ClassVar[str]
    policy: ClassVar[str]
    exact: ClassVar[bool] = False
    empty_path: ClassVar[bool] = False
    batched: ClassVar[bool] = False
    # Largest error of an output and of a published state against float64 that passes the gate,
    # for operands of unit size: float32 arithmetic, unless the policy rounds to bfloat16.
    tolerance: ClassVar[tuple[float, float]] = (1e-5, 1e-4)

    def __init__(
        self,
        tree: TreeDescriptor,
        geometry: Geometry,
        device: torch.device,
        value_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.value_dtype = value_dtype
        self.tree, self.geometry, self.device = tree, geometry, torch.device(device)
        self.rows = len(tree)
        self.buffers: dict[str, Tensor] = {}

    def buffer(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """A named buffer, NaN until written: what nobody wrote must not go unseen."""
        fill = float("nan") if dtype.is_floating_point else 0
        self.buffers[name] = torch.full(shape, fill, dtype=dtype, device=self.device)
        return self.buffers[name]

    @property
    def buffers_mib(self) -> float:
        return sum(b.numel() * b.element_size() for b in self.buffers.values()) / MIB

    def destination(self, layer: int, operands: Operands) -> Operands:
        """Where a layer's operands shall be written: a verifier that keeps some offers its own
        buffers for them, and takes the rest of `operands`, which are anybody's."""
        return operands

    def place(self, layer: int, operands: Operands) -> Operands:
        """Copies operands that are there already to their destination, which it returns."""
        kept = self.destination(layer, operands)
        kept.copy_(operands)
        return kept

    @abstractmethod
    def verify(self, layer: int, recurrent: Tensor, operands: Operands) -> Tensor:
        """Outputs of all rows, float32 [rows, heads, dv].

        recurrent float32 [layers, heads, dk, dv]; only a verifier whose `pending` is true may
        write to it, and then only the commit of the step before. With seats: recurrent
        [N, layers, ...], operands and outputs of R * rows rows; those of nobody's are undefined.
        """

    @abstractmethod
    def publish(self, recurrent: Tensor, path: Path) -> None:
        """Advances every layer's state along `path`, or records what `flush` shall do."""

    pending: bool = False

    def flush(self, recurrent: Tensor) -> None:  # noqa: B027 - nothing to do is the rule
        """Completes a publication that waits for the next verification; most have none."""

    def forget(self) -> None:  # noqa: B027
        """Drops a publication that waits: the states are another request's from here on."""


def by_value_head(x: Tensor, heads: int) -> Tensor:
    """[rows, key heads, ...] -> [heads, rows, ...]: the key head of each value head."""
    return x.repeat_interleave(heads // x.shape[1], dim=1).transpose(0, 1)

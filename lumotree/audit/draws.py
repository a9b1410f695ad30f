"""What production code draws from: the values, noise positions and seed behind each row's token.

A token is the argmax of its row's kept values plus Gumbel noise, so the softmax of those values
is the distribution it is drawn from, exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from lumotree import sampling
from lumotree.audit.faults.base import replaced
from lumotree.decoder import Decoder, Verified
from lumotree.request import SamplingParams
from lumotree.sampling import TokenHistory
from lumotree.tree import TreeDescriptor


@dataclass
class Draws:
    """Of one selection. values and ids [rows, kept], positions int64 [rows]."""

    values: Tensor | None = None
    ids: Tensor | None = None
    positions: list[int] = field(default_factory=list)
    seed: int | None = None

    def probabilities(self, vocab: int) -> np.ndarray:
        """float64 [rows, vocab]."""
        rows = self.values.double().softmax(-1)
        full = torch.zeros(len(rows), vocab, dtype=torch.float64, device=rows.device)
        return full.scatter_(1, self.ids, rows).cpu().numpy()


@contextmanager
def recorded_draws() -> Iterator[Draws]:
    """The last draw made inside the `with`."""
    draws = Draws()

    def make(draw):
        def wrapped(values, ids, seed, positions):
            draws.values, draws.ids = values.clone(), ids.clone()
            draws.seed, draws.positions = seed, positions.tolist()
            return draw(values, ids, seed, positions)

        return wrapped

    with replaced(sampling, "_perturbed_argmax", make):
        yield draws


class Selector(Decoder):
    """The selection stage of a decoder alone, over logits from anywhere."""

    def __init__(self, device: torch.device) -> None:
        self.model = SimpleNamespace(device=device)
        self._path_tensors = {}

    def choose(
        self,
        tree: TreeDescriptor,
        tokens: list[int],
        logits: Tensor,
        params: SamplingParams,
        history: TokenHistory,
        root_position: int,
    ) -> tuple[list[int], int]:
        """`Decoder.select` of a step that was never verified."""
        run = SimpleNamespace(params=params, history=history)
        rows = SimpleNamespace(prefix=root_position)
        kept = tuple(range(len(tree)))
        active = [True] * len(tree)
        return self.select(run, Verified(tree, kept, tokens, rows, logits, logits, active))

"""Several requests of one arm, decoded side by side: one draft and one target forward for all.

Weights are read once for every request of a round. What a request answers does not depend on
the others: its rows see its own state alone, and products have equal bits at the row counts that
`probe_rows` found so on this machine; a round of more rows is cut.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lumotree.decoder import EXACT_SCAN, Decoder, Run, timed
from lumotree.model.hybrid import HybridModel
from lumotree.state import HybridState

# Start-up may take so long to find out how many rows a round can have.
PROBE_S = 5.0


@dataclass(frozen=True)
class Active:
    """A request past its prompt, in the seat of a decoder of its own."""

    decoder: Decoder
    run: Run
    state: HybridState


class Batch:
    """Rounds over requests whose decoders share a model and a configuration.

    most_rows: rows of a forward that are known to have the bits of smaller ones.
    """

    def __init__(self, decoders: Sequence[Decoder]) -> None:
        self.decoders = list(decoders)
        first = self.decoders[0]
        tree = first.runner.padded(len(first.tree))
        self.most_rows = tree
        # Other verifiers keep one request's operands from a verification to its publication, and
        # captured graphs are of one request each (lumotree.captured.batch has those of several).
        alone = first.config.verify != EXACT_SCAN or first.model.kernels
        if len(self.decoders) > 1 and not alone:
            multiple = first.runner.multiple
            counts = range(tree, tree * len(decoders) + 1, multiple)
            self.most_rows = probe_rows(first.model, multiple, counts)
        self.together = max(1, self.most_rows // tree)

    @torch.inference_mode()
    def step(self, active: Sequence[Active]) -> dict[int, Exception]:
        """One round for every request: draft, verify, select, publish.

        Returns who failed, by place, in what concerns a request alone; the others went on.
        """
        failed: dict[int, Exception] = {}
        for start in range(0, len(active), self.together):
            part = self._round(active[start : start + self.together])
            failed |= {start + place: error for place, error in part.items()}
        return failed

    def _round(self, active: Sequence[Active]) -> dict[int, Exception]:
        first = active[0].decoder
        failed: dict[int, Exception] = {}
        if len(active) == 1:
            try:
                first.step(active[0].run, active[0].state)
            except Exception as error:
                failed[0] = error
            return failed
        runs, device = [a.run for a in active], first.model.device
        with timed(runs, "draft", device):
            proposals = first.propose_all([(a.run, a.state) for a in active])
        with timed(runs, "verify", device):
            verified = first.verify_all(
                [(a.state, proposal) for a, proposal in zip(active, proposals, strict=True)]
            )
        for place, a in enumerate(active):
            try:
                a.decoder.settle(a.run, proposals[place], verified[place])
            except Exception as error:
                failed[place] = error
        return failed


@torch.inference_mode()
def probe_rows(
    model: HybridModel, multiple: int, counts: Sequence[int], seconds: float = PROBE_S
) -> int:
    """Up to which of `counts` products of so many rows give the bits that they give `multiple`.

    counts: ascending multiples of `multiple`; the first, of one request, is taken to hold. What
    cannot be tried in `seconds` is not claimed.
    """
    began = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(counts[-1], model.config.hidden_size, generator=generator)
    hidden = hidden.to(model.device, model.dtype)
    pieces = hidden.split(multiple)
    wanted: list[list[Tensor]] = []
    for known, count in pairwise(counts):
        here = pieces[len(wanted) : count // multiple]
        wanted += [_products(model, piece) for piece in here]
        made = _products(model, hidden[:count])
        parts = zip(*wanted, strict=True)
        same = all(torch.equal(x, torch.cat(part)) for x, part in zip(made, parts, strict=True))
        if not same or time.perf_counter() - began > seconds:
            return count if same else known
    return counts[-1]


def _products(model: HybridModel, x: Tensor) -> list[Tensor]:
    """Every kind of product that a step makes of rows [n, hidden size], each of its own input."""
    table, made = model.table, []
    kinds = {type(layer.mixer): layer for layer in model.layers}.values()
    for layer in kinds:
        projected = table.linear(x, layer.mixer.in_proj)
        mixed = projected[:, : _inputs(layer.mixer.out_proj, x)].contiguous()
        total, normed = table.linear_add_norm(x, mixed, layer.mixer.out_proj, layer.post_norm)
        inner = table.linear_swiglu(normed, layer.mlp.gate_up)
        made += [projected, total, inner]
        made += table.linear_add_norm(total, inner, layer.mlp.down, layer.input_norm)
    made.append(model.logits(x))
    if model.mtp is not None:
        made.append(table.linear(torch.cat((x, x), -1), model.mtp.fc))
    return made


def _inputs(packed: Tensor, x: Tensor) -> int:
    """Inputs of a packed weight whose outputs are as many as x has columns."""
    return packed.numel() // x.shape[1]

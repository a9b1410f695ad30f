"""Several requests of one arm, decoded side by side: one draft and one target forward for all.

Weights are read once for every request of a round. What a request answers does not depend on
the others: its rows see its own state alone, and products have equal bits at the row counts that
`probe_rows` found so on this machine; a round of more rows is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lumotree.decoder import EXACT_SCAN, Decoder, Run, timed
from lumotree.model.hybrid import HybridModel
from lumotree.model.runner import MATCHED_ROWS
from lumotree.state import HybridState


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
        tree = -(-len(first.tree) // first.runner.multiple) * first.runner.multiple
        if first.runner.mode == "matched":
            tree = max(tree, MATCHED_ROWS)
        self.most_rows = tree
        # Other verifiers keep one request's operands from a verification to its publication, and
        # captured graphs are of one request each (lumotree.captured.batch has those of several).
        alone = first.config.verify != EXACT_SCAN or first.model.kernels
        if len(self.decoders) > 1 and not alone:
            self.most_rows = probe_rows(first.model, first.runner.multiple, tree, len(decoders))
        self.together = max(1, self.most_rows // tree)

    @torch.inference_mode()
    def step(self, active: Sequence[Active]) -> None:
        """One round for every request: draft, verify, select, publish."""
        for start in range(0, len(active), self.together):
            self._round(active[start : start + self.together])

    def _round(self, active: Sequence[Active]) -> None:
        first = active[0].decoder
        if len(active) == 1:
            first.step(active[0].run, active[0].state)
            return
        runs, device = [a.run for a in active], first.model.device
        with timed(runs, "draft", device):
            proposals = first.propose_all([(a.run, a.state) for a in active])
        with timed(runs, "verify", device):
            verified = first.verify_all(
                [(a.state, proposal) for a, proposal in zip(active, proposals, strict=True)]
            )
        for a, proposal, answer in zip(active, proposals, verified, strict=True):
            a.decoder.settle(a.run, proposal, answer)


@torch.inference_mode()
def probe_rows(model: HybridModel, multiple: int, least: int, requests: int) -> int:
    """Up to how many rows the products of a step give the bits that they give `multiple` rows.

    From `least`, the rows of one request, to those of `requests`, in steps of `multiple`; `least`
    where already the next count differs.
    """
    generator = torch.Generator().manual_seed(0)
    most = least * requests
    hidden = torch.randn(most, model.config.hidden_size, generator=generator)
    hidden = hidden.to(model.device, model.dtype)
    parts = [_products(model, piece) for piece in hidden.split(multiple)]
    wanted = [torch.cat(outputs) for outputs in zip(*parts, strict=True)]
    for count in range(least + multiple, most + 1, multiple):
        made = _products(model, hidden[:count])
        if not all(
            torch.equal(here, there[:count]) for here, there in zip(made, wanted, strict=True)
        ):
            return count - multiple
    return most


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

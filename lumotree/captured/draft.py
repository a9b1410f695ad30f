"""Drafting with the MTP head on fixed buffers; the torch definition is lumotree.draft.mtp."""

from __future__ import annotations

import torch
from torch import Tensor

from lumotree.captured.rows import AttentionRows
from lumotree.captured.step import VerifyStep
from lumotree.model.hybrid import HybridModel
from lumotree.ops.select import TopCandidates
from lumotree.state import HybridState
from lumotree.tree import TreeDescriptor, tree_from_name


class DraftPasses:
    """Refill of the head's keys from true hidden rows, then `passes` passes along the spine.

    hidden [steps, hidden size] and tokens int32 [steps]: rows of the positions just published
    and the tokens after them, the pending one last; count int32 [1] of them are real.
    candidates int32 [passes, 4]: argmax and ordered best three of each depth; leads float32
    [passes]: the best logit less the second. With `first` passes, the others are `more`'s.
    """

    def __init__(
        self,
        model: HybridModel,
        state: HybridState,
        step: VerifyStep,
        passes: int,
        first: int,
        vocab: int,
    ) -> None:
        self.model, self.step, self.passes, self.vocab = model, step, passes, vocab
        device = model.device
        steps = max(step.tree.depth) + 1
        self.hidden = torch.zeros(steps, model.config.hidden_size, dtype=model.dtype, device=device)
        self.tokens = torch.zeros(steps, dtype=torch.int32, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self.start = torch.zeros(1, dtype=torch.int32, device=device)
        self.slots = torch.zeros(max(passes, 1), 1, dtype=torch.int32, device=device)
        self.ahead = torch.arange(max(passes, 1), dtype=torch.int32, device=device)[:, None]
        self.first = min(first or passes, passes)
        self.results = torch.zeros(passes, 5, dtype=torch.int32, device=device)
        self.candidates, self.leads = self.results[:, :4], self.results[:, 4].view(torch.float32)
        self.last = torch.zeros_like(self.hidden[:1])

        def see(tree: TreeDescriptor, length: Tensor) -> AttentionRows:
            return AttentionRows(model, tree, len(tree), state.mtp_kv, length, first=1)

        chain = tree_from_name(f"chain-{steps - 1}" if steps > 1 else "root")
        self.refill_rows = see(chain, self.start)
        root = tree_from_name("root")
        self.pass_rows = [see(root, slot) for slot in self.slots]
        self.top = TopCandidates(1, vocab, live=vocab, device=device)

    def feed(self, hidden: Tensor, token: int) -> None:
        """Takes the prompt's last hidden row [1, hidden size] and the first pending token."""
        self.hidden[:1].copy_(hidden)
        self.tokens[:1].fill_(token)
        self.count.fill_(1)

    def take(self) -> None:
        """Takes the rows that the step published and the tokens after them."""
        step = self.step
        step.selector.take(step.hidden, step.tokens, self.hidden, self.tokens, self.count)

    def draft(self) -> None:
        model, length = self.model, self.step.request.length
        self.start.copy_(length + 1 - self.count)
        self.slots.copy_(length + self.ahead)
        out = model.draft_forward(self.tokens, self.hidden, self.refill_rows)
        hidden = out.index_select(0, (self.count - 1).clamp(min=0))
        self._passes(1, self.first, hidden)

    def more(self) -> None:
        """The passes after the first ones, from where those left off."""
        self._passes(self.first + 1, self.passes, self.last)

    def _passes(self, start: int, stop: int, hidden: Tensor) -> None:
        """Depths start .. stop; `hidden` [1, hidden size] predicts the token of depth `start`."""
        model = self.model
        for depth in range(start, stop + 1):
            logits = model.logits(hidden, self.vocab)
            best, ordered = self.top(logits)
            self.candidates[depth - 1, 0].copy_(best[0])
            self.candidates[depth - 1, 1:].copy_(ordered[0])
            if depth < self.passes:
                hidden = model.draft_forward(best, hidden, self.pass_rows[depth])
            if depth == self.first < self.passes:
                pair = logits[0].index_select(0, ordered[0, :2])
                self.leads[depth - 1].copy_(pair[0] - pair[1])
                self.last.copy_(hidden)

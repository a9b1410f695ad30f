"""Drafting with the MTP head on fixed buffers; the torch definition is lumotree.draft.mtp."""

from __future__ import annotations

import torch
from torch import Tensor

from lumotree.captured.rows import AttentionRows
from lumotree.captured.step import VerifyStep
from lumotree.draft.mtp import sure
from lumotree.model.drafter import Drafter
from lumotree.model.hybrid import HybridModel
from lumotree.ops.select import TopCandidates
from lumotree.state import KVCache
from lumotree.tree import TreeDescriptor, tree_from_name


def candidates_of(result: Tensor, depths: int) -> list[tuple[int, list[int]]]:
    """(argmax, ordered best three) of the first `depths` passes of a request's results."""
    return [(best, ordered) for best, *ordered in result[:depths, :4].tolist()]


def is_sure(result: Tensor, depth: int) -> bool:
    """Whether passes after `depth` pay, by a request's results."""
    return sure([result.view(torch.float32)[depth, 4].item(), 0.0])


class DraftInputs:
    """What the head refills from, a place a seat.

    hidden [seats, steps, hidden size] and tokens int32 [seats, steps]: rows of the positions just
    published and the tokens after them, the pending one last; count int32 [seats] of them are
    real. `steps` is the longest path that a step publishes.
    """

    def __init__(self, model: HybridModel, tree: TreeDescriptor, seats: int = 1) -> None:
        self.steps = max(tree.depth) + 1
        width, device = model.config.hidden_size, model.device
        self.hidden = torch.zeros(seats, self.steps, width, dtype=model.dtype, device=device)
        self.tokens = torch.zeros(seats, self.steps, dtype=torch.int32, device=device)
        self.count = torch.zeros(seats, dtype=torch.int32, device=device)

    def feed(self, hidden: Tensor, token: int, seat: int = 0) -> None:
        """Takes the prompt's last hidden row [1, hidden size] and the first pending token."""
        self.hidden[seat, :1].copy_(hidden)
        self.tokens[seat, :1].fill_(token)
        self.count[seat].fill_(1)


class DraftPasses:
    """Refill of the head's keys from true hidden rows, then `passes` passes along the spine.

    results int32 [requests, passes, 5]: of each depth argmax, ordered best three, and the bits of
    a float32, the best logit less the second. With `first` passes, the others are `more`'s.
    """

    def __init__(
        self,
        model: HybridModel,
        cache: KVCache,
        step: VerifyStep,
        inputs: DraftInputs,
        passes: int,
        first: int,
        vocab: int,
        drafter: Drafter,
    ) -> None:
        self.drafter, self.step, self.inputs = drafter, step, inputs
        self.passes, self.vocab = passes, vocab
        device, seats = model.device, step.upload.seats
        # Rows of a request's refill: the longest path of this step, which may be less than a
        # place of the inputs holds.
        self.steps = steps = step.selector.depth + 1
        self.seats, places = seats, inputs.count.shape[0]
        requests = 1 if seats is None else seats.numel()
        kind = dict(dtype=torch.int32, device=device)
        self.start = torch.zeros(places, **kind)
        self.slots = torch.zeros(max(passes, 1), places, **kind)
        self.ahead = torch.arange(max(passes, 1), **kind)[:, None]
        self.rows = torch.arange(requests, **kind) * steps
        self.first = min(first or passes, passes)
        self.results = torch.zeros(requests, passes, 5, **kind)
        self.leads = self.results.view(torch.float32)[..., 4]
        width = model.config.hidden_size
        self.last = torch.zeros(requests, width, dtype=model.dtype, device=device)

        def see(tree: TreeDescriptor, length: Tensor) -> AttentionRows:
            return AttentionRows(model, tree, len(tree), cache, length, first=1, seats=seats)

        chain = tree_from_name(f"chain-{steps - 1}" if steps > 1 else "root")
        self.refill_rows = see(chain, self.start)
        root = tree_from_name("root")
        self.pass_rows = [see(root, slot) for slot in self.slots]
        self.top = TopCandidates(requests, vocab, live=vocab, device=device)

    def take(self) -> None:
        """Takes the rows that the step published and the tokens after them."""
        step, to = self.step, self.inputs
        tokens = step.upload.tokens
        step.selector.take(step.hidden, tokens, to.hidden, to.tokens, to.count)

    def _of_requests(self, places: Tensor) -> Tensor:
        """Entries [seats, ...] of the requests, [requests, ...]; somebody's where it is nobody."""
        if self.seats is None:
            return places
        return places.index_select(0, self.seats.clamp(min=0))

    def draft(self) -> None:
        length, inputs = self.step.request.length, self.inputs
        torch.sub(length + 1, inputs.count, out=self.start)
        torch.add(self.ahead, length, out=self.slots)
        tokens, hidden, count = (
            self._of_requests(x)
            for x in (inputs.tokens[:, : self.steps], inputs.hidden[:, : self.steps], inputs.count)
        )
        out = self.drafter.draft_forward(tokens.flatten(), hidden.flatten(0, 1), self.refill_rows)
        self._passes(1, self.first, out.index_select(0, self.rows + (count - 1).clamp(min=0)))

    def more(self) -> None:
        """The passes after the first ones, from where those left off."""
        self._passes(self.first + 1, self.passes, self.last)

    def _passes(self, start: int, stop: int, hidden: Tensor) -> None:
        """Depths start .. stop; `hidden` [requests, hidden size] predicts that of `start`."""
        drafter = self.drafter
        for depth in range(start, stop + 1):
            logits = drafter.logits(hidden, self.vocab)
            best, ordered = self.top(logits, self.results[:, depth - 1, :4])
            if depth < self.passes:
                hidden = drafter.draft_forward(best, hidden, self.pass_rows[depth])
            if depth == self.first < self.passes:
                pair = logits.gather(1, ordered[:, :2].long())
                self.leads[:, depth - 1].copy_(pair[:, 0] - pair[:, 1])
                self.last.copy_(hidden)

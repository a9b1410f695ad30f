"""Verification, selection and publication of one tree over one state slot, stage by stage."""

from __future__ import annotations

import torch
from torch import Tensor

from lumotree.captured.rows import StepRows
from lumotree.model.hybrid import HybridModel
from lumotree.ops.select import SamplingBlock, Selector
from lumotree.sampling import TokenHistory
from lumotree.state import HybridState
from lumotree.tree import TreeDescriptor


class RequestBuffers:
    """What a request brings to the device, at fixed addresses.

    params: its sampling parameters. history: its TokenHistory, kept up by `Selector.walk`.
    length int32 [1]: materialised tokens.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.params = SamplingBlock(device)
        self.history = TokenHistory(vocab_size, (), device)
        self.length = torch.zeros(1, dtype=torch.int32, device=device)


class VerifyStep:
    """Launches of one tree's step. The methods take nothing, so that each can be captured.

    tokens int32 [padded] and active uint8 [padded] are the proposal, written in one copy to
    `upload`; hidden [padded, hidden size] and logits [padded, vocab] are the target's answer.
    """

    def __init__(
        self,
        model: HybridModel,
        state: HybridState,
        request: RequestBuffers,
        tree: TreeDescriptor,
        padded: int,
        rows: StepRows,
    ) -> None:
        self.model, self.state, self.request = model, state, request
        self.tree, self.rows = tree, rows
        device = model.device
        self.upload = torch.zeros(5 * padded, dtype=torch.uint8, device=device)
        self.tokens = self.upload[: 4 * padded].view(torch.int32)
        self.active = self.upload[4 * padded :]
        self.active[0] = 1
        vocab = model.config.vocab_size
        self.selector = Selector(tree, vocab, live=vocab, device=device)
        self.hidden: Tensor | None = None
        self.logits: Tensor | None = None

    def verify(self) -> None:
        self.hidden = self.model.forward(self.tokens, self.rows)
        self.logits = self.model.logits(self.hidden)

    def select(self) -> None:
        """Samples every row, walks, and counts what is emitted; see `Selector.result`."""
        request, selector = self.request, self.selector
        selector.sample(
            self.logits,
            request.params,
            request.history.generated,
            request.history.prompt_seen,
            self.tokens[: len(self.tree)],
            request.length,
        )
        selector.walk(self.tokens, self.active, request.history.generated)

    def publish(self) -> None:
        """Advances the state and `length` along the path in `Selector.result`."""
        self.rows.publish(self.selector.path)
        self.request.length.add_(self.selector.path.count)

"""Verification, selection and publication of one tree, stage by stage: of one request, or of
several in their seats (lumotree.ops.seats)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lumotree.captured.rows import StepRows
from lumotree.decoder import Run
from lumotree.model.hybrid import HybridModel
from lumotree.ops.select import SamplingBlock, Selector
from lumotree.sampling import TokenHistory
from lumotree.tree import TreeDescriptor


class RequestBuffers:
    """What requests bring to the device, at fixed addresses, a place a seat.

    params: sampling parameters. histories: a TokenHistory each, kept up by `Selector.walk`; their
    counts lie in generated int32 [seats, vocab] and prompt_seen bool [seats, vocab].
    length int32 [seats]: materialised tokens.
    """

    def __init__(self, vocab_size: int, device: torch.device, seats: int = 1) -> None:
        self.params = SamplingBlock(device, seats)
        self.generated = torch.zeros(seats, vocab_size, dtype=torch.int32, device=device)
        self.prompt_seen = torch.zeros(seats, vocab_size, dtype=torch.bool, device=device)
        self.length = torch.zeros(seats, dtype=torch.int32, device=device)
        self.histories = list(map(TokenHistory.over, self.generated, self.prompt_seen))

    def enter(self, run: Run, length: int, seat: int = 0) -> None:
        """Takes a request whose prompt of `length` tokens is materialised."""
        self.params.set(run.params, seat)
        self.length[seat].fill_(length)
        self.histories[seat].copy_(run.history)
        run.history = self.histories[seat]


class Upload:
    """What the host tells a step, in one copy: a request's seat, its tokens and active rows.

    tokens int32 [requests * padded], active uint8 [requests * padded], request after request;
    seats int32 [requests], or None where `requests` is.
    """

    def __init__(self, padded: int, device: torch.device, requests: int | None = None) -> None:
        self.padded, self.requests = padded, requests
        every = (requests or 1) * padded
        self._cuts = (4 * (requests or 0), 4 * every, every)
        size, pin = sum(self._cuts), device.type == "cuda"
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=pin)
        seats, self.tokens, self.active = self._views(self._device)
        self._seats, self._tokens, self._active = self._views(self._host)
        self.seats = None if requests is None else seats
        self._active.view(-1, padded)[:, 0] = 1  # a root is never inactive
        self._sent = torch.cuda.Event() if pin else None
        self.send()

    def _views(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seats, tokens, active = buffer.split(self._cuts)
        return seats.view(torch.int32), tokens.view(torch.int32), active

    def put(self, place: int, tokens: Sequence[int], active: Sequence[bool]) -> None:
        """The proposal of the request at a place, for the next `send`."""
        self._wait()
        start, stop = place * self.padded, place * self.padded + len(tokens)
        self._tokens[start:stop] = torch.tensor(tokens, dtype=torch.int32)
        self._active[start:stop] = torch.tensor(active)

    def sit(self, seats: Sequence[int]) -> None:
        """Who has which seat from the next `send` on, in the order of places; the rest nobody."""
        self._wait()
        empty = [-1] * (self.requests - len(seats))
        self._seats.copy_(torch.tensor([*seats, *empty], dtype=torch.int32))

    def send(self) -> None:
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def _wait(self) -> None:
        """Until the copy under way has read what is about to be written."""
        if self._sent is not None:
            self._sent.synchronize()


class VerifyStep:
    """Launches of one tree's step. The methods take nothing, so that each can be captured.

    `upload` is the proposal; hidden [rows, hidden size] and logits [rows, vocab] are the target's
    answer, `padded` rows a request.
    """

    def __init__(
        self,
        model: HybridModel,
        request: RequestBuffers,
        tree: TreeDescriptor,
        upload: Upload,
        rows: StepRows,
    ) -> None:
        self.model, self.request, self.upload = model, request, upload
        self.tree, self.rows = tree, rows
        vocab = model.config.vocab_size
        self.selector = Selector(
            tree, vocab, vocab, model.device, seats=upload.seats, padded=upload.padded
        )
        self.hidden: Tensor | None = None
        self.logits: Tensor | None = None

    def verify(self) -> None:
        self.hidden = self.model.forward(self.upload.tokens, self.rows)
        self.logits = self.model.logits(self.hidden)

    def select(self) -> None:
        """Samples every row, walks, and counts what is emitted; see `Selector.result`."""
        request, selector, upload = self.request, self.selector, self.upload
        selector.sample(
            self.logits,
            request.params,
            request.generated,
            request.prompt_seen,
            upload.tokens,
            request.length,
        )
        selector.walk(upload.tokens, upload.active, request.generated)

    def publish(self) -> None:
        """Advances the states and lengths along the paths in `Selector.result`."""
        seats, path = self.upload.seats, self.selector.path
        self.rows.publish(path)
        if seats is None:
            self.request.length.add_(path.count)
        else:  # a seat below 0 adds nothing, to somebody's length
            steps = torch.where(seats >= 0, path.count, 0)
            self.request.length.index_add_(0, seats.clamp(min=0), steps)

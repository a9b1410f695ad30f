"""The decoder's stages as captured graphs: same loop, same proposals, same walk.

A step launches verification, selection, publication and the next drafts in a row, without
asking the host in between: publication and drafting read the accepted path on the device. The
host waits once for the path, and takes tokens, text and suffix statistics in while publication
and drafting run; what it then waits for are the drafts themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lumotree.captured.clock import Clock
from lumotree.captured.draft import DraftInputs, DraftPasses, candidates_of, is_sure
from lumotree.captured.graphs import StepGraphs
from lumotree.captured.step import RequestBuffers, VerifyStep
from lumotree.decoder import Decoder, Run, Verified
from lumotree.draft.plan import Proposal, fill
from lumotree.errors import RequestError
from lumotree.model.runner import MATCHED_ROWS
from lumotree.ops.select import SamplingBlock
from lumotree.sampling import accept_walk
from lumotree.state import HybridState
from lumotree.tree import TreeDescriptor

# State slots come in powers of two from here: a captured graph belongs to one slot.
FIRST_CAPACITY = 4096


class CapturedDecoder(Decoder):
    """Decodes one request at a time; buffers and graphs live as long as the state slot."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        model = self.model
        self.active_tree, self.kept = self.tree.restrict(self.tree.default_active)
        self.request = RequestBuffers(model.config.vocab_size, model.device)
        self.clock = Clock(model.device)
        self.drafted: DraftPasses | None = None
        # Rows of a path that an audit has published: drafts wait for the token after it.
        self.forced = 0
        self.tree_step: VerifyStep | None = None

    def _enter(self, run: Run, state: HybridState, hidden: Tensor) -> None:
        super()._enter(run, state, hidden)
        self.clock.clear()
        self.clock.start([run])
        self.forced = 0
        self.tree_step.rows.verifier.forget()
        self.request.enter(run, state.length)
        if self.uses_mtp:
            self.drafted.inputs.feed(state.mtp_hidden, run.tokens[-1])
            state.mtp_hidden = state.mtp_hidden[:0]
            self._launch_drafts()

    def propose(self, run: Run, state: HybridState) -> Proposal:
        """Draft tokens for the rows that have a source; waits for the drafts launched before."""
        candidates = []
        if self.uses_mtp:
            if self.forced:
                self.drafted.inputs.tokens[0, self.forced - 1].fill_(run.tokens[-1])
                self.forced, state.mtp_hidden = 0, state.mtp_hidden[:0]
                self.clock.start()
                self._launch_drafts()
            self.clock.book()
            done, found = self.drafted.first, self.graphs.candidates[0]
            if done < self.drafted.passes and is_sure(found, done - 1):
                self.clock.start()
                self.graphs.launch("more")
                self.clock.lap("draft")
                self.clock.book()
                done = self.drafted.passes
            candidates = candidates_of(found, done)
        return fill(self.plan, run.tokens[-1], candidates, run.suffix)

    def repend(self, run: Run, token: int) -> None:
        super().repend(run, token)
        self.forced = 1

    def verify(self, state: HybridState, proposal: Proposal) -> Verified:
        """Launches one target forward over the tree; the state is only read."""
        graphs = self.graphs
        graphs.put(0, proposal)
        self.clock.start()
        graphs.upload.send()
        graphs.launch("verify")
        self.clock.lap("verify")
        return graphs.answer(0, proposal, _Rows(self, state))

    def select(self, run: Run, verified: Verified) -> tuple[list[int], int]:
        """The walk on the device, then publication and drafts behind it without waiting."""
        selector = self.tree_step.selector
        ahead = self.config.selection == "fused" and SamplingBlock.supports(run.params)
        if ahead:
            self.graphs.launch("select")
            self.clock.lap("select")
            # A verifier that cannot publish an empty path waits for the host to see the flag.
            ahead = self.tree_step.rows.verifier.empty_path
            if ahead:
                self._advance()
            self.clock.book(until="select")
            outcome = selector.outcome(self.graphs.result[0])
            if not outcome.flag:
                if not ahead:
                    self._advance()
                return list(outcome.path), outcome.pending
        return self._select_on_host(run, verified)

    def _select_on_host(self, run: Run, verified: Verified) -> tuple[list[int], int]:
        self.clock.start()
        path, pending = select_on_host(self, run, verified, verified.rows.prefix)
        self.tree_step.selector.set(path, pending)
        self.clock.lap("select")
        self._advance()
        return path, pending

    def publish(self, run: Run, verified: Verified, path: list[int]) -> None:
        """`select` has launched it; here the host learns of the new length."""
        verified.rows.state.length += len(path)

    def _advance(self) -> None:
        self.graphs.launch("publish")
        self.clock.lap("publish")
        if self.uses_mtp:
            self._launch_drafts()

    def _launch_drafts(self) -> None:
        self.graphs.launch("draft")
        self.clock.lap("draft")

    def reserve(self, tokens: int) -> HybridState:
        """The state slot and its graphs, made anew when a request needs more room."""
        margin = room_ahead(self.tree)
        needed = tokens + margin
        if self._state is not None and self._state.capacity >= needed:
            return self._state
        self._drop()
        capacity = FIRST_CAPACITY
        while capacity < needed:
            capacity *= 2
        capacity = max(needed, min(capacity, self.max_context + margin))
        try:
            self._capture(super().reserve(capacity - len(self.tree)))
        except torch.OutOfMemoryError as error:
            self._drop()
            raise RequestError(
                f"{self.model.device} has no memory for the step's buffers at {capacity} tokens",
                "lower max_tokens or shorten the prompt",
            ) from error
        except BaseException:
            self._drop()
            raise
        return self._state

    def _drop(self) -> None:
        """Lets go of the slot and of all that was captured over it."""
        self._state = self.tree_step = self.drafted = self.graphs = None

    def _capture(self, state: HybridState) -> None:
        model = self.model
        # No slot is read before it is written, but in a warm-up, and by stock attention, which
        # gives unseen slots no weight and multiplies them all the same.
        for cache in state.buffers.caches:
            cache.keys.zero_()
            cache.values.zero_()
        inputs = DraftInputs(model, self.active_tree) if self.uses_mtp else None
        self.request.length.zero_()
        active = self.tree.default_active
        self.graphs = StepGraphs(self, active, state.buffers, self.request, inputs)
        self.tree_step, self.drafted = self.graphs.step, self.graphs.drafted
        self.request.generated.zero_()

    @contextmanager
    def _phase(self, run: Run, name: str) -> Iterator[None]:
        """Stages are timed by events on the device, see `Clock`."""
        yield


def room_ahead(tree: TreeDescriptor) -> int:
    """Slots past a request's last token: a step that is under way when the request ends may publish
    and draft once more."""
    return 2 * len(tree) + MATCHED_ROWS


def select_on_host(
    decoder: Decoder, run: Run, verified: Verified, length: int
) -> tuple[list[int], int]:
    """What the kernels do not cover (any top_k, many ties), by the torch definition; counted.

    length: the state's materialised tokens.
    """
    tree, tokens = verified.tree, verified.tokens
    sampled = decoder.sample(run, verified.logits, tree, tokens, length)
    path, pending = accept_walk(tree.children, tokens, verified.active, sampled)
    run.history.add([*(tokens[row] for row in path[1:]), pending])
    return path, pending


class _Rows:
    """A verified step's rows: what an audit publishes along a path of its own choice.

    The draft head follows with the next `propose`, when the token after the path is known.
    """

    def __init__(self, decoder: CapturedDecoder, state: HybridState) -> None:
        self.decoder, self.state = decoder, state

    @property
    def prefix(self) -> int:
        return self.state.length

    def publish(self, path: list[int], hidden: Tensor) -> None:
        decoder = self.decoder
        decoder.tree_step.selector.set(path, 0)
        decoder.graphs.launch("publish")
        decoder.forced = len(path)
        self.state.length += len(path)
        if decoder.uses_mtp:
            self.state.mtp_hidden = decoder.drafted.inputs.hidden[0, : len(path)].clone()

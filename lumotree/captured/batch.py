"""Several requests of one arm in captured graphs: states in seats, a graph per number of requests.

A round is the captured decoder's step (lumotree.captured.decoder) over all requests at once. A
graph reads from the device who sits where, so any requests can take a round together, and a
number of them that has no graph takes the next larger one, whose places to spare are nobody's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lumotree.batch import Active
from lumotree.captured.clock import Clock
from lumotree.captured.draft import DraftInputs, candidates_of, is_sure
from lumotree.captured.graphs import StepGraphs
from lumotree.captured.step import RequestBuffers
from lumotree.decoder import Decoder, DecoderConfig, Run, Verified
from lumotree.draft.plan import Proposal, fill
from lumotree.errors import LumoTreeError, RequestError
from lumotree.model.hybrid import HybridModel
from lumotree.model.runner import MATCHED_ROWS, RowRunner
from lumotree.ops.linear import MAX_STEP_ROWS
from lumotree.sampling import accept_walk
from lumotree.state import HybridState
from lumotree.text import ChatTokenizer
from lumotree.verifiers import verifier_class


def can_batch(config: DecoderConfig) -> bool:
    """Whether rounds of several requests have kernels for a configuration."""
    plain = DecoderConfig()
    named = all(
        getattr(config, option) == getattr(plain, option)
        for option in ("attention", "selection", "operands")
    )
    return named and verifier_class(config.verify).batched


class CapturedBatch:
    """Seats for `seats` requests of up to `context` tokens, prompt and answer together.

    Raises LumoTreeError where they do not fit the device, or where a step of that many requests
    has more rows than products have kernels for.
    """

    def __init__(
        self,
        model: HybridModel,
        tokenizer: ChatTokenizer,
        config: DecoderConfig,
        runner: RowRunner,
        seats: int,
        context: int,
    ) -> None:
        self.model, self.config = model, config
        model.reserve(context)
        self.decoders = [
            SeatDecoder(self, seat, model, tokenizer, config, runner) for seat in range(seats)
        ]
        first = self.decoders[0]
        self.tree, self.kept = first.tree.restrict(first.tree.default_active)
        self.padded = len(self.tree)
        if runner.mode == "matched":
            self.padded = max(self.padded, MATCHED_ROWS)
        if seats * self.padded > MAX_STEP_ROWS:
            most = MAX_STEP_ROWS // self.padded
            raise LumoTreeError(
                f"{seats} requests of {self.padded} rows are more than the {MAX_STEP_ROWS} rows "
                "of a step",
                f"serve at most {most} at once",
            )
        self.uses_mtp = first.uses_mtp
        self.clock = Clock(model.device)
        # A step that is under way when a request ends may publish and draft once more.
        capacity = context + 2 * len(first.tree) + MATCHED_ROWS
        try:
            self.buffers = model.new_buffers(capacity, self.uses_mtp, seats)
            for cache in self.buffers.caches:  # a warm-up reads slots before they are written
                cache.keys.zero_()
                cache.values.zero_()
            self.request = RequestBuffers(model.config.vocab_size, model.device, seats)
            self.inputs = DraftInputs(model, self.tree, seats) if self.uses_mtp else None
            pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None
            given = (first, self.padded, self.buffers, self.request, self.inputs)
            self.rounds = {size: StepGraphs(*given, size, pool) for size in _sizes(seats)}
        except torch.OutOfMemoryError as error:
            raise LumoTreeError(
                f"{model.device} has no memory for {seats} requests of {context} tokens",
                "lower --active or --max-context",
            ) from error
        self.request.length.zero_()
        self.request.generated.zero_()
        for decoder in self.decoders:
            decoder.sit(HybridState(self.buffers.seat(decoder.seat)))
        # Drafts of each seat that wait for its next round, and the launch that others come from.
        self.drafts: dict[int, list] = {}
        self.coming: tuple[StepGraphs, list[Active]] | None = None

    @torch.inference_mode()
    def enter(self, active: Active, hidden: Tensor) -> None:
        """Takes in a request that has emitted its first token; hidden: the prompt's last row."""
        seat = active.decoder.seat
        self.request.enter(active.run, active.state.length, seat)
        if self.uses_mtp:
            self._collect()
            self.inputs.feed(hidden, active.run.tokens[-1], seat)
            single = self.rounds[1]
            single.upload.sit([seat])
            self.clock.start()
            single.upload.send()
            self._launch_drafts(single, [active])
            self._collect()

    @torch.inference_mode()
    def step(self, active: Sequence[Active]) -> None:
        """One round for every request: draft, verify, select, publish."""
        runs = [a.run for a in active]
        captured = next(r for size, r in self.rounds.items() if size >= len(active))
        upload, selector = captured.upload, captured.step.selector
        self._collect()
        proposals = [self._propose(a) for a in active]
        for place, proposal in enumerate(proposals):
            upload.put(
                place,
                [proposal.tokens[row] for row in self.kept],
                [proposal.active[row] for row in self.kept],
            )
        upload.sit([a.decoder.seat for a in active])
        self.clock.start()
        upload.send()
        captured.launch("verify")
        self.clock.lap("verify")
        captured.launch("select")
        self.clock.lap("select")
        self._publish(captured, active)
        self.clock.book(runs, until="select")
        chosen = [selector.outcome(result) for result in captured.result[: len(active)]]
        verified = [self._answer(captured, place, p) for place, p in enumerate(proposals)]
        paths = [(list(outcome.path), outcome.pending) for outcome in chosen]
        late = [place for place, outcome in enumerate(chosen) if outcome.flag]
        if late:
            for place in late:
                paths[place] = self._select_on_host(active[place], verified[place])
                selector.set(*paths[place], place)
            self._publish_again(captured, active, late)
        for a, proposal, answer, (path, pending) in zip(
            active, proposals, verified, paths, strict=True
        ):
            a.decoder.take(a.run, proposal, answer, path, pending)
            a.state.length += len(path)
            a.decoder.hand_out(a.run)

    def _answer(self, captured: StepGraphs, place: int, proposal: Proposal) -> Verified:
        """What the target said of a place's proposal, a view."""
        start = place * self.padded
        tokens = [proposal.tokens[row] for row in self.kept]
        active = [proposal.active[row] for row in self.kept]
        hidden = captured.step.hidden[start : start + self.padded]
        logits = captured.step.logits[start : start + len(tokens)]
        return Verified(self.tree, self.kept, tokens, captured.step.rows, hidden, logits, active)

    def _propose(self, active: Active) -> Proposal:
        decoder, run = active.decoder, active.run
        return fill(decoder.plan, run.tokens[-1], self.drafts.get(decoder.seat, []), run.suffix)

    def _publish(self, captured: StepGraphs, active: Sequence[Active]) -> None:
        captured.launch("publish")
        self.clock.lap("publish")
        if self.uses_mtp:
            self._launch_drafts(captured, active)

    def _publish_again(
        self, captured: StepGraphs, active: Sequence[Active], late: Sequence[int]
    ) -> None:
        """Publication of those places alone whose paths the host has chosen."""
        self._collect()
        seats = [a.decoder.seat if i in late else -1 for i, a in enumerate(active)]
        captured.upload.sit(seats)
        self.clock.start()
        captured.upload.send()
        self._publish(captured, [a if i in late else None for i, a in enumerate(active)])

    def _launch_drafts(self, captured: StepGraphs, active: Sequence[Active | None]) -> None:
        captured.launch("draft")
        self.clock.lap("draft")
        self.coming = (captured, list(active))

    def _collect(self) -> None:
        """Waits for the drafts launched last, and keeps them by seat."""
        if self.coming is None:
            return
        captured, active = self.coming
        self.coming = None
        there = [(place, a) for place, a in enumerate(active) if a is not None]
        runs = [a.run for _, a in there]
        self.clock.book(runs)
        first, passes = captured.drafted.first, captured.drafted.passes
        done = {place: first for place, _ in there}
        if first < passes:
            sure = [p for p, _ in there if is_sure(captured.candidates[p], first - 1)]
            if sure:
                self.clock.start()
                captured.launch("more")
                self.clock.lap("draft")
                self.clock.book(runs)
            done |= dict.fromkeys(sure, passes)
        for place, a in there:
            self.drafts[a.decoder.seat] = candidates_of(captured.candidates[place], done[place])

    def _select_on_host(self, active: Active, verified: Verified) -> tuple[list[int], int]:
        """What the kernels do not cover (any top_k, many ties), by the torch definition."""
        run, tree = active.run, verified.tree
        sampled = active.decoder.sample(
            run, verified.logits, tree, verified.tokens, active.state.length
        )
        path, pending = accept_walk(tree.children, verified.tokens, verified.active, sampled)
        run.history.add([*(verified.tokens[row] for row in path[1:]), pending])
        return path, pending


def _sizes(seats: int) -> list[int]:
    """Powers of two below, and the number itself."""
    return [*(1 << i for i in range(seats.bit_length()) if 1 << i < seats), seats]


class SeatDecoder(Decoder):
    """Takes requests into one seat of a batch; rounds are the batch's."""

    def __init__(self, batch: CapturedBatch, seat: int, *args) -> None:
        super().__init__(*args)
        self.batch, self.seat = batch, seat

    def sit(self, state: HybridState) -> None:
        self._state = state

    def reserve(self, tokens: int) -> HybridState:
        """The seat's state. Raises RequestError for a request that needs more room."""
        room = self._state.capacity - 2 * len(self.tree) - MATCHED_ROWS
        if tokens > room:
            raise RequestError(
                f"the request needs {tokens} tokens; a seat has {room}",
                "shorten the prompt or lower max_tokens",
            )
        return self._state

    def _enter(self, run: Run, state: HybridState, hidden: Tensor) -> None:
        super()._enter(run, state, hidden)
        self.batch.enter(Active(self, run, state), state.mtp_hidden)
        state.mtp_hidden = state.mtp_hidden[:0]

    def step(self, run: Run, state: HybridState) -> None:
        self.batch.step([Active(self, run, state)])

    @contextmanager
    def _phase(self, run: Run, name: str) -> Iterator[None]:
        """Stages are timed by events on the device, see `Clock`."""
        yield

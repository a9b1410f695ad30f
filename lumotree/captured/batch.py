"""Several requests of one arm in captured graphs: states in seats, a graph per number of requests.

A round is the captured decoder's step (lumotree.captured.decoder) over all requests at once. A
graph reads from the device who sits where, so any requests can take a round together, and a
number of them that has no graph takes the next larger one, whose places to spare are nobody's.
Graphs of more requests have fewer rows of each (`DecoderConfig.round_rows`): what is drafted and
not verified costs steps, never tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lumotree.batch import Active
from lumotree.captured.clock import Clock
from lumotree.captured.decoder import room_ahead, select_on_host
from lumotree.captured.draft import DraftInputs, candidates_of, is_sure
from lumotree.captured.graphs import StepGraphs
from lumotree.captured.step import RequestBuffers
from lumotree.decoder import Decoder, DecoderConfig, Run
from lumotree.draft.plan import DraftPlan, Proposal, draft_plan, fill
from lumotree.errors import LumoTreeError, RequestError
from lumotree.exactness import PROBED_ROWS
from lumotree.model.hybrid import HybridModel
from lumotree.model.runner import RowRunner
from lumotree.ops.linear import MAX_STEP_ROWS
from lumotree.state import HybridState
from lumotree.text import ChatTokenizer
from lumotree.tree import tree_from_name
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
        tree = tree_from_name(config.tree)
        active_tree, _ = tree.restrict(tree.default_active)
        self.rows = row_counts(config, runner, seats)
        if self.rows[-1] > MAX_STEP_ROWS:
            most = most_seats(config, runner, MAX_STEP_ROWS)
            raise LumoTreeError(
                f"{seats} requests have rounds of {self.rows[-1]} rows, more than the "
                f"{MAX_STEP_ROWS} of a step",
                f"serve at most {most} at once" if most else "take a smaller tree",
            )
        cuts = {size: _cut(config, runner, size) for size in _sizes(seats)}
        model.reserve(context)
        self.model = model
        self.room = context
        self.clock = Clock(model.device)
        self.decoders = [
            SeatDecoder(self, seat, model, tokenizer, config, runner) for seat in range(seats)
        ]
        first = self.decoders[0]
        self.uses_mtp = first.uses_mtp
        try:
            capacity = context + room_ahead(tree)
            self.buffers = model.new_buffers(capacity, self.uses_mtp, seats)
            for cache in self.buffers.caches:  # a warm-up reads slots before they are written
                cache.keys.zero_()
                cache.values.zero_()
            for decoder in self.decoders:  # resets the rest of the seat
                decoder.sit(HybridState(self.buffers.seat(decoder.seat)))
            self.request = RequestBuffers(model.config.vocab_size, model.device, seats)
            self.inputs = DraftInputs(model, active_tree, seats) if self.uses_mtp else None
            pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None
            given = (self.buffers, self.request, self.inputs)
            self.rounds = {
                size: StepGraphs(first, cut, *given, size, pool) for size, cut in cuts.items()
            }
        except torch.OutOfMemoryError as error:
            raise LumoTreeError(
                f"{model.device} has no memory for {seats} requests of {context} tokens",
                "lower --active or --max-context",
            ) from error
        self.request.length.zero_()
        self.request.generated.zero_()
        # Drafts of each seat that wait for its next round, and the launch that others come from.
        self.drafts: dict[int, list] = {}
        self.coming: tuple[StepGraphs, list[Active | None]] | None = None

    @torch.inference_mode()
    def enter(self, active: Active, hidden: Tensor) -> None:
        """Takes in a request that has emitted its first token; hidden: the prompt's last row."""
        seat = active.decoder.seat
        self.request.enter(active.run, active.state.length, seat)
        if self.uses_mtp:
            self.collect()
            self.inputs.feed(hidden, active.run.tokens[-1], seat)
            single = self.rounds[1]
            single.upload.sit([seat])
            self.clock.start([active.run])
            single.upload.send()
            self._launch_drafts(single, [active])

    @torch.inference_mode()
    def step(self, active: Sequence[Active]) -> dict[int, Exception]:
        """One round for every request: draft, verify, select, publish.

        Returns who failed, by place, in what concerns a request alone; the others went on.
        """
        captured = next(r for size, r in self.rounds.items() if size >= len(active))
        upload, selector = captured.upload, captured.step.selector
        self.collect()
        proposals = [self._propose(a, captured.plan) for a in active]
        for place, proposal in enumerate(proposals):
            captured.put(place, proposal)
        upload.sit([a.decoder.seat for a in active])
        self.clock.start([a.run for a in active])
        upload.send()
        captured.launch("verify")
        self.clock.lap("verify")
        captured.launch("select")
        self.clock.lap("select")
        self._publish(captured, active)
        self.clock.book(until="select")
        outcomes = [selector.outcome(result) for result in captured.result[: len(active)]]
        paths = {i: (list(o.path), o.pending) for i, o in enumerate(outcomes) if not o.flag}
        answers = [
            captured.answer(place, p, captured.step.rows) for place, p in enumerate(proposals)
        ]
        failed: dict[int, Exception] = {}
        late = []
        for place, a in enumerate(active):
            if place not in paths:
                try:
                    paths[place] = select_on_host(a.decoder, a.run, answers[place], a.state.length)
                    selector.set(*paths[place], place)
                    late.append(place)
                except Exception as error:
                    failed[place] = error
        if late:
            self._publish_again(captured, active, late)
        for place, (a, proposal) in enumerate(zip(active, proposals, strict=True)):
            if place in failed:
                continue
            path, pending = paths[place]
            try:
                a.decoder.take(a.run, proposal, answers[place], path, pending)
                a.state.length += len(path)
                a.decoder.hand_out(a.run)
            except Exception as error:
                failed[place] = error
        return failed

    def _propose(self, active: Active, plan: DraftPlan) -> Proposal:
        run, candidates = active.run, self.drafts.get(active.decoder.seat, [])
        return fill(plan, run.tokens[-1], candidates, run.suffix)

    def _publish(self, captured: StepGraphs, active: Sequence[Active | None]) -> None:
        captured.launch("publish")
        self.clock.lap("publish")
        if self.uses_mtp:
            self._launch_drafts(captured, active)

    def _publish_again(
        self, captured: StepGraphs, active: Sequence[Active], late: Sequence[int]
    ) -> None:
        """Publication of those places alone whose paths the host has chosen."""
        self.collect()
        those = [a if i in late else None for i, a in enumerate(active)]
        captured.upload.sit([-1 if a is None else a.decoder.seat for a in those])
        self.clock.start([a.run for a in those if a is not None])
        captured.upload.send()
        self._publish(captured, those)

    def _launch_drafts(self, captured: StepGraphs, active: Sequence[Active | None]) -> None:
        captured.launch("draft")
        self.clock.lap("draft")
        self.coming = (captured, list(active))

    def collect(self) -> None:
        """Waits for the drafts launched last, and keeps them by seat.

        To be called before a seat's state changes hands: more passes may start here, for requests
        that have not ended.
        """
        if self.coming is None:
            return
        captured, active = self.coming
        self.coming = None
        there = [(place, a) for place, a in enumerate(active) if a is not None]
        self.clock.book()
        first, passes = captured.drafted.first, captured.drafted.passes
        sure = [
            place
            for place, a in there
            if first < passes
            and a.run.finish_reason is None
            and is_sure(captured.candidates[place], first - 1)
        ]
        if sure:
            self.clock.start()
            captured.launch("more")
            self.clock.lap("draft")
            self.clock.book()
        for place, a in there:
            depths = passes if place in sure else first
            self.drafts[a.decoder.seat] = candidates_of(captured.candidates[place], depths)


def row_counts(config: DecoderConfig, runner: RowRunner, seats: int) -> list[int]:
    """Rows of a step of one request, as far as start-up has probed them, then those of all rounds
    that have more, ascending."""
    sizes = {1, *_sizes(seats)}
    counts = {size * runner.padded(sum(_cut(config, runner, size))) for size in sizes}
    probed = min(runner.padded(sum(_cut(config, runner, 1))), runner.padded(PROBED_ROWS))
    return [probed, *sorted(count for count in counts if count > probed)]


def most_seats(config: DecoderConfig, runner: RowRunner, rows: int) -> int:
    """Up to how many seats no round has more rows."""
    seats = 0
    while row_counts(config, runner, seats + 1)[-1] <= rows:
        seats += 1
    return seats


def _sizes(seats: int) -> list[int]:
    """Powers of two below, and the number itself."""
    return [*(1 << i for i in range(seats.bit_length()) if 1 << i < seats), seats]


def _cut(config: DecoderConfig, runner: RowRunner, requests: int) -> tuple[bool, ...]:
    """The most rows of the tree with which a round of so many requests stays within
    `round_rows`; the fewest where none does."""
    plan = draft_plan(tree_from_name(config.tree), config.passes)
    if requests == 1 or not config.round_rows:
        return plan.cuts[0]
    # Without text to copy from nothing fills a tail.
    cuts = plan.cuts if config.suffix else (plan.cuts[0], plan.cuts[-1])
    rows = {cut: requests * runner.padded(sum(cut)) for cut in cuts}
    fitting = [cut for cut in cuts if rows[cut] <= config.round_rows]
    return fitting[0] if fitting else min(cuts, key=rows.get)


class SeatDecoder(Decoder):
    """Takes requests into one seat of a batch; rounds are the batch's."""

    def __init__(self, batch: CapturedBatch, seat: int, *args) -> None:
        super().__init__(*args)
        self.batch, self.seat = batch, seat

    def sit(self, state: HybridState) -> None:
        self._state = state

    def reserve(self, tokens: int) -> HybridState:
        """The seat's state. Raises RequestError for a request that needs more room."""
        if tokens > self.batch.room:
            raise RequestError(
                f"the request needs {tokens} tokens; a seat has {self.batch.room}",
                "shorten the prompt or lower max_tokens",
            )
        self.batch.collect()
        return self._state

    def _enter(self, run: Run, state: HybridState, hidden: Tensor) -> None:
        super()._enter(run, state, hidden)
        self.batch.enter(Active(self, run, state), state.mtp_hidden)
        state.mtp_hidden = state.mtp_hidden[:0]

    def step(self, run: Run, state: HybridState) -> None:
        for error in self.batch.step([Active(self, run, state)]).values():
            raise error

    @contextmanager
    def _phase(self, run: Run, name: str) -> Iterator[None]:
        """Stages are timed by events on the device, see `Clock`."""
        yield

"""Who decodes when: a bounded queue, and one worker thread that owns the model.

In a round every active request does one piece of its work, so none starves and a cancelled one is
gone before the next: a chunk of its prompt, or its part of one decode step that all requests past
their prompts take together. What a request answers does not depend on what else runs: slots share
weights and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lumotree.errors import LumoTreeError
from lumotree.request import Generation, SamplingParams
from lumotree.serve.errors import ApiError

if TYPE_CHECKING:
    from lumotree.serve.metrics import Metrics
    from lumotree.serve.slots import Slot, Slots

log = logging.getLogger("lumotree.serve")


@dataclass(frozen=True)
class Tokens:
    """What one step emitted: token ids, the text that became certain, log probabilities."""

    ids: tuple[int, ...]
    text: str
    logprobs: tuple = ()


@dataclass(frozen=True)
class Done:
    """The end of a request that was served. stop_id: the end-of-text token, if that ended it."""

    generation: Generation
    stop_id: int | None = None


Event = Tokens | Done | ApiError


@dataclass(eq=False)
class Job:
    """One request for one choice. `deliver` is called from the worker thread with each event,
    the last of which is Done or an ApiError; after `cancel` it may be neither.

    arrived and deadline are time.monotonic() seconds.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    deliver: Callable[[Event], None]
    deadline: float
    logprobs: int | None = None
    arrived: float = field(default_factory=time.monotonic)
    ended: ApiError | None = None  # set by whoever ends it early
    first_at: float | None = None
    counted: dict[str, int] = field(default_factory=dict)

    def cancel(self, reason: ApiError | None = None) -> None:
        """Ends the request before its next turn. Any thread may call it, more than once."""
        self.ended = self.ended or reason or ApiError(499, "the client went away")


class Scheduler:
    """Admits jobs into slots, first come first served, and lets them take rounds together."""

    def __init__(self, slots: Slots, queue: int, metrics: Metrics) -> None:
        self._slots, self._free = slots, list(slots)
        self.capacity = len(slots) + queue
        self._waiting: deque[Job] = deque()
        self._active: list[tuple[Job, Slot]] = []
        self._metrics = metrics
        self._changed = threading.Condition()
        self._draining = self._stopped = False
        self._thread = threading.Thread(target=self._work, name="decoder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def load(self) -> tuple[int, int]:
        """Active and waiting requests."""
        with self._changed:
            return len(self._active), len(self._waiting)

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Takes all jobs or none. Raises ApiError: 429 when the queue is full, 503 at the end,
        400 for more jobs than it ever takes.
        """
        if len(jobs) > self.capacity:
            raise ApiError(
                400, f"{len(jobs)} answers at once are more than the {self.capacity} taken here"
            )
        with self._changed:
            if self._draining or self._stopped:
                raise ApiError(503, "the server is shutting down", code="shutting_down")
            if len(self._active) + len(self._waiting) + len(jobs) > self.capacity:
                self._metrics.refused("queue_full")
                raise ApiError(
                    429,
                    f"the queue is full ({self.capacity} requests under way); try again later",
                    code="queue_full",
                    headers={"retry-after": "1"},
                )
            self._waiting.extend(jobs)
            self._changed.notify()

    def drain(self) -> None:
        """Refuses new jobs; those taken go on."""
        with self._changed:
            self._draining = True
            self._changed.notify()

    def stop(self, reason: str = "the server was stopped") -> None:
        """Ends every job with a 503 and the thread after them."""
        with self._changed:
            self._draining = self._stopped = True
            for job in [*self._waiting, *(job for job, _ in self._active)]:
                job.cancel(ApiError(503, reason, code="shutting_down"))
            self._changed.notify()

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while self._admit():
            self._round()
            self._expire_waiting()

    def _admit(self) -> bool:
        """Waits for work and fills free slots; False once stopped and empty."""
        with self._changed:
            while not self._waiting and not self._active:
                if self._stopped:
                    return False
                self._changed.wait()
            while self._waiting and self._free:
                job, slot = self._waiting.popleft(), self._free.pop()
                slot.open(job.prompt_ids, job.params, job.logprobs)
                self._active.append((job, slot))
        return True

    def _round(self) -> None:
        """One piece of every job's work, or its end."""
        decoding = []
        for job, slot in list(self._active):
            if self._ended(job):
                self._end(job, slot, job.ended)
            elif slot.prompt_done:
                decoding.append((job, slot))
            else:
                self._advance_prompt(job, slot)
        if decoding:
            try:
                failed = self._slots.step([slot for _, slot in decoding])
            except Exception as error:
                failed = dict.fromkeys(range(len(decoding)), error)
            for place, (job, slot) in enumerate(decoding):
                if place in failed:
                    self._fail(job, slot, failed[place])
                else:
                    self._emitted(job, slot)

    def _advance_prompt(self, job: Job, slot: Slot) -> None:
        try:
            slot.advance_prompt()
        except LumoTreeError as error:
            self._end(job, slot, ApiError(400, str(error)))
        except Exception as error:
            self._fail(job, slot, error)
        else:
            if slot.prompt_done:
                self._emitted(job, slot)

    def _fail(self, job: Job, slot: Slot, error: Exception) -> None:
        """Ends a job by a fault that is not its client's."""
        log.error("decoding failed", exc_info=error)
        self._end(job, slot, ApiError(500, f"decoding failed: {type(error).__name__}"))

    def _end(self, job: Job, slot: Slot, reason: ApiError) -> None:
        job.ended = reason
        self._close(job, slot)
        job.deliver(reason)

    def _emitted(self, job: Job, slot: Slot) -> None:
        """Delivers what a job's last piece of work emitted, and its end."""
        try:
            self._count(job, slot)
            self._hand_out(job, slot)
            if not slot.finished:
                return
            generation = slot.result()
            self._hand_out(job, slot)
            done = Done(generation, slot.stop_id)
            self._metrics.finished(job, generation)
        except Exception as error:
            self._fail(job, slot, error)
        else:
            self._close(job, slot, done=True)
            job.deliver(done)

    def _ended(self, job: Job) -> bool:
        if job.ended is None and time.monotonic() > job.deadline:
            job.ended = ApiError(504, "the request took longer than the server allows")
        return job.ended is not None

    def _expire_waiting(self) -> None:
        """Waiting jobs that were cancelled or ran out of time leave the queue."""
        with self._changed:
            gone = [job for job in self._waiting if self._ended(job)]
            for job in gone:
                self._waiting.remove(job)
        for job in gone:
            self._metrics.failed(job.ended.status)
            job.deliver(job.ended)

    def _count(self, job: Job, slot: Slot) -> None:
        """Adds what this turn did to the counters."""
        if job.first_at is None:
            job.first_at = time.monotonic()
            self._metrics.first_token(job, slot.run)
        self._metrics.step(job, slot.run)

    @staticmethod
    def _hand_out(job: Job, slot: Slot) -> None:
        ids, text = slot.run.fresh
        if ids or text:
            job.deliver(Tokens(ids, text, slot.run.fresh_logprobs))

    def _close(self, job: Job, slot: Slot, done: bool = False) -> None:
        if slot.run is not None:
            self._metrics.phases(slot.run)
        if not done:
            self._metrics.failed(job.ended.status)
        slot.close()
        with self._changed:
            self._active.remove((job, slot))
            self._free.append(slot)

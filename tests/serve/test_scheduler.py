"""Queue, turns and ends, with slots that only count."""

import threading
import time
from dataclasses import dataclass

import pytest

from lumotree.request import PHASES, Generation, SamplingParams
from lumotree.serve.errors import ApiError
from lumotree.serve.metrics import Metrics
from lumotree.serve.scheduler import Done, Job, Scheduler, Tokens


@dataclass
class FakeRun:
    prompt_tokens: int
    completion_tokens: int = 0
    fresh: tuple = ((), "")
    fresh_logprobs: tuple = ()
    steps: int = 0
    drafted: int = 0
    reused: int = 0
    accepted_by_depth: tuple = ()
    phases_ms: dict = None


class FakeSlot:
    """A step emits one token; `gate` holds every step back until it is set."""

    def __init__(self, log, gate=None, fault=None):
        self.log, self.gate, self.fault = log, gate, fault
        self.run, self.open_now, self.stop_id, self.prompt_done = None, False, None, False

    def open(self, prompt_ids, params, logprobs):
        assert not self.open_now
        self.name, self.limit, self.open_now = prompt_ids[0], params.max_tokens, True

    def advance_prompt(self):
        self.advance()
        self.prompt_done = True

    def advance(self):
        if self.gate is not None:
            assert self.gate.wait(60)
        if self.fault is not None and self.name == self.fault:
            raise RuntimeError("boom")
        self.log.append(self.name)
        self.run = self.run or FakeRun(1, phases_ms=dict.fromkeys(PHASES, 1.0))
        self.run.completion_tokens += 1
        self.run.fresh = ((self.name,), "x")

    @property
    def finished(self):
        return self.run is not None and self.run.completion_tokens == self.limit

    def result(self):
        self.run.fresh = ((), "")
        n = self.run.completion_tokens
        return Generation([], "", "length", 1, n, 0, 0.0, 0.0, 0)

    def close(self):
        self.run, self.open_now, self.prompt_done = None, False, False


class FakeSlots(list):
    def step(self, slots):
        for slot in slots:
            slot.advance()
        return {}


class Inbox(list):
    """What a job delivered, and a wait for its end."""

    def __init__(self):
        super().__init__()
        self.ended = threading.Event()

    def deliver(self, what):
        self.append(what)
        if not isinstance(what, Tokens):
            self.ended.set()

    @property
    def end(self):
        assert self.ended.wait(60)
        return self[-1]


def job(name, tokens=3, seconds=30.0):
    inbox = Inbox()
    params = SamplingParams(max_tokens=tokens)
    made = Job([name], params, inbox.deliver, time.monotonic() + seconds)
    return made, inbox


@pytest.fixture
def running():
    """running(slots, queue, **slot options) -> scheduler, log of turns."""
    started = []

    def start(slots, queue, **options):
        log, metrics = [], Metrics()
        made = FakeSlots(FakeSlot(log, **options) for _ in range(slots))
        scheduler = Scheduler(made, queue, metrics)
        scheduler.start()
        started.append(scheduler)
        return scheduler, log

    yield start
    for scheduler in started:
        scheduler.stop()
        scheduler.join(60)
        assert not scheduler.alive


def test_turns_are_fair_and_admission_is_in_order(running):
    gate = threading.Event()
    scheduler, log = running(2, 4, gate=gate)
    jobs = [job(name, tokens) for name, tokens in ((1, 4), (2, 2), (3, 2))]
    scheduler.submit([made for made, _ in jobs])
    gate.set()
    assert all(isinstance(inbox.end, Done) for _, inbox in jobs)
    assert log == [1, 2, 1, 2, 3, 1, 1, 3]  # a prompt's piece comes before the common step


def test_the_queue_is_bounded_and_a_batch_is_taken_whole_or_not(running):
    gate = threading.Event()
    scheduler, _ = running(1, 2, gate=gate)
    first, second = job(1), job(2)
    scheduler.submit([first[0], second[0]])
    with pytest.raises(ApiError) as caught:
        scheduler.submit([job(3)[0], job(4)[0]])
    assert caught.value.status == 429 and caught.value.headers["retry-after"] == "1"
    assert sum(scheduler.load) == 2
    with pytest.raises(ApiError, match="4 answers at once are more than the 3") as caught:
        scheduler.submit([job(name)[0] for name in range(4)])
    assert caught.value.status == 400
    third = job(5)
    scheduler.submit([third[0]])
    gate.set()
    assert all(isinstance(inbox.end, Done) for _, inbox in (first, second, third))


def test_a_cancelled_request_leaves_within_one_step(running):
    gate = threading.Event()
    scheduler, log = running(1, 2, gate=gate)
    long, waiting, last = job(1, 10_000), job(2), job(3, 1)
    scheduler.submit([long[0], waiting[0], last[0]])
    waiting[0].cancel()
    long[0].cancel()
    gate.set()
    assert long[1].end.status == waiting[1].end.status == 499
    assert isinstance(last[1].end, Done)
    assert log.count(1) <= 1 and 2 not in log
    assert scheduler.load == (0, 0)


def test_deadlines_hold_while_waiting_and_while_running(running):
    scheduler, _ = running(1, 2)
    long, waiting = job(1, 10**9, seconds=0.2), job(2, seconds=0.05)
    scheduler.submit([long[0], waiting[0]])
    assert waiting[1].end.status == long[1].end.status == 504
    assert not [event for event in waiting[1] if isinstance(event, Tokens)]


def test_drain_ends_what_was_taken_and_takes_nothing(running):
    gate = threading.Event()
    scheduler, _ = running(1, 2, gate=gate)
    taken = job(1), job(2)
    scheduler.submit([made for made, _ in taken])
    scheduler.drain()
    with pytest.raises(ApiError, match="shutting down"):
        scheduler.submit([job(3)[0]])
    gate.set()
    assert all(isinstance(inbox.end, Done) for _, inbox in taken)


def test_stop_tells_everyone_why(running):
    scheduler, _ = running(1, 2)
    jobs = [job(name, 10**9) for name in (1, 2, 3)]
    scheduler.submit([made for made, _ in jobs])
    scheduler.stop("because")
    assert [inbox.end.message for _, inbox in jobs] == ["because"] * 3
    scheduler.join(60)
    assert not scheduler.alive


def test_a_fault_in_a_prompt_is_one_request_s_and_frees_its_slot(running):
    scheduler, _ = running(1, 3, fault=2)
    jobs = [job(name) for name in (1, 2, 3)]
    scheduler.submit([made for made, _ in jobs])
    kinds = [inbox.end for _, inbox in jobs]
    assert isinstance(kinds[0], Done) and isinstance(kinds[2], Done)
    assert kinds[1].status == 500 and "RuntimeError" in kinds[1].message


def test_a_fault_in_a_round_ends_those_who_took_it_and_no_other(running):
    gate = threading.Event()
    scheduler, _ = running(2, 3, gate=gate)
    jobs = [job(name) for name in (1, 2, 3)]
    scheduler.submit([made for made, _ in jobs])
    real, rounds = scheduler._slots.step, []

    def step(slots):
        rounds.append(len(slots))
        if len(rounds) == 1:
            raise RuntimeError("boom")
        return real(slots)

    scheduler._slots.step = step
    gate.set()
    ends = [inbox.end for _, inbox in jobs]
    assert [end.status for end in ends[:2]] == [500, 500] and "RuntimeError" in ends[0].message
    assert isinstance(ends[2], Done) and rounds[0] == 2
    assert scheduler.load == (0, 0)


def test_a_fault_in_handing_out_ends_one_job_and_not_the_worker(running):
    scheduler, _ = running(1, 3)
    slot = scheduler._slots[0]
    real = slot.result

    def result():
        if slot.name == 1:
            raise RuntimeError("boom")
        return real()

    slot.result = result
    jobs = [job(name) for name in (1, 2)]
    scheduler.submit([made for made, _ in jobs])
    assert jobs[0][1].end.status == 500 and isinstance(jobs[1][1].end, Done)
    assert scheduler.alive and scheduler.load == (0, 0)


def test_a_fault_of_one_in_a_round_ends_it_alone(running):
    gate = threading.Event()
    scheduler, _ = running(2, 3, gate=gate)
    jobs = [job(name) for name in (1, 2)]
    scheduler.submit([made for made, _ in jobs])
    real = scheduler._slots.step
    scheduler._slots.step = lambda slots: (
        real(slots)
        | {place: ValueError("boom") for place, slot in enumerate(slots) if slot.name == 2}
    )
    gate.set()
    assert isinstance(jobs[0][1].end, Done) and jobs[1][1].end.status == 500

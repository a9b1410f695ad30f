"""Load: who is in flight when, what the figures say, and that tokens do not change."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from arms.protocol import ArmResult
from lumotree.errors import LumoTreeError
from replay import load, metrics
from replay.cli import app
from replay.corpus import parse_line
from replay.load import (
    LoadPlan,
    load_of,
    meets,
    offsets,
    parse_goodput,
    percentiles,
    replay_load,
)
from replay.rows import Row
from tests.replay.fakes import FakeEngine, corpus_lines, install, write_corpus
from tests.replay.test_runner import Silent, StubArm, items


class Meeting(StubArm):
    """Counts how many of its requests are in flight; each waits for `together` of them."""

    def __init__(self, name, together=1):
        super().__init__(name)
        self.barrier = threading.Barrier(together)
        self.lock, self.flying, self.most = threading.Lock(), 0, 0

    def run(self, request, params):
        with self.lock:
            self.flying += 1
            self.most = max(self.most, self.flying)
        if params.max_tokens == 100:  # not a warm-up
            self.barrier.wait(60)
        with self.lock:
            self.flying -= 1
        return ArmResult(completion_tokens=3, ttft_s=0.1, e2e_s=0.3, burst_s=(0.1, 0.1))


def served(arms, work, plan, runs=1, warmup=1):
    rows = []
    replay_load(
        arms, work, plan, runs=runs, warmup=warmup, done=(), append=rows.append, progress=Silent()
    )
    return rows


def test_a_closed_loop_keeps_its_number_in_flight():
    arm = Meeting("x", together=3)
    rows = served([arm], items(["a"] * 6), LoadPlan(3))
    assert arm.most == 3
    assert sorted(r.request_id for r in rows if not r.warmup) == [f"r{i}" for i in range(6)]
    assert all(r.details["load"]["burst_s"] == [0.1, 0.1] for r in rows if not r.warmup)


def test_an_open_loop_sends_on_time_whatever_is_under_way():
    arm = Meeting("x", together=3)  # nothing ends before all three have come
    rows = served([arm], items(["a"] * 3), LoadPlan(None, (0.0, 0.05, 0.1)), warmup=0)
    assert arm.most == 3
    sent = {r.request_id: r.details["load"] for r in rows}
    for name, due in (("r0", 0.0), ("r1", 0.05), ("r2", 0.1)):
        assert sent[name]["sent_s"] >= due and sent[name]["late_s"] >= 0


def test_arms_run_one_after_another_and_rotate():
    arms = [Meeting("x"), Meeting("y")]
    rows = served(arms, items(["a"]), LoadPlan(2), runs=2, warmup=0)
    assert [(r.run, r.arm) for r in rows] == [(1, "x"), (1, "y"), (2, "y"), (2, "x")]


def test_a_disk_that_is_full_ends_the_replay():
    def full(row):
        raise LumoTreeError("disk full")

    with pytest.raises(LumoTreeError, match="disk full"):
        replay_load(
            [Meeting("x")], items(["a"] * 50), LoadPlan(2),
            runs=1, warmup=0, done=(), append=full, progress=Silent(),
        )  # fmt: skip


@pytest.mark.parametrize("error", [LumoTreeError("disk full"), KeyboardInterrupt()])
def test_clients_that_wait_for_their_time_are_told_of_the_end(error):
    def full(row):
        raise error

    arm, began = StubArm("x"), time.perf_counter()
    with pytest.raises(type(error)):
        replay_load(
            [arm], items(["a"] * 3), LoadPlan(None, (0.0, 20.0, 20.0)),
            runs=1, warmup=0, done=(), append=full, progress=Silent(),
        )  # fmt: skip
    assert time.perf_counter() - began < 10 and len(arm.served) == 1


def test_an_interrupt_ends_the_wait_of_clients(monkeypatch):
    class Interrupted(ThreadPoolExecutor):
        def map(self, *args):
            super().map(*args)
            raise KeyboardInterrupt

    monkeypatch.setattr(load, "ThreadPoolExecutor", Interrupted)
    arm, began = StubArm("x"), time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        served([arm], items(["a"] * 3), LoadPlan(None, (20.0,) * 3), warmup=0)
    assert time.perf_counter() - began < 10 and not arm.served


def row(ttft=0.1, e2e=1.1, n=11, bursts=(0.1,) * 10, error=None, sent=0.0, run=1):
    load = {"sent_s": sent, "burst_s": list(bursts)}
    return Row(
        arm="x", run=run, request_id="r", completion_tokens=n, ttft_s=ttft, e2e_s=e2e,
        decode_s=e2e - ttft, error=error, details={"load": load},
    )  # fmt: skip


def test_figures():
    rows = [row(), row(ttft=3.0, e2e=4.0, sent=1.0), row(error="cut", n=0, e2e=0.0, ttft=0.0)]
    figures = load_of(rows, {"ttft": 2.0})
    assert figures.keys() == metrics.tags(metrics.LOAD)
    assert (figures["requests"], figures["failed_requests"]) == (2, 1)
    assert figures["wall_s"] == 5.0
    assert figures["requests_per_s"] == 2 / 5 and figures["output_tok_s"] == 22 / 5
    assert figures["goodput_per_s"] == 1 / 5 and figures["good_share"] == 1 / 3
    assert figures["ttft_s"] == {"p50": 0.1, "p95": 3.0, "p99": 3.0}
    assert figures["late_s"] is None
    assert load_of(rows, {})["goodput_per_s"] is None
    two_runs = load_of([row(), row(run=2)], {})
    assert two_runs["wall_s"] == 2.2


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 0.1}, True),
        ({"ttft": 0.09}, False),
        ({"e2e": 1.2, "tpot": 0.11, "burst": 0.1}, True),
        ({"tpot": 0.09}, False),
        ({"burst": 0.09}, False),
    ],
    ids=str,
)
def test_limits(limits, good):
    assert meets(row(), limits) is good


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_are_values_and_ordered(values):
    found = percentiles(values)
    assert list(found) == ["p50", "p95", "p99"] and set(found.values()) <= set(values)
    assert found["p50"] <= found["p95"] <= found["p99"]
    assert sum(v <= found["p95"] for v in values) >= 0.95 * len(values)


def test_limits_and_times_are_read():
    assert parse_goodput("ttft=2,burst=0.2") == {"ttft": 2.0, "burst": 0.2}
    for bad in ("", "ttft", "ttft=0", "ttft=x", "speed=1", "ttft=1,ttft=2", "e2e=inf"):
        with pytest.raises(LumoTreeError, match="--goodput"):
            parse_goodput(bad)
    assert offsets(iter([5.0, 3.0, 4.5])) == (2.0, 0.0, 1.5)
    line = {"custom_id": "a", "body": {"messages": [{"role": "user", "content": "q"}]}}
    for at, seconds in ((3, 3.0), ("1970-01-01T00:00:02.5+00:00", 2.5), ("noon", None)):
        raw = json.dumps(line | {"lumotree": {"recorded_at": at}}).encode()
        assert parse_line(raw, 1, "x").recorded_at == seconds


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    install(FakeEngine(), monkeypatch)
    return write_corpus(tmp_path / "c.jsonl", corpus_lines())


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_wrong_use(corpus, tmp_path):
    for words, says in (
        (["--concurrency", 0], "--concurrency is 0"),
        (["--arrivals", "poisson"], "--arrivals is 'poisson'; it takes recorded"),
        (["--goodput", "ttft=1"], "--goodput needs"),
        (["--arrivals", "recorded"], "line 1 has no time in lumotree.recorded_at"),
    ):
        done = call("replay", corpus, "--arms", "openai", *words)
        assert done.exit_code == 2 and says in done.stderr, done.stderr


def test_a_run_under_load_is_whole_or_new(corpus, tmp_path):
    words = ("replay", corpus, "--arms", "openai:url=http://127.0.0.1:9", "--concurrency", 2)
    done = call(*words, "--out", tmp_path / "run", "--goodput", "ttft=1")
    assert done.exit_code == 0, done.output
    options = json.loads((tmp_path / "run" / "run.json").read_text())["options"]
    assert (options["concurrency"], options["goodput"]) == (2, {"ttft": 1.0})
    again = call("replay", "--resume", tmp_path / "run")
    assert again.exit_code == 2 and "cannot be resumed" in again.stderr

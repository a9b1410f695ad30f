"""Counters of servers: read, differenced, and checked before a rate is made of them."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.agent.attempt import TIME, Attempt
from replay.agent.boundaries import Boundaries
from replay.agent.counters import Counters, difference, faults, parse, scrape, settled, total
from replay.agent.loop import Answer, Exchange
from replay.agent.scripted import ScriptedEndpoint

VLLM = """\
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 1203.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 7.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 3.0
vllm:e2e_request_latency_seconds_sum{engine="0",model_name="m"} 50.5
vllm:e2e_request_latency_seconds_bucket{le="+Inf"} 10.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 1.25e+01
vllm:num_requests_running{engine="0"} 0.0
vllm:num_requests_waiting{engine="0"} 2.0
python_info{version="3"} 1.0
"""
SGLANG = """\
sglang:generation_tokens_total{model_name="m"} 100
sglang:num_requests_total{model_name="m"} 4
sglang:e2e_request_latency_seconds_sum{model_name="m"} 9
sglang:time_to_first_token_seconds_sum{model_name="m"} 1
sglang:num_running_reqs{model_name="m"} 1
sglang:num_queue_reqs{model_name="m"} 0
"""


def test_counters_of_both_kinds_of_server() -> None:
    assert parse(VLLM) == Counters(1203, 10, 50.5, 12.5, 2)
    assert parse(SGLANG) == Counters(100, 4, 9, 1, 1)
    assert parse(VLLM.replace("vllm:", "lumotree:")) == Counters(1203, 10, 50.5, 12.5, 2)


def test_a_page_without_the_four_counters_is_none() -> None:
    assert parse("") is None
    assert parse(VLLM.replace("time_to_first", "time_to_last")) is None
    # Before its first request a labelled counter has no sample at all.
    fresh = "\n".join(line for line in VLLM.splitlines() if "success" not in line)
    assert parse(fresh).requests == 0


def test_the_rate_leaves_out_first_tokens_and_prefill() -> None:
    before, after = Counters(100, 2, 10.0, 4.0), Counters(302, 4, 20.0, 6.0)
    # (202 tokens - 2 requests) / (10 s - 2 s)
    assert difference(before, after).tok_s == pytest.approx(25.0)
    assert difference(before, before).tok_s is None


def test_pooled_parts_are_weighted_by_time() -> None:
    parts = [
        difference(Counters(0, 0, 0, 0), Counters(101, 1, 11.0, 1.0)),
        difference(Counters(101, 1, 11.0, 1.0), Counters(402, 2, 22.0, 2.0)),
    ]
    assert total(parts).tok_s == pytest.approx(400 / 20)
    assert total([]) is None


GOOD = (Counters(0, 0, 0, 0, 0), Counters(0, 0, 0, 0, 0), Counters(50, 5, 9, 1, 0))


@pytest.mark.parametrize(
    ("previous", "before", "after", "sent", "tokens", "fault"),
    [
        (*GOOD, 5, 50, None),
        (None, *GOOD[1:], 5, 50, None),
        (*GOOD, None, None, None),
        (Counters(9, 1, 2, 1, 0), *GOOD[1:], 5, 50, "reset before the task"),
        (GOOD[0], Counters(60, 6, 9, 1, 0), GOOD[2], 5, 50, "reset during the task"),
        (
            GOOD[0],
            Counters(10, 1, 2, 1, 0),
            Counters(60, 6, 9, 2, 0),
            5,
            50,
            "1 requests of somebody",
        ),
        (GOOD[0], Counters(0, 0, 0, 0, 2), GOOD[2], 5, 50, "2 requests under way .* beginning"),
        (*GOOD[:2], Counters(50, 5, 9, 1, 1), 5, 50, "1 requests under way at the task's end"),
        (*GOOD, 4, 50, "counted 5 requests, 4 were sent"),
        (*GOOD, 5, 49, "counted 50 tokens, its answers said 49"),
    ],
)
def test_what_spoils_a_difference_is_said(previous, before, after, sent, tokens, fault) -> None:
    found = faults(previous, before, after, sent, tokens)
    if fault is None:
        assert found == []
    else:
        assert len(found) == 1 and re.search(fault, found[0])


def test_a_request_that_broke_off_spoils_a_difference() -> None:
    """Its tokens are counted as they come, its seconds never."""
    found = faults(*GOOD, None, None, broke_off=True)
    assert found == ["a request broke off; its tokens have no time"]


STEPS = st.lists(
    st.tuples(st.integers(1, 500), st.integers(1, 9), st.floats(0.1, 50), st.floats(0.01, 5)),
    min_size=1,
    max_size=6,
)


@given(STEPS)
def test_parts_add_up_to_the_whole(steps: list) -> None:
    scrapes = [Counters(0, 0, 0, 0, 0)]
    for tokens, requests, decode, first in steps:
        last = scrapes[-1]
        scrapes.append(
            Counters(
                last.generation_tokens + tokens + requests,
                last.requests + requests,
                last.e2e_s + decode + first,
                last.ttft_s + first,
                0,
            )
        )
    parts = [difference(a, b) for a, b in zip(scrapes, scrapes[1:], strict=False)]
    whole = difference(scrapes[0], scrapes[-1])
    assert total(parts).tok_s == pytest.approx(whole.tok_s)
    for before, after in zip(scrapes, scrapes[1:], strict=False):
        assert faults(before, before, after, None, None) == []


class Server:
    """An arm with counters that a test moves."""

    name, model, key, decodes = "arm", "m", None, True

    def __init__(self) -> None:
        self.endpoint = ScriptedEndpoint([])
        self.url = self.endpoint.start()

    def serve(self, requests: int, tokens: int) -> None:
        for _ in range(requests):
            self.endpoint.count(tokens // requests, 1.5, 0.5)


def attempt_of(requests: int, tokens: int) -> Attempt:
    answer = Answer({}, "stop", {"completion_tokens": tokens // requests})
    return Attempt([Exchange({}, answer, (), ())] * requests)


def test_the_boundaries_of_tasks_catch_a_stranger() -> None:
    arm = Server()
    arm.serve(3, 30)
    known: dict = {}
    with Boundaries(arm, known, parallel=1) as boundaries:
        before = boundaries.before()
        arm.serve(2, 20)
        first = boundaries.after(before, attempt_of(2, 20))
        arm.serve(1, 7)  # somebody else, between the tasks
        before = boundaries.before()
        arm.serve(2, 20)
        second = boundaries.after(before, attempt_of(2, 20))
        before = boundaries.before()
        arm.serve(4, 40)  # two of the four are not ours
        third = boundaries.after(before, attempt_of(2, 20))
    arm.endpoint.stop()
    assert first["faults"] == [] and first["tok_s"] == pytest.approx((20 - 2) / 2)
    assert second["faults"] == ["1 requests of somebody else since the task before"]
    assert third["faults"] == ["the server counted 4 requests, 2 were sent"]
    assert known == {}


def test_a_server_without_counters_gives_none() -> None:
    arm = Server()
    arm.endpoint.stop()
    with Boundaries(arm, {}, parallel=1) as boundaries:
        assert boundaries.after(boundaries.before(), attempt_of(1, 1)) is None


@pytest.mark.parametrize("parallel", [1, 2])
def test_an_attempt_whose_request_broke_off_is_in_no_rate(parallel: int) -> None:
    arm, known = Server(), {}
    made = attempt_of(2, 20)
    made.exit_status, made.broke_off = TIME, True
    with Boundaries(arm, known, parallel) as boundaries:
        before = boundaries.before()
        arm.serve(2, 33)
        seen = boundaries.after(before, made)
        # The fault is of the whole segment, not of its last task.
        arm.serve(2, 20)
        if parallel > 1:
            boundaries.after(None, attempt_of(2, 20))
    arm.endpoint.stop()
    part = seen if parallel == 1 else known["segments"][0]
    assert part["faults"] == ["a request broke off; its tokens have no time"]


def test_a_server_with_a_key_is_scraped_with_it_or_says_what_is_missing(capsys) -> None:
    class Guarded(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            known = self.headers["authorization"] == "Bearer k"
            self.send_response(200 if known else 401)
            self.end_headers()
            self.wfile.write(VLLM.encode() if known else b"")

    with HTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert scrape(url, "k") == parse(VLLM)
        assert capsys.readouterr().err == ""
        assert scrape(url) is None and settled(url, "wrong") is None
        server.shutdown()
    said = capsys.readouterr().err
    assert said.count("answered 401") == 1 and "(key=)" in said

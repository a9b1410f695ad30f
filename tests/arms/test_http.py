"""The SGLang arm against a small server on the loopback that can misbehave in each known way."""

import json

import pytest

from arms.protocol import ArmRequest
from arms.sglang import SglangArm, sglang_sampling
from arms.spec import ArmSpec
from lumotree.errors import ArmError
from lumotree.request import SamplingParams
from replay.guards.counters import row_faults
from replay.rows import Row
from tests.arms.servers import closed_url

REQUEST = ArmRequest("r1", (5, 6, 7))
PARAMS = SamplingParams(max_tokens=8, seed=3, top_k=0)


def event(ids, finish=None, **extra):
    meta = {"prompt_tokens": 3, "completion_tokens": len(ids), "cached_tokens": 1} | extra
    meta["finish_reason"] = finish
    return b"data: " + json.dumps({"text": "x", "output_ids": ids, "meta_info": meta}).encode()


@pytest.fixture
def arm(server):
    arm = SglangArm(ArmSpec("sglang-eagle", {"url": server.url}), timeout_s=2.0)
    yield arm
    arm.close()


STOP = {"type": "stop", "matched": 2}


def test_counts_come_from_the_server_and_ids_are_sent(server, arm):
    assert arm.start()["server"] == {"model_path": "m"}
    server.script = [
        b": a comment",
        event([1, 2]),
        event([1, 2, 3]),
        event(
            [1, 2, 3, 4, 5],
            STOP,
            spec_verify_ct=2,
            spec_correct_drafts_histogram=[0, 1, 1],
        ),
        b"data: [DONE]",
    ]
    result = arm.run(REQUEST, PARAMS)
    assert result.error is None
    assert (result.prompt_tokens, result.completion_tokens, result.steps) == (3, 5, 2)
    assert result.token_ids == (1, 2, 3, 4, 5)
    assert result.accepted_by_depth == (2, 1)
    assert result.prefix_reused_tokens == 1
    assert result.finish_reason == "stop"
    assert 0 < result.ttft_s <= result.e2e_s
    assert result.details == {"first_event_tokens": 2}
    path, body = server.bodies[-1]
    assert path == "/generate"
    assert body["input_ids"] == [5, 6, 7] and body["stream"] is True
    assert body["sampling_params"] == sglang_sampling(PARAMS)
    assert body["sampling_params"]["top_k"] == -1


def test_an_error_that_is_null_is_none(server, arm):
    last = json.loads(event([1], STOP).removeprefix(b"data: ")) | {"error": None}
    last["text"] = "a\u2028b"
    server.script = [
        b"data: " + json.dumps(last, ensure_ascii=False).encode(),
        b"data: [DONE]",
    ]
    assert arm.run(REQUEST, PARAMS).error is None


def test_incremental_ids_are_not_taken_for_the_whole_output(server, arm):
    last = event([5], STOP).replace(b'"completion_tokens": 1', b'"completion_tokens": 5')
    server.script = [event([1]), last, b"data: [DONE]"]
    result = arm.run(REQUEST, PARAMS)
    assert (result.completion_tokens, result.token_ids) == (5, None)


def test_chunks_counted_as_tokens_do_not_hide_from_the_guards(server, arm):
    ids = list(range(100))
    last = event(ids, STOP, completion_tokens=20)
    server.script = [event(ids[:9], completion_tokens=2), last, b"data: [DONE]"]
    result = arm.run(REQUEST, PARAMS)
    assert (result.completion_tokens, result.token_ids) == (20, tuple(ids))
    row = Row(
        arm=arm.name,
        run=1,
        request_id="r1",
        completion_tokens=result.completion_tokens,
        token_ids=list(result.token_ids),
        finish_reason=result.finish_reason,
        decode_s=1.0,
    )
    assert row_faults(row, cap=200) == ["fewer completion tokens than token ids"]


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ([event([1])], "cut before its end"),
        ([], "cut before its end"),
        ([b"data: [DONE]"], "without an event"),
        ([event([1]), b"data: [DONE]"], "without a finish reason"),
        ([b"data: {oops", b"data: [DONE]"], "malformed stream event"),
        ([b"data: 3", b"data: [DONE]"], "malformed stream event"),
        ([b"<html>"], "malformed stream line"),
        ([b'data: {"error": {"message": "too long"}}'], "too long"),
        ([event([], STOP), b"data: [DONE]"], "no completion tokens"),
        (
            [event([1], {"type": "abort", "message": "out of memory"}), b"data: [DONE]"],
            "out of memory",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_stream_is_a_failed_row(server, arm, script, says):
    server.script = script
    result = arm.run(REQUEST, PARAMS)
    assert says in result.error
    assert result.completion_tokens == 0 and result.e2e_s == 0


@pytest.mark.parametrize("status", [400, 404, 500, 503])
def test_an_error_status_is_a_failed_row(server, arm, status):
    server.status, server.script = status, [b"because"]
    assert arm.run(REQUEST, PARAMS).error == f"the server answered {status}: because"


def test_a_silent_server_times_out(server, arm):
    server.script, server.stall = [event([1])], "wait"
    assert "in time" in arm.run(REQUEST, PARAMS).error


def test_a_connection_closed_in_the_middle(server, arm):
    server.script, server.stall = [event([1])], "promise"
    assert "was cut" in arm.run(REQUEST, PARAMS).error


def test_a_server_that_went_away(server, arm):
    arm.start()
    arm.urls = [closed_url()]
    assert "connection refused" in arm.run(REQUEST, PARAMS).error


def test_no_server_is_said_with_the_address():
    arm = SglangArm(ArmSpec("sglang-eagle", {"url": closed_url()}))
    with pytest.raises(ArmError, match="no server reached at http://127.0.0.1:"):
        arm.start()
    arm.close()


@pytest.mark.parametrize(
    ("status", "info", "says"),
    [(404, b"", "answered 404"), (200, b"hello", "without a JSON object")],
)
def test_another_kind_of_server(server, arm, status, info, says):
    server.info_status, server.info = status, info
    with pytest.raises(ArmError, match=says):
        arm.start()

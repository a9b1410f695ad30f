"""OpenAI's protocol against scripted servers; the wire shapes are written by hand here."""

import json
import threading

import pytest

from arms.openai import OpenAIArm, openai_sampling
from arms.protocol import ArmRequest
from arms.spec import parse_arm
from lumotree.errors import ArmError
from lumotree.request import SamplingParams
from tests.arms.servers import Server, closed_url

MESSAGES = ({"role": "user", "content": "q"},)
REQUEST = ArmRequest("r1", (5, 6, 7), messages=MESSAGES, tools=({"type": "function"},))
PARAMS = SamplingParams(max_tokens=8, seed=3, top_k=0, stop=("END",))
MODELS = (200, b'{"data": [{"id": "m"}]}')
DONE = b"data: [DONE]"


def chunk(text="", ids=None, finish=None, **choice):
    choice |= {"index": 0, "text": text, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = ids
    return b"data: " + json.dumps({"choices": [choice]}).encode()


def usage(prompt=3, completion=5, cached=2):
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return (
        b"data: "
        + json.dumps({"choices": [], "usage": counts | {"prompt_tokens_details": details}}).encode()
    )


@pytest.fixture
def arm(server):
    server.pages["/v1/models"] = MODELS
    arm = OpenAIArm(parse_arm(f"openai:url={server.url}/v1"), timeout_s=2.0)
    arm.start()
    yield arm
    arm.close()


def made(server, text):
    server.pages["/v1/models"] = MODELS
    arm = OpenAIArm(parse_arm(text.format(url=server.url)), timeout_s=2.0)
    return arm


def test_ids_go_in_and_counts_come_from_usage(server, arm):
    server.script = [
        chunk("a", [1]),
        chunk("bcd", [2, 3, 4]),
        chunk("", [], "stop"),
        usage(),
        DONE,
    ]
    result = arm.run(REQUEST, PARAMS)
    assert result.error is None
    assert (result.prompt_tokens, result.completion_tokens) == (3, 5)
    assert result.prefix_reused_tokens == 2
    assert result.token_ids == (1, 2, 3, 4)
    assert result.finish_reason == "stop" and result.steps is None
    assert len(result.burst_s) == 1 and 0 < result.ttft_s <= result.e2e_s
    assert result.details == {"first_event_tokens": 1}
    path, body = server.bodies[-1]
    assert path == "/v1/completions"
    assert body == {
        "model": "m",
        "prompt": [5, 6, 7],
        **openai_sampling(PARAMS),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert body["top_k"] == -1 and body["stop"] == ["END"]


@pytest.mark.parametrize(
    ("extra", "ids"),
    [
        ({"stop_reason": None}, (1, 2)),  # vLLM: the end-of-text token is the last id
        ({"stop_reason": "END"}, (1, 2, 3)),
        ({}, (1, 2, 3)),
    ],
)
def test_the_end_of_text_token_is_no_output(server, arm, extra, ids):
    server.script = [chunk("ab", [1, 2, 3], "stop", **extra), usage(completion=3), DONE]
    assert arm.run(REQUEST, PARAMS).token_ids == ids


def test_without_token_ids_there_are_none(server, arm):
    server.script = [chunk("ab"), chunk("c", finish="length"), usage(), DONE]
    result = arm.run(REQUEST, PARAMS)
    assert result.token_ids is None and result.output_sha256 and result.details == {}


def test_chat_sends_messages_and_reads_calls(server):
    arm = made(server, "openai:url={url},api=chat,extras=off")
    described = arm.start()
    assert described["sends"] == "messages" and "top_k" in described["not_sent"]
    call = {"index": 0, "function": {"name": "f", "arguments": "{}"}}
    deltas = [({"role": "assistant"}, None), ({"content": "x"}, None)]
    deltas += [({"tool_calls": [call]}, None), ({}, "tool_calls")]
    server.script = [
        b"data: " + json.dumps({"choices": [{"delta": d, "finish_reason": f}]}).encode()
        for d, f in deltas
    ]
    server.script += [usage(prompt=40), DONE]
    result = arm.run(REQUEST, PARAMS)
    assert (result.prompt_tokens, result.finish_reason) == (40, "stop")
    assert len(result.burst_s) == 1
    path, body = server.bodies[-1]
    assert path == "/v1/chat/completions"
    assert body["messages"] == list(MESSAGES) and "prompt" not in body
    assert not {"top_k", "min_p", "return_token_ids"} & body.keys()
    arm.close()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ([chunk("a", [1])], "cut before its end"),
        ([chunk("a", [1]), usage(), DONE], "without a finish reason"),
        ([chunk("a", [1], "stop"), DONE], "no completion tokens"),
        ([b"data: {oops", DONE], "malformed stream event"),
        ([b"<html>"], "malformed stream line"),
        ([b'data: {"a": 1}', DONE], "no choices"),
        ([b'data: {"choices": [3]}', DONE], "no object"),
        ([b'data: {"error": {"message": "too long"}}'], "too long"),
        ([chunk("a", [1], "content_filter"), usage(), DONE], "without a finish reason"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_stream_is_a_failed_row(server, arm, script, says):
    server.script = script
    result = arm.run(REQUEST, PARAMS)
    assert says in result.error and result.completion_tokens == 0


def test_faults_of_the_connection(server, arm):
    server.script, server.stall = [chunk("a", [1])], "wait"
    assert "in time" in arm.run(REQUEST, PARAMS).error
    server.stall = "promise"
    assert "was cut" in arm.run(REQUEST, PARAMS).error
    server.status, server.stall, server.script = 429, None, [b"busy"]
    assert arm.run(REQUEST, PARAMS).error == "the server answered 429: busy"
    arm.urls = [closed_url()]
    assert "connection refused" in arm.run(REQUEST, PARAMS).error


def test_the_key_is_a_variable_s(server, monkeypatch):
    monkeypatch.setenv("A_KEY", "hunter2")
    arm = made(server, "openai:url={url}/v1,key=A_KEY")
    assert "hunter2" not in repr(arm.start()) + arm.name
    server.script = [chunk("a", [1], "length"), usage(), DONE]
    arm.run(REQUEST, PARAMS)
    assert server.keys == ["Bearer hunter2"]
    arm.close()
    monkeypatch.delenv("A_KEY")
    with pytest.raises(ArmError, match="no environment variable A_KEY"):
        made(server, "openai:url={url}/v1,key=A_KEY")


def test_several_addresses_take_turns(server, arm):
    other = Server()
    thread = threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    both = made(server, f"openai:url={{url}}/v1+{other.url}/v1")
    other.pages["/v1/models"] = MODELS
    assert both.start()["urls"] == [f"{server.url}/v1", f"{other.url}/v1"]
    for each in (server, other):
        each.script = [chunk("a", [1], "length"), usage(), DONE]
    for _ in range(4):
        assert both.run(REQUEST, PARAMS).error is None
    assert len(server.bodies) == len(other.bodies) == 2
    both.close()
    other.shutdown()
    thread.join()
    other.server_close()


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ((404, b""), "answered 404 to /models"),
        ((200, b"hello"), "without a JSON object"),
        ((200, b'{"data": []}'), "lists no model"),
    ],
)
def test_a_server_that_does_not_say_its_model(server, page, says):
    arm = made(server, "openai:url={url}")
    server.pages["/v1/models"] = page
    with pytest.raises(ArmError, match=says):
        arm.start()
    arm.close()

"""The client against a server that answers whatever a test wants."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from replay.agent.client import ChatClient, EndpointError, OutOfTime
from replay.agent.loop import Answer, command_of, converse
from replay.agent.shell import Result

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


class FakeServer:
    """Answers each POST with `status` and the given bytes, after `wait_s`."""

    def __init__(self) -> None:
        self.status, self.data, self.wait_s = 200, b"", 0.0
        self.seen: list[dict] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *words: object) -> None:
                pass

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                body = json.loads(self.rfile.read(length))
                owner.seen.append({"path": self.path, "body": body, **dict(self.headers)})
                self.send_response(owner.status)
                self.end_headers()
                with contextlib.suppress(OSError):  # a client may leave
                    for part in owner.data.split(b"|"):
                        self.wfile.write(part)
                        self.wfile.flush()
                        time.sleep(owner.wait_s)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def chunks(self, *events: object) -> None:
        lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
        self.data = b"|".join([b": ping\n\n", *lines, b"data: [DONE]\n\n"])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


def delta(finish: str | None = None, **fields: object) -> dict:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def test_a_message_is_put_together_from_its_pieces(server: FakeServer) -> None:
    def call(index: int, **function: str) -> dict:
        return {"index": index, "function": function}

    server.chunks(
        delta(role="assistant", content="I "),
        delta(content="look.", reasoning_content="hm"),
        delta(tool_calls=[{"id": "a", "type": "function", **call(0, name="bash", arguments="")}]),
        delta(tool_calls=[call(0, arguments='{"command": ')]),
        delta(tool_calls=[call(0, arguments='"ls"}'), {"id": "b", **call(1, name="bash")}]),
        delta(tool_calls=[call(1, arguments='{"command": "pwd"}')]),
        delta("tool_calls"),
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9}},
    )
    answer = ChatClient(f"{server.url}/v1/", key="k")(BODY)
    assert answer.message["content"] == "I look." and answer.message["reasoning_content"] == "hm"
    assert [command_of(call) for call in answer.message["tool_calls"]] == ["ls", "pwd"]
    assert [call["id"] for call in answer.message["tool_calls"]] == ["a", "b"]
    assert answer.finish_reason == "tool_calls" and answer.usage["completion_tokens"] == 9
    assert 0 < answer.ttft_s <= answer.e2e_s
    (seen,) = server.seen
    assert seen["path"] == "/v1/chat/completions" and seen["authorization"] == "Bearer k"
    assert seen["body"]["stream"] and seen["body"]["stream_options"] == {"include_usage": True}
    assert "stream" not in BODY


@pytest.mark.parametrize(
    ("status", "data", "fault"),
    [
        (500, b'{"error": "broken"}', "answered 500: .*broken"),
        (
            200,
            b'data: {"error": {"message": "out of memory"}}\n\n',
            "reported an error: out of memory",
        ),
        (200, b"data: nonsense\n\n", "malformed stream line"),
        (200, b"data: [1]\n\n", "malformed stream line"),
        (200, b'data: {"choices": [3]}\n\n', "ended without a finish reason"),
        (200, b"", "ended without a finish reason"),
    ],
)
def test_a_server_that_fails_is_named(
    server: FakeServer, status: int, data: bytes, fault: str
) -> None:
    server.status, server.data = status, data
    with pytest.raises(EndpointError, match=fault) as caught:
        ChatClient(server.url)(BODY)
    assert caught.value.status == (status if status != 200 else None)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(EndpointError, match="http://127.0.0.1:9/v1/chat/completions: ConnectError"):
        ChatClient("http://127.0.0.1:9")(BODY)


@pytest.mark.parametrize("wait_s", [0.3, 20.0], ids=["trickle", "silence"])
def test_the_deadline_ends_an_answer_that_does_not(server: FakeServer, wait_s: float) -> None:
    server.wait_s = wait_s
    server.chunks(*[delta(content="x") for _ in range(20)])
    client = ChatClient(server.url)
    client.deadline = time.monotonic() + 0.4
    began = time.monotonic()
    with pytest.raises(OutOfTime) as caught:
        client(BODY)
    assert caught.value.asked and time.monotonic() - began < 5
    with pytest.raises(OutOfTime) as caught:
        client(BODY)
    assert not caught.value.asked


def test_lone_surrogates_do_not_get_into_a_message(server: FakeServer) -> None:
    server.chunks(delta(content="a\ud83d"), delta(content="\ude00b\ud800"), delta("stop"))
    answer = ChatClient(server.url)(BODY)
    assert answer.message["content"] == "a\U0001f600b\ufffd"
    answer.message["content"].encode()


def test_an_error_in_lone_surrogates_can_be_written_down(server: FakeServer) -> None:
    server.chunks({"error": {"message": "out of \udcff"}})
    with pytest.raises(EndpointError, match="out of \ufffd"):
        ChatClient(server.url)(BODY)


def test_only_line_feeds_end_a_line_of_the_stream(server: FakeServer) -> None:
    text = "a\u2028b\u0085c"
    event = json.dumps(delta("stop", content=text), ensure_ascii=False)
    server.data = f"data: {event}\r\n\r\ndata: [DONE]\r\n\r\n".encode()
    assert ChatClient(server.url)(BODY).message["content"] == text


class Recorder:
    """A shell that runs nothing."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    def run(self, command: str) -> Result:
        self.commands.append(command)
        return Result(0, "done\n", "left 1 process in the background, which were ended")


@pytest.mark.parametrize(
    ("name", "arguments", "ran"),
    [
        ("bash", '{"command": "ls"}', ["ls"]),
        ("bash", '{"command": "ls"', []),
        ("bash", '{"cmd": "ls"}', []),
        ("bash", '["ls"]', []),
        ("bash", '{"command": 3}', []),
        ("bash", '{"command": "a\\u0000b"}', []),
        ("python", '{"command": "ls"}', []),
        ("bash", None, []),
    ],
)
def test_malformed_calls_are_told_to_the_agent(name: str, arguments: str, ran: list) -> None:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    answers = iter(
        [
            Answer({"role": "assistant", "content": "", "tool_calls": [call]}),
            Answer({"role": "assistant", "content": "end", "tool_calls": []}),
        ]
    )
    shell = Recorder()
    first, last = converse(["go"], lambda body: next(answers), shell, {"model": "m"})
    assert shell.commands == ran
    (told,) = first.observations
    assert told["tool_call_id"] == "c"
    if ran:
        assert told["content"] == (
            "exit code: 0\n[left 1 process in the background, which were ended]\ndone"
        )
    else:
        assert told["content"].startswith("exit code: 2\nno command was run")
    assert last.body["messages"][-1] == told and last.results == ()

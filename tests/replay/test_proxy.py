"""The recording proxy between a client and a scripted upstream."""

import asyncio
import contextlib
import gzip
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from itertools import takewhile

import pytest

from replay.corpus import load_corpus
from replay.proxy.http1 import Head
from replay.proxy.recorder import Exchange, Recorder
from replay.proxy.relay import Proxy, Upstream

MESSAGES = [{"role": "user", "content": "hé"}]
KEY = "sk-very-secret-1234"
COOKIE = "session-cookie-value"


def request(body=None, path="/v1/chat/completions", extra="", method="POST"):
    raw = json.dumps(body or {"messages": MESSAGES}).encode() if method == "POST" else b""
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: somewhere\r\nAuthorization: Bearer {KEY}\r\n"
        f"Cookie: a={COOKIE}\r\nUser-Agent: agent/1\r\n{extra}"
    )
    return head.encode() + f"content-length: {len(raw)}\r\n\r\n".encode() + raw


def answer(body, kind="application/json", status="200 OK", extra=""):
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nX-Odd-Case:  kept \r\n{extra}"
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def chunked(*parts):
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    return [head, *(f"{len(p):x}\r\n".encode() + p + b"\r\n" for p in parts), b"0\r\n\r\n"]


def sse(delta, finish=None, **more):
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


WHOLE = {
    "choices": [{"message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
}
STREAM = chunked(
    sse({"role": "assistant"}),
    sse({"content": "Hé"}),
    sse({"content": "llo"}),
    sse({"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": "{"}}]}),
    sse({"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}),
    sse({}, "tool_calls", usage={"completion_tokens": 9}),
    b"data: [DONE]\n\n",
)


class Upstreamer:
    """Answers each request on a connection with the next script: parts, or a callable."""

    def __init__(self, *scripts):
        self.scripts, self.seen = list(scripts), []
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port = self._sock.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._sock.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with connection, contextlib.suppress(OSError, ValueError):
            file = connection.makefile("rb")
            while head := b"".join(takewhile(lambda line: line.strip(), file)):
                size = next(
                    (
                        int(v)
                        for k, _, v in (line.partition(b":") for line in head.splitlines())
                        if k.lower() == b"content-length"
                    ),
                    0,
                )
                self.seen.append((head, file.read(size)))
                script = self.scripts.pop(0)
                if script is None:
                    return
                for part in script:
                    if callable(part):
                        part = part()
                    connection.sendall(part)
                    time.sleep(0.002)
                if script[-1] == b"":  # an answer that lasts until the close
                    return

    def close(self):
        self._sock.close()


class Running:
    """A proxy in a thread, and the lines it wrote."""

    def __init__(self, upstream, out):
        self.out = out
        self.recorder = Recorder(out, "s", "a task", None)
        self.loop = asyncio.new_event_loop()
        self.proxy = Proxy(Upstream.of(upstream), self.recorder)
        self.port = self.loop.run_until_complete(self.proxy.start("127.0.0.1", 0))
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def stop(self):
        asyncio.run_coroutine_threadsafe(self.proxy.stop(30.0), self.loop).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.recorder.close()

    def lines(self):
        """Stops the proxy and reads what it recorded."""
        self.stop()
        return [json.loads(line) for line in self.out.read_bytes().splitlines()]


@pytest.fixture
def through(tmp_path):
    """through(*scripts) -> upstream, proxy."""
    made = []

    def start(*scripts):
        upstream = Upstreamer(*scripts)
        made.append(upstream)
        return upstream, Running(f"http://127.0.0.1:{upstream.port}", tmp_path / "out.jsonl")

    yield start
    for upstream in made:
        upstream.close()


def ask(port, *requests, answers=None):
    """The raw bytes that come back for requests on one connection, until they stop."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        got = b""
        for index, each in enumerate(requests):
            sock.sendall(each)
            expected = sum(map(len, answers[: index + 1])) if answers else None
            while expected is None or len(got) < expected:
                part = sock.recv(1 << 16)
                if not part:
                    break
                got += part
        return got


ENCODED = answer(gzip.compress(json.dumps(WHOLE).encode()), extra="Content-Encoding: gzip\r\n")
UNTIL_CLOSE = [b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n", b"a", b"b", b""]


@pytest.mark.parametrize(
    "script",
    [
        [answer(json.dumps(WHOLE, indent=1).encode())],
        STREAM,
        [ENCODED],
        [answer(b'{"error": "no"}', status="429 Too Many")],
        UNTIL_CLOSE,
        [b"HTTP/1.1 100 Continue\r\n\r\n", answer(b"{}")],
        [b"not HTTP at all\r\n\r\n", b""],
    ],
    ids=["whole", "stream", "gzip", "error", "until close", "continue", "no HTTP"],
)
def test_bytes_are_the_same_with_and_without_it(through, script):
    upstream, proxy = through(list(script), list(script))
    size = [b"".join(part for part in script)]
    direct = ask(upstream.port, request(), answers=size)
    assert direct == ask(proxy.port, request(), answers=size) == size[0]
    proxy.stop()
    (head, body), (seen, same) = upstream.seen
    host = f"Host: 127.0.0.1:{upstream.port}".encode()
    assert seen == head.replace(b"Host: somewhere", host) and body == same


def test_several_requests_on_one_connection(through):
    upstream, proxy = through([answer(json.dumps(WHOLE).encode())], STREAM, [answer(b"[]")])
    answers = [answer(json.dumps(WHOLE).encode()), b"".join(STREAM), answer(b"[]")]
    more = [*MESSAGES, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "b"}]
    requests = [request(), request({"messages": more}), request(path="/v1/models", method="GET")]
    assert ask(proxy.port, *requests, answers=answers) == b"".join(answers)
    first, second = proxy.lines()
    assert proxy.recorder.counts["passed"] == 1
    assert [line["custom_id"] for line in (first, second)] == ["s-00001", "s-00002"]
    about = first["lumotree"]
    assert (about["conversation"], about["turn"], about["task"]) == ("s-001", 1, "a task")
    assert about["agent"] == "agent/1"
    assert about["completion"] == WHOLE["choices"][0]["message"]
    assert about["response"]["usage"] == WHOLE["usage"]
    assert about["response"]["status"] == 200
    told = second["lumotree"]
    assert (told["conversation"], told["turn"]) == ("s-001", 2)
    assert told["completion"]["content"] == "Héllo"
    assert told["completion"]["tool_calls"] == [
        {"id": "c1", "function": {"name": "f", "arguments": "{}"}}
    ]
    assert told["response"]["finish_reason"] == "tool_calls"
    times = told["response"]["timings"]
    assert 0 < times["headers_s"] <= times["first_text_s"] < times["end_s"]


def test_the_body_stays_as_it_was_written(through):
    body = b'{ "messages":[{"role":"user","content":"h\\u00e9"}],"temperature":0.60 }'
    raw = request().partition(b"content-length")[0] + b"content-length: %d\r\n\r\n" % len(body)
    _, proxy = through([answer(json.dumps(WHOLE).encode())])
    ask(proxy.port, raw + body, answers=[answer(json.dumps(WHOLE).encode())])
    proxy.stop()
    assert b'"body":' + body + b',"lumotree":' in proxy.out.read_bytes()


def test_secrets_are_never_written(through):
    said = json.dumps({"error": f"the key {KEY} is wrong"}).encode()
    script = answer(said, status="401 Unauthorized", extra=f"set-cookie: {COOKIE}\r\n")
    _, proxy = through([script])
    body = {"messages": [{"role": "user", "content": f"my key is {KEY}"}], "api_key": "another"}
    ask(proxy.port, request(body), answers=[script])
    (line,) = proxy.lines()
    text = proxy.out.read_text()
    for secret in (KEY, COOKIE, "another", "Bearer"):
        assert secret not in text
    assert line["lumotree"]["response"]["status"] == 401
    assert proxy.recorder.counts["failed"] == 1


def recorded(tmp_path, body, head=b"Authorization: Bearer x-secret-1\r\n"):
    """The recorder of one exchange whose client sent `head`, after its end."""
    recorder = Recorder(tmp_path / "out.jsonl", "s", None, None)
    start = b"POST /v1/chat/completions HTTP/1.1\r\n"
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    recorder.put(Exchange(Head.parse(start + head), datetime.now(UTC), bytearray(raw)))
    recorder.close()
    return recorder


def test_secrets_that_are_words_of_the_protocol_destroy_no_line(tmp_path):
    body = {"messages": [{"role": "assistant", "content": "messages of assistant"}], "seed": 123456}
    cookies = b"cookie: a=messages; b=assistant; c=content; d=123456\r\n"
    recorder = recorded(tmp_path, body, cookies)
    assert recorder.counts["recorded"] == 1
    (kept,) = load_corpus(tmp_path / "out.jsonl").requests
    assert kept.messages == [{"role": "assistant", "content": "[removed] of [removed]"}]


def test_secrets_are_found_as_json_spells_them(tmp_path):
    secret = 'pa"ss\\wörd'
    inner = json.dumps({"key": secret})
    body = {"messages": [{"role": "user", "content": f"{inner} {secret}"}]}
    recorded(tmp_path, body, f"x-api-key: {secret}\r\n".encode())
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    said = json.loads(line)["body"]["messages"][0]["content"]
    assert said == '{"key": "[removed]"} [removed]'


def test_a_value_that_its_key_hides_is_not_written(tmp_path):
    raw = b'{"x": "x-secret-1", "messages": [{"role": "user", "content": "a"}], "x": "y"}'
    assert recorded(tmp_path, raw).counts["recorded"] == 1
    assert b"secret" not in (tmp_path / "out.jsonl").read_bytes()


def test_a_file_without_a_last_line_end_is_gone_on_with(tmp_path):
    (tmp_path / "out.jsonl").write_bytes(b'{"a": 1}')
    recorded(tmp_path, {"messages": MESSAGES})
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_bytes().splitlines())
    assert first == {"a": 1} and second["body"] == {"messages": MESSAGES}


def test_a_line_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    write, room = os.write, [10**9]

    def short(file, data):
        """Takes 100 bytes at a time until there is no room."""
        if not room[0]:
            raise OSError(28, "No space left on device")
        taken = write(file, data[: min(100, room[0])])
        room[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", short)
    assert not recorded(tmp_path, {"messages": MESSAGES}).unwritten
    whole = (tmp_path / "out.jsonl").read_bytes()
    assert len(whole) > 100 and whole.endswith(b"}\n") and json.loads(whole)
    room[0] = 150
    recorder = recorded(tmp_path, {"messages": MESSAGES})
    assert recorder.unwritten == recorder.counts["left out"] == 1
    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_an_answer_that_is_cut(through):
    _, proxy = through([*STREAM[:3], b""])
    got = ask(proxy.port, request())
    assert got == b"".join(STREAM[:3])
    (line,) = proxy.lines()
    response = line["lumotree"]["response"]
    assert "closed the connection" in response["fault"] and "aborted" not in response
    assert line["lumotree"]["completion"]["content"] == "Hé"


def test_a_client_that_leaves(through):
    left = threading.Event()

    def wait():
        assert left.wait(60)
        time.sleep(0.05)
        return STREAM[3]

    _, proxy = through([*STREAM[:3], wait, *STREAM[3:]])
    with socket.create_connection(("127.0.0.1", proxy.port)) as sock:
        sock.sendall(request())
        got = b""
        while len(got) < sum(map(len, STREAM[:3])):
            got += sock.recv(1 << 16)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    left.set()
    (line,) = proxy.lines()
    assert line["lumotree"]["response"]["aborted"] is True
    assert proxy.recorder.counts["aborted"] == 1


def test_an_upstream_that_is_not_there(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    proxy = Running(f"http://127.0.0.1:{port}", tmp_path / "out.jsonl")
    got = ask(proxy.port, request())
    assert got.startswith(b"HTTP/1.1 502") and b"cannot be reached" in got
    (line,) = proxy.lines()
    assert line["lumotree"]["response"]["status"] is None
    assert "cannot be reached" in line["lumotree"]["response"]["fault"]


@pytest.mark.parametrize(
    ("body", "says"),
    [(b"{", "broken JSON"), (b'{"messages": []}', "messages"), (b"\xff", "not UTF-8")],
)
def test_what_cannot_be_a_line_passes_and_is_counted(through, body, says):
    raw = request().partition(b"content-length")[0] + b"content-length: %d\r\n\r\n" % len(body)
    _, proxy = through([answer(b"{}")])
    assert ask(proxy.port, raw + body, answers=[answer(b"{}")]) == answer(b"{}")
    assert proxy.lines() == []
    assert proxy.recorder.counts["left out"] == 1 and says in proxy.recorder.reasons[0]


def test_what_it_writes_is_a_corpus(through):
    _, proxy = through(STREAM, [answer(json.dumps(WHOLE).encode())])
    ask(proxy.port, request(), answers=[b"".join(STREAM)])
    ask(proxy.port, request(), answers=[answer(json.dumps(WHOLE).encode())])
    proxy.stop()
    corpus = load_corpus(proxy.out)
    assert [r.messages for r in corpus.requests] == [MESSAGES] * 2
    assert [(r.conversation, r.turn) for r in corpus.requests] == [("s-001", 1), ("s-001", 2)]


def test_chunks_are_not_held_back(through):
    """Time from an upstream's send to the client's read: the proxy's part of it is small."""

    def stamped():
        text = b"data: %020d\n\n" % time.perf_counter_ns()
        return b"%x\r\n" % len(text) + text + b"\r\n"

    head = STREAM[0]

    def delay(port):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(request())
            got, delays = b"", []
            while not got.endswith(b"0\r\n\r\n"):
                part = sock.recv(1 << 16)
                now = time.perf_counter_ns()
                got += part
                for word in part.split(b"data: ")[1:]:
                    delays.append(now - int(word[:20]))
        assert len(delays) == 60
        return statistics.median(delays) / 1e6

    script, tries = [head, *[stamped] * 60, b"0\r\n\r\n"], 5
    upstream, proxy = through(*[list(script) for _ in range(2 * tries)])
    # Far above the 0.5 ms that scripts/proxy_delay.py measures on a quiet machine. A busy one
    # may be slow now and then; a proxy that waits for more bytes is slow every time.
    found = any(delay(proxy.port) - delay(upstream.port) < 10.0 for _ in range(tries))
    proxy.stop()
    assert found


@pytest.mark.parametrize(
    ("base", "asked", "target"),
    [
        ("http://h:1", b"/v1/x", b"/v1/x"),
        ("http://h:1/v1", b"/v1/x", b"/v1/x"),
        ("http://h:1/v1/", b"/models", b"/v1/models"),
        ("https://h/openai/v1", b"/v1/x", b"/openai/v1/x"),
    ],
)
def test_paths_of_the_upstream(base, asked, target):
    assert Upstream.of(base).target(asked) == target


def test_the_command(tmp_path):
    out = tmp_path / "out.jsonl"
    script = answer(json.dumps(WHOLE).encode())
    upstream = Upstreamer([script])
    where = ["--upstream", f"http://127.0.0.1:{upstream.port}", "--out", str(out), "--port", "0"]
    command = [sys.executable, "-m", "replay.cli", "record", *where, "--json"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = run.stderr.readline()
    assert said.startswith("recording http://127.0.0.1:")
    ask(int(said.split(" ")[1].rpartition(":")[2]), request(), answers=[script])
    run.terminate()
    stdout, _ = run.communicate(timeout=60)
    upstream.close()
    assert run.returncode == 0
    assert json.loads(stdout) == {
        "recorded": 1,
        "aborted": 0,
        "failed": 0,
        "passed": 0,
        "left_out": 0,
    }
    assert len(load_corpus(out).requests) == 1
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 2 and "--append" in again.stderr


def test_the_command_fails_when_a_request_could_not_be_written():
    script = answer(json.dumps(WHOLE).encode())
    upstream = Upstreamer([script])
    where = ["--upstream", f"http://127.0.0.1:{upstream.port}", "--out", "/dev/full"]
    command = [sys.executable, "-m", "replay.cli", "record", *where, "--append", "--port", "0"]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said = run.stderr.readline()
    ask(int(said.split(" ")[1].rpartition(":")[2]), request(), answers=[script])
    run.terminate()
    _, said = run.communicate(timeout=60)
    upstream.close()
    assert run.returncode == 1 and "cannot be written: No space left" in said

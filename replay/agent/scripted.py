"""The scripted agent: an OpenAI-compatible endpoint that answers from written scripts.

It has no model. Given the messages of a conversation it finds the script whose first user message
they begin with, and answers with the step that comes after the answers already given. So it proves
the harness (an agent that knows the answer must resolve every task), and it makes recordings that
are the same every time. What it counts as tokens are words.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lumotree.errors import LumoTreeError
from replay.agent.loop import call_message
from replay.agent.script import Script, ScriptError, Step, read_script
from replay.agent.tasks import Task

NAME = "scripted"
IDLE_WORDS = "There is nothing that I would change."


def task_scripts(tasks: Sequence[Task]) -> list[Script]:
    """The scripts of tasks: `../scripts/ID.md` from the task's file. Raises LumoTreeError."""
    scripts = []
    for task in tasks:
        path = task.folder.parent / "scripts" / f"{task.id}.md"
        try:
            scripts.append(read_script(path, task.problem_statement.strip(), task.fix_command()))
        except FileNotFoundError:
            raise LumoTreeError(
                f"the scripted agent has no script for task {task.id}", f"write {path}"
            ) from None
        except ScriptError as error:
            raise LumoTreeError(str(error)) from None
    return scripts


def idle_script(task: Task) -> Script:
    """An agent that does nothing."""
    from replay.agent.script import Go

    return Script(task.id, (Go(task.problem_statement.strip(), (Step(IDLE_WORDS, None),)),))


class ScriptedEndpoint:
    """The server. `start` returns its address; counters are those of a model server."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self._steps = {
            script.goes[0].user: (script.name, [s for go in script.goes for s in go.steps])
            for script in scripts
        }
        self._lock = threading.Lock()
        self._tokens = self._requests = 0
        self._e2e_s = self._ttft_s = 0.0
        self._server: ThreadingHTTPServer | None = None

    def start(self) -> str:
        endpoint = self

        class Handler(_Handler):
            owner = endpoint

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def answer(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The next assistant message. Raises ScriptError when the conversation left the script."""
        first = next((m.get("content") for m in messages if m.get("role") == "user"), None)
        if first not in self._steps:
            raise ScriptError("no script begins with this user message")
        name, steps = self._steps[first]
        turn = sum(message.get("role") == "assistant" for message in messages)
        if turn >= len(steps):
            raise ScriptError(f"{name} has {len(steps)} turns, and one more was asked for")
        if turn and steps[turn - 1].command is not None:
            expected = f"exit code: {steps[turn - 1].exit_code}"
            seen = str(messages[-1].get("content", "")).partition("\n")
            if seen[0] != expected:
                raise ScriptError(
                    f"{name}, turn {turn}: {seen[0]!r} where {expected!r} was due: {seen[2][-400:]}"
                )
        return call_message(steps[turn].say, steps[turn].command, turn + 1)

    def count(self, words: int, e2e_s: float, ttft_s: float) -> None:
        with self._lock:
            self._tokens += words
            self._requests += 1
            self._e2e_s += e2e_s
            self._ttft_s += ttft_s

    def metrics(self) -> str:
        with self._lock:
            return (
                f"lumotree:generation_tokens_total {self._tokens}\n"
                f"lumotree:request_success_total {self._requests}\n"
                f"lumotree:e2e_request_latency_seconds_sum {self._e2e_s}\n"
                f"lumotree:time_to_first_token_seconds_sum {self._ttft_s}\n"
                "lumotree:num_requests_running 0\n"
            )


class _Handler(BaseHTTPRequestHandler):
    owner: ScriptedEndpoint
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._send(200, self.owner.metrics().encode(), "text/plain")
        elif self.path == "/v1/models":
            self._json(200, {"object": "list", "data": [{"id": NAME, "object": "model"}]})
        else:
            self._json(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        began = time.monotonic()
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        try:
            message = self.owner.answer(body["messages"])
        except ScriptError as error:
            self._json(500, {"error": {"message": str(error), "type": "script"}})
            return
        calls = message.get("tool_calls", [])
        words = len(f"{message['content']} {json.dumps(calls)}".split())
        usage = {
            "prompt_tokens": sum(len(json.dumps(m).split()) for m in body["messages"]),
            "completion_tokens": words,
        }
        finish = "tool_calls" if calls else "stop"
        first = time.monotonic()
        # Counted before the last byte is out: a client that has the answer may scrape at once.
        self.owner.count(words, time.monotonic() - began, first - began)
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": finish}
            self._json(200, {"object": "chat.completion", "choices": [choice], "usage": usage})
            return
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": message["content"]}]
        for index, call in enumerate(calls):
            function = call["function"]
            half = len(function["arguments"]) // 2
            head = {**call, "function": {**function, "arguments": function["arguments"][:half]}}
            rest = {"function": {"arguments": function["arguments"][half:]}}
            deltas += [{"tool_calls": [{"index": index, **part}]} for part in (head, rest)]
        events: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
        ]
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        events.append({"choices": [], "usage": usage})
        data = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self._send(200, data.encode(), "text/event-stream")

    def _json(self, status: int, value: Any) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

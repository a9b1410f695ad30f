"""Asks an OpenAI-compatible endpoint for the next message, streaming, within a deadline."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx

from lumotree.errors import LumoTreeError
from replay.agent.loop import Answer, Body

CONNECT_S = 5.0
# What a stream's options add to a request; recorded bodies do not have it.
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


class EndpointError(LumoTreeError):
    """The server refused (then `status` is its HTTP status), broke off or answered nonsense."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class OutOfTime(Exception):
    """The task's budget ended before the answer did."""


class ChatClient:
    """One endpoint. Called with a request's body it returns the answer; `deadline` may be moved.

    `deadline` is a time of `time.monotonic`. Raises EndpointError, and OutOfTime at the deadline.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        """`url` is the server's root; paths below /v1 are added."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.deadline = float("inf")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # Proxies of the environment are not for a server that is named by its address.
        self._client = httpx.Client(headers=headers, trust_env=False)

    def close(self) -> None:
        self._client.close()

    def __call__(self, body: Body) -> Answer:
        began = time.monotonic()
        left = self.deadline - began
        if left <= 0:
            raise OutOfTime
        timeout = httpx.Timeout(left if left < 1e6 else None, connect=CONNECT_S)
        address = f"{self.url}/v1/chat/completions"
        reply = _Reply(began)
        try:
            with self._client.stream(
                "POST", address, json={**body, **STREAM}, timeout=timeout
            ) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise EndpointError(
                        f"{address} answered {answer.status_code}: {answer.text.strip()[:500]}",
                        answer.status_code,
                    )
                for event in events(answer.iter_lines()):
                    reply.take(event)
                    if time.monotonic() > self.deadline:
                        raise OutOfTime
        except httpx.TimeoutException:
            if time.monotonic() >= self.deadline:
                raise OutOfTime from None
            raise EndpointError(f"no answer from {address} in time") from None
        except httpx.HTTPError as error:
            raise EndpointError(f"{address}: {type(error).__name__}: {error}") from None
        return reply.answer()


class _Reply:
    """Puts a message together from the pieces of a stream."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._first: float | None = None
        self._last = began
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._finish: str | None = None
        self._usage: dict[str, Any] = {}

    def take(self, event: dict[str, Any]) -> None:
        """Raises EndpointError when the event is an error or has no shape of a chunk."""
        if "error" in event:
            error = event["error"]
            words = error.get("message") if isinstance(error, dict) else error
            raise EndpointError(f"the server reported an error: {words}")
        now = time.monotonic()
        try:
            if event.get("usage"):
                self._usage = dict(event["usage"])
            for choice in event.get("choices") or []:
                delta = choice.get("delta") or {}
                pieces = (delta.get("content"), delta.get("reasoning_content"))
                calls = delta.get("tool_calls") or []
                if any(pieces) or calls:
                    self._first = self._first or now
                    self._last = now
                self._content.append(pieces[0] or "")
                self._reasoning.append(pieces[1] or "")
                for call in calls:
                    self._call(call)
                self._finish = choice.get("finish_reason") or self._finish
        except (AttributeError, KeyError, TypeError, ValueError):
            raise EndpointError(f"malformed chunk: {str(event)[:200]}") from None

    def _call(self, piece: dict[str, Any]) -> None:
        index = int(piece.get("index", len(self._calls)))
        call = self._calls.setdefault(
            index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = piece.get("id") or call["id"]
        function = piece.get("function") or {}
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""

    def answer(self) -> Answer:
        if self._finish is None and not self._usage:
            raise EndpointError("the stream ended without a finish reason")
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if reasoning := "".join(self._reasoning):
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        first = self._first or self._last
        return Answer(
            message, self._finish, self._usage, first - self._began, self._last - self._began
        )


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream up to [DONE]. Raises EndpointError on anything else."""
    for line in lines:
        field, _, data = line.partition(":")
        if field != "data":
            continue
        data = data.strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise EndpointError(f"malformed stream line: {data[:100]!r}") from None
        if not isinstance(event, dict):
            raise EndpointError(f"malformed stream line: {data[:100]!r}")
        yield event

"""Asks an OpenAI-compatible endpoint for the next message, streaming, within a deadline."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import httpx

from arms.sse import fields
from lumotree.errors import LumoTreeError
from replay.agent.loop import Answer, Body
from replay.proxy.answer import joined

CONNECT_S = 5.0
# What a stream's options add to a request; recorded bodies do not have it.
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


class EndpointError(LumoTreeError):
    """The server refused (then `status` is its HTTP status), broke off or answered nonsense."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class OutOfTime(Exception):
    """The task's budget ended before the answer did; `asked`: after the request was sent."""

    def __init__(self, asked: bool = True) -> None:
        super().__init__()
        self.asked = asked


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
        secure = self.url.startswith("https:")
        self._client = httpx.Client(headers=headers, trust_env=False, verify=secure)

    def close(self) -> None:
        self._client.close()

    def __call__(self, body: Body) -> Answer:
        began = time.monotonic()
        left = self.deadline - began
        if left <= 0:
            raise OutOfTime(asked=False)
        timeout = httpx.Timeout(left if left < 1e6 else None, connect=CONNECT_S)
        address = f"{self.url}/v1/chat/completions"
        stream: list[tuple[float, dict[str, Any]]] = []
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
                for event in events(answer.iter_bytes()):
                    stream.append((time.monotonic() - began, event))
                    if time.monotonic() > self.deadline:
                        raise OutOfTime
        except httpx.TimeoutException:
            if time.monotonic() >= self.deadline:
                raise OutOfTime from None
            raise EndpointError(f"no answer from {address} in time") from None
        except httpx.HTTPError as error:
            raise EndpointError(f"{address}: {type(error).__name__}: {error}") from None
        return read_reply(stream)


def read_reply(stream: list[tuple[float, dict[str, Any]]]) -> Answer:
    """The answer of a whole stream of (seconds since the request, chunk). Raises EndpointError."""
    found = without_surrogates(joined(stream))
    if "error" in found:
        error = found["error"]
        words = error.get("message") if isinstance(error, dict) else error
        raise EndpointError(f"the server reported an error: {words}")
    if "finish_reason" not in found and "usage" not in found:
        raise EndpointError("the stream ended without a finish reason")
    message = found["message"]
    for call in message.get("tool_calls", ()):
        call.setdefault("id", "")
        call.setdefault("type", "function")
    ended = stream[-1][0]
    return Answer(
        message,
        found.get("finish_reason"),
        found.get("usage", {}),
        found.get("first_text_s", ended),
        ended,
    )


def without_surrogates(value: dict[str, Any]) -> dict[str, Any]:
    """JSON with U+FFFD for each lone surrogate, which no request and no file can hold.

    Halves that came in two chunks are joined.
    """
    text = json.dumps(value, ensure_ascii=False)
    return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def events(parts: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream up to [DONE]. Raises EndpointError on anything else."""
    for name, value in fields(parts):
        if name != b"data":
            continue
        data = value.decode("utf-8", "replace")
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise EndpointError(f"malformed stream line: {data[:100]!r}") from None
        if not isinstance(event, dict):
            raise EndpointError(f"malformed stream line: {data[:100]!r}")
        yield event

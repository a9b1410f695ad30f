"""What arms behind a server share: addresses, event streams, the clock, faults as reasons.

Times come from this client's clock; counts come from what the server says, because one stream
event may carry several tokens.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from arms.protocol import ArmRequest, ArmResult
from arms.spec import ArmSpec
from arms.sse import fields
from lumotree.errors import ArmError
from lumotree.request import SamplingParams

PROBE_TIMEOUT_S = 2.0
# A first event waits for the whole prefill; later ones follow within a step.
REQUEST_TIMEOUT_S = 600.0


class BadAnswer(Exception):
    """The server answered something that is no usable completion; the text is the reason."""


class HttpArm:
    """A server at one address, or several that take requests in turn.

    Subclasses say what to ask and how to read it: `_describe` and `_serve`.
    """

    in_process = False
    default_url = ""

    def __init__(self, spec: ArmSpec, *, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self.name = str(spec)
        self.options = spec.values()
        urls = self.options.get("url") or [self.default_url]
        self.urls = [self._base(url.rstrip("/")) for url in urls]
        self._next = itertools.cycle(range(len(self.urls)))
        self._lock = threading.Lock()
        # Proxies of the environment are not for a server that is named by its address.
        self._client = httpx.Client(
            timeout=httpx.Timeout(timeout_s, connect=PROBE_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None),
            headers=self._headers(),
            trust_env=False,
        )

    @staticmethod
    def _base(url: str) -> str:
        return url

    def _headers(self) -> dict[str, str]:
        """The key of the variable that `key=` names. Raises ArmError when it is not there."""
        name = self.options.get("key")
        if name is None:
            return {}
        if not os.environ.get(name):
            raise ArmError(f"arm '{self.name}': there is no environment variable {name}")
        return {"authorization": f"Bearer {os.environ[name]}"}

    def start(self) -> dict[str, Any]:
        """Ask who is there. Raises ArmError: no server, or not the kind that this arm needs."""
        known = [self._describe(url) for url in self.urls]
        if len(known) == 1:
            return known[0]
        return {**known[0], "urls": self.urls}

    def new_run(self) -> None:
        """The server keeps its prefix cache, which touches prefill only: ttft is in no rate."""

    def run(self, request: ArmRequest, params: SamplingParams) -> ArmResult:
        with self._lock:
            url = self.urls[next(self._next)]
        try:
            return self._serve(url, request, params)
        except BadAnswer as error:
            return ArmResult.failed(str(error))
        except httpx.ConnectError:
            return ArmResult.failed(f"connection refused at {url}")
        except httpx.TimeoutException:
            return ArmResult.failed(f"no answer from {url} in time")
        except httpx.HTTPError as error:
            return ArmResult.failed(f"the stream from {url} was cut: {type(error).__name__}")

    def close(self) -> None:
        self._client.close()

    def _describe(self, url: str) -> dict[str, Any]:
        raise NotImplementedError

    def _serve(self, url: str, request: ArmRequest, params: SamplingParams) -> ArmResult:
        raise NotImplementedError

    def _get(self, url: str, path: str) -> httpx.Response:
        """A short GET that must succeed. Raises ArmError."""
        try:
            answer = self._client.get(f"{url}{path}", timeout=PROBE_TIMEOUT_S)
        except httpx.TimeoutException:
            raise ArmError(f"no server reached at {url} within {PROBE_TIMEOUT_S:g} s") from None
        except httpx.HTTPError:
            raise ArmError(f"no server reached at {url}") from None
        if answer.status_code != 200:
            raise ArmError(f"the server at {url} answered {answer.status_code} to {path}")
        return answer

    def _get_object(self, url: str, path: str) -> dict[str, Any]:
        """The JSON object of a short GET. Raises ArmError."""
        try:
            value = self._get(url, path).json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ArmError(f"the server at {url} answered {path} without a JSON object")
        return value

    def _events(self, url: str, body: Mapping[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        """Events of a streamed POST, each with its seconds since the request was sent.

        Raises BadAnswer for an error status, an error event and anything that is no stream.
        """
        began = time.perf_counter()
        with self._client.stream("POST", url, json=body) as answer:
            if answer.status_code != 200:
                answer.read()
                text = " ".join(answer.text.split())[:200]
                raise BadAnswer(f"the server answered {answer.status_code}: {text}")
            for current in sse_events(answer.iter_bytes()):
                if current.get("error") is not None:
                    said = message_of(current["error"])
                    raise BadAnswer(f"the server reported an error: {said}")
                yield time.perf_counter() - began, current


class Bursts:
    """When tokens came, in seconds since the request was sent; one burst may hold several."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def note(self, at: float) -> None:
        self.times.append(at)

    @property
    def first(self) -> float:
        return self.times[0] if self.times else 0.0

    @property
    def last(self) -> float:
        return self.times[-1] if self.times else 0.0

    @property
    def gaps(self) -> list[float]:
        """Seconds between bursts, to the microsecond."""
        return [round(b - a, 6) for a, b in itertools.pairwise(self.times)]


def sse_events(parts: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream up to [DONE]. Raises BadAnswer on anything else."""
    for field, data in fields(parts):
        start = data[:80].decode("utf-8", "replace")
        if field != b"data":
            if field in (b"event", b"id", b"retry"):
                continue
            name = field[:80].decode("utf-8", "replace")
            raise BadAnswer(f"malformed stream line: {f'{name}:{start}'!r}")
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise BadAnswer(f"malformed stream event: {start!r}") from None
        if not isinstance(event, dict):
            raise BadAnswer(f"malformed stream event: {start!r}")
        yield event
    raise BadAnswer("the stream was cut before its end")


def message_of(value: Any) -> str:
    """The words of an error, on one line."""
    if isinstance(value, dict):
        value = value.get("message", value)
    return " ".join(str(value).split())[:200]

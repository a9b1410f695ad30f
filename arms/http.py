"""Arms behind a server: SGLang's EAGLE, asked in token ids over its native endpoint.

Times come from this client's clock; counts come from the server's own meta_info, because one
stream event may carry several tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx

from arms.protocol import ArmRequest, ArmResult, text_sha256
from arms.spec import ArmSpec
from lumotree.errors import ArmError
from lumotree.request import SamplingParams

DEFAULT_URL = "http://127.0.0.1:30000"
PROBE_TIMEOUT_S = 2.0
# A first event waits for the whole prefill; later ones follow within a step.
REQUEST_TIMEOUT_S = 600.0
INFO_KEYS = (
    "model_path",
    "version",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)


class BadAnswer(Exception):
    """The server answered something that is no usable completion; the text is the reason."""


class SglangArm:
    """SGLang with EAGLE/NEXTN drafting. Options: `url=`."""

    in_process = False

    def __init__(self, spec: ArmSpec, *, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self.name = str(spec)
        self.url = spec.options.get("url", DEFAULT_URL).rstrip("/")
        # Proxies of the environment are not for a server that is named by its address.
        self._client = httpx.Client(
            timeout=httpx.Timeout(timeout_s, connect=PROBE_TIMEOUT_S), trust_env=False
        )

    def start(self) -> dict[str, Any]:
        """Ask who is there. Raises ArmError: no server, or one that is not SGLang."""
        try:
            answer = self._client.get(f"{self.url}/server_info", timeout=PROBE_TIMEOUT_S)
        except httpx.TimeoutException:
            raise ArmError(
                f"no server reached at {self.url} within {PROBE_TIMEOUT_S:g} s"
            ) from None
        except httpx.HTTPError:
            raise ArmError(f"no server reached at {self.url}") from None
        if answer.status_code != 200:
            raise ArmError(
                f"the server at {self.url} answered {answer.status_code} to /server_info"
            )
        try:
            info = answer.json()
        except ValueError:
            info = None
        if not isinstance(info, dict):
            raise ArmError(f"the server at {self.url} answered /server_info without a JSON object")
        return {
            "kind": "sglang",
            "url": self.url,
            "server": {key: info[key] for key in INFO_KEYS if key in info},
        }

    def new_run(self) -> None:
        """The server keeps its prefix cache, which touches prefill only: ttft is in no rate."""

    def run(self, request: ArmRequest, params: SamplingParams) -> ArmResult:
        body = {
            "input_ids": list(request.prompt_ids),
            "sampling_params": sglang_sampling(params),
            "stream": True,
        }
        try:
            return self._stream(body)
        except BadAnswer as error:
            return ArmResult.failed(str(error))
        except httpx.ConnectError:
            return ArmResult.failed(f"connection refused at {self.url}")
        except httpx.TimeoutException:
            return ArmResult.failed(f"no answer from {self.url} in time")
        except httpx.HTTPError as error:
            return ArmResult.failed(f"the stream from {self.url} was cut: {type(error).__name__}")

    def close(self) -> None:
        self._client.close()

    def _stream(self, body: dict[str, Any]) -> ArmResult:
        began = time.perf_counter()
        first_s = last_s = 0.0
        first_tokens = 0
        event: dict[str, Any] | None = None
        with self._client.stream("POST", f"{self.url}/generate", json=body) as answer:
            if answer.status_code != 200:
                answer.read()
                raise BadAnswer(
                    f"the server answered {answer.status_code}: {answer.text.strip()[:200]}"
                )
            for current in sse_events(answer.iter_lines()):
                now = time.perf_counter() - began
                if "error" in current:
                    raise BadAnswer(f"the server reported an error: {_message(current['error'])}")
                tokens = _count(current, "completion_tokens")
                if tokens and not first_tokens:
                    first_s, first_tokens = now, tokens
                if event is None or tokens > _count(event, "completion_tokens"):
                    last_s = now
                event = current
        if event is None:
            raise BadAnswer("the stream ended without an event")
        return finished_result(event, first_s, last_s, first_tokens)


def sse_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream up to [DONE]. Raises BadAnswer on anything else."""
    for line in lines:
        if not line or line.startswith(":"):
            continue
        field, _, data = line.partition(":")
        if field != "data":
            if field in ("event", "id", "retry"):
                continue
            raise BadAnswer(f"malformed stream line: {line[:80]!r}")
        data = data.strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise BadAnswer(f"malformed stream event: {data[:80]!r}") from None
        if not isinstance(event, dict):
            raise BadAnswer(f"malformed stream event: {data[:80]!r}")
        yield event
    raise BadAnswer("the stream was cut before its end")


def finished_result(
    event: dict[str, Any], ttft_s: float, e2e_s: float, first_tokens: int
) -> ArmResult:
    """The result of a stream's last event. Raises BadAnswer when it is not a finished one."""
    meta = event.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind == "abort":
        raise BadAnswer(f"the server aborted the request: {_message(reason)}")
    if kind not in ("stop", "length"):
        raise BadAnswer("the stream ended without a finish reason")
    completion = _count(event, "completion_tokens")
    if completion < 1:
        raise BadAnswer("the server reported no completion tokens")
    ids = event.get("output_ids")
    text = event.get("text")
    return ArmResult(
        prompt_tokens=_count(event, "prompt_tokens"),
        completion_tokens=completion,
        prefix_reused_tokens=_count(event, "cached_tokens"),
        ttft_s=ttft_s,
        e2e_s=e2e_s,
        steps=_count(event, "spec_verify_ct") or None,
        accepted_by_depth=_survivors(meta.get("spec_correct_drafts_histogram")),
        finish_reason=kind,
        # Some launches stream increments: then the last event holds only the last ids. More ids
        # than were counted are kept: chunks counted as tokens show by them.
        token_ids=tuple(ids) if isinstance(ids, list) and len(ids) >= completion else None,
        output_sha256=text_sha256(text) if isinstance(text, str) else None,
        details={"first_event_tokens": first_tokens},
    )


def sglang_sampling(params: SamplingParams) -> dict[str, Any]:
    """SamplingParams in SGLang's words (top_k -1 is off; the seed is `sampling_seed`)."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "max_new_tokens": params.max_tokens,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
        "sampling_seed": params.seed,
    }


def _survivors(histogram: Any) -> tuple[int, ...]:
    """Steps that accepted at least d + 1 drafts, from steps that accepted exactly d."""
    if not isinstance(histogram, list) or not all(isinstance(n, int) for n in histogram):
        return ()
    return tuple(sum(histogram[depth:]) for depth in range(1, len(histogram)))


def _count(event: dict[str, Any], key: str) -> int:
    meta = event.get("meta_info")
    value = meta.get(key) if isinstance(meta, dict) else None
    return value if isinstance(value, int) and value >= 0 else 0


def _message(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("message", value)
    return " ".join(str(value).split())[:200]

"""vLLM with MTP drafts: OpenAI's completions in token ids, steps from its counters."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import httpx

from arms.counters import Counters
from arms.http import PROBE_TIMEOUT_S
from arms.openai import OpenAIArm
from arms.protocol import ArmRequest, ArmResult
from lumotree.errors import ArmError
from lumotree.request import SamplingParams

# The counters of a finished request may be booked a moment after its last event.
BOOKED_WITHIN_S = 1.0
POLL_S = 0.02


class VllmArm(OpenAIArm):
    """Options: `url=`, `model=`, `key=`.

    Steps and accepted drafts are differences of /metrics around a request. They are left out
    when other requests were under way, and when the counters fell: the server was restarted.
    """

    kind = "vllm"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._under_way = self._begun = 0

    def _describe(self, url: str) -> dict[str, Any]:
        described = super()._describe(url)
        page = self._get(_root(url), "/metrics").text
        if Counters.read(page) is None:
            raise ArmError(
                f"the server at {url} has no counters of speculative decoding: "
                "start it with --speculative-config"
            )
        return described

    def _serve(self, url: str, request: ArmRequest, params: SamplingParams) -> ArmResult:
        with self._lock:
            self._under_way += 1
            self._begun += 1
            ticket, alone = self._begun, self._under_way == 1
        try:
            before = self._read(url) if alone else None
            result = super()._serve(url, request, params)
            after = None
            if before is not None and self._begun == ticket:
                after = self._booked(url, before, result.completion_tokens)
            return result if after is None else with_counters(result, before, after)
        finally:
            with self._lock:
                self._under_way -= 1

    def _read(self, url: str) -> Counters | None:
        try:
            answer = self._client.get(f"{_root(url)}/metrics", timeout=PROBE_TIMEOUT_S)
        except httpx.HTTPError:
            return None
        return Counters.read(answer.text) if answer.status_code == 200 else None

    def _booked(self, url: str, before: Counters, tokens: int) -> Counters | None:
        """The counters once they hold the request's tokens, or as they are after a while."""
        deadline = time.monotonic() + BOOKED_WITHIN_S
        while True:
            after = self._read(url)
            if after is None or (after - before).generated >= tokens:
                return after
            if time.monotonic() > deadline or (after - before).fell:
                return after
            time.sleep(POLL_S)


def with_counters(result: ArmResult, before: Counters, after: Counters) -> ArmResult:
    """The result with what the counters say of it, if their difference can be this request's."""
    change = after - before
    read = {"counters": {"before": before.as_dict(), "after": after.as_dict()}}
    result = replace(result, details=result.details | read)
    if change.fell or change.generated != result.completion_tokens:
        return result
    return replace(result, steps=change.steps or None, accepted_by_depth=change.by_depth)


def _root(url: str) -> str:
    return url.removesuffix("/v1")

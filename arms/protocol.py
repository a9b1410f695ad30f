"""What an arm is: the contract between the replay and whatever answers a request."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lumotree.request import Generation, SamplingParams


@dataclass(frozen=True)
class ArmRequest:
    """One request, already tokenised by the run, so that every arm sees the same token ids.

    messages and tools are for servers that take no token ids.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    conversation: str | None = None
    messages: Sequence[dict[str, Any]] | None = None
    tools: Sequence[dict[str, Any]] | None = None


@dataclass(frozen=True)
class ArmResult:
    """How one request went. Times are client wall-clock seconds, phases are milliseconds.

    `error` is None for a completed request; otherwise it is a sentence and the counts and
    times say nothing: a failed request never enters a rate. `steps` is None where the server
    does not count them. `token_ids` excludes the end-of-text token, `completion_tokens`
    counts it. `burst_s` are the seconds between the moments at which tokens came, several of
    them at once as may be. `details` holds what only this arm can say.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prefix_reused_tokens: int = 0
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    steps: int | None = None
    accepted_by_depth: tuple[int, ...] = ()
    accepted_by_row: tuple[int, ...] = ()
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    phases_ms: dict[str, float] = field(default_factory=dict)
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    output_sha256: str | None = None
    error: str | None = None
    burst_s: tuple[float, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_generation(cls, generation: Generation) -> ArmResult:
        """The result of an in-process request."""
        return cls(
            prompt_tokens=generation.prompt_tokens,
            completion_tokens=generation.completion_tokens,
            prefix_reused_tokens=generation.prefix_reused_tokens,
            ttft_s=generation.ttft_s,
            e2e_s=generation.e2e_s,
            steps=generation.steps,
            accepted_by_depth=tuple(generation.accepted_by_depth),
            accepted_by_row=tuple(generation.accepted_by_row),
            accepted_by_source=dict(generation.accepted_by_source),
            phases_ms=dict(generation.phases_ms),
            finish_reason=generation.finish_reason,
            token_ids=tuple(generation.token_ids),
            output_sha256=text_sha256(generation.text),
        )

    @classmethod
    def failed(cls, reason: str, **details: Any) -> ArmResult:
        """A request that was not completed, and why."""
        return cls(error=reason, details=details)


class Arm(Protocol):
    """One way to serve requests.

    The replay calls `start` once, then `run` for one request at a time, then `close`; it calls
    `new_run` between runs. An arm must not keep anything from one run to the next that makes
    later runs do less work, must send exactly `prompt_ids`, and must report only what it
    measured or was told: no estimate stands in for a missing figure.
    """

    name: str
    """The canonical spec: what rows and tables call this arm."""
    in_process: bool
    """True when the arm runs the decoder of this project: its token ids are checked."""

    def start(self) -> dict[str, Any]:
        """Get ready; return a description for run.json.

        Raises ArmError, with the reason in one sentence, when the arm is not available here.
        Raises CheckpointError when the model cannot serve it, which is wrong use.
        """

    def new_run(self) -> None:
        """Forget what earlier requests left behind (prefix snapshots)."""

    def run(self, request: ArmRequest, params: SamplingParams) -> ArmResult:
        """Serve one request. A request that fails is a result with `error`, not an exception."""

    def close(self) -> None:
        """Release what `start` took; called once, also after a failed run."""


def text_sha256(text: str) -> str:
    """The hash by which outputs are compared when they cannot be kept."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

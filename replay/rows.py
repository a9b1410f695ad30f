"""The row of requests.jsonl: one (arm, run, request). Written as read, so a resume can check it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from arms.protocol import ArmResult
from lumotree.request import PHASES

WARMUP_RUN = 0
RowKey = tuple[str, int, str]


class Row(BaseModel):
    """One request through one arm in one run. Runs count from 1; warm-up rows have run 0.

    `ttft_s`, `e2e_s`, `decode_s` (e2e - ttft) are seconds, `phases_ms` milliseconds.
    A row with `error` carries no counts. `token_ids` lets the equality check survive a resume.
    """

    model_config = ConfigDict(extra="allow")
    arm: str
    run: int = Field(ge=0)
    request_id: str
    warmup: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prefix_reused_tokens: int = 0
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    decode_s: float = 0.0
    steps: int | None = None
    accepted_by_depth: list[int] = []
    accepted_by_row: list[int] = []
    accepted_by_source: dict[str, int] = {}
    phases_ms: dict[str, float] = {}
    finish_reason: str | None = None
    output_sha256: str | None = None
    token_ids: list[int] | None = None
    error: str | None = None
    details: dict[str, Any] = {}

    @property
    def key(self) -> RowKey:
        """What a resume goes by."""
        return (self.arm, self.run, self.request_id)

    @property
    def completed(self) -> bool:
        """True for a measured request: neither failed nor a warm-up."""
        return self.error is None and not self.warmup


def make_row(arm: str, run: int, request_id: str, result: ArmResult) -> Row:
    """The row of a result. All five phases are present when the arm reports phases at all."""
    phases = result.phases_ms
    return Row(
        arm=arm,
        run=run,
        request_id=request_id,
        warmup=run == WARMUP_RUN,
        prompt_tokens=result.prompt_tokens,
        completion_tokens=result.completion_tokens,
        prefix_reused_tokens=result.prefix_reused_tokens,
        ttft_s=result.ttft_s,
        e2e_s=result.e2e_s,
        decode_s=result.e2e_s - result.ttft_s,
        steps=result.steps,
        accepted_by_depth=list(result.accepted_by_depth),
        accepted_by_row=list(result.accepted_by_row),
        accepted_by_source=result.accepted_by_source,
        phases_ms={phase: phases.get(phase, 0.0) for phase in PHASES} if phases else {},
        finish_reason=result.finish_reason,
        output_sha256=result.output_sha256,
        token_ids=None if result.token_ids is None else list(result.token_ids),
        error=result.error,
        details=result.details,
    )

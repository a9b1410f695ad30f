"""SGLang with EAGLE/NEXTN drafts, asked in token ids over its native endpoint."""

from __future__ import annotations

from typing import Any

from arms.http import BadAnswer, Bursts, HttpArm, message_of
from arms.protocol import ArmRequest, ArmResult, text_sha256
from lumotree.request import SamplingParams

INFO_KEYS = (
    "model_path",
    "version",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)


class SglangArm(HttpArm):
    """Options: `url=`, `key=`."""

    default_url = "http://127.0.0.1:30000"

    def _describe(self, url: str) -> dict[str, Any]:
        info = self._get_object(url, "/server_info")
        server = {key: info[key] for key in INFO_KEYS if key in info}
        return {"kind": "sglang", "url": url, "server": server}

    def _serve(self, url: str, request: ArmRequest, params: SamplingParams) -> ArmResult:
        body = {
            "input_ids": list(request.prompt_ids),
            "sampling_params": sglang_sampling(params),
            "stream": True,
        }
        bursts, first_tokens = Bursts(), 0
        event: dict[str, Any] | None = None
        for at, current in self._events(f"{url}/generate", body):
            tokens = _count(current, "completion_tokens")
            if event is None or tokens > _count(event, "completion_tokens"):
                if tokens:
                    bursts.note(at)
                first_tokens = first_tokens or tokens
            event = current
        if event is None:
            raise BadAnswer("the stream ended without an event")
        return finished_result(event, bursts, first_tokens)


def finished_result(event: dict[str, Any], bursts: Bursts, first_tokens: int) -> ArmResult:
    """The result of a stream's last event. Raises BadAnswer when it is not a finished one."""
    meta = event.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind == "abort":
        raise BadAnswer(f"the server aborted the request: {message_of(reason)}")
    if kind not in ("stop", "length"):
        raise BadAnswer("the stream ended without a finish reason")
    completion = _count(event, "completion_tokens")
    if completion < 1:
        raise BadAnswer("the server reported no completion tokens")
    ids = event.get("output_ids")
    # Some launches stream increments: then the last event holds only the last ids. More ids
    # than were counted are kept: chunks counted as tokens show by them.
    whole = isinstance(ids, list) and len(ids) >= completion
    # The end-of-text token is the last id and no output.
    if whole and kind == "stop" and ids and ids[-1] == reason.get("matched"):
        ids = ids[:-1]
    text = event.get("text")
    return ArmResult(
        prompt_tokens=_count(event, "prompt_tokens"),
        completion_tokens=completion,
        prefix_reused_tokens=_count(event, "cached_tokens"),
        ttft_s=bursts.first,
        e2e_s=bursts.last,
        steps=_count(event, "spec_verify_ct") or None,
        accepted_by_depth=_survivors(meta.get("spec_correct_drafts_histogram")),
        finish_reason=kind,
        token_ids=tuple(ids) if whole else None,
        output_sha256=text_sha256(text) if isinstance(text, str) else None,
        burst_s=tuple(bursts.gaps),
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

"""Any server that speaks OpenAI's protocol: token ids to /completions, or messages to
/chat/completions where that is all it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from arms.http import BadAnswer, Bursts, HttpArm
from arms.protocol import ArmRequest, ArmResult, text_sha256
from lumotree.errors import ArmError
from lumotree.request import SamplingParams


class OpenAIArm(HttpArm):
    """Options: `url=` (with its /v1), `model=` (default: the first one listed), `key=` (name of
    the environment variable that holds the key), `api=completions|chat`, `extras=on|off`.

    With api=chat the server renders the messages with a template of its own, so its prompt may
    have another length; the guards compare. extras=off leaves out what is not OpenAI's (top_k,
    min_p, repetition_penalty, ignore_eos, token ids), for servers that refuse it.
    """

    kind = "openai"
    default_url = "http://127.0.0.1:8000/v1"

    @staticmethod
    def _base(url: str) -> str:
        """An address without a path has its API under /v1."""
        return url if url.count("/") > 2 else f"{url}/v1"

    @property
    def chat(self) -> bool:
        return self.options.get("api") == "chat"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.model: str | None = self.options.get("model")

    def _describe(self, url: str) -> dict[str, Any]:
        self.model = self.model or self._first_model(url)
        extras = self.options.get("extras", True)
        return {
            "kind": self.kind,
            "url": url,
            "model": self.model,
            "sends": "messages" if self.chat else "token ids",
            "not_sent": [] if extras else list(EXTRAS),
        }

    def _first_model(self, url: str) -> str:
        listed = self._get_object(url, "/models").get("data")
        if isinstance(listed, list) and listed and isinstance(listed[0], dict):
            name = listed[0].get("id")
            if isinstance(name, str):
                return name
        raise ArmError(f"the server at {url} lists no model", "name one with model=")

    def _serve(self, url: str, request: ArmRequest, params: SamplingParams) -> ArmResult:
        path = "/chat/completions" if self.chat else "/completions"
        return read_stream(self._events(url + path, self._body(request, params)))

    def _body(self, request: ArmRequest, params: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model}
        if self.chat:
            if request.messages is None:
                raise BadAnswer("api=chat needs the messages of the request")
            body["messages"] = list(request.messages)
            if request.tools:
                body["tools"] = list(request.tools)
        else:
            body["prompt"] = list(request.prompt_ids)
        body |= openai_sampling(params)
        if not self.options.get("extras", True):
            for name in EXTRAS:
                body.pop(name, None)
        return body | {"stream": True, "stream_options": {"include_usage": True}}


EXTRAS = ("top_k", "min_p", "repetition_penalty", "ignore_eos", "return_token_ids")


def openai_sampling(params: SamplingParams) -> dict[str, Any]:
    """SamplingParams in OpenAI's words, and vLLM's for what OpenAI has not (top_k -1 is off)."""
    body = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "seed": params.seed,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "ignore_eos": params.ignore_eos,
        "return_token_ids": True,
    }
    return body | ({"stop": list(params.stop)} if params.stop else {})


def read_stream(events: Any) -> ArmResult:
    """The result of a stream of completion chunks. Raises BadAnswer for an unfinished one."""
    bursts, text, ids, usage = Bursts(), "", [], {}
    reason = stopped_by = None
    first_tokens, has_ids = None, False
    for at, event in events:
        choice = _first_choice(event)
        piece, own = _text_of(choice), choice.get("token_ids")
        new = own if isinstance(own, list) else []
        has_ids |= isinstance(own, list)
        if piece or new:
            bursts.note(at)
            if first_tokens is None and new:
                first_tokens = len(new)
        text += piece
        ids += new
        if choice.get("finish_reason") is not None:
            reason, stopped_by = choice["finish_reason"], choice.get("stop_reason", "unsaid")
        if isinstance(event.get("usage"), dict):
            usage = event["usage"]
    if reason == "tool_calls":
        reason = "stop"
    if reason not in ("stop", "length"):
        raise BadAnswer("the stream ended without a finish reason")
    completion = _whole(usage, "completion_tokens")
    if completion < 1:
        raise BadAnswer("the server reported no completion tokens")
    # vLLM's ids end with the end-of-text token, and `stop_reason` is then null.
    if reason == "stop" and stopped_by is None and len(ids) == completion:
        ids.pop()
    cached = usage.get("prompt_tokens_details")
    return ArmResult(
        prompt_tokens=_whole(usage, "prompt_tokens"),
        completion_tokens=completion,
        prefix_reused_tokens=_whole(cached, "cached_tokens"),
        ttft_s=bursts.first,
        e2e_s=bursts.last,
        finish_reason=reason,
        token_ids=tuple(ids) if has_ids else None,
        output_sha256=text_sha256(text),
        burst_s=tuple(bursts.gaps),
        details={} if first_tokens is None else {"first_event_tokens": first_tokens},
    )


def _first_choice(event: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = event.get("choices")
    if not isinstance(choices, list):
        raise BadAnswer("malformed stream event: it has no choices")
    if not choices:
        return {}
    if not isinstance(choices[0], dict):
        raise BadAnswer("malformed stream event: a choice is no object")
    return choices[0]


def _text_of(choice: Mapping[str, Any]) -> str:
    """The text of a chunk of either endpoint; of a tool call, its name and arguments."""
    if isinstance(choice.get("text"), str):
        return choice["text"]
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return ""
    parts: list[Any] = [delta.get("reasoning_content"), delta.get("content")]
    calls = delta.get("tool_calls")
    for call in calls if isinstance(calls, Sequence) and not isinstance(calls, str) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            parts += [function.get("name"), function.get("arguments")]
    return "".join(part for part in parts if isinstance(part, str))


def _whole(value: Any, key: str) -> int:
    found = value.get(key) if isinstance(value, Mapping) else None
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else 0

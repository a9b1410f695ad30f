"""The requests that the server takes: OpenAI's fields, and the sampling fields beyond them.

A field that would change the answer and is not served is refused, never dropped; fields that
cannot change it (`user`, `metadata`, ...) are taken without effect.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from lumotree.errors import RequestError
from lumotree.request import SamplingParams
from lumotree.serve.errors import ApiError

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
SEED_BITS = 63

# Kept as sent, because the chat template renders them key by key.
ChatMessage = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                "content": {
                    "anyOf": [
                        {"type": "string"},
                        {"type": "null"},
                        {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "required": ["type", "text"],
                                "properties": {
                                    "type": {"const": "text"},
                                    "text": {"type": "string"},
                                },
                            },
                        },
                    ]
                },
                "tool_call_id": {"type": "string"},
                "tool_calls": {"type": "array", "items": {"type": "object"}},
            },
        }
    ),
]
Tool = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": {"type": "string", "minLength": 1},
                        "description": {"type": "string"},
                        "parameters": {"type": "object"},
                    },
                },
            },
        }
    ),
]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str


class Sampling(BaseModel):
    """What both endpoints share. None means the default: OpenAI's, and off beyond it.

    top_k 0 or -1 is off. Without a seed each request draws its own.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    response_format: ResponseFormat | None = None
    logit_bias: dict[str, float] | None = None
    # Without effect on the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    def limit(self) -> int | None:
        """Most tokens to generate; None for as many as the context leaves."""
        return self.max_tokens

    def params(self, room: int) -> list[SamplingParams]:
        """Parameters of each choice; `room` is what the context leaves. Raises ApiError."""
        self.refuse()
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOPS:
            raise ApiError(400, f"stop has more than {MAX_STOPS} strings", param="stop")
        seed = secrets.randbits(SEED_BITS) if self.seed is None else self.seed

        def value(given: float | None, default: float) -> float:
            return default if given is None else given

        try:
            return [
                SamplingParams(
                    temperature=value(self.temperature, 1.0),
                    top_p=value(self.top_p, 1.0),
                    top_k=max(self.top_k or 0, 0),
                    min_p=value(self.min_p, 0.0),
                    presence_penalty=value(self.presence_penalty, 0.0),
                    frequency_penalty=value(self.frequency_penalty, 0.0),
                    repetition_penalty=value(self.repetition_penalty, 1.0),
                    seed=seed + choice,
                    max_tokens=max(1, min(self.limit() or room, room)),
                    stop=tuple(stop),
                    ignore_eos=self.ignore_eos,
                )
                for choice in range(self.choices)
            ]
        except RequestError as error:
            raise ApiError(400, str(error), param=error.message.partition("=")[0]) from None

    def refuse(self) -> None:
        """Raises ApiError for what this server does not do."""
        if self.response_format is not None and self.response_format.type != "text":
            kind = self.response_format.type
            raise ApiError(
                400,
                f"response_format '{kind}' is not served: there is no constrained decoding here; "
                "ask for JSON in the prompt",
                param="response_format",
            )
        if self.logit_bias:
            raise ApiError(400, "logit_bias is not served", param="logit_bias")


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """Tools that the model is told of; tool_choice none offers nothing."""
        return (self.tools or None) if self.tool_choice != "none" else None

    @property
    def top(self) -> int | None:
        """Alternatives beside each token's log probability; None for no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def refuse(self) -> None:
        super().refuse()
        if self.tool_choice not in (None, "none", "auto"):
            raise ApiError(
                400,
                "tool_choice can be 'auto' or 'none': no call can be forced without constrained "
                "decoding",
                param="tool_choice",
            )
        for index, message in enumerate(self.messages):
            if not isinstance(message.get("role"), str):
                raise ApiError(400, f"message {index} has no role", param=f"messages.{index}.role")
        for index, tool in enumerate(self.tools or ()):
            function = tool.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            if tool.get("type") != "function" or not isinstance(name, str) or not name:
                raise ApiError(
                    400, f"tool {index} is not a function with a name", param=f"tools.{index}"
                )
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")

    def conversation(self) -> list[dict[str, Any]]:
        """Messages as the template knows them: `developer` is what `system` was called before."""
        return [
            {**message, "role": "system"} if message["role"] == "developer" else message
            for message in self.messages
        ]


class CompletionRequest(Sampling):
    """POST /v1/completions; token ids go to the model as they are."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def limit(self) -> int | None:
        return self.max_tokens or COMPLETION_TOKENS

    @property
    def top(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """One or several prompts, each text or token ids. Raises ApiError for an empty list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError(400, "the prompt is empty", param="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def refuse(self) -> None:
        super().refuse()
        for name in ("echo", "suffix"):
            if getattr(self, name):
                raise ApiError(400, f"{name} is not served", param=name)
        if self.best_of is not None and self.best_of != self.choices:
            raise ApiError(400, "best_of other than n is not served", param="best_of")

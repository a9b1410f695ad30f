"""From decoder events to OpenAI's objects: one choice at a time, streamed or whole."""

from __future__ import annotations

import codecs
import math
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lumotree.logprobs import TokenLogprob
from lumotree.request import Generation
from lumotree.serve.scheduler import Tokens
from lumotree.serve.tools import ToolCall, ToolCallParser

if TYPE_CHECKING:
    from lumotree.text import ChatTokenizer

# JSON has no minus infinity; OpenAI's floor for a token that cannot come.
LOWEST = -9999.0


class Choice:
    """One choice under way. `take` and `finish` return what to stream, None for nothing.

    token_ids: whether the token ids go out too.
    """

    def __init__(
        self, index: int, prompt_ids: Sequence[int], tokenizer: ChatTokenizer, token_ids: bool
    ) -> None:
        self.index, self.prompt_ids = index, prompt_ids
        self._tokenizer, self._wants_ids = tokenizer, token_ids
        self.generation: Generation | None = None
        self.text = ""
        self.logprobs: list[TokenLogprob] = []

    @property
    def finish_reason(self) -> str:
        return self.generation.finish_reason

    def _ids(self, ids: Sequence[int], first: bool) -> dict[str, Any]:
        if not self._wants_ids:
            return {}
        return {"token_ids": list(ids)} | ({"prompt_token_ids": self.prompt_ids} if first else {})

    def _named(self, token: int) -> tuple[str, bytes]:
        raw = self._tokenizer.token_bytes(token)
        return raw.decode("utf-8", "replace"), raw


class ChatChoice(Choice):
    """A choice of /v1/chat/completions. `parser` is None where no tools were offered."""

    def __init__(self, *args: Any, parser: ToolCallParser | None, top: int | None) -> None:
        super().__init__(*args)
        self._parser, self._top = parser, top
        self.calls: list[ToolCall] = []

    def begin(self) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return self._part(delta) | self._ids((), first=True)

    def take(self, event: Tokens) -> dict[str, Any] | None:
        text, calls = event.text, []
        if self._parser is not None:
            text, calls = self._parser.push(event.text)
        self.logprobs += event.logprobs
        part = self._part(self._delta(text, calls)) | self._ids(event.ids, first=False)
        if event.logprobs:
            part["logprobs"] = self._logprobs(event.logprobs)
        return part if part["delta"] or event.logprobs or part.get("token_ids") else None

    def finish(self, generation: Generation) -> dict[str, Any]:
        self.generation = generation
        rest = self._parser.finish() if self._parser is not None else ""
        return self._part(self._delta(rest, [])) | {"finish_reason": self.finish_reason}

    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            message["content"] = self.text or None
            message["tool_calls"] = [call.as_dict() for call in self.calls]
        return {
            "index": self.index,
            "message": message,
            "logprobs": self._logprobs(self.logprobs) if self._top is not None else None,
            "finish_reason": self.finish_reason,
        } | self._ids(self.generation.token_ids, first=True)

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.calls else self.generation.finish_reason

    def _part(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _delta(self, text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        self.text += text
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            first = len(self.calls)
            self.calls += calls
            delta["tool_calls"] = [
                {"index": first + i} | call.as_dict() for i, call in enumerate(calls)
            ]
        return delta

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        def one(token: int, logprob: float) -> dict[str, Any]:
            text, raw = self._named(token)
            return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}

        content = [
            one(e.token_id, e.logprob) | {"top_logprobs": [one(*pair) for pair in e.top]}
            for e in entries
        ]
        return {"content": content, "refusal": None}


class TextChoice(Choice):
    """A choice of /v1/completions."""

    def __init__(self, *args: Any, top: int | None) -> None:
        super().__init__(*args)
        self._top = top
        self._restart()

    def _restart(self) -> None:
        """Offsets count characters of the text, which tokens may hold a part of."""
        self._offset, self._utf8 = 0, codecs.getincrementaldecoder("utf-8")("replace")

    def begin(self) -> dict[str, Any] | None:
        part = self._part("") | self._ids((), first=True)
        return part if self._wants_ids else None

    def take(self, event: Tokens) -> dict[str, Any] | None:
        self.text += event.text
        self.logprobs += event.logprobs
        part = self._part(event.text) | self._ids(event.ids, first=False)
        if event.logprobs:
            part["logprobs"] = self._logprobs(event.logprobs)
        return part if event.text or event.logprobs or part.get("token_ids") else None

    def finish(self, generation: Generation) -> dict[str, Any]:
        self.generation = generation
        return self._part("") | {"finish_reason": self.finish_reason}

    def whole(self) -> dict[str, Any]:
        self._restart()
        return {
            "index": self.index,
            "text": self.text,
            "logprobs": self._logprobs(self.logprobs) if self._top is not None else None,
            "finish_reason": self.finish_reason,
        } | self._ids(self.generation.token_ids, first=True)

    def _part(self, text: str) -> dict[str, Any]:
        return {"index": self.index, "text": text, "logprobs": None, "finish_reason": None}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        named = [self._named(e.token_id) for e in entries]
        offsets = []
        for _, raw in named:
            offsets.append(self._offset)
            self._offset += len(self._utf8.decode(raw))
        return {
            "tokens": [text for text, _ in named],
            "token_logprobs": [_finite(e.logprob) for e in entries],
            "top_logprobs": [{self._named(i)[0]: _finite(p) for i, p in e.top} for e in entries],
            "text_offset": offsets,
        }


class Answer:
    """What stands around the choices: id, time, model, usage."""

    def __init__(self, kind: str, model: str, choices: Sequence[Choice], per_prompt: int) -> None:
        """kind: `chat.completion` or `text_completion`; per_prompt: choices of each prompt."""
        self._kind, self.choices, self._per_prompt = kind, choices, per_prompt
        prefix = "chatcmpl" if kind == "chat.completion" else "cmpl"
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": model,
        }

    def chunk(self, parts: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        kind = f"{self._kind}.chunk" if self._kind == "chat.completion" else self._kind
        return {**self._head, "object": kind, "choices": parts, **more}

    def whole(self) -> dict[str, Any]:
        choices = [choice.whole() for choice in self.choices]
        return {**self._head, "object": self._kind, "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Prompts count once, whatever the number of choices."""
        runs = [choice.generation for choice in self.choices]
        prompt = sum(run.prompt_tokens for run in runs[:: self._per_prompt])
        completion = sum(run.completion_tokens for run in runs)
        reused = sum(run.prefix_reused_tokens for run in runs[:: self._per_prompt])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": reused},
        }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LOWEST

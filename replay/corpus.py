"""The corpus file: JSONL, one OpenAI batch line per request, with an optional `lumotree` object.

Every fault names the file and the line. A manifest beside the file freezes it.

Prompts are rendered from `messages` and `tools` with the chat template of the run's own model.
`lumotree.input_ids`, the ids that a recorder saw, may stand in the file for other tools that read
it; they are checked to be whole numbers and no replay sends them, because they belong to the
tokenizer and template they were recorded with.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lumotree.errors import CorpusError

CHAT_URL = "/v1/chat/completions"
# Python's own functions recurse on nested values; no request comes near this.
MAX_DEPTH = 100


class Message(BaseModel):
    """One chat message, kept as recorded: malformed tool arguments are text like any other."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[Any] | None = None


class Body(BaseModel):
    """What the client sent. Sampling fields matter only to `--sampling recorded`."""

    model_config = ConfigDict(extra="allow")
    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None


class Recorded(BaseModel):
    """What the recorder knew about the request; `input_ids` and `completion` are never replayed."""

    model_config = ConfigDict(extra="allow")
    conversation: str | None = None
    turn: int | None = None
    task: str | None = None
    recorded_at: str | float | None = None
    completion: Any = None
    input_ids: list[int] | None = None


class Line(BaseModel):
    """One line of the file."""

    model_config = ConfigDict(extra="allow")
    custom_id: str = Field(min_length=1)
    method: Literal["POST"] = "POST"
    url: Literal["/v1/chat/completions"] = CHAT_URL
    body: Body
    lumotree: Recorded = Field(default_factory=Recorded)


@dataclass(frozen=True)
class CorpusRequest:
    """One request of a corpus; `line` is where it stands in the file, from 1.

    recorded_at: when it was sent, in seconds of any clock; None where the file does not say.
    """

    request_id: str
    line: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    sampling: dict[str, Any]
    conversation: str | None = None
    turn: int | None = None
    task: str | None = None
    recorded_at: float | None = None


@dataclass(frozen=True)
class Corpus:
    """A corpus in capture order; `sha256` is of the file's bytes."""

    path: Path
    sha256: str
    requests: tuple[CorpusRequest, ...]

    def where(self, request: CorpusRequest) -> str:
        """How errors name a request."""
        return f"{self.path} line {request.line}"


def load_corpus(path: Path) -> Corpus:
    """Read and check a corpus and, when there is one, its manifest. Raises CorpusError."""
    corpus = read_corpus(path)
    fault = manifest_fault(corpus)
    if fault:
        raise CorpusError(fault, "restore the file, or write a new manifest with the new corpus")
    return corpus


def read_corpus(path: Path) -> Corpus:
    """Read a corpus without its manifest. Raises CorpusError naming file and line."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CorpusError(f"{path} does not exist") from None
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror}") from None
    requests: list[CorpusRequest] = []
    seen: dict[str, int] = {}
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        request = parse_line(raw, number, path)
        if request.request_id in seen:
            raise CorpusError(
                f"{path} line {number}: custom_id '{request.request_id}' "
                f"is already on line {seen[request.request_id]}"
            )
        seen[request.request_id] = number
        requests.append(request)
    if not requests:
        raise CorpusError(f"{path} is empty: it holds no request")
    return Corpus(path, hashlib.sha256(data).hexdigest(), tuple(requests))


class BadJson(ValueError):
    """Text that is not JSON a corpus may hold; `reason` says why, `line` where in the text."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.line = reason, line


def load_json(raw: str | bytes) -> Any:
    """One JSON value. Raises BadJson also for what Python's parser or later steps choke on."""
    try:
        value = json.loads(raw)
    except UnicodeDecodeError:
        raise BadJson("not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise BadJson(f"broken JSON: {error.msg} at column {error.colno}", error.lineno) from None
    except RecursionError:
        raise BadJson("JSON is nested too deeply") from None
    except ValueError:
        limit = sys.get_int_max_str_digits()
        text = raw if isinstance(raw, str) else raw.decode("utf-8", "replace")
        found = re.search(rf"\d{{{limit + 1},}}", text)
        line = text.count("\n", 0, found.start()) + 1 if found else None
        raise BadJson(f"a number has more than {limit} digits", line) from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return value
    raise BadJson("JSON is nested too deeply")


def parse_line(raw: bytes, number: int, path: Path) -> CorpusRequest:
    """One line of the file. Raises CorpusError."""
    where = f"{path} line {number}"
    try:
        value = load_json(raw)
    except BadJson as error:
        raise CorpusError(f"{where}: {error.reason}") from None
    try:
        line = Line.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"]) or "line"
        raise CorpusError(f"{where}: {name}: {first['msg']}") from None
    body = value["body"]
    known = ("messages", "tools")
    sampling = {k: v for k, v in line.body.model_dump(exclude_none=True).items() if k not in known}
    return CorpusRequest(
        request_id=line.custom_id,
        line=number,
        messages=body["messages"],
        tools=body.get("tools") or None,
        sampling={k: v for k, v in sampling.items() if k in Body.model_fields},
        conversation=line.lumotree.conversation,
        turn=line.lumotree.turn,
        task=line.lumotree.task,
        recorded_at=_seconds(line.lumotree.recorded_at),
    )


def _seconds(at: str | float | None) -> float | None:
    """A recorded time, a number or an ISO 8601 text; None for anything else."""
    if not isinstance(at, str):
        return at
    try:
        return datetime.fromisoformat(at).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def manifest_path(path: Path) -> Path:
    """`first.jsonl` has its manifest in `first.manifest.json`."""
    return path.with_suffix(".manifest.json")


def manifest_fault(corpus: Corpus) -> str | None:
    """What differs between a corpus and its manifest; None if nothing or no manifest."""
    path = manifest_path(corpus.path)
    try:
        manifest = json.loads(path.read_bytes())
        count, sha256 = manifest["count"], manifest["sha256"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"{path} is not a manifest: an object with 'count' and 'sha256' is expected"
    if count != len(corpus.requests):
        return f"{corpus.path} holds {len(corpus.requests)} requests, its manifest says {count}"
    if sha256 != corpus.sha256:
        return f"{corpus.path} is not the file its manifest froze: the sha256 differs"
    return None

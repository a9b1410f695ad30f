"""From exchanges to corpus lines, in a thread of its own: the wire never waits for the disk."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lumotree.errors import CorpusError
from replay.corpus import CHAT_URL, BadJson, load_json, parse_line
from replay.formats.reading import dump
from replay.formats.secrets import without_secrets
from replay.formats.threads import Threads
from replay.proxy.answer import decoded, read_answer
from replay.proxy.http1 import Head

# Bodies beyond this pass through and are not kept.
MAX_KEPT = 64 << 20
# Headers whose values must not reach the file, wherever a client may repeat them.
SECRET_HEADERS = (b"authorization", b"proxy-authorization", b"cookie", b"x-api-key", b"api-key")
SHORTEST_SECRET = 6
REMOVED = "[removed]"
# Words of the protocol, which stay also where they are somebody's secret.
WORDS = {
    "role": ("system", "developer", "user", "assistant", "tool", "function"),
    "type": ("function", "text"),
}


@dataclass
class Exchange:
    """One request and its answer. Times are seconds since the request's first byte.

    fault: why there is no whole answer; `aborted` when it was the client that left.
    """

    request: Head
    at: datetime
    body: bytearray = field(default_factory=bytearray)
    response: Head | None = None
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    head_s: float | None = None
    end_s: float | None = None
    aborted: bool = False
    fault: str | None = None
    kept: int = 0
    too_large: bool = False

    def add_body(self, payload: bytes) -> None:
        if self._room(payload):
            self.body += payload

    def add_part(self, at_s: float, payload: bytes) -> None:
        if self._room(payload):
            self.parts.append((at_s, payload))

    def _room(self, payload: bytes) -> bool:
        self.kept += len(payload)
        self.too_large |= self.kept > MAX_KEPT
        return not self.too_large

    @property
    def is_chat(self) -> bool:
        path = self.request.target.partition(b"?")[0].rstrip(b"/")
        return self.request.method == b"POST" and path.endswith(b"/chat/completions")


class Recorder:
    """Writes one line per chat request to `out`, whole or not at all.

    counts: `recorded`, `aborted` and `failed` (both among the recorded), `passed` (other paths),
    `left out` (what cannot be a corpus line or be written). `unwritten`: those of them that the
    file did not take.
    """

    def __init__(self, out: Path, session: str, task: str | None, agent: str | None) -> None:
        """Raises CorpusError when the file cannot be opened."""
        self._session, self._task, self._agent = session, task, agent
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(out, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                self._write(b"\n")  # a last line without its end would swallow the next one
        except OSError as error:
            raise CorpusError(f"{out} cannot be written: {error.strerror}") from None
        self.counts: Counter[str] = Counter()
        self.reasons: list[str] = []
        self.unwritten = 0
        self._threads = Threads(f"{session}-")
        self._queue: queue.SimpleQueue[Exchange | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
        self._thread.start()

    def put(self, exchange: Exchange) -> None:
        """Takes an exchange that has ended; returns at once."""
        self._queue.put(exchange)

    def close(self) -> None:
        """Writes what was put and closes the file."""
        self._queue.put(None)
        self._thread.join()
        os.close(self._file)

    def _work(self) -> None:
        while (exchange := self._queue.get()) is not None:
            if not exchange.is_chat:
                self.counts["passed"] += 1
                continue
            try:
                line = self._line(exchange)
            except (CorpusError, BadJson) as error:
                reason = getattr(error, "reason", None) or str(error)
                self._leave_out(reason.partition(" line 0: ")[2] or reason)
                continue
            try:
                self._write(line)
            except OSError as error:
                self.unwritten += 1
                self._leave_out(f"the file cannot be written: {error.strerror}")
                continue
            self.counts["recorded"] += 1
            self.counts["aborted"] += exchange.aborted
            status = exchange.response.status if exchange.response else 0
            self.counts["failed"] += not exchange.aborted and status != 200

    def _write(self, line: bytes) -> None:
        """A whole line or nothing, in one call where the system takes it. Raises OSError."""
        written = 0
        try:
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError:
            end = os.lseek(self._file, 0, os.SEEK_CUR)
            # What others appended since is theirs.
            if written and os.fstat(self._file).st_size == end:
                os.ftruncate(self._file, end - written)
            raise

    def _leave_out(self, reason: str) -> None:
        self.counts["left out"] += 1
        self.reasons.append(reason)

    def _line(self, exchange: Exchange) -> bytes:
        """The corpus line of an exchange. Raises CorpusError or BadJson when it cannot be one."""
        if exchange.too_large:
            raise CorpusError(f"request and answer have more than {MAX_KEPT >> 20} MiB")
        raw = bytes(exchange.body)
        body = load_json(raw)
        secrets = secrets_of(exchange.request)
        kept = without_values(without_secrets(body), secrets)
        number = self.counts["recorded"] + 1
        about = without_values(self._about(exchange, raw), secrets)
        head = {"custom_id": f"{self._session}-{number:05}", "method": "POST", "url": CHAT_URL}
        parse_line(dump({**head, "body": kept, "lumotree": about}), 0, Path("request"))
        name, turn = self._threads.place(kept)
        about = {"conversation": name, "turn": turn, **about}
        # As the client wrote it, where that is one line and holds nothing that must go.
        # A value that a second one of its key hides is in the raw text only.
        as_it_came = kept == body and not any(secret.encode() in raw for secret in secrets)
        verbatim = raw.strip() if as_it_came and b"\n" not in raw.strip() else dump(kept)
        return dump(head)[:-1] + b',"body":' + verbatim + b',"lumotree":' + dump(about) + b"}\n"

    def _about(self, exchange: Exchange, raw: bytes) -> dict[str, Any]:
        response = self._response(exchange)
        agent = exchange.request.get(b"user-agent") or b""
        about = {
            "session": self._session,
            "task": self._task,
            "agent": self._agent or agent.decode("latin-1") or None,
            "recorded_at": exchange.at.isoformat(),
            "input_ids": response.pop("input_ids", None),
            "body_sha256": hashlib.sha256(raw).hexdigest(),
            "completion": response.pop("message", None),
            "response": response,
        }
        return without_secrets({k: v for k, v in about.items() if v is not None})

    @staticmethod
    def _response(exchange: Exchange) -> dict[str, Any]:
        found: dict[str, Any] = {}
        status = None
        if exchange.response is not None:
            status = exchange.response.status
            kind = (exchange.response.get(b"content-type") or b"").lower()
            encoding = (exchange.response.get(b"content-encoding") or b"").decode("latin-1").lower()
            try:
                parts = decoded(exchange.parts, encoding)
                found = read_answer(parts, stream=kind.startswith(b"text/event-stream"))
            except ValueError as error:
                found = {"unread": str(error)}
        timings = {
            "headers_s": exchange.head_s,
            "first_text_s": found.pop("first_text_s", None),
            "end_s": exchange.end_s,
        }
        found["timings"] = {k: round(v, 6) for k, v in timings.items() if v is not None}
        marks = {"aborted": exchange.aborted or None, "fault": exchange.fault}
        return {"status": status, **{k: v for k, v in marks.items() if v is not None}, **found}


def without_values(value: Any, secrets: Sequence[str]) -> Any:
    """A copy whose texts hold none of `secrets`. Keys, and words of the protocol, stay."""
    if isinstance(value, dict):
        return {
            key: inner
            if isinstance(inner, str) and inner in WORDS.get(key, ())
            else without_values(inner, secrets)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [without_values(inner, secrets) for inner in value]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, REMOVED)
    return value


def secrets_of(request: Head) -> list[str]:
    """The values that a client authenticates with, and how JSON within a text spells them;
    longest first.
    """
    values = set()
    for name, value in request.headers:
        if name not in SECRET_HEADERS:
            continue
        values.add(value)
        if name == b"cookie":
            values |= {part.partition(b"=")[2].strip() for part in value.split(b";")}
        else:
            values.add(value.rpartition(b" ")[2])
    texts = {v.decode("utf-8", "replace") for v in values if len(v) >= SHORTEST_SECRET}
    texts |= {v.decode("latin-1") for v in values if len(v) >= SHORTEST_SECRET}
    texts |= {
        json.dumps(text, ensure_ascii=ascii_only)[1:-1]
        for text in texts
        for ascii_only in (True, False)
    }
    return sorted(texts, key=len, reverse=True)


def new_session() -> str:
    """A name for a recording, by its start."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}"

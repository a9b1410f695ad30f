"""What an upstream answered, put together again after its last byte."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from arms.sse import fields

GZIP = 16 + zlib.MAX_WBITS
DECODERS = {"": None, "identity": None, "gzip": GZIP, "x-gzip": GZIP, "deflate": zlib.MAX_WBITS}


def decoded(parts: Sequence[tuple[float, bytes]], encoding: str) -> list[tuple[float, bytes]]:
    """The parts without their content encoding. Raises ValueError for one that is not known."""
    if encoding not in DECODERS:
        raise ValueError(f"the answer is encoded as {encoding[:20]}, which is not read")
    window = DECODERS[encoding]
    if window is None:
        return list(parts)
    inflate = zlib.decompressobj(window)
    try:
        return [(at, inflate.decompress(part)) for at, part in parts]
    except zlib.error:
        raise ValueError(f"the answer is not the {encoding} that it says") from None


def read_answer(parts: Sequence[tuple[float, bytes]], stream: bool) -> dict[str, Any]:
    """Message, finish reason, usage and first-text time of the parts of a body.

    Each part has its seconds since the request. Of several choices the first counts. What is
    missing or malformed is left out: the answer is kept for reference and never replayed.
    """
    if stream:
        return joined(list(events(parts)))
    try:
        whole = json.loads(b"".join(part for _, part in parts))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(whole, dict):
        return {}
    choice = _choice(whole)
    return _known(
        message=choice.get("message"),
        finish_reason=choice.get("finish_reason"),
        usage=whole.get("usage"),
        input_ids=_ids(choice) or _ids(whole),
        error=whole.get("error"),
    )


def events(parts: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """The JSON objects of an event stream, each with the time of its last byte."""
    now = 0.0

    def payloads() -> Iterator[bytes]:
        nonlocal now
        for at, payload in parts:
            now = at
            yield payload

    for name, data in fields(payloads()):
        try:
            value = json.loads(data) if name == b"data" else None
        except (ValueError, RecursionError):
            continue  # [DONE], or nothing that can be read
        if isinstance(value, dict):
            yield now, value


def joined(stream: Sequence[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    """One message out of chunks."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: dict[Any, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    for at, chunk in stream:
        for key in ("usage", "error"):
            if chunk.get(key):
                found[key] = chunk[key]
        choice = _choice(chunk)
        if choice.get("index", 0) != 0:
            continue
        found.setdefault("input_ids", _ids(choice) or _ids(chunk))
        if choice.get("finish_reason"):
            found["finish_reason"] = choice["finish_reason"]
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            continue
        for key in ("content", "reasoning_content"):
            if isinstance(delta.get(key), str) and delta[key]:
                message[key] = (message.get(key) or "") + delta[key]
                found.setdefault("first_text_s", at)
        for part in delta.get("tool_calls") or ():
            if isinstance(part, dict):
                _add_call(calls.setdefault(part.get("index", len(calls)), {}), part)
                found.setdefault("first_text_s", at)
    if calls:
        message["tool_calls"] = list(calls.values())
    return _known(message=message, **found)


def _add_call(call: dict[str, Any], part: Mapping[str, Any]) -> None:
    for key in ("id", "type"):
        if isinstance(part.get(key), str):
            call[key] = part[key]
    function = call.setdefault("function", {"name": "", "arguments": ""})
    given = part.get("function")
    for key in ("name", "arguments"):
        if isinstance(given, dict) and isinstance(given.get(key), str):
            function[key] += given[key]


def _choice(value: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = value.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else {}


def _ids(value: Mapping[str, Any]) -> list[int] | None:
    """The prompt's token ids, where the server tells them."""
    ids = value.get("prompt_token_ids")
    whole = isinstance(ids, list) and all(type(token) is int for token in ids)
    return ids or None if whole else None


def _known(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}

"""HAR files of a browser or proxy: the chat completion requests among their entries.

Headers and cookies, where a HAR keeps keys, are never read.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from arms.sse import fields
from replay.corpus import BadJson, load_json
from replay.formats.source import Source, messages_of, need

NAME = "har"
TEXT = "HAR files"
ENDPOINT = "/chat/completions"


def matches(record: dict[str, Any]) -> bool:
    return isinstance(record.get("log"), dict) and isinstance(record["log"].get("entries"), list)


def read(record: dict[str, Any], source: Source) -> Iterator[dict[str, Any]]:
    found = 0
    for number, entry in enumerate(record["log"]["entries"], start=1):
        request = entry.get("request") if isinstance(entry, dict) else None
        if not isinstance(request, dict) or request.get("method") != "POST":
            continue
        where = source.within(f"entry {number}")
        try:
            path = urlsplit(str(request.get("url"))).path
        except ValueError:
            raise where.error("the request's url is no address") from None
        if not path.endswith(ENDPOINT):
            continue
        text = (request.get("postData") or {}).get("text")
        try:
            body = need(load_json(text or ""), dict, "request body", where)
        except BadJson as error:
            raise where.error(f"the request body is no JSON: {error.reason}") from None
        messages_of(body.get("messages"), "messages", where)
        found += 1
        known = {"recorded_at": entry.get("startedDateTime"), "completion": _answer(entry)}
        yield {
            "body": body,
            "lumotree": {key: value for key, value in known.items() if value is not None},
        }
    if not found:
        raise source.error(f"no entry is a POST to {ENDPOINT} with a body")


def _answer(entry: dict[str, Any]) -> dict[str, Any] | None:
    """The assistant message of the response; None when it is missing or cut off."""
    content = (entry.get("response") or {}).get("content") or {}
    text = content.get("text") or ""
    if content.get("encoding") == "base64":
        try:
            text = base64.b64decode(text).decode("utf-8", "replace")
        except ValueError:
            return None
    try:
        return load_json(text)["choices"][0]["message"]
    except (ValueError, LookupError, TypeError):
        return _from_stream(text)


def _from_stream(text: str) -> dict[str, Any] | None:
    """The message that the events of a streamed answer add up to."""
    said, calls = "", {}
    for name, data in fields([text.encode("utf-8", "surrogatepass")]):
        if name != b"data":
            continue
        try:
            event = load_json(data.decode("utf-8", "surrogatepass"))
            delta = event["choices"][0]["delta"]
        except (ValueError, LookupError, TypeError):
            continue
        said += delta.get("content") or ""
        for piece in delta.get("tool_calls") or ():
            call = calls.setdefault(piece.get("index", 0), {"type": "function", "function": {}})
            call |= {key: piece[key] for key in ("id", "type") if piece.get(key)}
            for key, value in (piece.get("function") or {}).items():
                call["function"][key] = call["function"].get(key, "") + (value or "")
    if not said and not calls:
        return None
    message: dict[str, Any] = {"role": "assistant", "content": said}
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message

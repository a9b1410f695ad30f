"""Mooncake traces with text: `messages`, `payload` or `text_input` on each line.

Most published traces have lengths and block hashes only. Text made up to those lengths says
nothing about acceptance, which depends on what the text is; so they are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replay.formats.source import Source, messages_of, need

NAME = "mooncake"
TEXT = "Mooncake traces with messages, payload or text_input"
LENGTHS = ("input_length", "output_length", "hash_ids", "timestamp")
WITH_TEXT = ("messages", "payload", "text_input")


def matches(record: dict[str, Any]) -> bool:
    foreign = "trajectory_format" in record or "custom_id" in record
    return not foreign and any(key in record for key in (*LENGTHS, "payload", "text_input"))


def read(record: dict[str, Any], source: Source) -> Iterator[dict[str, Any]]:
    given = [key for key in WITH_TEXT if record.get(key) is not None]
    if not given:
        raise source.error(
            "the trace has lengths and hashes but no text, and acceptance on made-up text means "
            "nothing",
            "import a trace with messages or payload, or a recording of real traffic such as HAR",
        )
    if "payload" in given:
        body = dict(need(record["payload"], dict, "payload", source))
        messages_of(body.get("messages"), "payload.messages", source)
    elif "messages" in given:
        body = {"messages": messages_of(record["messages"], "messages", source)}
        if record.get("tools"):
            body["tools"] = record["tools"]
    else:
        text = need(record["text_input"], str, "text_input", source)
        body = {"messages": [{"role": "user", "content": text}]}
    if isinstance(record.get("output_length"), int) and "payload" not in given:
        body["max_tokens"] = record["output_length"]
    known: dict[str, Any] = {}
    if record.get("session_id") is not None:
        known["conversation"] = str(record["session_id"])
    if record.get("timestamp") is not None:
        known["recorded_at"] = record["timestamp"]
    yield {"body": body, "lumotree": known}

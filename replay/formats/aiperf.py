"""AIPerf's inputs.json: `data`, a list of sessions, each with the payloads it sent in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replay.formats.source import Source, messages_of, need

NAME = "aiperf"
TEXT = "AIPerf inputs.json"


def matches(record: dict[str, Any]) -> bool:
    data = record.get("data")
    return isinstance(data, list) and all(
        isinstance(session, dict) and "payloads" in session for session in data
    )


def read(record: dict[str, Any], source: Source) -> Iterator[dict[str, Any]]:
    for index, session in enumerate(record["data"]):
        name = str(session.get("session_id") or f"{source.stem}-{index + 1}")
        where = source.within(f"session {name}")
        for turn, payload in enumerate(need(session["payloads"], list, "payloads", where), start=1):
            body = need(payload, dict, f"payloads[{turn - 1}]", where)
            messages_of(body.get("messages"), f"payloads[{turn - 1}].messages", where)
            yield {
                "custom_id": f"{name}-{turn:02}",
                "body": body,
                "lumotree": {"conversation": name, "turn": turn},
            }

"""OpenAI batch line: `custom_id`, `method`, `url`, `body`; our own corpus line is one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replay.corpus import CHAT_URL
from replay.formats.source import Source, messages_of, need

NAME = "batch"
TEXT = "OpenAI batch lines"


def matches(record: dict[str, Any]) -> bool:
    return "custom_id" in record and "body" in record


def read(record: dict[str, Any], source: Source) -> Iterator[dict[str, Any]]:
    body = need(record["body"], dict, "body", source)
    url = record.get("url", CHAT_URL)
    if url != CHAT_URL or record.get("method", "POST") != "POST":
        raise source.error(
            f"{record.get('method', 'POST')} {url}; only POST {CHAT_URL} is replayed"
        )
    messages_of(body.get("messages"), "body.messages", source)
    line = {"custom_id": need(record["custom_id"], str, "custom_id", source), "body": body}
    if record.get("lumotree") is not None:
        line["lumotree"] = need(record["lumotree"], dict, "lumotree", source)
    yield line

"""ShareGPT conversations: one request per answer, with all that was said before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replay.formats.source import Source, need

NAME = "sharegpt"
TEXT = "ShareGPT conversations"
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


def matches(record: dict[str, Any]) -> bool:
    return isinstance(record.get("conversations", record.get("conversation")), list)


def read(record: dict[str, Any], source: Source) -> Iterator[dict[str, Any]]:
    turns = record.get("conversations", record.get("conversation"))
    name = str(record.get("id") or f"{source.stem}-{_number(source)}")
    messages = []
    if record.get("system"):
        messages.append({"role": "system", "content": str(record["system"])})
    answered = 0
    for index, turn in enumerate(turns):
        need(turn, dict, f"conversations[{index}]", source)
        said = turn.get("from", turn.get("role"))
        if said not in ROLES:
            raise source.error(f"conversations[{index}].from is {said!r}, which is no known role")
        text = turn.get("value", turn.get("content"))
        message = {
            "role": ROLES[said],
            "content": need(text, str, f"conversations[{index}].value", source),
        }
        if message["role"] == "assistant" and any(m["role"] == "user" for m in messages):
            answered += 1
            yield {
                "custom_id": f"{name}-{answered:02}",
                "body": {"messages": list(messages)},
                "lumotree": {"conversation": name, "turn": answered, "completion": message},
            }
        messages.append(message)


def _number(source: Source) -> str:
    return str(source.line) if source.line is not None else (source.item or "1").split()[-1]

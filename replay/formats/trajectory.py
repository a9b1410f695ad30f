"""mini-swe-agent trajectories: one request per step of the agent.

A trajectory does not hold the tool definitions that were sent, so requests have none. Messages
lose `extra`, which is the agent's own bookkeeping and was never sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replay.formats.source import Source, messages_of

NAME = "mini-swe-agent"
TEXT = "mini-swe-agent trajectories"
# Roles that only the trajectory knows: how the agent ended.
NOT_SENT = ("exit",)


def matches(record: dict[str, Any]) -> bool:
    return isinstance(record.get("messages"), list) and (
        "trajectory_format" in record or isinstance(record.get("info"), dict)
    )


def read(record: dict[str, Any], source: Source) -> Iterator[dict[str, Any]]:
    messages_of(record["messages"], "messages", source)
    name = str(record.get("instance_id") or source.stem)
    history: list[dict[str, Any]] = []
    turn = 0
    for message in record["messages"]:
        if message["role"] in NOT_SENT:
            continue
        sent = {key: value for key, value in message.items() if key not in ("extra", "timestamp")}
        if message["role"] == "assistant" and history:
            turn += 1
            yield {
                "custom_id": f"{name}-{turn:03}",
                "body": {"messages": list(history)},
                "lumotree": {
                    "conversation": name,
                    "turn": turn,
                    "task": name,
                    "completion": sent,
                },
            }
        history.append(sent)
    if not turn:
        raise source.error("the trajectory holds no answer of the agent, so no request")

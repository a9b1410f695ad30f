"""Which requests belong to one conversation, where the file does not say.

A request continues another when its messages begin with all of the other's. That is what agents
and chat clients send, turn after turn; replays reuse prefixes and resample by conversation.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any


def name_conversations(lines: list[dict[str, Any]]) -> None:
    """Fill in `conversation` and `turn` of lines that have no conversation, in place."""
    tails: dict[bytes, tuple[str, int]] = {}
    count = 0
    for line in lines:
        known = line["lumotree"]
        if known.get("conversation") is not None:
            continue
        prefixes = _prefixes(line["body"])
        # The longest earlier request that this one extends; an equal one was only sent again.
        found = next((tails[p] for p in reversed(prefixes) if p in tails), None)
        if found is None:
            count += 1
            found = (f"conversation-{count:03}", 0)
        name, turn = found[0], found[1] + 1
        known |= {"conversation": name, "turn": turn}
        tails[prefixes[-1]] = (name, turn)


def _prefixes(body: dict[str, Any]) -> list[bytes]:
    """A hash for the tools and first n messages, for each n; a lone first message is no thread."""
    running = hashlib.sha256(json.dumps(body.get("tools"), sort_keys=True).encode())
    found = []
    for message in body["messages"]:
        running.update(json.dumps(message, sort_keys=True).encode())
        found.append(running.digest())
    return found

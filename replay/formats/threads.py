"""Which requests belong to one conversation, where the file does not say.

A request continues another when its messages begin with all of the other's. That is what agents
and chat clients send, turn after turn; replays reuse prefixes and resample by conversation.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any


class Threads:
    """Names conversations as their requests come; `prefix` stands before each number."""

    def __init__(self, prefix: str = "conversation-") -> None:
        self._prefix, self._count = prefix, 0
        self._tails: dict[bytes, tuple[str, int]] = {}

    def place(self, body: dict[str, Any]) -> tuple[str, int]:
        """The conversation of a request with messages, and its turn there, from 1."""
        prefixes = _prefixes(body)
        # The longest earlier request that this one extends; an equal one was only sent again.
        found = next((self._tails[p] for p in reversed(prefixes) if p in self._tails), None)
        if found is None:
            self._count += 1
            found = (f"{self._prefix}{self._count:03}", 0)
        name, turn = found[0], found[1] + 1
        self._tails[prefixes[-1]] = (name, turn)
        return name, turn


def name_conversations(lines: list[dict[str, Any]]) -> None:
    """Fill in `conversation` and `turn` of lines that have no conversation, in place."""
    threads = Threads()
    for line in lines:
        known = line["lumotree"]
        if known.get("conversation") is None:
            name, turn = threads.place(line["body"])
            known |= {"conversation": name, "turn": turn}


def _prefixes(body: dict[str, Any]) -> list[bytes]:
    """A hash for the tools and first n messages, for each n; a lone first message is no thread."""
    running = hashlib.sha256(json.dumps(body.get("tools"), sort_keys=True).encode())
    found = []
    for message in body["messages"]:
        running.update(json.dumps(message, sort_keys=True).encode())
        found.append(running.digest())
    return found

"""Prompts that audits start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lumotree.errors import LumoTreeError

# A prefix and its script take at least this many tokens of a prompt.
SHORTEST = 16
SCRIPT = 96


@dataclass(frozen=True)
class Prompt:
    name: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Prefix:
    """Tokens to start from, and those that go on: script[0] is the first pending token."""

    name: str
    tokens: tuple[int, ...]
    script: tuple[int, ...]


def prefixes(prompts: Sequence[Prompt], lengths: Sequence[int], seed: int) -> list[Prefix]:
    """One prefix per length, each the start of another prompt, which its script continues.

    Raises LumoTreeError when no prompt is long enough for any.
    """
    usable = [p for p in prompts if len(p.tokens) >= SHORTEST + SCRIPT]
    if not usable:
        raise LumoTreeError(f"no prompt of the corpus has {SHORTEST + SCRIPT} tokens")
    found = []
    for i, length in enumerate(lengths):
        long = [p for p in usable if len(p.tokens) >= length + SCRIPT] or usable
        prompt = long[(seed + i) % len(long)]
        length = min(length, len(prompt.tokens) - SCRIPT)
        script = prompt.tokens[length : length + SCRIPT]
        found.append(Prefix(f"{prompt.name}[:{length}]", prompt.tokens[:length], script))
    return found

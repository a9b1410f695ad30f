"""What a corpus holds, as figures and as lines of text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from arms import inprocess
from lumotree.errors import CheckpointError
from replay.corpus import Corpus, CorpusRequest

PERCENTILES = (0, 10, 50, 90, 100)


def inspect_corpus(corpus: Corpus, model: str) -> dict[str, Any]:
    """Counts and prompt lengths. Lengths are in tokens of `model`.

    When the embedded model is not there, lengths are in characters and `unit` says so; any
    other model that cannot be loaded raises CheckpointError.
    """
    conversations = Counter(r.conversation for r in corpus.requests if r.conversation is not None)
    lengths, unit = prompt_lengths(corpus.requests, model)
    tools = Counter(
        tool.get("function", tool).get("name", "?")
        for r in corpus.requests
        for tool in r.tools or ()
    )
    return {
        "corpus": str(corpus.path),
        "sha256": corpus.sha256,
        "requests": len(corpus.requests),
        "conversations": len(conversations),
        "turns_per_conversation": dict(conversations),
        "tasks": dict(Counter(r.task for r in corpus.requests if r.task is not None)),
        "tools": dict(tools),
        "prompt_length": {
            "unit": unit,
            **{f"p{p}": percentile(lengths, p) for p in PERCENTILES},
            "total": sum(lengths),
        },
    }


def prompt_lengths(requests: Sequence[CorpusRequest], model: str) -> tuple[list[int], str]:
    """Prompt lengths and their unit: `tokens <model>` or `characters`."""
    try:
        tokenizer = inprocess.load_tokenizer(model)
    except CheckpointError:
        if model != "embedded":
            raise
        texts = (json.dumps([r.messages, r.tools], ensure_ascii=False) for r in requests)
        return [len(text) for text in texts], "characters"
    return [len(tokenizer.encode_chat(r.messages, r.tools)) for r in requests], f"tokens of {model}"


def percentile(values: Sequence[int], p: int) -> int:
    """Nearest-rank percentile: a length that occurs, not an interpolation."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * p // 100) - 1)]


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures for a reader."""
    length = figures["prompt_length"]
    turns = Counter(figures["turns_per_conversation"].values())
    rows = [
        ("corpus", figures["corpus"]),
        ("sha256", figures["sha256"]),
        ("requests", str(figures["requests"])),
        ("conversations", str(figures["conversations"])),
        ("turns", ", ".join(f"{n} with {turn}" for turn, n in sorted(turns.items())) or "-"),
        ("tasks", ", ".join(f"{k} ({n})" for k, n in figures["tasks"].items()) or "-"),
        ("tools", ", ".join(f"{k} ({n})" for k, n in figures["tools"].items()) or "-"),
        (
            "prompt length",
            ", ".join(f"{_rank(p)} {length[f'p{p}']}" for p in PERCENTILES)
            + f" ({length['unit']}; {length['total']} in all)",
        ),
    ]
    return [f"{name:<14} {text}" for name, text in rows]


def _tool_name(tool: dict[str, Any]) -> str:
    inner = tool.get("function")
    return str((inner if isinstance(inner, dict) else tool).get("name", "?"))


def _rank(p: int) -> str:
    return {0: "least", 50: "median", 100: "most"}.get(p, f"p{p}")

"""Synthetic conversations of a coding agent over the training packages.

Every file, search result, diff and edit is made of the real text of a training file; the test runs
and the remarks are invented. The point is the form: a request, looking, an edit that quotes code
verbatim, a check, a summary. A model trained on them learns to copy out of its context.

    python scripts/train/transcripts.py .train/corpus/train-00.jsonl.xz --show 2
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from conversation import BASH_TOOL, Conversation  # noqa: E402
from data import read_shard  # noqa: E402
from render import render  # noqa: E402
from source import Source, inspect  # noqa: E402
from tasks import task  # noqa: E402

MAX_CHARS = 40_000
MAX_FILE_CHARS = 60_000
NEIGHBOURS = 6


def conversation(rng: random.Random, pkg: str, files: list[Source], names: list[str]) -> list[dict]:
    """A conversation of one to four tasks."""
    c = Conversation(rng, pkg, files, names)
    src = rng.choice(files)
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 4])):
        after = None
        for _attempt in range(4):
            after = task(c, src)
            if after is not None:
                break
        if sum(len(m["content"]) for m in c.messages) > MAX_CHARS:
            break
        fresh = inspect(after.path, after.text) if after is not None else None
        src = fresh if fresh and rng.random() < 0.5 else rng.choice(files)
    return c.messages


def generate(rows: list[dict], seed: int, target_chars: int) -> Iterator[str]:
    """Rendered conversations over the packages of a shard until target_chars are written."""
    rng = random.Random(seed)
    names: dict[str, list[str]] = {}
    pools: dict[str, list[dict]] = {}
    for row in rows:
        names.setdefault(row["pkg"], []).append(row["path"])
        if row["path"].endswith(".py") and len(row["text"]) < MAX_FILE_CHARS:
            pools.setdefault(row["pkg"], []).append(row)
    order = [p for p, pool in pools.items() if len(pool) >= 3]
    weights = [len(pools[p]) for p in order]
    written = 0
    while written < target_chars:
        pkg = rng.choices(order, weights)[0]
        at = rng.randrange(len(pools[pkg]))
        near = pools[pkg][at : at + NEIGHBOURS]
        files = [s for r in near if (s := inspect(r["path"], r["text"]))]
        if not files:
            continue
        for _ in range(6):
            try:
                messages = conversation(rng, pkg.replace("_core", ""), files, names[pkg])
            except (IndexError, KeyError, ValueError):  # a file of unusual form; take another
                continue
            if len(messages) < 4:
                continue
            text = render(messages, [BASH_TOOL])
            written += len(text)
            yield text


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shard", type=Path)
    parser.add_argument("--show", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for i, text in enumerate(generate(read_shard(args.shard), args.seed, 10**9)):
        if i == args.show:
            break
        print(text)
        print("=" * 100)


if __name__ == "__main__":
    main()

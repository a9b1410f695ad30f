"""Corpus shards -> token files: code in package order, and conversations made of the same files.

    python scripts/train/prepare.py --corpus .train/corpus --out .train/tokens

Each stream is a uint16 array with ``<|endoftext|>`` after every document, and an int64 array of
document starts. One process per shard.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from data import WORK, read_shard  # noqa: E402
from transcripts import generate  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "lumotree/embedded/tokenizer.json"
END = 4089
MARKERS = (
    "<|endoftext|>",
    "<|im_",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)


def encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Token stream and document starts."""
    from tokenizers import Tokenizer

    tok = Tokenizer.from_file(str(TOKENIZER))
    rows = [np.array([*tok.encode(t).ids, END], dtype=np.uint16) for t in texts]
    starts = np.cumsum([0] + [len(r) for r in rows[:-1]], dtype=np.int64)
    return np.concatenate(rows), starts


def shard(path: Path, out: Path, chars: int, seed: int) -> str:
    """Both streams of one shard."""
    rows = [r for r in read_shard(path) if not any(m in r["text"] for m in MARKERS)]
    name = path.name.split(".")[0]
    number = sum(map(ord, name))
    code, code_starts = encode([r["text"] for r in rows])
    texts = list(generate(rows, seed + number, chars))
    chat, chat_starts = encode(texts)
    np.savez(
        out / f"{name}.npz", code=code, code_starts=code_starts, chat=chat, chat_starts=chat_starts
    )
    size = sum(len(r["text"].encode()) for r in rows)
    chats = f"{len(chat)} conversation tokens in {len(texts)}"
    return f"{name} {len(code)} code tokens ({size} bytes), {chats}"


def load(folder: Path, prefix: str) -> dict[str, np.ndarray]:
    """All shards of one split, joined: code, code_starts, chat, chat_starts."""
    parts = [np.load(f) for f in sorted(folder.glob(f"{prefix}*.npz"))]
    joined = {}
    for kind in ("code", "chat"):
        offsets = np.cumsum([0] + [len(p[kind]) for p in parts[:-1]])
        joined[kind] = np.concatenate([p[kind] for p in parts])
        joined[f"{kind}_starts"] = np.concatenate(
            [p[f"{kind}_starts"] + o for p, o in zip(parts, offsets, strict=True)]
        )
    return joined


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, default=WORK / "corpus")
    parser.add_argument("--out", type=Path, default=WORK / "tokens")
    parser.add_argument("--chars", type=int, default=14_000_000, help="conversation text per shard")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", default="", help="shards whose name contains this")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    paths = [p for p in sorted(args.corpus.glob("*.jsonl.xz")) if args.only in p.name]
    with ProcessPoolExecutor(min(len(paths), os.cpu_count() or 2)) as pool:
        for line in pool.map(partial(shard, out=args.out, chars=args.chars, seed=args.seed), paths):
            print(line, flush=True)


if __name__ == "__main__":
    main()

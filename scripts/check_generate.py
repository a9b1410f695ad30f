"""Greedy decoding equals transformers' `generate`, token for token.

Prompts are conversations of a recorded corpus. At the first difference, the gap between the two
best logits of one full transformers forward is printed: below --margin, float32 rounding
explains the difference; above it, something is wrong and the exit status is 1.

    python scripts/check_generate.py --prompts 20 --tokens 200
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from lumotree.engine import DecoderConfig, Engine
from lumotree.request import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
MARGIN = 1e-4


@dataclass(frozen=True)
class Comparison:
    """One prompt. at: index of the first differing token, None when all are equal; margin: gap
    between the oracle's two best logits there."""

    tokens: int
    at: int | None = None
    margin: float | None = None

    def accepted(self, bound: float = MARGIN) -> bool:
        return self.at is None or self.margin < bound

    def __str__(self) -> str:
        if self.at is None:
            return f"{self.tokens} tokens equal"
        return f"differs at token {self.at} of {self.tokens}, top-2 margin {self.margin:.2e}"


def load_oracle(folder: Path):
    """The checkpoint in transformers, float32, without an end token: every answer is full."""
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    oracle.generation_config.eos_token_id = None
    return oracle


@torch.no_grad()
def compare(
    engine: Engine, oracle, config: DecoderConfig, prompt: Sequence[int], tokens: int
) -> Comparison:
    """Decodes `tokens` tokens greedily with both."""
    params = SamplingParams(
        temperature=0.0, presence_penalty=0.0, max_tokens=tokens, ignore_eos=True
    )
    ours = engine.decoder(config).generate(prompt, params).token_ids
    ids = torch.tensor([list(prompt)])
    made = oracle.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
    )
    theirs = made[0, len(prompt) :].tolist()
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    if at is None:
        return Comparison(tokens)
    logits = oracle(made[:, : len(prompt) + at], use_cache=False).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    return Comparison(tokens, at, best - second)


def corpus_prompts(engine: Engine, corpus: Path, count: int) -> list[list[int]]:
    """Evenly spaced requests of a recorded corpus as token ids."""
    lines = corpus.read_text(encoding="utf-8").splitlines()
    bodies = [json.loads(lines[i * len(lines) // count])["body"] for i in range(count)]
    return [engine.tokenizer.encode_chat(b["messages"], b.get("tools")) for b in bodies]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--corpus", type=Path, default=ROOT / "corpora" / "first.jsonl")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--tree", default="hydra27")
    parser.add_argument("--margin", type=float, default=MARGIN)
    args = parser.parse_args()

    engine = Engine.load(args.model, dtype="float32", device="cpu")
    oracle = load_oracle(engine.source.folder)
    config = DecoderConfig(args.tree, 5 if engine.has_mtp else 0, True)
    failed = equal = 0
    for number, prompt in enumerate(corpus_prompts(engine, args.corpus, args.prompts)):
        result = compare(engine, oracle, config, prompt, args.tokens)
        failed += not result.accepted(args.margin)
        equal += result.at is None
        print(f"prompt {number} ({len(prompt)} tokens): {result}", flush=True)
    print(f"{equal}/{args.prompts} equal, {failed} differ beyond a margin of {args.margin:g}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

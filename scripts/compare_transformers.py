"""Decode rate of the ar arm beside transformers' `generate`.

Same checkpoint, dtype, threads and prompts. Both decode greedily, prefill is left out of both
rates, and the two take turns on every prompt, so that a machine that slows down slows both.
Prints one JSON object.

    python scripts/compare_transformers.py --prompts 8 --tokens 128 --repeats 3
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers

from lumotree.engine import DecoderConfig, Engine
from lumotree.request import SamplingParams

ROOT = Path(__file__).resolve().parent.parent


class Clock(transformers.StoppingCriteria):
    """Notes when each token is there; never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids, scores, **_) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def transformers_seconds(model, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
    """Seconds between the first and the last of `tokens` generated tokens, and the ids."""
    ids = torch.tensor([prompt])
    clock = Clock()
    # No end-of-text id: every text runs to its full length, as in our arm.
    settings = transformers.GenerationConfig(
        max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=settings,
        stopping_criteria=transformers.StoppingCriteriaList([clock]),
    )
    return clock.times[-1] - clock.times[0], out[0, len(prompt) :].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--corpus", type=Path, default=ROOT / "corpora" / "first.jsonl")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()

    engine = Engine.load(args.model, dtype=args.dtype, device="cpu", threads=args.threads)
    decoder = engine.decoder(DecoderConfig(tree="root", passes=0, suffix=False))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        engine.source.folder, dtype=engine.model.dtype
    )
    oracle.eval()
    oracle.generation_config = transformers.GenerationConfig()
    params = SamplingParams(
        temperature=0.0, presence_penalty=0.0, max_tokens=args.tokens, ignore_eos=True
    )
    lines = args.corpus.read_text(encoding="utf-8").splitlines()
    bodies = [json.loads(line)["body"] for line in lines[:: max(1, len(lines) // args.prompts)]]
    ratios, ours, theirs, same = [], 0.0, 0.0, 0
    prompts = [
        engine.tokenizer.encode_chat(body["messages"], body.get("tools"))
        for body in bodies[: args.prompts]
    ]
    for repeat in range(args.repeats + 1):
        for prompt in prompts:
            made = decoder.generate(prompt, params)
            seconds, ids = transformers_seconds(oracle, prompt, args.tokens)
            if repeat == 0:  # warm-up
                continue
            ours += made.e2e_s - made.ttft_s
            theirs += seconds
            same += ids == made.token_ids
            ratios.append(seconds / (made.e2e_s - made.ttft_s))
    steps = (args.tokens - 1) * len(ratios)
    print(
        json.dumps(
            {
                "ar_tok_s": round(steps / ours, 1),
                "transformers_tok_s": round(steps / theirs, 1),
                "pooled_ratio": round(theirs / ours, 3),
                "ratio_median": round(statistics.median(ratios), 3),
                "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
                "equal_outputs": f"{same}/{len(ratios)}",
                "prompts": len(prompts),
                "tokens": args.tokens,
                "repeats": args.repeats,
                "threads": args.threads,
                "dtype": args.dtype,
                "prompt_tokens": [len(prompt) for prompt in prompts],
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
                "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()

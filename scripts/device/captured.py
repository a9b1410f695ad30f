"""The captured decoder on a GPU: equal tokens across arms, milliseconds a step, idle share.

python scripts/device/captured.py --model embedded --prompt 500 --tokens 128 --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from pathlib import Path

import torch

from lumotree.decoder import DecoderConfig
from lumotree.engine import Engine
from lumotree.request import SamplingParams

ARMS = {
    "ar": DecoderConfig("root", 0, False),
    "mtp-5": DecoderConfig("chain-5", 5, False),
    "mtp-7": DecoderConfig("chain-7", 7, False),
    "lumotree": DecoderConfig(),
    "lumotree stock attention": DecoderConfig(attention="stock"),
    "lumotree separate selection": DecoderConfig(selection="separate"),
    "lumotree inline operands": DecoderConfig(operands="inline"),
    "lumotree draft vocabulary": DecoderConfig(draft_vocab=4096),
    "mtp-5 fp8": DecoderConfig("chain-5", 5, False, draft_weights="fp8"),
    "lumotree fp8": DecoderConfig(draft_weights="fp8"),
    "lumotree 3 passes": DecoderConfig(passes=3),
}
PROTOCOL = dict(temperature=0.6, top_p=0.95, top_k=20, presence_penalty=1.0, seed=7)


def prompts(lengths: list[int], engine: Engine) -> list[list[int]]:
    """Recorded prompts, repeated or cut to each length."""
    lines = Path("corpora/first.jsonl").read_text(encoding="utf-8").splitlines()
    bodies = [json.loads(line)["body"] for line in lines[:12]]
    ids = []
    for body in bodies:
        ids += engine.tokenizer.encode_chat(body["messages"], body.get("tools"))
    while len(ids) < max(lengths):
        ids += ids
    return [ids[-n:] for n in lengths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--prompt", type=int, nargs="+", default=[500, 2000])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", default="natural")
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="kernels of ar and lumotree too")
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args()
    started = time.perf_counter()
    engine = Engine.load(args.model, rows=args.rows)
    print(f"loaded and probed in {time.perf_counter() - started:.1f} s", flush=True)
    print({k: engine.description()[k] for k in ("equal_bits", "rows", "dtype")}, flush=True)
    table, tokens, failed = [], {}, False
    decoders = {}
    for name in args.arms:
        decoders[name] = engine.decoder(ARMS[name])
    texts = prompts(args.prompt, engine)
    for round_ in range(args.rounds):
        for length, prompt in zip(args.prompt, texts, strict=True):
            for sampling in ("greedy", "sampled"):
                options = dict(temperature=0.0) if sampling == "greedy" else PROTOCOL
                params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, **options)
                for name, decoder in decoders.items():
                    try:
                        made = decoder.generate(prompt, params)
                    except Exception:
                        traceback.print_exc()
                        failed = True
                        continue
                    tokens.setdefault((length, sampling), {})[name] = made.token_ids
                    decode_ms = (made.e2e_s - made.ttft_s) * 1e3
                    row = {
                        "round": round_,
                        "prompt": length,
                        "sampling": sampling,
                        "arm": name,
                        "ttft_ms": made.ttft_s * 1e3,
                        "ms_per_step": decode_ms / made.steps,
                        "tok_s": (made.completion_tokens - 1) / decode_ms * 1e3,
                        "tokens_per_step": (made.completion_tokens - 1) / made.steps,
                        **{k: v / made.steps for k, v in made.phases_ms.items()},
                    }
                    table.append(row)
                    if round_ == args.rounds - 1:
                        shown = " ".join(
                            f"{v:9.3f}" if isinstance(v, float) else f"{v!s:>9}"
                            for k, v in row.items()
                            if k != "round"
                        )
                        print(shown, flush=True)
    wrong = failed
    for key, found in tokens.items():
        first = next(iter(found.values()))
        same = {name: ids == first for name, ids in found.items()}
        where = {
            name: next(
                (i for i, (a, b) in enumerate(zip(ids, first, strict=False)) if a != b), None
            )
            for name, ids in found.items()
            if ids != first
        }
        wrong |= not all(same.values())
        print(key, "same tokens" if all(same.values()) else f"DIFFER at {where}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "captured.json").write_text(json.dumps(table, indent=1))
    if args.profile:
        from profile_step import show

        for name in ("ar", "lumotree"):
            if name in decoders:
                show(f"{name} {args.prompt[-1]}", decoders[name], args.out)
    if wrong:
        raise SystemExit(1)
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()

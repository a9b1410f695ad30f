"""Makes rehearsals on a GPU: seconds, memory on device and host, and agreement with the embedded.

python scripts/device/rehearsal.py --shapes 27b --out rehearsal.json
"""

from __future__ import annotations

import argparse
import json
import resource
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from lumotree.engine import Engine
from lumotree.model.checkpoint import EMBEDDED
from lumotree.model.names import tensor_shapes
from lumotree.model.source import open_source
from lumotree.request import SamplingParams
from lumotree.text import ChatTokenizer
from replay.machine import describe_machine, describe_versions, git_commit


def host_gib() -> float:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def make_every_tensor(name: str, device: torch.device) -> dict[str, Any]:
    """Seconds and device memory to make the weights one by one, none kept."""
    source = open_source(name)
    weights = source.weights(device, torch.bfloat16)
    before, started, count = host_gib(), time.perf_counter(), 0
    torch.cuda.reset_peak_memory_stats(device)
    for tensor, shape in tensor_shapes(source.config, source.has_mtp()).items():
        made = weights.take(tensor, shape)
        count += made.numel() * made.element_size()
        if not made.isfinite().all():
            raise ValueError(f"{tensor} is not finite")
    torch.cuda.synchronize(device)
    return {
        "bytes": count,
        "seconds": time.perf_counter() - started,
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "host_gib_before": before,
        "host_gib_after": host_gib(),
    }


def prompts(count: int) -> list[list[int]]:
    tokenizer = ChatTokenizer.load(EMBEDDED)
    found = []
    with Path("corpora/first.jsonl").open(encoding="utf-8") as corpus:
        for line in corpus:
            body = json.loads(line)["body"]
            found.append(tokenizer.encode_chat(body["messages"], body.get("tools"))[:1500])
            if len(found) == count:
                return found
    return found


def greedy(name: str, device: str, texts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Token ids and acceptance of `lumotree` and the seconds that loading took."""
    from lumotree.decoder import DecoderConfig

    started = time.perf_counter()
    engine = Engine.load(name, device=device, dtype="bfloat16")
    torch.cuda.synchronize()
    loaded = time.perf_counter() - started
    decoder = engine.decoder(DecoderConfig("chain-5", 5, False))
    params = SamplingParams(
        max_tokens=tokens, temperature=0.0, presence_penalty=0.0, ignore_eos=True
    )
    runs = [decoder.generate(text, params) for text in texts]
    vocab = engine.tokenizer.vocab_size
    return {
        "load_s": loaded,
        "held_gib": torch.cuda.memory_allocated() / 2**30,
        "row_multiple": engine.row_multiple,
        "tokens": [run.token_ids for run in runs],
        "tokens_per_step": sum(r.completion_tokens for r in runs) / sum(r.steps for r in runs),
        "outside_vocabulary": sum(token >= vocab for r in runs for token in r.token_ids),
        "ms_per_step": [sum(r.phases_ms.values()) / r.steps for r in runs],
    }


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> dict[str, Any]:
    """How far greedy texts run together, in bfloat16 of both."""
    together = []
    for mine, its in zip(ours, theirs, strict=True):
        pairs = zip(mine, its, strict=False)
        together.append(next((i for i, (a, b) in enumerate(pairs) if a != b), len(its)))
    return {"common_prefix": together, "of": [len(its) for its in theirs]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["27b"])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device("cuda")
    torch.zeros(1, device=device)
    texts = prompts(args.prompts)
    small = greedy("embedded", "cuda", texts, args.tokens)
    found: dict[str, Any] = {
        "machine": {**describe_machine(), "gpu": torch.cuda.get_device_name()},
        "versions": describe_versions(),
        "commit": git_commit(),
        "embedded": small,
    }
    for shape in args.shapes:
        name = f"rehearsal:{shape}"
        here = found[name] = {}
        for part, work in (
            ("make", lambda name=name: make_every_tensor(name, device)),
            ("decode", lambda name=name: greedy(name, "cuda", texts, args.tokens)),
        ):
            try:
                here[part] = work()
            except Exception:
                here[part] = {"error": traceback.format_exc()}
                print(here[part]["error"], flush=True)
            torch.cuda.empty_cache()
        if "tokens" in here["decode"]:
            here["agreement"] = agreement(here["decode"]["tokens"], small["tokens"])
        print(name, json.dumps({k: _short(v) for k, v in here.items()}, indent=1), flush=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _short(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "tokens"}


if __name__ == "__main__":
    main()

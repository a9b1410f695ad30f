"""Milliseconds of the draft head's products with weights in 8 bits, by block, beside bfloat16.

    python scripts/device/linear8.py --out linear8.json

One row; each weight in as many copies as keep the L2 cache out of it; medians of graph replays.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from lumotree.ops import linear as ops
from lumotree.ops.eight_bits import Scaled
from lumotree.ops.linear import Block

# (N, K), halves, and the blocks to try.
WIDE = [Block(n, k, 1, s, w) for n, k, s, w in (
    (64, 128, 4, 4), (64, 128, 6, 4), (128, 128, 4, 4), (128, 128, 5, 8), (128, 64, 6, 4),
    (64, 256, 4, 4), (128, 256, 3, 8), (256, 128, 3, 8))]  # fmt: skip
NARROW = [Block(n, k, p, s, w) for n, k, p, s, w in (
    (64, 128, 2, 4, 4), (64, 128, 3, 4, 4), (64, 128, 4, 5, 4), (128, 128, 3, 4, 4),
    (128, 128, 6, 4, 8), (64, 256, 3, 3, 4))]  # fmt: skip
SHAPES = {
    "output head": ((248320, 5120), 1, WIDE),
    "gate and up": ((34816, 5120), 2, WIDE[:7]),
    "attention in": ((14336, 5120), 1, WIDE[:6]),
    "down": ((5120, 17408), 1, NARROW),
    "fc": ((5120, 10240), 1, NARROW),
    "attention out": ((5120, 6144), 1, NARROW),
}
FRESH = 400 * 2**20  # bytes between two reads of the same weight


def timed(launches) -> float:
    """Milliseconds a launch, median of replays."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    found = []
    for _ in range(25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / len(launches))
    return statistics.median(found)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--deadline", type=float, default=85, help="seconds")
    args = parser.parse_args()
    began, found = time.perf_counter(), []
    for name, ((n, k), halves, blocks) in SHAPES.items():
        copies = max(1, -(-FRESH // (n * k)))
        x = torch.randn(1, k, device="cuda", dtype=torch.bfloat16)
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        narrow = [Scaled.of(w) for w in weights]
        product = ops.linear if halves == 1 else ops.linear_swiglu
        tries = [("bfloat16", None, weights), *(("fp8", block, narrow) for block in blocks)]
        wide = narrow[0].wide(torch.float32)
        exact = x.float() @ wide.t()
        for kind, block, using in tries:
            if time.perf_counter() - began > args.deadline:
                break
            entry = {"shape": name, "n": n, "k": k, "kind": kind, "block": block and asdict(block)}
            try:
                entry["ms"] = timed([partial(product, x, w, block=block) for w in using])
                entry["tb_s"] = n * k * (2 if kind == "bfloat16" else 1) / entry["ms"] / 1e9
                if kind == "fp8" and halves == 1:
                    got = ops.linear(x, narrow[0], torch.float32, block)
                    entry["error"] = ((got - exact).norm() / exact.norm()).item()
            except Exception as error:  # a block too large for the device: the table says so
                entry["failed"] = str(error).strip()[:200]
            found.append(entry)
            about = (block.n, block.k, block.splits, block.stages, block.warps) if block else ""
            print(name, kind, about, {x: entry.get(x) for x in ("ms", "tb_s", "error", "failed")},
                  flush=True)  # fmt: skip
        del weights, narrow, wide
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

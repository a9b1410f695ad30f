"""Attention of a verification step on a device: checks, bit equality, times of launch variants.

  python scripts/device/attention.py --out DIR      everything, 27B geometry, bfloat16

Rows of a tree are compared bit for bit with root-only steps on linear caches; times are those of
one layer in a graph of 16 with caches of their own. Writes DIR/attention.json after every step
and exits with 1 when a check failed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import triton  # noqa: E402

from lumotree.captured.graph import capture  # noqa: E402
from lumotree.ops import reference as ops  # noqa: E402
from lumotree.ops.attention import TreeAttention  # noqa: E402
from lumotree.ops.attention_define import (  # noqa: E402
    attend_rows,
    move_rows,
    prepare_rows,
)
from lumotree.ops.attention_launch import Launch, choose  # noqa: E402
from lumotree.tree import TreeDescriptor, tree_from_name  # noqa: E402

HEADS, KV_HEADS, D, ROTARY, LAYERS = 24, 4, 256, 64, 16
SLOTS = 33792
PREFIXES = {"2k": 2048 + 300, "16k": 16384 + 300, "32k": 32768 + 300}
# On and around borders of blocks and chunks.
BORDERS = [5, 63, 64, 127, 448, 500, 507, 511, 512, 575, 1020, 1023, 1024, 1535, 2040, 4095]
VARIANTS = [
    Launch(stages=3),
    Launch(stages=3, row_stages=1),
    Launch(stages=3, programs=264),
    Launch(stages=3, programs=10000),
    Launch(stages=2),
    Launch(tile=128, warps=8, stages=2),
    Launch(block=32, stages=5),
    Launch(chunk=256, stages=3),
    Launch(chunk=1024, stages=3),
]
DEVICE = torch.device("cuda")


def active_tree(name: str) -> TreeDescriptor:
    tree = tree_from_name(name)
    return tree.restrict(tree.default_active)[0]


class Step:
    """A tree's step over the shared caches of all layers."""

    caches: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(self, tree: TreeDescriptor, launch: Launch, padded: int = 32) -> None:
        if Step.caches is None:
            shape = (LAYERS, KV_HEADS, SLOTS, D)
            Step.caches = tuple(
                torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)
            )
        self.keys, self.values = Step.caches
        self.tree, self.launch = tree, launch
        padded = max(padded, len(tree))
        kind = (HEADS, KV_HEADS, D, torch.bfloat16, DEVICE, launch)
        self.attention = TreeAttention(tree, padded, *kind)
        torch.manual_seed(1)
        width = (2 * HEADS + 2 * KV_HEADS) * D
        self.projected = torch.randn(padded, width, device=DEVICE).to(torch.bfloat16)
        weight = 1 + 0.3 * torch.randn(HEADS + KV_HEADS, D, device=DEVICE)
        weight[:HEADS] *= D**-0.5
        self.tables = (
            ops.Norm.of(weight, 1e-6),
            ops.rope_table(SLOTS, D, ROTARY, 1e7, torch.bfloat16, DEVICE),
            ops.rope_partner(D, ROTARY, DEVICE),
        )
        self.length = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def chunks(self, length: int) -> int:
        return (length + self.attention.steps) // self.launch.chunk + 1

    def prepare(self, layer: int = 0) -> torch.Tensor:
        at = (self.length, self.keys[layer], self.values[layer])
        return self.attention.prepare(self.projected, *self.tables, *at)

    def attend(self, q, chunks: int, layer: int = 0, stock: bool = False) -> torch.Tensor:
        run = self.attention.attend_stock if stock else self.attention.attend
        return run(q, self.projected, self.keys[layer], self.values[layer], self.length, chunks)


def check_prepare(step: Step) -> dict:
    length = 777
    step.length.fill_(length)
    keys, values = step.keys[0].clone(), step.values[0].clone()
    at = (length, keys, values)
    expected = prepare_rows(step.attention, step.projected, *step.tables, *at)
    q = step.prepare()
    same = [(q == expected).float().mean(), (step.keys[0] == keys).float().mean()]
    error = (q.float() - expected.float()).abs().max()
    assert error < 2**-4 and torch.equal(step.values[0], values)
    return {"q_equal": same[0].item(), "max_error": error.item()}


def check_float64(step: Step, length: int) -> dict:
    """Largest error against float64, for the kernels and for torch's attention."""
    step.length.fill_(length)
    q = step.prepare()
    expected = attend_rows(
        step.attention, q.double(), step.projected, step.keys[0], step.values[0], length
    ).double()
    rows = len(step.tree)
    found = {}
    for stock in (False, True):
        out = step.attend(q, step.chunks(length), stock=stock).double()
        found["stock" if stock else "kernels"] = (out - expected)[:rows].abs().max().item()
    scale = expected.abs().max().item()
    assert found["kernels"] < 0.02 * scale, (found, scale)
    return {**found, "scale": scale}


def check_rows(step: Step, root: Step, length: int) -> int:
    """Rows whose bits are those of root-only steps; NaN in every slot that nobody may see."""
    tree = step.tree
    keys, values = step.keys[1].clone(), step.values[1].clone()
    for side in (step.keys, step.values):
        side[1, :, length:] = torch.nan
    step.length.fill_(length)
    q = step.prepare(1)
    out = step.attend(q, step.chunks(length), 1)
    assert out.isfinite().all()
    full = step.attend(q, SLOTS // step.launch.chunk, 1)
    assert torch.equal(out, full), "bits depend on the chunks launched"
    saved = [side[1].clone() for side in (step.keys, step.values)]
    equal = 0
    for row, path in enumerate(tree.root_paths):
        source = torch.tensor([tree.slots[r] for r in path], device=DEVICE) + length
        for side, old in zip((step.keys, step.values), saved, strict=True):
            side[1, :, length:] = torch.nan
            side[1, :, length : length + len(path)] = old[:, source]
        root.projected[0] = step.projected[row]
        root.length.fill_(length + len(path) - 1)
        mine = torch.zeros(root.attention.padded, HEADS, D, device=DEVICE, dtype=q.dtype)
        mine[0] = q[row]
        alone = root.attend(mine, root.chunks(length + len(path) - 1), 1)
        equal += int(torch.equal(alone[0], out[row]))
    step.keys[1], step.values[1] = keys, values
    assert equal == len(tree), f"{equal} of {len(tree)} rows are equal"
    return equal


def check_move(step: Step) -> int:
    moves = 0
    for path in step.tree.root_paths:
        keys, values = (side[:2, :, :1200].clone() for side in (step.keys, step.values))
        moved = keys.clone(), values.clone()
        move_rows(step.attention, *moved, list(path), 1100)
        rows = [*path, *[0] * (step.attention.steps + 1 - len(path))]
        numbers = [
            torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (rows, [len(path)], [1100])
        ]
        step.attention.move(keys, values, *numbers)
        assert torch.equal(keys, moved[0]) and torch.equal(values, moved[1])
        moves += 1
    return moves


def timed(stage, replays: int = 50) -> float:
    """Median microseconds a layer of a graph of `stage`, which runs all layers."""
    graph = capture(stage)
    scratch = torch.empty(256 * 2**20, dtype=torch.uint8, device=DEVICE)
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays + 5)]
    for start, stop in marks:
        scratch.fill_(1)
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    spent = [start.elapsed_time(stop) for start, stop in marks[5:]]
    return round(1e3 * statistics.median(spent) / LAYERS, 2)


def time_attend(step: Step, length: int) -> float:
    step.length.fill_(length)
    q = step.prepare()
    chunks = step.chunks(length)
    return timed(lambda: [step.attend(q, chunks, i) for i in range(LAYERS)])


def time_prefix(step: Step, length: int) -> float:
    step.length.fill_(length)
    q = step.prepare()
    room = step.attention.partials(step.chunks(length))
    sides = [(step.keys[i], step.values[i]) for i in range(LAYERS)]
    run, walk = step.attention.attend_prefix, step.attention.walks(step.chunks(length))
    return timed(lambda: [run(q, *side, step.length, room, 0, walk) for side in sides])


def time_parts(step: Step, length: int) -> dict[str, float]:
    """Each kernel by itself, torch's attention, and a whole layer from projections on."""
    step.length.fill_(length)
    a, layers, chunks = step.attention, range(LAYERS), step.chunks(length)
    q = step.prepare()
    room, walk = a.partials(chunks), a.walks(chunks)
    path = [*step.tree.root_paths[-1], *[0] * a.steps]
    path, count = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (path, [a.steps]))
    sides = [(step.keys[i], step.values[i]) for i in layers]
    stages = {
        "prepare": lambda: [step.prepare(i) for i in layers],
        "prefix": lambda: [a.attend_prefix(q, *s, step.length, room, 0, walk) for s in sides],
        "tail": lambda: [a.attend_tail(q, step.projected, *s, step.length, room, 0) for s in sides],
        "combine": lambda: [a.combine(step.projected, step.length, room) for _ in layers],
        "attend": lambda: [step.attend(q, chunks, i) for i in layers],
        "prepare+attend": lambda: [step.attend(step.prepare(i), chunks, i) for i in layers],
        "stock": lambda: [step.attend(q, chunks, i, stock=True) for i in layers],
        "move/16": lambda: a.move(step.keys, step.values, path, count, step.length),
    }
    found = {}
    for name, stage in stages.items():
        try:
            found[name] = timed(stage)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found


def warm(part: int, parts: int, launches: list[Launch]) -> None:
    Step.caches = tuple(
        torch.zeros(1, KV_HEADS, SLOTS, D, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)
    )
    for launch in launches[part::parts]:
        for name in ("root", "chain-5", "hydra27"):
            try:
                step = Step(active_tree(name), launch)
                step.length.fill_(600)
                step.attend(step.prepare(), 3)
            except Exception:
                traceback.print_exc(limit=-1)
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="results/h200")
    parser.add_argument("--warm")
    parser.add_argument("--deadline", type=float, default=95.0, help="seconds for the whole run")
    options = parser.parse_args()
    began = time.time()
    early = torch.cuda.get_device_capability()[0] >= 9
    launches = [replace(launch, early=early, tma=early) for launch in VARIANTS]
    launches += [replace(launches[0], early=False), replace(launches[0], tma=False)]
    if options.warm:
        part, parts = map(int, options.warm.split("/"))
        warm(part, parts, launches)
        return 0
    helpers = [
        subprocess.Popen([sys.executable, __file__, "--warm", f"{i}/{len(launches)}"])
        for i in range(len(launches))
    ]
    report = {
        "device": torch.cuda.get_device_name(),
        "versions": [platform.python_version(), torch.__version__, triton.__version__],
        "geometry": dict(heads=HEADS, kv_heads=KV_HEADS, head_dim=D, layers=LAYERS),
        "checks": {},
        "variants": [],
        "parts": {},
    }

    def keep() -> None:
        folder = Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "attention.json").write_text(json.dumps(report, indent=1) + "\n")

    def tried(kind: str, run, *arguments) -> None:
        try:
            report["checks"][kind] = run(*arguments)
        except Exception as error:
            traceback.print_exc(limit=-2)
            report["checks"][kind] = f"FAILED {type(error).__name__}: {error}"[:300]
        print(f"{time.time() - began:6.1f} s", kind, report["checks"][kind], flush=True)
        keep()

    trees = {name: active_tree(name) for name in ("root", "chain-5", "hydra27", "chain-127")}
    for helper in helpers:
        helper.wait()
    print(f"{time.time() - began:6.1f} s compiled", flush=True)
    chosen = replace(choose(D, torch.bfloat16, DEVICE), early=early)
    steps = {name: Step(tree, chosen) for name, tree in trees.items()}
    steps["root alone"] = Step(trees["root"], chosen, padded=1)
    tried("prepare", check_prepare, steps["hydra27"])
    tried("move", check_move, steps["hydra27"])
    for length in (130, PREFIXES["2k"], PREFIXES["16k"]):
        tried(f"float64 at {length}", check_float64, steps["hydra27"], length)
    for name in ("chain-5", "hydra27", "chain-127"):
        for length in [*BORDERS, *PREFIXES.values(), 16380, 32760]:
            kind = f"equal rows of {len(trees[name])}, {name} at {length}"
            tried(kind, check_rows, steps[name], steps["root alone"], length)
    for name in ("root", "chain-5", "hydra27"):
        for label, length in PREFIXES.items():
            found = time_parts(steps[name], length)
            report["parts"][f"{name} {label}"] = found
            print(f"{time.time() - began:6.1f} s {name:8} {label:4}", found, flush=True)
            keep()
    bits: dict[tuple[int, int], torch.Tensor] = {}
    for launch in launches:
        if time.time() - began > options.deadline:
            break
        entry: dict = {"launch": asdict(launch), "us": {}}
        report["variants"].append(entry)
        try:
            for name in ("root", "chain-5", "hydra27"):
                step = Step(trees[name], launch)
                if name == "hydra27":
                    step.length.fill_(PREFIXES["2k"])
                    out = step.attend(step.prepare(), step.chunks(PREFIXES["2k"]))
                    first = bits.setdefault((launch.chunk, launch.block), out)
                    entry["same bits"] = torch.equal(out, first)
                    alone = Step(trees["root"], launch, padded=1)
                    lengths = [511, 1000, 2040, 16380]
                    entry["equal"] = [check_rows(step, alone, length) for length in lengths]
                    entry["float64"] = check_float64(step, PREFIXES["2k"])["kernels"]
                entry["us"][f"{name} prefix"] = time_prefix(step, PREFIXES["16k"])
                for label, length in PREFIXES.items():
                    entry["us"][f"{name} {label}"] = time_attend(step, length)
        except Exception as error:
            entry["error"] = f"{type(error).__name__}: {error}"[:300]
        sizes = {k: v for k, v in asdict(launch).items() if k != "row_tile"}
        print(
            f"{time.time() - began:6.1f} s",
            sizes,
            {k: v for k, v in entry.items() if k != "launch"},
        )
        sys.stdout.flush()
        keep()
    found = [*report["checks"].values(), *(entry.get("error") for entry in report["variants"])]
    return int(any("FAILED" in str(x) or "Error" in str(x) for x in found))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())

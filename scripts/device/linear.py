"""Skinny-M products on a device: checks, a sweep of block shapes, and the chain of a whole step.

  python scripts/device/linear.py --out DIR       everything, at the 27B shapes (needs 60 GB)
  python scripts/device/linear.py --warm 3/12     compiles every twelfth variant and exits

The chain is the dense part of one step of 64 layers, each with weights of its own, and the
output head, as one graph; beside it the same products by torch.mm, without the norms.
Writes DIR/linear.json after every step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from lumotree.ops import linear as ops  # noqa: E402
from lumotree.ops import reference  # noqa: E402
from lumotree.ops.linear import Block  # noqa: E402

HIDDEN, MLP, VOCAB, MIXED = 5120, 17408, 248320, 6144
GDN, ATTENTION = 16480, 14336
SHAPES = {
    "gdn_in": (GDN, HIDDEN),
    "attention_in": (ATTENTION, HIDDEN),
    "out": (HIDDEN, MIXED),
    "gate_up": (2 * MLP, HIDDEN),
    "down": (HIDDEN, MLP),
    "head": (VOCAB, HIDDEN),
    "fc": (HIDDEN, 2 * HIDDEN),
}
SPLIT = ("out", "down", "fc")
LAYERS = 64
ROWS = (32, 16)
BFLOAT = torch.bfloat16


def ways(blocks: list[Block]) -> list[Block]:
    """By Triton's own pipeline, and by the Hopper kernel, the kernel behind late or early."""
    kinds = ({}, {"hopper": True}, {"hopper": True, "early": True})
    return [replace(b, **kind) for b in blocks for kind in kinds]


def blocks_of(name: str) -> list[Block]:
    if name == "gate_up":
        tiles = [(64, 64, 3, 4), (64, 64, 5, 4), (64, 128, 2, 4), (128, 64, 3, 8)]
    else:
        tiles = [
            (128, 64, 5, 4),
            (128, 64, 8, 4),
            (128, 128, 4, 8),
            (64, 128, 4, 4),
            (64, 64, 8, 4),
        ]
    plain = [Block(n, k, stages=stages, warps=warps) for n, k, stages, warps in tiles]
    if name in SPLIT:
        plain = [replace(b, splits=s) for b in plain for s in ((3,) if b.n == 128 else (3, 2))]
    return ways(plain)


def run(name: str, x: torch.Tensor, weight: torch.Tensor, block: Block) -> torch.Tensor:
    if name == "gate_up":
        return ops.linear_swiglu(x, weight, block)
    if name == "head":
        return ops.linear(x, weight, torch.float32, block)
    return ops.linear(x, weight, block=block)


def warm(part: int, parts: int, device: torch.device) -> None:
    jobs = [(n, r, b) for r in ROWS for n in ("gdn_in", "out", "gate_up") for b in blocks_of(n)]
    for name, rows, block in jobs[part::parts]:
        x = torch.zeros(rows, 1024, dtype=BFLOAT, device=device)
        weight = torch.zeros(1024, 1024, dtype=BFLOAT, device=device)
        try:
            run(name, x, weight, block)
        except Exception as error:
            print(f"{name} {block}: {error}"[:300])


def captured(step) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        step()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def timed(step, replays: int = 50) -> tuple[float, float, float]:
    """Median, p10 and p90 of a replay of `step`, ms."""
    graph = captured(step)
    for _ in range(3):
        graph.replay()
    marks = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        marks.append((start, stop))
    torch.cuda.synchronize()
    found = sorted(start.elapsed_time(stop) for start, stop in marks)
    return median(found), found[replays // 10], found[-replays // 10 - 1]


class Model:
    """Weights of the dense part: 64 layers, the output head and a few MTP input projections."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        make = self._make
        inputs = ["attention_in" if i % 4 == 3 else "gdn_in" for i in range(LAYERS)]
        self.layers = [
            {"in": make(name), "out": make("out"), "gate_up": make("gate_up"), "down": make("down")}
            for name in inputs
        ]
        self.head = make("head")
        self.copies = {
            "gdn_in": [x["in"] for x, n in zip(self.layers, inputs, strict=True) if n == "gdn_in"],
            "attention_in": [self.layers[i]["in"] for i in range(3, LAYERS, 4)],
            "fc": [make("fc") for _ in range(6)],
            "head": [self.head],
            **{n: [x[n] for x in self.layers] for n in ("out", "gate_up", "down")},
        }
        weight = 1 + torch.randn(HIDDEN, device=device) / 8
        self.norm = reference.Norm.of(weight, 1e-6)

    def _make(self, name: str) -> torch.Tensor:
        n, k = SHAPES[name]
        made = torch.empty(n, k, dtype=BFLOAT, device=self.device)
        return ops.pack(made.normal_(std=k**-0.5))

    def rows(self, count: int, width: int, seed: int = 0) -> torch.Tensor:
        source = torch.Generator(self.device).manual_seed(seed)
        x = torch.randn(128, width, device=self.device, generator=source)
        return x[:count].to(BFLOAT)

    def chain(self, x: torch.Tensor, residual: torch.Tensor, blocks: dict[str, Block], head: bool):
        for i, layer in enumerate(self.layers):
            kind = "attention_in" if i % 4 == 3 else "gdn_in"
            mixed = ops.linear(x, layer["in"], block=blocks[kind])[:, :MIXED]
            residual, x = ops.linear_add_norm(
                residual, mixed, layer["out"], self.norm, blocks["out"]
            )
            hidden = ops.linear_swiglu(x, layer["gate_up"], blocks["gate_up"])
            residual, x = ops.linear_add_norm(
                residual, hidden, layer["down"], self.norm, blocks["down"]
            )
        return ops.linear(x, self.head, torch.float32, blocks["head"]) if head else x

    def products(self, rows: int, blocks: dict[str, Block]):
        """The chain without what stands between products: sums of shares and norms."""
        x, mixed, hidden = (self.rows(rows, width) for width in (HIDDEN, MIXED, MLP))

        def step():
            for i, layer in enumerate(self.layers):
                kind = "attention_in" if i % 4 == 3 else "gdn_in"
                ops._product(x, layer["in"], blocks[kind], BFLOAT)
                ops._product(mixed, layer["out"], blocks["out"], BFLOAT)
                ops.linear_swiglu(x, layer["gate_up"], blocks["gate_up"])
                ops._product(hidden, layer["down"], blocks["down"], BFLOAT)

        return step

    def cublas(self, x: torch.Tensor, head: bool):
        for layer in self.layers:
            mixed = torch.mm(x, layer["in"].t())[:, :MIXED]
            x = torch.mm(mixed, layer["out"].t())
            hidden = torch.mm(x, layer["gate_up"].t())[:, :MLP]
            x = torch.mm(hidden, layer["down"].t())
        return torch.mm(x, self.head.t()) if head else x


def definition(name: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Float32 sums, rounded as the definition rounds."""
    product = (x.float() @ weight.float().t()).to(torch.float32 if name == "head" else BFLOAT)
    return reference.swiglu(product) if name == "gate_up" else product


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def check(model: Model, name: str, block: Block, most: int) -> dict:
    """Error against float32, and whether a row has the same bits at every row count."""
    weight = model.copies[name][0]
    x = model.rows(most, SHAPES[name][1])
    full = run(name, x, weight, block)
    want = definition(name, x, weight)
    other = torch.mm(x, weight.t()).to(full.dtype)
    if name == "gate_up":
        other = reference.swiglu(other)
    differ = [
        r
        for r in (1, 2, 5, 16, 17, 28, 32, 33, 64)
        if r < most and not torch.equal(run(name, x[:r].contiguous(), weight, block), full[:r])
    ]
    part = slice(7, 29)
    shifted = torch.equal(run(name, x[part].contiguous(), weight, block), full[part])
    return {
        "error": error_of(full, want),
        "cublas_error": error_of(other, want),
        "differs_at": differ,
        "shifted": shifted,
    }


def check_norms(model: Model, block: Block) -> dict:
    x, residual = model.rows(64, MIXED, 1), model.rows(64, HIDDEN, 2)
    weight = model.copies["out"][0]
    total, normed = ops.linear_add_norm(residual, x, weight, model.norm, block)
    want = (residual.float() + x.float() @ weight.float().t()).to(BFLOAT)
    differ = []
    for r in (1, 5, 16, 28, 32):
        part = ops.linear_add_norm(residual[:r], x[:r].contiguous(), weight, model.norm, block)
        if not (torch.equal(part[0], total[:r]) and torch.equal(part[1], normed[:r])):
            differ.append(r)
    return {
        "sum_error": error_of(total, want),
        "norm_error": error_of(normed, reference.rms_norm(total, model.norm)),
        "alone": torch.equal(ops.rms_norm(total, model.norm), normed),
        "differs_at": differ,
    }


def rate(model: Model, name: str, rows: int, block: Block | None) -> float:
    """TB/s of weight bytes of launches back to back, distinct weights; None: torch.mm."""
    copies = model.copies[name][:12]
    x = model.rows(rows, SHAPES[name][1])

    def step():
        for weight in copies:
            if block is None:
                torch.mm(x, weight.t())
            else:
                run(name, x, weight, block)

    size = sum(w.numel() * w.element_size() for w in copies)
    return size / timed(step, 20)[0] / 1e9


@triton.jit
def read_kernel(w, out, N, K, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Sums of COLS columns at a time of ROWS rows: reads and hardly anything else."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = w + row.to(tl.int64)[:, None] * K + tl.arange(0, COLS)[None, :]
    total = tl.zeros([ROWS, COLS], tl.float32)
    for _ in range(0, K, COLS):
        total += tl.load(at)
        at += COLS
    tl.store(out + tl.program_id(0), tl.sum(tl.sum(total, 1), 0))


def read_rates(model: Model) -> dict[str, float]:
    """TB/s of reading the output head in tiles of 16 KiB, by tile shape; and contiguously."""
    found = {}
    for rows, cols in ((128, 64), (64, 128), (32, 256), (16, 512), (8, 1024), (1, 8192)):
        w = model.head if rows > 1 else model.head.view(-1, 8192)
        n, k = w.shape
        out = torch.empty(n // rows, device=w.device)
        for warps in (4, 8):
            read = read_kernel[(n // rows,)]
            ms = timed(partial(read, w, out, n, k, rows, cols, num_warps=warps), 20)[0]
            found[f"{rows}x{cols} warps {warps}"] = round(w.numel() * 2 / ms / 1e9, 3)
    return found


def profile(model: Model, blocks: dict[str, Block]) -> list[tuple[str, float, float]]:
    """Kernels of a replay of the chain from its middle on: name, start and length in us."""
    x, residual = model.rows(32, HIDDEN), model.rows(32, HIDDEN, 1)
    graph = captured(lambda: model.chain(x, residual, blocks, False))
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        graph.replay()
        torch.cuda.synchronize()
    events = sorted(
        (e.time_range.start, e.time_range.elapsed_us(), e.name)
        for e in seen.events()
        if "kernel" in e.name
    )
    events = events[len(events) // 2 :]
    return [(name, round(t - events[0][0], 2), round(us, 2)) for t, us, name in events]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="results/h200")
    parser.add_argument("--warm")
    parser.add_argument("--deadline", type=float, default=140, help="seconds for the whole run")
    options = parser.parse_args()
    began = time.time()
    device = torch.device("cuda")
    if options.warm:
        part, parts = map(int, options.warm.split("/"))
        warm(part, parts, device)
        print(f"warm {options.warm}: {time.time() - began:.0f} s")
        return
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    parts = 12
    children = [
        subprocess.Popen([sys.executable, __file__, "--warm", f"{i}/{parts}"]) for i in range(parts)
    ]
    model = Model(device)
    torch.cuda.synchronize()
    print(f"weights: {time.time() - began:.0f} s")
    for child in children:
        child.wait()
    print(f"compiled: {time.time() - began:.0f} s")
    result: dict = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def keep(**more) -> None:
        result.update(more)
        (out / "linear.json").write_text(json.dumps(result, indent=1))

    def left() -> float:
        return options.deadline - (time.time() - began)

    cublas = {}
    for rows in (1, 16, 32, 64, 128):
        x = model.rows(rows, HIDDEN)
        whole = timed(lambda x=x: model.cublas(x, True))
        layers = timed(lambda x=x: model.cublas(x, False))
        cublas[rows] = {"with_head": whole, "layers": layers}
        print(f"cublas rows {rows}: layers {layers[0]:.3f} with head {whole[0]:.3f} ms")
    keep(cublas=cublas)
    try:
        rates = read_rates(model)
        keep(read=rates)
        print("read TB/s", rates)
    except Exception as error:
        print(f"{type(error).__name__}: {error}"[:300])
    sweep: list[dict] = []
    best: dict[str, Block] = {}
    ranked: dict[str, list[Block]] = {}
    table = {
        name: ops.choose(*shape, 2 if name == "gate_up" else 1, BFLOAT, ops.limits_of(device))
        for name, shape in SHAPES.items()
    }
    for name in SHAPES:
        entries = []
        for block in blocks_of(name):
            if left() < (80 if name == "fc" else 60):
                break
            entry: dict = {"shape": name, "block": asdict(block)}
            try:
                for rows in ROWS:
                    entry[f"tb_s_{rows}"] = round(rate(model, name, rows, block), 3)
            except Exception as error:
                entry["error"] = f"{type(error).__name__}: {error}"[:200]
            entries.append(entry)
        library = {rows: round(rate(model, name, rows, None), 3) for rows in ROWS}
        sweep.append({"shape": name, "cublas": library})
        good = sorted((e for e in entries if "tb_s_16" in e), key=lambda e: -e["tb_s_32"])
        print(f"{name} cublas {library} {time.time() - began:.0f} s")
        for e in good + [e for e in entries if "error" in e]:
            b = e["block"]
            kind = ("hopper early" if b["early"] else "hopper") if b["hopper"] else "plain"
            print(f"  {e.get('tb_s_32')} {e.get('tb_s_16')} {b['n']}x{b['k']} s{b['splits']} "
                  f"st{b['stages']} w{b['warps']} {kind} {e.get('error', '')}")  # fmt: skip
        sweep += entries
        keep(sweep=sweep)
        ranked[name] = [Block(**e["block"]) for e in good] or blocks_of(name)[:1]
        best[name] = ranked[name][0]
    keep(best={k: asdict(v) for k, v in best.items()})
    checks = {}
    for name, block in table.items():
        try:
            most = 128 if name in ("gdn_in", "out", "gate_up") else 32
            checks[name] = check(model, name, block, most)
        except Exception as error:
            checks[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
        print(name, checks[name])
    try:
        checks["add_norm"] = check_norms(model, table["out"])
        print("add_norm", checks["add_norm"])
    except Exception as error:
        print("add_norm", error)
    for name, order in ranked.items():
        seen: dict[tuple, torch.Tensor] = {}
        x = model.rows(28, SHAPES[name][1])
        other = [
            block
            for block in order
            if not torch.equal(
                got := run(name, x, model.copies[name][0], block),
                seen.setdefault((block.splits, block.k), got),
            )
        ]
        checks[name]["other_bits"] = [asdict(b) for b in other]
        print(f"{name}: blocks with other bits: {len(other)} of {len(order)}", other[:3])
    keep(checks=checks)
    print(f"checks: {time.time() - began:.0f} s")
    chains: list[dict] = []

    def chain(word: str, blocks: dict[str, Block], rows: int, replays: int = 50) -> float:
        x, residual = model.rows(rows, HIDDEN), model.rows(rows, HIDDEN, 1)
        try:
            whole = timed(lambda: model.chain(x, residual, blocks, True), replays)
        except Exception as error:
            print(f"chain {word} rows {rows}: {type(error).__name__}: {error}"[:300])
            return 1e9
        if replays == 50:
            layers = timed(lambda: model.chain(x, residual, blocks, False))
            chains.append({"variant": word, "rows": rows, "with_head": whole, "layers": layers})
            print(f"chain {word} rows {rows}: layers {layers[0]:.3f} with head {whole[0]:.3f} ms, "
                  f"p10-p90 {whole[1]:.3f}-{whole[2]:.3f}")  # fmt: skip
        return whole[0]

    chain("fastest alone", best, 32)
    current = dict(table)
    now = chain("table", current, 32)
    for turn in range(2):
        for name in ("gate_up", "gdn_in", "down", "out", "attention_in", "head"):
            for block in ranked[name][: 16 if turn == 0 else 8]:
                if left() < 20:
                    break
                trial = chain("", {**current, name: block}, 32, 12)
                if trial < now * 0.9995:
                    now, current[name] = trial, block
            print(f"turn {turn} {name}: {now:.3f} ms {current[name]}")
    keep(tuned={k: asdict(v) for k, v in current.items()})
    for rows in (32, 16, 1, 64, 128):
        chain("tuned", current, rows)
    keep(chains=chains)
    try:
        alone = timed(model.products(32, current))
        keep(products_alone=alone)
        print(f"products without norms rows 32: layers {alone[0]:.3f} ms")
        timeline = profile(model, current)
        keep(timeline=timeline)
        for line in timeline[:24]:
            print("  " + " ".join(map(str, line)))
    except Exception as error:
        print(f"{type(error).__name__}: {error}"[:300])
    norm_times = {}
    for rows in (1, 32, 4096):
        x = torch.randn(rows, HIDDEN, device=device).to(BFLOAT)
        ms = timed(lambda x=x: [ops.rms_norm(x, model.norm) for _ in range(64)], 20)[0]
        norm_times[rows] = ms / 64 * 1e3
    print("rms_norm us by rows", {k: round(v, 2) for k, v in norm_times.items()})
    keep(norm_us=norm_times, seconds=time.time() - began)
    print(f"done: {time.time() - began:.0f} s")


if __name__ == "__main__":
    main()

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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

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


def wide_blocks() -> list[Block]:
    """One share of K."""
    plain = [
        Block(128, 64, stages=5),
        Block(128, 64, stages=8),
        Block(128, 64, stages=8, warps=8),
        Block(128, 128, stages=4, warps=8),
        Block(64, 64, stages=8),
        Block(64, 64, stages=5),
        Block(64, 128, stages=4),
        Block(256, 64, stages=5, warps=8),
        Block(128, 64, stages=5, tma=False),
        Block(128, 64, stages=8, tma=False, warps=8),
        Block(64, 128, stages=4, tma=False),
        Block(64, 64, stages=5, tma=False),
        Block(64, 256, stages=3),
        Block(64, 128, stages=6),
        Block(128, 128, stages=3, warps=8),
    ]
    first, small = plain[0], plain[5]
    return plain + [
        replace(first, early=False),
        replace(first, late=True),
        replace(first, ask=512),
        replace(first, ask=1024),
        replace(first, ask=1024, line=0),
        replace(first, ask=512, roll=128),
        replace(first, ask=512, roll=512),
        replace(first, ask=512, roll=512, line=0),
        replace(first, ask=1024, roll=1024),
        replace(first, ask=1024, roll=1024, line=0),
        replace(plain[1], ask=512),
        replace(plain[1], ask=512, roll=512),
        replace(small, ask=512, roll=512),
        replace(small, ask=1024, roll=512, line=0),
        replace(plain[8], ask=512, roll=512),
    ]


def swiglu_blocks() -> list[Block]:
    plain = [
        Block(128, 64, stages=3, warps=8),
        Block(128, 64, stages=4, warps=8),
        Block(128, 64, stages=3),
        Block(64, 64, stages=3),
        Block(64, 64, stages=5),
        Block(64, 128, stages=3),
        Block(128, 32, stages=6, warps=8),
        Block(64, 64, stages=3, tma=False),
        Block(128, 64, stages=3, tma=False, warps=8),
    ]
    first, third = plain[0], plain[3]
    return plain + [
        replace(first, early=False),
        replace(first, ask=256),
        replace(first, ask=512),
        replace(first, ask=512, roll=128),
        replace(first, ask=512, roll=512),
        replace(first, ask=512, roll=512, line=0),
        replace(third, ask=512),
        replace(third, ask=512, roll=512),
        replace(third, ask=512, roll=512, line=0),
    ]


def blocks_of(name: str) -> list[Block]:
    if name == "gate_up":
        return swiglu_blocks()
    if name not in SPLIT:
        return wide_blocks()
    found = []
    for block in wide_blocks():
        choices = {64: (2, 3), 128: (3, 6), 256: (6,)}[block.n]
        for splits in choices[:1] if name == "fc" else choices:
            found.append(replace(block, splits=splits))
    return found


def run(name: str, x: torch.Tensor, weight: torch.Tensor, block: Block) -> torch.Tensor:
    if name == "gate_up":
        return ops.linear_swiglu(x, weight, block)
    if name == "head":
        return ops.linear(x, weight, torch.float32, block)
    return ops.linear(x, weight, block=block)


def warm(part: int, parts: int, device: torch.device) -> None:
    jobs = []
    for rows in ROWS:
        jobs += [("gdn_in", rows, b) for b in wide_blocks()]
        jobs += [("out", rows, replace(b, splits=2)) for b in wide_blocks()]
        jobs += [("gate_up", rows, b) for b in swiglu_blocks()]
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

    def chain(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        blocks: dict[str, Block],
        head: bool,
        ahead_mb: float = 0,
    ):
        """One step. ahead_mb: of the next weight each product asks for when it has done."""

        def then(name: str, weight: torch.Tensor) -> ops.Ahead | None:
            if not ahead_mb:
                return None
            splits, block_k = blocks[name].splits, blocks[name].k
            n, k = weight.shape
            size = min(int(ahead_mb * 1e6) // (n * splits), 2 * (k // splits)) // 128 * 128
            return ops.Ahead(weight, splits, block_k, size) if size else None

        kinds = ["attention_in" if i % 4 == 3 else "gdn_in" for i in range(LAYERS)]
        for i, layer in enumerate(self.layers):
            after = then("head", self.head) if head else None
            if i + 1 < LAYERS:
                after = then(kinds[i + 1], self.layers[i + 1]["in"])
            mixed = ops.linear(
                x, layer["in"], block=blocks[kinds[i]], then=then("out", layer["out"])
            )[:, :MIXED]
            residual, x = ops.linear_add_norm(
                residual, mixed, layer["out"], self.norm, blocks["out"],
                then("gate_up", layer["gate_up"]),
            )  # fmt: skip
            hidden = ops.linear_swiglu(
                x, layer["gate_up"], blocks["gate_up"], then("down", layer["down"])
            )
            residual, x = ops.linear_add_norm(
                residual, hidden, layer["down"], self.norm, blocks["down"], after
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


def compiled(model: Model, jobs: list[tuple[str, Block]], rows: int) -> None:
    """Compiles what is missing, in threads; what fails fails again where it is used."""

    def job(name: str, block: Block) -> None:
        n, k = SHAPES[name]
        weight, x = model.copies[name][0], model.rows(rows, k)
        then = ops.Ahead(weight, 1, block.k, 128)
        for after in (None, then):
            if name == "gate_up":
                ops.linear_swiglu(x, weight, block, after)
            elif name == "head":
                ops.linear(x, weight, torch.float32, block, after)
            else:
                ops.linear(x, weight, block=block, then=after)

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(job, *j) for j in dict.fromkeys(jobs)]:
            if future.exception():
                print(f"compile: {future.exception()}"[:200])


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
    for rows in (1, 16, 32):
        x = model.rows(rows, HIDDEN)
        whole = timed(lambda x=x: model.cublas(x, True))
        layers = timed(lambda x=x: model.cublas(x, False))
        cublas[rows] = {"with_head": whole, "layers": layers}
        print(f"cublas rows {rows}: layers {layers[0]:.3f} with head {whole[0]:.3f} ms")
    keep(cublas=cublas)
    sweep: list[dict] = []
    best: dict[str, Block] = {}
    for name in SHAPES:
        entries = []
        for block in blocks_of(name):
            if left() < (70 if name == "fc" else 50):
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
            words = f"{b['n']}x{b['k']} s{b['splits']} st{b['stages']} w{b['warps']}"
            flags = " ".join(k for k in ("tma", "late", "early") if b[k])
            print(f"  {e.get('tb_s_32')} {e.get('tb_s_16')} {words} "
                  f"ask{b['ask']}/{b['line']}/{b['roll']} "
                  f"{flags} {e.get('error', '')}")  # fmt: skip
        sweep += entries
        keep(sweep=sweep)
        best[name] = Block(**good[0]["block"]) if good else blocks_of(name)[0]
    keep(best={k: asdict(v) for k, v in best.items()})
    checks = {}
    for name, block in best.items():
        try:
            most = 128 if name in ("gdn_in", "out", "gate_up") else 32
            checks[name] = check(model, name, block, most)
        except Exception as error:
            checks[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
        print(name, checks[name])
    try:
        checks["add_norm"] = check_norms(model, best["out"])
        print("add_norm", checks["add_norm"])
    except Exception as error:
        print("add_norm", error)
    keep(checks=checks)
    print(f"checks: {time.time() - began:.0f} s")
    variants = {
        "best": best,
        "no ask": {k: replace(b, ask=0, roll=0) for k, b in best.items()},
        "no early": {k: replace(b, early=False) for k, b in best.items()},
        "ask 512": {k: replace(b, ask=512, line=128, roll=0) for k, b in best.items()},
        "ask 512 roll": {k: replace(b, ask=512, line=128, roll=512) for k, b in best.items()},
        "ask 512 late": {
            k: replace(b, ask=512, line=128, roll=0, late=True) for k, b in best.items()
        },
    }
    compiled(model, [j for blocks in variants.values() for j in blocks.items()], 32)
    print(f"compiled again: {time.time() - began:.0f} s")
    chains: list[dict] = []

    def chain(word: str, blocks: dict[str, Block], rows: int, ahead: float = 0) -> float:
        x, residual = model.rows(rows, HIDDEN), model.rows(rows, HIDDEN, 1)
        try:
            whole = timed(lambda: model.chain(x, residual, blocks, True, ahead))
            layers = timed(lambda: model.chain(x, residual, blocks, False, ahead))
        except Exception as error:
            print(f"chain {word} rows {rows}: {type(error).__name__}: {error}"[:300])
            return 1e9
        chains.append({"variant": word, "rows": rows, "with_head": whole, "layers": layers})
        keep(chains=chains)
        print(f"chain {word} rows {rows}: layers {layers[0]:.3f} with head {whole[0]:.3f} ms, "
              f"p10-p90 {whole[1]:.3f}-{whole[2]:.3f}")  # fmt: skip
        return whole[0]

    times = {(word, 0): chain(word, blocks, 32) for word, blocks in variants.items() if left() > 20}
    for ahead in (8, 16, 24):
        for word in ("no ask", "best"):
            if left() > 15:
                times[word, ahead] = chain(f"{word} ahead {ahead}", variants[word], 32, ahead)
    word, ahead = min(times, key=times.get)
    for rows in (16, 1):
        chain(f"{word} ahead {ahead}", variants[word], rows, ahead)
    try:
        alone = timed(model.products(32, variants[word]))
        keep(products_alone=alone)
        print(f"products without norms rows 32: layers {alone[0]:.3f} ms")
        timeline = profile(model, variants[word])
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

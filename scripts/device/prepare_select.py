"""Operand preparation and selection on a device: checks against torch, then graph timings.

  python scripts/device/prepare_select.py --out DIR

Writes DIR/prepare_select.json after every step, so that a run cut short keeps what it had. Needs
torch and triton only. Timings are medians of replays of one captured graph; `cold` ones write
256 MiB first, which empties the caches.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import time
import traceback
from pathlib import Path as File

sys.path.insert(0, str(File(__file__).resolve().parents[2]))

import torch  # noqa: E402

from lumotree.bench.timing import Protocol, captured, time_stages  # noqa: E402
from lumotree.ops import gdn_prepare as prepare_ops  # noqa: E402
from lumotree.ops.gdn import GEOMETRIES, Operands  # noqa: E402
from lumotree.ops.reference import DeltaGates, Norm, gated_rms_norm  # noqa: E402
from lumotree.ops.select import MAX_TOP_K, SamplingBlock, Selector, TopCandidates  # noqa: E402
from lumotree.request import SamplingParams  # noqa: E402
from lumotree.sampling import TokenHistory, accept_walk, sample_rows  # noqa: E402
from lumotree.tree import tree_from_name  # noqa: E402

VOCAB, LIVE = 248_320, 248_077
WIDTH = 4
RUN, PROMPT = 1000, 8192  # prompt tokens of the check and of the timing
CUDA = torch.device("cuda")
WARM, COLD = Protocol(10, 60, 1), Protocol(10, 60)
TREES = ("hydra27", "chain-5", "root")


def active(name: str):
    tree = tree_from_name(name)
    return tree.restrict(tree.default_active)[0]


def timed(stage, protocol: Protocol) -> float:
    """Microseconds of a stage, the median; warm, of ten in one graph, cold, of a graph of one."""
    times = 10 if protocol is WARM else 1
    graph = captured(lambda: [stage() for _ in range(times)])
    spread = time_stages({"it": graph.replay}, lambda i: None, CUDA, protocol)["it"]
    return round(1e3 * spread.median / times, 2)


# -- preparation


class Layers:
    """Random inputs and weights of all GDN layers at the 27B geometry, and their buffers."""

    def __init__(self, rows: int, layers: int | None = None, seed: int = 0) -> None:
        g = self.geometry = GEOMETRIES["27b"]
        n = self.layers = layers or g.layers
        self.channels = 2 * g.key_heads * g.dk + g.heads * g.dv
        columns = self.channels + g.heads * g.dv + 2 * g.heads
        random_ = torch.Generator(CUDA).manual_seed(seed)

        def normal(*shape, dtype=torch.bfloat16):
            return torch.randn(shape, generator=random_, device=CUDA).to(dtype)

        self.projected = normal(n, rows, columns)
        self.conv = normal(n, WIDTH - 1, self.channels)
        self.weight = normal(n, WIDTH, self.channels, dtype=torch.float32)
        logs, biases = normal(2, n, g.heads, dtype=torch.float32)
        self.gates = [DeltaGates(a, b) for a, b in zip(logs, biases, strict=True)]
        self.norm = Norm.of(normal(g.dv, dtype=torch.float32), 1e-6)

    def fixed(self, layer: int):
        return self.weight[layer], self.gates[layer], 1e-6, self.geometry.dk**-0.5

    def buffers(self, rows: int, heads_first: bool = False) -> Operands:
        g = self.geometry

        def empty(heads, *width, dtype=torch.float32):
            shape = (heads, rows, *width) if heads_first else (rows, heads, *width)
            x = torch.full(shape, float("nan"), dtype=dtype, device=CUDA)
            return x.transpose(0, 1) if heads_first else x

        return Operands(
            empty(g.key_heads, g.dk),
            empty(g.key_heads, g.dk),
            empty(g.heads, g.dv, dtype=torch.bfloat16),
            empty(g.heads),
            empty(g.heads),
            empty(g.key_heads),
        )

    def define(self, layer: int, gather, like: Operands):
        inputs = torch.cat((self.conv[layer], self.projected[layer, :, : self.channels]))
        b_a = self.projected[layer, : len(gather), -2 * self.geometry.heads :]
        return prepare_ops.define(inputs[gather.long()], b_a, *self.fixed(layer), like)


def gather_of(tree) -> torch.Tensor:
    before = list(range(WIDTH - 1))
    table = [(before + [WIDTH - 1 + row for row in p])[-WIDTH:] for p in tree.root_paths]
    return torch.tensor(table, dtype=torch.int32, device=CUDA)


def furthest(found: Operands, wanted: Operands) -> dict[str, float]:
    return {
        name: (getattr(found, name).float() - getattr(wanted, name).float()).abs().max().item()
        for name in vars(wanted)
    }


def check_prepare() -> dict:
    """Distance from torch, bits of a row in a tree and in its own path, the run's bits."""
    tree = active("hydra27")
    whole = Layers(len(tree), 1)
    gather = gather_of(tree)
    found, record = (
        whole.buffers(len(tree)),
        torch.empty_like(whole.projected[0, :, : whole.channels]),
    )
    prepare_ops.prepare(whole.projected[0], whole.conv[0], gather, *whole.fixed(0), found, record)
    wanted, _ = whole.define(0, gather, found)
    result = {"error": furthest(found, wanted)}
    result["record_equal"] = torch.equal(record, whole.projected[0, :, : whole.channels])
    equal, run_equal = True, True
    for path in tree.root_paths:
        chain = gather_of(tree_from_name(f"chain-{len(path) - 1}" if len(path) > 1 else "root"))
        alone = Layers(len(path), 1)
        alone.weight, alone.gates, alone.conv = whole.weight, whole.gates, whole.conv
        alone.projected = whole.projected[:, list(path)].contiguous()
        own, kept = alone.buffers(len(path)), record[: len(path)].clone()
        prepare_ops.prepare(alone.projected[0], alone.conv[0], chain, *alone.fixed(0), own, kept)
        run = alone.buffers(len(path), heads_first=True)
        prepare_ops.prepare_run(alone.projected[0], alone.conv[0], *alone.fixed(0), run)
        for name in vars(own):
            rows = getattr(found, name)[list(path)]
            equal &= torch.equal(rows, getattr(own, name))
            if name != "decay":
                run_equal &= torch.equal(rows, getattr(run, name))
    result["rows_equal_alone"] = equal
    # Not a requirement: a run's tile sums in another order.
    result["rows_equal_run"] = run_equal
    g = whole.geometry
    read = torch.randn(len(tree), g.heads, g.dv, device=CUDA)
    out = torch.full((32, g.heads * g.dv), float("nan"), dtype=torch.bfloat16, device=CUDA)
    prepare_ops.finish(read, whole.projected[0], whole.norm, out)
    z = whole.projected[0, :, whole.channels : -2 * g.heads].reshape(read.shape)
    wanted = gated_rms_norm(read, z, whole.norm).flatten(1)
    result["finish_error"] = (out[: len(tree)].float() - wanted.float()).abs().max().item()
    result["finish_padding_zero"] = not out[len(tree) :].any().item()
    one = torch.empty_like(out[:1])
    same = all(
        torch.equal(
            prepare_ops.finish(read[r : r + 1], whole.projected[0, r : r + 1], whole.norm, one),
            out[r : r + 1],
        )
        for r in range(len(tree))
    )
    result["finish_rows_equal"] = same
    long = Layers(RUN, 1, seed=1)
    found = long.buffers(RUN, heads_first=True)
    prepare_ops.prepare_run(long.projected[0], long.conv[0], *long.fixed(0), found)
    gather = torch.arange(RUN, device=CUDA)[:, None] + torch.arange(WIDTH, device=CUDA)
    wanted, log_decay = long.define(0, gather, found)
    found = Operands(**{**vars(found), "decay": found.decay.exp()})
    result["run_error"] = furthest(found, wanted)
    inputs = torch.cat((long.conv[0], long.projected[0, :, : long.channels]))
    prepare_ops.advance_conv(long.conv[0], long.projected[0], RUN)
    result["run_history_equal"] = torch.equal(long.conv[0], inputs[-3:])
    return result


def time_prepare() -> dict:
    """Microseconds a layer, all 48 layers in one graph, with and without an early start."""
    found, g = {}, GEOMETRIES["27b"]
    for name in TREES:
        tree = active(name)
        rows = len(tree)
        case = Layers(rows)
        gather = gather_of(tree)
        operands = [case.buffers(rows) for _ in range(case.layers)]
        record = torch.empty(case.layers, rows, case.channels, dtype=torch.bfloat16, device=CUDA)
        read = torch.randn(case.layers, rows, g.heads, g.dv, device=CUDA)
        out = torch.empty(case.layers, rows, g.heads * g.dv, dtype=torch.bfloat16, device=CUDA)
        path = torch.arange(6, dtype=torch.int32, device=CUDA) % rows
        count = torch.full((1,), min(5, rows), dtype=torch.int32, device=CUDA)

        def prepare(early, case=case, gather=gather, operands=operands, record=record):
            for i in range(case.layers):
                prepare_ops.prepare(
                    case.projected[i], case.conv[i], gather, *case.fixed(i), operands[i],
                    record[i], early=early,
                )  # fmt: skip

        def finish(early, case=case, read=read, out=out):
            for i in range(case.layers):
                prepare_ops.finish(read[i], case.projected[i], case.norm, out[i], early=early)

        def publish(case=case, record=record, path=path, count=count):
            prepare_ops.publish_conv(case.conv, record, path, count)

        entry = found[name] = {}
        for label, early in (("", False), (" early", True)):
            for title, stage in (("prepare", prepare), ("finish", finish)):
                try:
                    us = timed(lambda s=stage, e=early: s(e), COLD) / case.layers
                    entry[f"{title}{label} us/layer"] = round(us, 3)
                except Exception as error:
                    entry[f"{title}{label}"] = f"{type(error).__name__}: {error}"[:300]
        entry["publish us"] = timed(publish, COLD)
    case = Layers(PROMPT, 1)
    into = case.buffers(PROMPT, heads_first=True)
    read = torch.randn(PROMPT, g.heads, g.dv, device=CUDA)
    out = torch.empty(PROMPT, g.heads * g.dv, dtype=torch.bfloat16, device=CUDA)
    found[f"run of {PROMPT} us/layer"] = timed(
        lambda: prepare_ops.prepare_run(case.projected[0], case.conv[0], *case.fixed(0), into), COLD
    )
    found[f"finish of {PROMPT} us/layer"] = timed(
        lambda: prepare_ops.finish(read, case.projected[0], case.norm, out), COLD
    )
    return found


# -- selection


class Step:
    """Logits, history and drafts of one step; drafts follow the samples often enough."""

    def __init__(
        self, name: str, dtype=torch.bfloat16, live: int = LIVE, seed: int = 0, early: bool = False
    ) -> None:
        self.tree, self.live = active(name), live
        rows = len(self.tree)
        random_ = torch.Generator(CUDA).manual_seed(seed)
        self.logits = (3 * torch.randn(rows, VOCAB, generator=random_, device=CUDA)).to(dtype)
        self.tokens = torch.randint(
            0, live, (rows,), generator=random_, device=CUDA, dtype=torch.int32
        )
        prompt, generated = torch.randint(
            0, live, (2, 2000), generator=random_, device=CUDA
        ).tolist()
        self.history = TokenHistory(VOCAB, prompt, CUDA)
        self.history.add(generated)
        self.length = torch.tensor([2000], dtype=torch.int32, device=CUDA)
        self.active = torch.ones(rows, dtype=torch.uint8, device=CUDA)
        self.selector = Selector(self.tree, VOCAB, live, CUDA, early)
        self.block = SamplingBlock(CUDA)
        self.block.set(SamplingParams())
        # A row's best tokens are its drafts' and the history's: penalties must move them.
        for row, path in enumerate(self.tree.root_paths):
            on_path = self.tokens[list(path)].long()
            self.logits[row, on_path] += 8
            self.logits[row, torch.tensor(generated[:4], device=CUDA)] += 9

    def sample(self):
        return self.selector.sample(
            self.logits, self.block, self.history.generated, self.history.prompt_seen,
            self.tokens, self.length,
        )  # fmt: skip

    def walk(self):
        self.selector.walk(self.tokens, self.active, self.history.generated)

    def define(self, params: SamplingParams):
        tree, deepest = self.tree, max(self.tree.depth)
        below = [[*p[1:], *[-1] * (deepest - len(p) + 1)] for p in tree.root_paths]
        ids = torch.cat((self.tokens.long(), self.tokens.new_full((1,), -1).long()))
        paths = ids[torch.tensor(below, device=CUDA).view(len(tree), deepest).long()]
        positions = torch.tensor(tree.depth, device=CUDA) + self.length + 1
        known = TokenHistory(self.live, [], CUDA)
        known.generated = self.history.generated[: self.live]
        known.prompt_seen = self.history.prompt_seen[: self.live]
        logits = self.logits[:, : self.live].float()
        return sample_rows(logits, params, known, paths, positions)


def drawn(state: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=state.choice([0.0, 0.6, 0.6, 1.0, 1.5]),
        top_p=state.choice([1.0, 0.95, 0.8, 0.3]),
        top_k=state.choice([1, 5, 20, 20, 40, 56, MAX_TOP_K]),
        min_p=state.choice([0.0, 0.0, 0.05]),
        presence_penalty=state.choice([0.0, 1.0, 1.5]),
        frequency_penalty=state.choice([0.0, 0.3]),
        repetition_penalty=state.choice([1.0, 1.1, 0.9]),
        seed=state.randrange(2**63),
    )


def check_select() -> dict:
    """200 parameter sets against sample_rows; rows alone; the walk; draft candidates."""
    state, result = random.Random(1), {"rows": 0, "wrong": 0, "fallback": 0}
    for i in range(10):
        dtype = torch.float32 if i % 2 else torch.bfloat16
        live = 4096 if i % 5 == 4 else LIVE
        step = Step(TREES[i % 2], dtype, live=live, seed=i)
        for _ in range(20):
            params = drawn(state)
            step.block.set(params)
            sampled, wanted = step.sample().long(), step.define(params)
            held = step.selector.fallback == 0
            result["rows"] += len(held)
            result["fallback"] += int((~held).sum())
            result["wrong"] += int((sampled != wanted)[held].sum())
    step = Step("hydra27")
    step.block.set(SamplingParams(frequency_penalty=0.2))
    whole, alone = step.sample().tolist(), True
    for path in step.tree.root_paths:
        chain = Step(f"chain-{len(path) - 1}" if len(path) > 1 else "root")
        chain.block, chain.history = step.block, step.history
        chain.logits, chain.tokens = step.logits[list(path)], step.tokens[list(path)]
        alone &= chain.sample().tolist() == [whole[row] for row in path]
    result["rows_equal_alone"] = alone
    walks = True
    for _ in range(40):
        sampled = [state.randrange(3) for _ in whole]
        tokens = [state.randrange(3) for _ in whole]
        step.selector.sampled.copy_(torch.tensor(sampled))
        step.selector.fallback.zero_()
        step.tokens.copy_(torch.tensor(tokens))
        before = step.history.generated.clone()
        step.walk()
        path, pending = accept_walk(step.tree.children, tokens, [True] * len(tokens), sampled)
        outcome = step.selector.outcome()
        walks &= list(outcome.path) == path and outcome.pending == pending and not outcome.flag
        more = torch.bincount(torch.tensor([*(tokens[r] for r in path[1:]), pending]), minlength=3)
        walks &= (step.history.generated - before)[:3].tolist() == more[:3].tolist()
    result["walks_equal"] = walks
    best = True
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.randn(5, VOCAB, device=CUDA).to(dtype)
        top = TopCandidates(5, VOCAB, LIVE, CUDA)
        found, ordered = top(logits)
        known = logits[:, :LIVE].float()
        stable = known.sort(dim=-1, descending=True, stable=True).indices[:, :3]
        best &= torch.equal(found.long(), known.argmax(-1)) and torch.equal(ordered.long(), stable)
        values = known.gather(1, ordered.long())
        best &= torch.equal(values, known.topk(3).values)
        once = ordered.clone()
        for row in range(5):
            best &= torch.equal(top(logits[row : row + 1])[1][0], once[row])
    result["best_equal"] = best
    return result


def kernel_times(stage) -> dict[str, float]:
    """Microseconds of each kernel that `stage` launches, the mean of 20."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA], acc_events=True) as profile:
        for _ in range(20):
            stage()
        torch.cuda.synchronize()
    return {
        event.key: round(event.self_device_time_total / event.count, 2)
        for event in profile.key_averages()
        if event.key.endswith("_kernel")
    }


def time_select() -> dict:
    found = {}
    for name in TREES:
        for early in (False, True):
            step = Step(name, early=early)
            top = TopCandidates(len(step.tree), VOCAB, LIVE, CUDA, early)
            stages = {
                "sample": step.sample,
                "sample + walk": lambda s=step: (s.sample(), s.walk()),
                "top": lambda t=top, s=step: t(s.logits),
            }
            entry = found[f"{name}{' early' * early}"] = {}
            for title, stage in stages.items():
                for label, protocol in (("warm", WARM), ("cold", COLD)):
                    try:
                        entry[f"{title} {label}"] = timed(stage, protocol)
                    except Exception as error:
                        entry[f"{title} {label}"] = f"{type(error).__name__}: {error}"[:300]
    for name in ("hydra27", "root"):
        step = Step(name)
        for title, params in (
            ("protocol", SamplingParams()),
            ("greedy", SamplingParams(temperature=0.0, presence_penalty=0.0)),
            ("top_k 56", SamplingParams(top_k=56)),
        ):
            step.block.set(params)
            found[f"{name} {title}"] = kernel_times(step.sample)
    return found


def warm(part: int) -> None:
    """Compiles a share of the kernels into the cache that the main process reads."""
    tree, g = active("hydra27"), GEOMETRIES["27b"]
    if part < 3:
        case = Layers(len(tree), 1)
        into, fixed = case.buffers(len(tree)), case.fixed(0)
        x, conv, read = case.projected[0], case.conv[0], torch.zeros(28, g.heads, g.dv).to(CUDA)
        record = torch.empty_like(x[:, : case.channels]).contiguous()
        out = torch.empty(8192, g.heads * g.dv, dtype=x.dtype, device=CUDA)
        if part == 0:
            prepare_ops.prepare_run(x, conv, *fixed, case.buffers(len(tree), heads_first=True))
            prepare_ops.finish(read, x, case.norm, out)
            prepare_ops.advance_conv(conv, x, 5)
        else:
            prepare_ops.prepare(x, conv, gather_of(tree), *fixed, into, record, early=part == 1)
            prepare_ops.finish(read, x, case.norm, out[:28], early=part == 1)
    elif part < 5:
        step = Step("hydra27", (torch.bfloat16, torch.float32)[part - 3])
        step.sample()
        step.walk()
    else:
        for dtype in (torch.bfloat16, torch.float32):
            TopCandidates(2, VOCAB, LIVE, CUDA)(torch.zeros(2, VOCAB, dtype=dtype, device=CUDA))
        for name in TREES:
            early = Step(name, early=True)
            early.walk()
            Step(name).walk()
        early.sample()
        TopCandidates(2, VOCAB, LIVE, CUDA, True)(early.logits)
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=File)
    parser.add_argument("--warm", type=int, help="compile one share of the kernels and exit")
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    if args.warm is not None:
        warm(args.warm)
        return 0
    started = time.perf_counter()
    shares = [subprocess.Popen([sys.executable, __file__, "--warm", str(i)]) for i in range(6)]
    for share in shares:
        share.wait()
    args.out.mkdir(parents=True, exist_ok=True)
    record = {
        "warm s": round(time.perf_counter() - started, 1),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for stage in (check_prepare, time_prepare, check_select, time_select):
        if args.only and stage.__name__ not in args.only:
            continue
        began = time.perf_counter()
        try:
            record[stage.__name__] = stage()
        except Exception:
            record[stage.__name__] = traceback.format_exc()[-2000:]
        record[f"{stage.__name__} s"] = round(time.perf_counter() - began, 1)
        text = json.dumps(record, indent=1)
        (args.out / "prepare_select.json").write_text(text)
        print(stage.__name__, json.dumps(record[stage.__name__], indent=1), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

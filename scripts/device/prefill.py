"""Prefill on a device: checks, parts timed at the 27B geometry, and a whole synthetic prefill.

  python scripts/device/prefill.py --out DIR                 all of it, under 100 s
  python scripts/device/prefill.py --out DIR --only checks   or whole, parts, float32

Writes DIR/prefill.json after every step, so that a run cut short keeps what it had. The whole
prefill has weights of all 64 layers, random; products are torch.mm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from lumotree.ops import gdn_prepare, linear, prefill, reference  # noqa: E402
from lumotree.ops.gdn import Operands  # noqa: E402
from lumotree.ops.prefill import AttentionLaunch, DeltaLaunch  # noqa: E402

HIDDEN, FF, HEADS, KEY_HEADS, DIM, WIDTH = 5120, 17408, 48, 16, 128, 4
Q_HEADS, KV_HEADS, HEAD_DIM, ROTARY = 24, 4, 256, 64
CONV = (2 * KEY_HEADS + HEADS) * DIM
LAYERS, EVERY = 64, 4
TOKENS = 16384
BF16 = torch.bfloat16
DELTA_LAUNCHES = [
    DeltaLaunch(stages=3),
    DeltaLaunch(stages=2),
    DeltaLaunch(stages=3, local_warps=8),
    DeltaLaunch(stages=3, group=3),
    DeltaLaunch(stages=3, group=3, local_warps=8),
]
ATTENTION_LAUNCHES = [
    AttentionLaunch(128, 64, 8, 2),
    AttentionLaunch(128, 32, 8, 3),
    AttentionLaunch(64, 64, 4, 2),
    AttentionLaunch(128, 128, 8, 1),
]


def delta_inputs(n: int, repeated: bool = False, dtype: torch.dtype = BF16):
    """query, key, value, g, beta, state at the 27B geometry; repeated: keys that are alike."""
    device = "cuda"
    shift = 3 * torch.randn(1, KEY_HEADS, DIM, device=device) if repeated else 0.0
    query = F.normalize(torch.randn(n, KEY_HEADS, DIM, device=device), dim=-1) * DIM**-0.5
    key = F.normalize(torch.randn(n, KEY_HEADS, DIM, device=device) + shift, dim=-1)
    value = torch.randn(n, HEADS, DIM, device=device).to(dtype)
    rate = torch.tensor([0.01, 0.3, 3.0], device=device).repeat(HEADS // 3)
    g = -torch.rand(n, HEADS, device=device) * rate
    beta = torch.sigmoid(2 * torch.randn(n, HEADS, device=device) + (3 if repeated else 0))
    state = 0.3 * torch.randn(HEADS, DIM, DIM, device=device)
    operand = prefill.operand_dtype(dtype)
    return query.to(operand), key.to(operand), value, g, beta, state


def exact_delta(query, key, value, g, beta, state):
    """The recurrence token by token, float64."""
    query, key, value, g, beta, state = (x.double() for x in (query, key, value, g, beta, state))
    query, key = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (query, key))
    state, out = state.clone(), torch.empty_like(value)
    for i in range(len(value)):
        state *= g[i].exp()[:, None, None]
        held = torch.einsum("hk,hkv->hv", key[i], state)
        written = beta[i][:, None] * (value[i] - held)
        state += key[i][:, :, None] * written[:, None]
        out[i] = torch.einsum("hk,hkv->hv", query[i], state)
    return out, state


def error(found: Tensor, want: Tensor) -> float:
    return ((found.double() - want.double()).norm() / want.double().norm()).item()


def delta_errors(say, dtype: torch.dtype, bound: float) -> None:
    for n, repeated in ((1, False), (63, False), (500, False), (500, True)):
        inputs = delta_inputs(n, repeated, dtype)
        want, end = exact_delta(*inputs)
        state = inputs[5].clone()
        out = torch.full((n, HEADS, DIM), float("nan"), device="cuda")
        prefill.delta_chunk(*inputs[:5], state, out=out)
        errors = error(out, want), error(state, end)
        say("delta", str(dtype), n, repeated, errors=errors, ok=max(errors) <= bound)


def check_delta(say) -> None:
    delta_errors(say, BF16, 2e-3)
    inputs = delta_inputs(1000)
    runs = []
    for n, launch in ((1000, None), (1000, None), (937, None), (1000, DELTA_LAUNCHES[1])):
        cut = [x[:n] for x in inputs[:5]]
        runs.append(prefill.delta_chunk(*cut, inputs[5].clone(), launch=launch)[:937])
    same = [torch.equal(runs[0], run) for run in runs[1:]]
    say("delta bits: again, shorter run, other stages", ok=all(same), same=same)


def attention_inputs(n: int, start: int, slots: int, dtype: torch.dtype = BF16):
    q = torch.randn(n, Q_HEADS, HEAD_DIM, device="cuda").mul(HEAD_DIM**-0.5).to(dtype)
    keys, values = (
        torch.randn(KV_HEADS, slots, HEAD_DIM, device="cuda").to(dtype) for _ in range(2)
    )
    keys[:, start + n :] = float("nan")
    values[:, start + n :] = float("nan")
    return q, keys, values


def attention_error(say, dtype, n: int, start: int, first: int, bound: float) -> None:
    q, keys, values = attention_inputs(n, start, 4096, dtype)
    shown = (x[:, : start + n].float() for x in (keys, values))
    want = reference.prefill_attention(q.float(), *shown, start, first)
    far = error(prefill.prefill_attention(q, keys, values, start, first), want)
    say("attention", str(dtype), n, start, first, error=far, ok=far <= bound)


def check_attention(say) -> None:
    for n, start, first in ((1, 0, 1), (300, 0, 0), (517, 700, 1), (200, 3000, 0)):
        attention_error(say, BF16, n, start, first, 6e-3)
    q, keys, values = attention_inputs(900, 0, 1024)
    whole = prefill.prefill_attention(q, keys, values, 0)
    same = [
        torch.equal(whole[a:b], prefill.prefill_attention(q[a:b], keys, values, a))
        for a, b in ((0, 899), (1, 2), (300, 777), (512, 900))
    ]
    say("attention bits in other runs", ok=all(same), same=same)


def check_float32(say) -> None:
    attention_error(say, torch.float32, 150, 70, 1, 1e-5)
    delta_errors(say, torch.float32, 5e-5)


def check_rest(say) -> None:
    gate_up = torch.randn(300, 2 * FF, device="cuda").to(BF16)
    far = error(prefill.swiglu(gate_up), reference.swiglu(gate_up))
    say("swiglu", error=far, ok=far <= 4e-3)


def timed(work, repeats: int = 5) -> float:
    """Median milliseconds of `work`, after one call; it moves gigabytes, so caches are cold."""
    work()
    spans = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end))
    return statistics.median(spans)


def delta_times(say) -> None:
    inputs = delta_inputs(TOKENS)
    for launch in DELTA_LAUNCHES:

        def run(launch=launch) -> Tensor:
            return prefill.delta_chunk(*inputs, launch=launch)

        attempt(say, f"delta {launch}", lambda run=run: timed(run))
        for piece in ("local", "walk"):
            attempt(say, f"  {piece}", lambda run=run, piece=piece: kernel_time(run, piece))


def attention_times(say) -> None:
    n, start = 8192, 8192
    q, keys, values = attention_inputs(n, start, TOKENS)
    flops = 4 * Q_HEADS * HEAD_DIM * n
    both = flops * (start + n / 2)
    for launch in ATTENTION_LAUNCHES:

        def run(launch=launch) -> Tensor:
            return prefill.prefill_attention(q, keys, values, start, launch=launch)

        attempt(say, f"attention {launch}", lambda run=run: timed(run), both)
    q, keys, values = q.transpose(0, 1)[None], keys[None], values[None]
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention

    def half(keys: Tensor, values: Tensor, causal: bool) -> tuple:
        return cudnn(q, keys, values, None, True, 0.0, causal, False, scale=1.0)

    early = [x[:, :, :start] for x in (keys, values)]
    late = [x[:, :, start:] for x in (keys, values)]
    rivals = {
        "flash (torch)": (lambda: flash(q, keys, values, 0.0, True, False, scale=1.0), both),
        "cudnn, first half": (lambda: half(*early, False), flops * start),
        "cudnn, causal half": (lambda: half(*late, True), flops * n / 2),
    }
    for name, (run, count) in rivals.items():
        attempt(say, f"attention {name}", lambda run=run: timed(run), count)


def kernel_time(run, piece: str) -> float:
    """Milliseconds of the kernel whose name has `piece` in it, from a profile."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    spans = [e.device_time for e in seen.events() if piece in e.name and e.device_time > 0]
    return statistics.median(spans) / 1e3


def attempt(say, name: str, work, flops: float | None = None) -> None:
    try:
        span = work()
        rate = {} if flops is None else {"tflops": flops / span / 1e9}
        say(name, ms=span, **rate)
    except Exception as problem:
        traceback.print_exc()
        say(name, failed=f"{type(problem).__name__}: {problem}"[:300], ok=False)


class Whole:
    """64 layers of random weights, and one run of prompt tokens through them."""

    def __init__(self, slots: int) -> None:
        def weight(*shape: int) -> Tensor:
            return torch.empty(*shape, device="cuda", dtype=BF16).normal_(std=shape[-1] ** -0.5)

        def norm(d: int, *lead: int) -> reference.Norm:
            return reference.Norm.of(torch.ones(*lead, d, device="cuda"), 1e-6)

        self.norm = norm(HIDDEN)
        self.gated_norm = norm(DIM)
        self.qk_norm = norm(HEAD_DIM, Q_HEADS + KV_HEADS)
        self.kinds = [(i + 1) % EVERY == 0 for i in range(LAYERS)]
        gdn_in, attention_in = CONV + HEADS * DIM + 2 * HEADS, 2 * (Q_HEADS + KV_HEADS) * HEAD_DIM
        self.weights = [
            (
                weight(attention_in if full else gdn_in, HIDDEN),
                weight(HIDDEN, Q_HEADS * HEAD_DIM if full else HEADS * DIM),
                weight(2 * FF, HIDDEN),
                weight(HIDDEN, FF),
            )
            for full in self.kinds
        ]
        self.conv_weight = torch.randn(WIDTH, CONV, device="cuda") * 0.5
        self.gates = reference.DeltaGates(
            torch.rand(HEADS, device="cuda"), torch.randn(HEADS, device="cuda")
        )
        self.states = torch.zeros(LAYERS, HEADS, DIM, DIM, device="cuda")
        self.conv = torch.zeros(LAYERS, WIDTH - 1, CONV, device="cuda", dtype=BF16)
        self.kv = torch.zeros(
            LAYERS // EVERY, 2, KV_HEADS, slots, HEAD_DIM, device="cuda", dtype=BF16
        )
        self.rope = reference.rope_table(slots, HEAD_DIM, ROTARY, 1e7, BF16, torch.device("cuda"))
        self.partner = reference.rope_partner(HEAD_DIM, ROTARY, torch.device("cuda"))
        self.marks: list[tuple[str, torch.cuda.Event]] | None = None

    def mark(self, name: str) -> None:
        """Everything since the last mark belongs to `name`."""
        if self.marks is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((name, event))

    def run(self, x: Tensor, start: int) -> Tensor:
        """x [n, hidden] at positions start ..; changed in place."""
        self.mark("start")
        for i, (w_in, w_out, w_up, w_down) in enumerate(self.weights):
            normed = linear.rms_norm(x, self.norm)
            self.mark("norms")
            projected = torch.mm(normed, w_in.t())
            self.mark("products")
            mix = self.attention if self.kinds[i] else self.delta
            mixed = mix(i, projected, start)
            x.addmm_(mixed, w_out.t())
            self.mark("products")
            normed = linear.rms_norm(x, self.norm)
            self.mark("norms")
            gate_up = torch.mm(normed, w_up.t())
            self.mark("products")
            active = prefill.swiglu(gate_up)
            self.mark("swiglu")
            x.addmm_(active, w_down.t())
            self.mark("products")
        return x

    def delta(self, i: int, projected: Tensor, start: int) -> Tensor:
        n = projected.shape[0]
        qk = projected.new_empty(2, n, KEY_HEADS, DIM, dtype=torch.float16)
        value = projected.new_empty(n, HEADS, DIM)
        gates = torch.empty(2, n, HEADS, device="cuda")
        overlap = torch.empty(n, KEY_HEADS, device="cuda")
        into = Operands(qk[0], qk[1], value, gates[0], gates[1], overlap)
        gdn_prepare.prepare_run(
            projected, self.conv[i], self.conv_weight, self.gates, 1e-6, DIM**-0.5, into
        )
        gdn_prepare.advance_conv(self.conv[i], projected, n)
        self.mark("gdn prepare")
        out = torch.empty(n, HEADS, DIM, device="cuda")
        prefill.delta_chunk(qk[0], qk[1], value, *gates, self.states[i], out=out)
        self.mark("gdn delta")
        done = gdn_prepare.finish(
            out, projected, self.gated_norm, projected.new_empty(n, HEADS * DIM)
        )
        self.mark("gdn finish")
        return done

    def attention(self, i: int, projected: Tensor, start: int) -> Tensor:
        n = projected.shape[0]
        keys, values = self.kv[i // EVERY]
        q = prefill.prepare_attention(
            projected, self.qk_norm, self.rope, self.partner, start, keys, values
        )
        self.mark("attention prepare")
        gate = projected[:, -Q_HEADS * HEAD_DIM :]
        out = prefill.prefill_attention(q, keys, values, start, gate=gate)
        self.mark("attention")
        return out.view(n, -1)

    def prefill(self, x: Tensor, chunk: int) -> Tensor:
        return torch.cat([self.run(x[i : i + chunk].clone(), i) for i in range(0, len(x), chunk)])


def whole_times(say) -> None:
    model = Whole(TOKENS)
    x = torch.randn(TOKENS, HIDDEN, device="cuda").to(BF16)
    model.prefill(x[:4096], 4096)
    for chunk in (8192, 4096, 2048, 16384):
        attempt(say, f"whole prefill, {TOKENS} tokens in runs of {chunk}",
                lambda c=chunk: timed(lambda: model.prefill(x, c), 3))  # fmt: skip
    for chunk in (8192, 2048):
        attempt(say, f"parts of it, runs of {chunk}", lambda c=chunk: breakdown(say, model, x, c))
    product_bits(say, model)
    ends = [model_end(model, x[:5000], chunk) for chunk in (5000, 5000)]
    say("whole prefill twice, same bits", ok=torch.equal(*ends))


def product_bits(say, model: Whole) -> None:
    """For each product, the row counts at which a row has the bits it has among 2048 rows."""
    for name, weight in zip(("in", "out", "gate and up", "down"), model.weights[0], strict=True):
        x = torch.randn(8192, weight.shape[1], device="cuda").to(BF16)
        whole = torch.mm(x[:2048], weight.t())
        counts = (1, 64, 128, 333, 512, 1000, 1024, 1536, 2047, 4096, 8192)
        same = [n for n in counts if torch.equal(torch.mm(x[:n], weight.t())[:2048], whole[:n])]
        say(f"product bits, {name}: as among 2048 rows", rows=same)


def model_end(model: Whole, x: Tensor, chunk: int) -> Tensor:
    model.states.zero_()
    model.conv.zero_()
    return model.prefill(x, chunk)


def breakdown(say, model: Whole, x: Tensor, chunk: int) -> float:
    model.marks = []
    model.prefill(x, chunk)
    torch.cuda.synchronize()
    marks, model.marks = model.marks, None
    spans: dict[str, float] = {}
    for (_, before), (name, after) in zip(marks, marks[1:], strict=False):
        spans[name] = spans.get(name, 0.0) + before.elapsed_time(after)
    for name, span in sorted(spans.items(), key=lambda item: -item[1]):
        say(f"  {name}, runs of {chunk}", ms=span)
    return sum(spans.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=("checks", "whole", "parts", "float32"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found: list[dict] = []
    begin = time.perf_counter()

    def say(*name, **values) -> None:
        found.append({"name": " ".join(map(str, name)), **values})
        flat = "  ".join(
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()
        )
        print(f"{time.perf_counter() - begin:6.1f}  {found[-1]['name']:60s} {flat}", flush=True)
        (options.out / "prefill.json").write_text(json.dumps(found, indent=1) + "\n")

    torch.manual_seed(0)
    say("device", device=torch.cuda.get_device_name(), torch=torch.__version__)
    stages = {
        "checks": (check_delta, check_attention, check_rest),
        "whole": (whole_times,),
        "parts": (delta_times, attention_times),
        "float32": (check_float32,),
    }
    for name, works in stages.items():
        for work in works if options.only in (None, name) else ():
            try:
                work(say)
            except Exception as problem:
                traceback.print_exc()
                say(work.__name__, failed=f"{type(problem).__name__}: {problem}"[:300], ok=False)
    return 0 if all(entry.get("ok", True) for entry in found) else 1


if __name__ == "__main__":
    sys.exit(main())

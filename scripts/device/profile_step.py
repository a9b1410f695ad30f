"""Where a captured step's time goes: kernels of each stage's graph, and idle time.

python scripts/device/profile_step.py --model rehearsal:27b --prompt 16000 --out FOLDER
"""

from __future__ import annotations

import argparse
import collections
import json
from pathlib import Path

import torch
from captured import ARMS, prompts
from torch.profiler import ProfilerActivity, profile

from lumotree.engine import Engine
from lumotree.request import SamplingParams

REPLAYS = 3


def kernels(graph, timeline: bool = False) -> tuple[dict[str, list[float]], float, float]:
    """Per kernel name [launches, microseconds] of one replay, span and busy microseconds."""
    for _ in range(2):
        graph()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        for _ in range(REPLAYS):
            graph()
        torch.cuda.synchronize()
    found = collections.defaultdict(lambda: [0, 0.0])
    spans = []
    for event in traced.events():
        if event.device_type.name != "CUDA":
            continue
        spans.append((event.time_range.start, event.time_range.end, event.name))
        found[event.name][0] += 1 / REPLAYS
        found[event.name][1] += event.time_range.elapsed_us() / REPLAYS
    spans.sort()
    busy, end = 0.0, spans[0][0]
    for first, last, name in spans[:60] if timeline else ():
        print(f"    {first - end:10.1f} {last - first:8.1f}  {name[:60]}")
    for first, last, _ in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return dict(found), (end - spans[0][0]) / REPLAYS, busy / REPLAYS


@torch.inference_mode()
def show(name: str, decoder, out: Path, timeline: bool = False) -> None:
    """Prints and saves the profile of each stage of a decoder that has just decoded."""
    saved = {}
    state, length = decoder._state, decoder.request.length
    before = [x.clone() for x in (state.recurrent, state.conv, length)]
    for stage, graph in decoder.graphs.launches.items():
        found, span, busy = kernels(graph, timeline and stage == "verify")
        # Publication moves the state on with every replay.
        for place, value in zip((state.recurrent, state.conv, length), before, strict=True):
            place.copy_(value)
        print(f"{name} {stage}: span {span:.0f} us, busy {busy:.0f} us")
        for kernel, (count, spent) in sorted(found.items(), key=lambda x: -x[1][1])[:14]:
            each = spent / max(count, 1)
            print(f"  {spent:9.1f} us  {count:6.1f} x {each:8.2f}  {kernel[:90]}", flush=True)
        saved[stage] = dict(span_us=span, busy_us=busy, kernels=found)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"profile-{name.replace(' ', '-')}.json").write_text(json.dumps(saved, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="rehearsal:27b")
    parser.add_argument("--prompt", type=int, nargs="+", default=[2000])
    parser.add_argument("--arms", nargs="+", default=["ar", "lumotree"])
    parser.add_argument("--timeline", action="store_true", help="starts of the first kernels")
    parser.add_argument("--rows", default="natural")
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args()
    engine = Engine.load(args.model, rows=args.rows)
    for name in args.arms:
        decoder = engine.decoder(ARMS[name])
        for prompt in prompts(args.prompt, engine):
            decoder.generate(prompt, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
            show(f"{name} {len(prompt)}", decoder, args.out, args.timeline)


if __name__ == "__main__":
    main()

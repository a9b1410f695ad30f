"""Tree rows against autoregressive decoding of the same paths on a GPU, bit for bit.

    python scripts/device/exactness.py --model rehearsal:27b --prompt 2000 16000 --steps 1000

Every step of a real lumotree decode is repeated row by row by an autoregressive decoder over a
state of its own: the rows of the accepted path in every step, all active rows in every
`--every`-th. After each step the published recurrent matrices, convolution histories and the
keys and values of the whole prefix are compared too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch
from captured import PROTOCOL, prompts

from lumotree.decoder import DecoderConfig, prefill
from lumotree.draft.plan import Proposal
from lumotree.engine import Engine
from lumotree.request import SamplingParams


class Native:
    """Autoregressive decoding from chosen states."""

    def __init__(self, engine: Engine, prompt: list[int], room: int) -> None:
        self.decoder = engine.decoder(DecoderConfig("root", 0, False))
        self.state = self.decoder.reserve(len(prompt) + room)
        self.state.reset()
        prefill(engine.model, self.state, prompt)
        self.decoder.request.length.fill_(self.state.length)

    def save(self) -> tuple:
        state = self.state
        return state.length, state.recurrent.clone(), state.conv.clone()

    def load(self, saved: tuple) -> None:
        """Keys and values past the saved length are written anew before they are read."""
        self.state.length = saved[0]
        self.state.recurrent.copy_(saved[1])
        self.state.conv.copy_(saved[2])
        self.decoder.request.length.fill_(saved[0])

    def take(self, token: int) -> torch.Tensor:
        """Consumes a token; its row's logits."""
        verified = self.decoder.verify(self.state, Proposal.root_only(self.decoder.tree, token))
        verified.rows.publish([0], verified.hidden)
        return verified.logits[0]


@torch.inference_mode()
def compare(engine: Engine, prompt: list[int], steps: int, every: int, sampled: bool) -> Counter:
    options = PROTOCOL if sampled else dict(temperature=0.0)
    room = 12 * steps + 64
    params = SamplingParams(max_tokens=room, ignore_eos=True, **options)
    tree = engine.decoder(DecoderConfig())
    run, state = tree.begin(prompt, params)
    native = Native(engine, prompt, room)
    found = Counter()
    for step in range(steps):
        proposal = tree.propose(run, state)
        verified = tree.verify(state, proposal)
        path, pending = tree.select(run, verified)
        logits, shape = verified.logits, verified.tree
        base = native.save()
        if step % every == 0:
            saved = {-1: base}
            # Depth first: a sibling's keys would lie where those of an ancestor must.
            todo = [0]
            while todo:
                row = todo.pop()
                todo += [child for child in shape.children[row] if verified.active[child]]
                native.load(saved[shape.parents[row]])
                found["rows"] += 1
                found["rows equal"] += int(
                    torch.equal(native.take(verified.tokens[row]), logits[row])
                )
                if any(verified.active[child] for child in shape.children[row]):
                    saved[row] = native.save()
            native.load(base)
        for row in path:
            found["path rows"] += 1
            found["path rows equal"] += int(
                torch.equal(native.take(verified.tokens[row]), logits[row])
            )
        tree._emit(run, [*(verified.tokens[row] for row in path[1:]), pending])
        tree.publish(run, verified, path)
        length = state.length
        found["steps"] += 1
        for name in ("recurrent", "conv"):
            same = torch.equal(getattr(state, name), getattr(native.state, name))
            found[f"{name} equal"] += int(same)
        sides = zip(
            (state.kv.keys, state.kv.values),
            (native.state.kv.keys, native.state.kv.values),
            strict=True,
        )
        same = all(torch.equal(a[:, :, :length], b[:, :, :length]) for a, b in sides)
        found["keys and values equal"] += int(same)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="rehearsal:27b")
    parser.add_argument("--prompt", type=int, nargs="+", default=[2000, 16000, 32000])
    parser.add_argument("--steps", type=int, default=1000, help="over all prompts")
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--rows", default="matched")
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args()
    engine = Engine.load(args.model, rows=args.rows)
    args.out.mkdir(parents=True, exist_ok=True)
    found = {}
    cases = list(zip(args.prompt, prompts(args.prompt, engine), strict=True))
    share = -(-args.steps // (2 * len(cases)))
    for length, prompt in cases:
        for sampled in (False, True):
            started = time.perf_counter()
            counts = compare(engine, prompt, share, args.every, sampled)
            name = f"{length} {'sampled' if sampled else 'greedy'}"
            found[name] = dict(counts)
            print(name, dict(counts), f"{time.perf_counter() - started:.1f} s", flush=True)
            total = sum((Counter(counts) for counts in found.values()), Counter())
            (args.out / "exactness.json").write_text(
                json.dumps({"model": args.model, "rows": args.rows, "cases": found, "total": total})
            )
    print("total", dict(total))


if __name__ == "__main__":
    main()

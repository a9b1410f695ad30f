"""Held-out loss and draft agreement of exported weights.

    python scripts/train/evaluate.py --weights .train/run/final.safetensors --out results.json

Three measurements, all against the trunk's own first choice:
forced       on held-out text, the chain is fed the real tokens;
continued    on the trunk's own continuation of held-out prefixes, greedy and at temperature 0.6:
             the chain is fed that continuation, which is what it drafted while it was right: the
             products of the conditional rates are the acceptance of a real chain;
pre-norm     the first step fed the hidden state before the final norm, which must be worse.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from decode import continue_rows  # noqa: E402
from model import Net, Shape  # noqa: E402
from prepare import TOKENIZER, load  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from torch import Tensor  # noqa: E402
from train import Text  # noqa: E402

DEPTH = 5


class Tally:
    """Matches by depth: alone, and given that all shallower steps matched."""

    def __init__(self) -> None:
        self.right = np.zeros(DEPTH)
        self.along = np.zeros(DEPTH)
        self.seen = np.zeros(DEPTH)
        self.positions = 0

    def add(self, matches: Tensor) -> None:
        """matches [positions, DEPTH] of booleans."""
        running = torch.cumprod(matches.long(), 1)
        before = torch.cat((torch.ones_like(running[:, :1]), running[:, :-1]), 1)
        self.right += matches.sum(0).cpu().numpy()
        self.along += running.sum(0).cpu().numpy()
        self.seen += before.sum(0).cpu().numpy()
        self.positions += len(matches)

    def row(self) -> dict:
        """Rates rounded for a results file."""
        return {
            "positions": self.positions,
            "agreement": [round(float(x), 4) for x in self.right / self.positions],
            "conditional": [round(float(x), 4) for x in self.along / np.maximum(self.seen, 1)],
            "accepted_of_5": round(float(self.along.sum() / self.positions), 3),
        }


def matches(
    net: Net, ids: Tensor, length: int, dtype: torch.dtype, raw: bool = False
) -> tuple[Tensor, Tensor]:
    """Per position and depth whether the chain names the trunk's choice; and next-token losses."""
    emb = net.p["model.embed_tokens.weight"]
    x, _ = net.layers(ids[:, :length], dtype)
    h = net.norm(x, net.p["model.norm.weight"])
    logits = F.linear(h, emb.to(dtype))
    loss = net.hard_loss(h, emb, ids[:, 1 : length + 1])
    best = logits.argmax(-1)
    outs = net.predict(x if raw else h, ids, DEPTH)
    keep = length - DEPTH
    found = [
        F.linear(m[:, :keep], emb.to(dtype)).argmax(-1) == best[:, k : k + keep]
        for k, m in enumerate(outs, 1)
    ]
    return torch.stack(found, -1), loss


@torch.no_grad()
def evaluate(net: Net, text: Text, rows: int, length: int, new: int, at_once: int) -> dict:
    """All measurements."""
    device = text.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    table = Tokenizer.from_file(str(TOKENIZER))
    out: dict = {"rows": rows, "length": length, "compute": str(dtype).removeprefix("torch.")}
    for kind, share in (("code", 0.0), ("chat", 1.0)):
        text.rng = np.random.default_rng(5)
        text.queue.clear()
        forced, raw, losses, size, late = Tally(), Tally(), [], 0, []
        for _ in range(0, rows, at_once):
            ids = text.batch(at_once, length + DEPTH + 1, share)
            found, loss = matches(net, ids, length, dtype)
            forced.add(found.flatten(0, 1))
            raw.add(matches(net, ids, length, dtype, raw=True)[0].flatten(0, 1))
            losses.append(loss.mean().item())
            late.append(loss[:, length // 2 :].mean().item())
            size += sum(
                len(table.decode(r, skip_special_tokens=False).encode())
                for r in ids[:, 1 : length + 1].tolist()
            )
        loss = float(np.mean(losses))
        per_byte = loss * rows * length / size
        out[kind] = {
            "tokens": rows * length,
            "nats_per_token": round(loss, 4),
            "nats_per_byte": round(per_byte, 4),
            "nats_per_token_second_half": round(float(np.mean(late)), 4),
            "forced": forced.row(),
            "forced_pre_norm_hidden": {"agreement": raw.row()["agreement"]},
        }
        for temperature in (0.0, 0.6):
            tally = Tally()
            for _ in range(0, rows, at_once):
                ids = text.prefixes(at_once, length - new, share)
                temps = torch.full((len(ids),), temperature, device=device)
                full = continue_rows(net, ids, new + DEPTH + 1, temps, dtype, at_once)
                tally.add(matches(net, full, length, dtype)[0][:, length - new :].flatten(0, 1))
            out[kind][f"continued_t{temperature}"] = tally.row()
    return out


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    work = Path(__file__).resolve().parents[2] / ".train"
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, default=work / "tokens")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument(
        "--new", type=int, default=512, help="tokens the trunk continues each prefix by"
    )
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(3)
    params = {k: v.float().to(device) for k, v in load_file(args.weights).items()}
    text = Text(load(args.tokens, "held-out"), device, 5)
    result = evaluate(Net(params, Shape()), text, args.rows, args.length, args.new, args.at_once)
    line = json.dumps(result, indent=1)
    if args.out:
        args.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()

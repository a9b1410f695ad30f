"""Train the trunk with one prediction step beside it, then the prediction block alone, five deep.

    python scripts/train/train.py --tokens .train/tokens --run .train/run
    python scripts/train/train.py ... --resume             # continue from the last checkpoint

A stage that names ``seconds`` times its first steps and then fixes the number of steps; one that
names ``steps`` is repeatable. Metrics go to ``metrics.jsonl``, weights to ``final.safetensors``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from decode import continue_rows
from model import Net, Shape, initial
from optim import Optimizer
from prepare import TOKENIZER, load
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

TIMED = 30


class Text:
    """Token streams on the training device; draws windows of a fixed length."""

    def __init__(self, arrays: dict[str, np.ndarray], device: torch.device, seed: int) -> None:
        self.tokens = {
            k: torch.from_numpy(arrays[k].astype(np.int16)).to(device) for k in ("code", "chat")
        }
        self.starts = {k: arrays[f"{k}_starts"] for k in ("code", "chat")}
        self.turns = turn_ends(arrays["chat"])
        self.rng, self.device = np.random.default_rng(seed), device
        self.queue: dict[tuple[str, int], np.ndarray] = {}

    def place(self, kind: str, length: int) -> int:
        """A window start: a third of them, and all long conversations, begin at a document."""
        size = len(self.tokens[kind]) - length
        if (kind == "chat" and length > 8000) or self.rng.random() < 0.3:
            starts = self.starts[kind]
            return int(min(starts[self.rng.integers(len(starts))], size))
        if not len(self.queue.get((kind, length), ())):
            shift = int(self.rng.integers(length))
            count = max(1, (size - shift) // length)
            self.queue[kind, length] = shift + self.rng.permutation(count) * length
        order = self.queue[kind, length]
        self.queue[kind, length] = order[1:]
        return int(min(order[0], size))

    def window(self, kind: str, start: int, length: int) -> Tensor:
        """One row of int64 ids."""
        return self.tokens[kind][start : start + length].long()

    def batch(self, rows: int, length: int, chat: float) -> Tensor:
        """Rows of ids; a share ``chat`` of the rows is conversations."""
        share = rows * chat
        chats = int(share) + int(self.rng.random() < share % 1)
        kinds = ["chat"] * chats + ["code"] * (rows - chats)
        return torch.stack([self.window(k, self.place(k, length), length) for k in kinds])

    def prefixes(self, rows: int, length: int, chat: float) -> Tensor:
        """Rows that end where generation starts: after an assistant header, or anywhere in code."""
        ends = self.turns[self.turns >= length]
        chats = int(rows * chat)
        picked = ends[self.rng.integers(len(ends), size=chats)]
        out = [self.window("chat", int(e) - length, length) for e in picked]
        return torch.stack(
            out
            + [self.window("code", self.place("code", length), length) for _ in range(rows - chats)]
        )


def turn_ends(stream: np.ndarray) -> np.ndarray:
    """Positions right after every assistant header of a conversation stream."""
    header = Tokenizer.from_file(str(TOKENIZER)).encode("<|im_start|>assistant\n").ids
    hits = np.ones(len(stream) - len(header), dtype=bool)
    for i, token in enumerate(header):
        hits &= stream[i : i + len(hits)] == token
    return np.flatnonzero(hits) + len(header)


class Trainer:
    """Runs the stages of a recipe."""

    def __init__(
        self, recipe: dict, text: Text, held: Text, run: Path, device: torch.device, compiled: bool
    ) -> None:
        self.recipe, self.text, self.held, self.run_dir = recipe, text, held, run
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        params = {
            k: v.to(device).requires_grad_() for k, v in initial(Shape(), recipe["seed"]).items()
        }
        self.net, self.plain = Net(params, Shape(), compiled), Net(params, Shape())
        self.optim = Optimizer(params, recipe["muon_lr"], recipe["adam_lr"], recipe["weight_decay"])
        self.stage = self.step = self.total = 0
        self.steps: dict[str, int] = {}
        self.sampled: Tensor | None = None
        self.log = (run / "metrics.jsonl").open("a")
        self.begun = time.time()

    # -- losses

    def trunk_loss(self, ids: Tensor, length: int) -> tuple[Tensor, dict]:
        """Next-token loss and the first prediction step beside it."""
        emb = self.net.p["model.embed_tokens.weight"]
        h = self.net.trunk(ids[:, :length], self.dtype)
        main = self.net.hard_loss(h, emb, ids[:, 1 : length + 1]).mean()
        (m,) = self.net.predict(h, ids, 1)
        mtp = self.net.hard_loss(m, emb, ids[:, 2 : length + 2]).mean()
        return main + self.recipe["mtp_joint_weight"] * mtp, {
            "loss": main.detach(),
            "mtp1": mtp.detach(),
        }

    def draft_loss(self, ids: Tensor, length: int, weight: Tensor) -> tuple[Tensor, dict]:
        """Five prediction steps against the frozen trunk; ``weight`` [length] says what counts."""
        depth, emb = self.recipe["draft_depth"], self.net.p["model.embed_tokens.weight"]
        with torch.no_grad():
            h = self.net.trunk(ids[:, :length], self.dtype)
        total, norm, metrics = 0.0, 0.0, {}
        for k, m in enumerate(self.net.predict(h, ids, depth), 1):
            target = torch.cat(
                (h[:, k:], h[:, :k]), 1
            )  # the last k rows have no target and weigh nothing
            loss, agree = self.net.soft_loss(m, target, emb, self.recipe["draft_choice_weight"])
            w = weight.clone()
            w[length - k :] = 0
            share = self.recipe["draft_depth_decay"] ** (k - 1)
            total, norm = total + share * (loss * w).sum() / (w.sum() * len(ids)), norm + share
            counted = (w == 1).float()
            metrics[f"agree{k}"] = (agree * counted).sum() / (counted.sum() * len(ids))
        return total / norm, {"loss": (total / norm).detach(), **metrics}

    # -- stages

    def rate(self, stage: dict, fraction: float) -> float:
        """Learning-rate multiplier."""
        first, last = stage["rate"]
        return (first + (last - first) * fraction) * min(
            1.0, (self.total + 1) / self.recipe["warmup_steps"]
        )

    def batch(self, stage: dict) -> tuple[Tensor, Tensor | None]:
        """Token rows with room for the draft targets, and their weights."""
        length = stage["length"]
        extra = self.recipe["draft_depth"] + 1
        if self.sampled is None or "sampled" not in stage:
            weight = torch.ones(length, device=self.text.device)
            return self.text.batch(stage["rows"], length + extra, stage["chat"]), weight
        pick = torch.randint(len(self.sampled), (stage["rows"],), device=self.sampled.device)
        weight = torch.full((length,), float(stage["prefix_weight"]), device=self.text.device)
        weight[length + extra - stage["sampled"]["new"] - 2 :] = 1
        return self.sampled[pick].long(), weight

    @torch.no_grad()
    def sample(self, stage: dict) -> None:
        """Let the trunk continue real prefixes; the rows become the stage's text."""
        conf, began = stage["sampled"], time.time()
        prefix = stage["length"] + self.recipe["draft_depth"] + 1 - conf["new"]
        rows = []
        for _ in range(conf["rounds"]):
            ids = self.text.prefixes(conf["sequences"], prefix, stage["chat"])
            temps = torch.tensor(conf["temperatures"], device=ids.device).repeat(len(ids))[
                : len(ids)
            ]
            rows.append(continue_rows(self.plain, ids, conf["new"], temps, self.dtype).short())
        self.sampled = torch.cat(rows)
        self.write(
            {
                "event": "sampled",
                "rows": len(self.sampled),
                "new": conf["new"],
                "seconds": time.time() - began,
            }
        )
        if self.text.device.type == "cuda":
            torch.cuda.empty_cache()

    def write(self, row: dict) -> None:
        """One line of metrics, also on the terminal."""
        row = {"t": round(time.time() - self.begun, 1), **row}
        row = {k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}
        self.log.write(json.dumps(row) + "\n")
        self.log.flush()
        print(json.dumps(row), flush=True)

    def save(self, name: str = "checkpoint.pt") -> None:
        """Everything needed to resume."""
        state = {
            "params": {k: v.detach() for k, v in self.net.p.items()},
            "optim": self.optim.state_dict(),
            "stage": self.stage,
            "step": self.step,
            "total": self.total,
            "steps": self.steps,
            "sampled": self.sampled,
        }
        torch.save(state, self.run_dir / "next.pt")
        (self.run_dir / "next.pt").rename(self.run_dir / name)

    def resume(self) -> None:
        """Continue from the last checkpoint."""
        saved = torch.load(self.run_dir / "checkpoint.pt", map_location=self.text.device)
        with torch.no_grad():
            for name, value in saved["params"].items():
                self.net.p[name].copy_(value)
        self.optim.load_state_dict(saved["optim"])
        self.stage, self.step, self.total = saved["stage"], saved["step"], saved["total"]
        self.steps, self.sampled = saved["steps"], saved["sampled"]

    def run_stage(self, stage: dict) -> None:
        """All steps of one stage."""
        draft = stage["kind"] == "draft"
        for name, p in self.net.p.items():
            p.requires_grad_(name.startswith("mtp.") or not draft)
        if "sampled" in stage and self.sampled is None:
            self.sample(stage)
        steps = stage.get("steps") or self.steps.get(stage["name"], 0)
        length, began, saved = stage["length"], time.time(), time.time()
        marks: dict[int, float] = {}
        while not steps or self.step < steps:
            ids, weight = self.batch(stage)
            loss, metrics = (
                self.draft_loss(ids, length, weight) if draft else self.trunk_loss(ids, length)
            )
            loss.backward()
            self.optim.step(self.rate(stage, self.step / steps if steps else 0.0))
            self.step, self.total = self.step + 1, self.total + 1
            if not steps and self.step in (TIMED // 2, TIMED):
                if self.text.device.type == "cuda":
                    torch.cuda.synchronize()
                marks[self.step] = time.time()
                if self.step == TIMED:
                    each = (marks[TIMED] - marks[TIMED // 2]) / (TIMED - TIMED // 2)
                    steps = TIMED + max(1, int((stage["seconds"] - (marks[TIMED] - began)) / each))
                    self.steps[stage["name"]] = steps
                    speed = stage["rows"] * length / each
                    self.write(
                        {
                            "event": "timed",
                            "stage": stage["name"],
                            "step_ms": each * 1e3,
                            "tokens_per_s": speed,
                            "steps": steps,
                        }
                    )
            if self.step % stage.get("log", 25) == 0 or self.step == 1:
                row = {k: float(v) for k, v in metrics.items()}
                if self.step % stage.get("check", 500) == 0:
                    row |= self.check(stage)
                self.write(
                    {
                        "stage": stage["name"],
                        "step": self.step,
                        "tokens": self.step * stage["rows"] * length,
                        **row,
                    }
                )
                if not np.isfinite(row["loss"]):
                    raise FloatingPointError(f"loss is {row['loss']} at step {self.step}")
            if time.time() - saved > 60:
                self.save()
                saved = time.time()
        self.write(
            {
                "event": "stage end",
                "stage": stage["name"],
                "steps": steps,
                "seconds": time.time() - began,
                **self.check(stage),
            }
        )

    def check(self, stage: dict) -> dict:
        """Losses on held-out rows of the stage's own shape, code and conversations apart."""
        out = {}
        for kind, share in (("code", 0.0), ("chat", 1.0)):
            self.held.rng = np.random.default_rng(1)
            self.held.queue.clear()
            ids = self.held.batch(
                stage["rows"], stage["length"] + self.recipe["draft_depth"] + 1, share
            )
            if stage["kind"] == "draft":
                _, metrics = self.draft_loss(
                    ids, stage["length"], torch.ones(stage["length"], device=ids.device)
                )
            else:
                _, metrics = self.trunk_loss(ids, stage["length"])
            out |= {f"held_{kind}_{k}": float(v) for k, v in metrics.items()}
        return out

    def run(self) -> None:
        """Stages from where we are to the end, then the weights."""
        stages = self.recipe["stages"]
        while self.stage < len(stages):
            self.run_stage(stages[self.stage])
            self.stage, self.step = self.stage + 1, 0
            self.save()
            self.export(f"after-{stages[self.stage - 1]['name']}.safetensors")
        self.export("final.safetensors")
        (self.run_dir / "steps.json").write_text(json.dumps(self.steps))

    def export(self, name: str) -> None:
        """Weights in bfloat16."""
        save_file(
            {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in self.net.p.items()},
            self.run_dir / name,
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).parent
    parser.add_argument("--recipe", type=Path, default=here / "recipe.json")
    parser.add_argument("--tokens", type=Path, default=here.parents[1] / ".train/tokens")
    parser.add_argument("--run", type=Path, default=here.parents[1] / ".train/run")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.run.mkdir(parents=True, exist_ok=True)
    recipe, device = json.loads(args.recipe.read_text()), torch.device(args.device)
    torch.manual_seed(recipe["seed"])
    torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.config.cache_size_limit = 64
    text, held = (Text(load(args.tokens, p), device, recipe["seed"]) for p in ("train", "held-out"))
    trainer = Trainer(
        recipe, text, held, args.run, device, compiled=device.type == "cuda" and not args.eager
    )
    if args.resume and (args.run / "checkpoint.pt").exists():
        trainer.resume()
    sizes = {k: len(v) for k, v in text.tokens.items()}
    trainer.write(
        {
            "event": "start",
            "parameters": sum(p.numel() for p in trainer.net.p.values()),
            "tokens": sizes,
            "torch": torch.__version__,
        }
    )
    trainer.run()


if __name__ == "__main__":
    main()

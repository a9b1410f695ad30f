"""A stand-in for the engine: deterministic tokens, no torch, switchable faults."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path

from arms import inprocess
from arms.spec import IN_PROCESS
from lumotree.errors import CheckpointError, RequestError
from lumotree.request import PHASES, Generation


@dataclass(frozen=True)
class FakeConfig:
    tree: str = "hydra27"
    passes: int = 5
    suffix: bool = True


def fake_config(spec):
    return FakeConfig(**IN_PROCESS[spec.name])


class FakeTokenizer:
    def encode_chat(self, messages, tools):
        text = " ".join(str(message.get("content")) for message in messages)
        return [len(word) for word in text.split()] + [7]

    def decode(self, ids):
        return " ".join(map(str, ids))


class FakeDecoder:
    def __init__(self, engine, config):
        self.engine, self.config = engine, config
        self.prefixes = {}

    def reset(self):
        self.prefixes.clear()

    def generate(self, prompt_ids, params, *, conversation=None, on_tokens=None):
        engine = self.engine
        if engine.fail_on is not None and len(prompt_ids) == engine.fail_on:
            raise RequestError("this request cannot be served")
        known = self.prefixes.get(conversation, [])
        reused = next(
            (i for i, (a, b) in enumerate(zip(known, prompt_ids, strict=False)) if a != b),
            min(len(known), len(prompt_ids)),
        )
        if conversation is not None:
            self.prefixes[conversation] = list(prompt_ids)
        ids = [token(params.seed, i) for i in range(params.max_tokens)]
        if engine.stray == self.config.tree and len(ids) > 2:
            ids[2] += 1
        per_step = 1 if self.config.tree == "root" else 3
        steps = -(-(len(ids) - 1) // per_step)
        time.sleep(engine.pause_s)
        return Generation(
            token_ids=ids,
            text=" ".join(map(str, ids)),
            finish_reason="length",
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(ids),
            prefix_reused_tokens=reused,
            ttft_s=0.01,
            e2e_s=0.01 + 0.004 * steps,
            steps=steps,
            accepted_by_depth=[steps] * (per_step - 1),
            phases_ms={phase: 0.8 * steps for phase in PHASES},
        )


class FakeEngine:
    max_context = 64

    def __init__(self, *, pause_s=0.0, stray=None, fail_on=None, has_mtp=True, weights="w1"):
        self.pause_s, self.stray, self.fail_on = pause_s, stray, fail_on
        self.has_mtp, self.weights = has_mtp, weights
        self.tokenizer = FakeTokenizer()

    def description(self):
        return {"name": "fake", "weights_sha256": self.weights, "device": "cpu"}

    def decoder(self, config):
        if config.passes and not self.has_mtp:
            raise CheckpointError("the checkpoint has no mtp.* tensors, which this arm needs")
        return FakeDecoder(self, config)

    def margin(self, prompt_ids, generated_ids, params):
        return 0.125


def token(seed, position):
    return hashlib.sha256(f"{seed}/{position}".encode()).digest()[0]


def install(engine, patch=None):
    """Put `engine` in place of the real one, for a test (with its monkeypatch) or a process."""
    put = patch.setattr if patch is not None else setattr
    put(inprocess, "load_engine", lambda model, **options: engine)
    put(inprocess, "load_tokenizer", lambda model: engine.tokenizer)
    put(inprocess, "decoder_config", fake_config)


def corpus_lines(conversations=2, turns=3):
    """A corpus in which each turn's prompt extends the one before."""
    lines = []
    for turn in range(turns):
        for number in range(conversations):
            text = " ".join(f"word{number}" * (1 + i) for i in range(2 + turn))
            lines.append(
                {
                    "custom_id": f"c{number}-t{turn}",
                    "method": "POST",
                    "url": "/v1/chat/completions",
                    "body": {"messages": [{"role": "user", "content": text}]},
                    "lumotree": {"conversation": f"c{number}", "turn": turn, "task": "t"},
                }
            )
    return lines


def write_corpus(path: Path, lines) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# Fields of a row that do not depend on the clock: with the fake, all of them.
def facts(row):
    return row.model_dump()

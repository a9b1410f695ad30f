"""Batch scaling as a library call: aggregate rates of in-process arms by active requests.

Every size serves the same requests, as many as the largest size, in groups: so sizes differ in
how many are decoded side by side and in nothing else. Arms of a size take turns, in an order that
rotates with run and size, and their buffers live as long as the size.

JSON of `lumotree bench batch`, batch.json in the folder of --out:

    schema_version, command, git_commit, started_at, machine, versions, model
    corpus        name, sha256
    options       arms, active, runs, prompt_tokens, tokens
    sampling      the rule, as in run.json
    requests      ids of the requests served
    rows          one per size, arm and run: see docs/metrics.md; `windows` are its groups
    unavailable   arm, active, reason: what has no buffers or kernels here
    token_ids     answers, equal (to the first answer of the request), first_difference
    cells, ratios, conclusion   see replay.scaling_summary
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from arms import inprocess
from arms.spec import parse_arms
from lumotree.errors import CheckpointError, LumoTreeError
from replay.corpus import Corpus, load_corpus
from replay.guards.equality import divergence
from replay.items import prompt_ids
from replay.machine import describe_machine, describe_versions, git_commit
from replay.scaling_options import ScalingOptions
from replay.scaling_summary import Row, summarise
from replay.selection import select

if TYPE_CHECKING:
    from lumotree.bench.batch import Group
    from lumotree.engine import DecoderConfig, Engine
    from lumotree.request import SamplingParams
    from lumotree.serve.slots import Slots

SCHEMA_VERSION = 1
WARMUP = 0
Note = Callable[[str], None]


@dataclass(frozen=True)
class Prompt:
    """One request as every size, arm and run serves it."""

    request_id: str
    ids: tuple[int, ...]
    params: SamplingParams


@dataclass
class Answers:
    """Compares each answer with the first one of its request."""

    first: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    answers: int = 0
    equal: int = 0
    first_difference: str | None = None

    def take(self, where: str, request_id: str, ids: tuple[int, ...]) -> None:
        """where: the arm, the size and the run, for the sentence."""
        origin, wanted = self.first.setdefault(request_id, (where, ids))
        place = divergence(wanted, ids)
        self.answers += 1
        self.equal += place is None
        if place is not None and self.first_difference is None:
            self.first_difference = (
                f"request {request_id}: {where} leaves {origin} at token {place}"
            )

    def as_dict(self) -> dict[str, Any]:
        return {
            "answers": self.answers,
            "equal": self.equal,
            "first_difference": self.first_difference,
        }


def scaling_study(
    corpus: Path,
    options: ScalingOptions,
    *,
    command: Sequence[str] = (),
    note: Note,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """The document above; `keep` gets it after each size, with what there is by then.

    Raises LumoTreeError for wrong use.
    """
    started = datetime.now(UTC)
    shared = options.replay
    read = load_corpus(corpus)
    if max(options.active) > len(read.requests):
        raise LumoTreeError(
            f"--active {max(options.active)}: {corpus} holds {len(read.requests)} requests, and "
            "those side by side must differ",
            "lower --active or name a larger --corpus",
        )
    specs = parse_arms(shared.arms)
    configs = {str(spec): inprocess.decoder_config(spec) for spec in specs}
    note(f"loading model {shared.model}")
    engine = inprocess.load_engine(
        shared.model,
        dtype=shared.dtype,
        device=shared.device,
        rows=shared.rows,
        threads=shared.threads,
    )
    if options.context > engine.max_context:
        raise LumoTreeError(
            f"--prompt-tokens {options.prompt_tokens} and --tokens {shared.cap} are "
            f"{options.context} positions; the model's context holds {engine.max_context}",
            "lower --prompt-tokens",
        )
    prompts = make_prompts(read, options, engine)
    bench = _Bench(engine, configs, prompts, options, note)
    about = {
        "schema_version": SCHEMA_VERSION,
        "command": list(command),
        "git_commit": git_commit(),
        "started_at": started.isoformat(),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "model": engine.description(),
        "corpus": {"name": corpus.name, "sha256": read.sha256},
        "options": {
            "arms": list(configs),
            "active": list(options.active),
            "runs": shared.runs,
            "prompt_tokens": options.prompt_tokens,
            "tokens": shared.cap,
        },
        "sampling": shared.rule().as_dict(),
        "requests": [prompt.request_id for prompt in prompts],
    }
    pairs = pairs_of([(str(spec), spec.name) for spec in specs])
    found = {}
    for index, active in enumerate(options.active):
        bench.measure(active, index)
        _release()
        found = about | bench.as_dict() | summarise(bench.rows, pairs)
        keep(found)
    if not bench.rows:
        first = bench.unavailable[0]
        raise LumoTreeError(
            f"arm '{first['arm']}' at --active {first['active']}: {first['reason']}"
        )
    return found


def make_prompts(corpus: Corpus, options: ScalingOptions, engine: Engine) -> list[Prompt]:
    """As many requests as the largest size: the last `prompt_tokens` ids of each conversation,
    which is repeated where it is shorter. None ends early.
    """
    prompts, length = [], options.prompt_tokens
    for request in select(corpus.requests, max(options.active)):
        ids = prompt_ids(corpus, request, engine)
        params = options.replay.rule().params(request.request_id, {})
        prompts.append(
            Prompt(
                request.request_id,
                tuple((ids * -(-length // len(ids)))[-length:]),
                replace(params, ignore_eos=True),
            )
        )
    return prompts


def pairs_of(arms: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """(arm, baseline) to compare, from (spec, name): each tree with every other kind of arm."""
    trees = [spec for spec, name in arms if name == "lumotree"]
    return [(tree, spec) for tree in trees for spec, name in arms if name != "lumotree"]


@dataclass
class _Bench:
    """What is measured with, and what has come of it."""

    engine: Engine
    configs: dict[str, DecoderConfig]
    prompts: Sequence[Prompt]
    options: ScalingOptions
    note: Note
    rows: list[Row] = field(default_factory=list)
    unavailable: list[dict[str, Any]] = field(default_factory=list)
    answers: Answers = field(default_factory=Answers)

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "unavailable": self.unavailable,
            "token_ids": self.answers.as_dict(),
        }

    def measure(self, active: int, shift: int) -> None:
        """A warm-up and all runs of one size. What it lays out is free when it returns."""
        laid = self._lay_out(active)
        for run in range(WARMUP, self.options.replay.runs + 1):
            for arm in rotated(list(laid), shift + run):
                groups = self._serve(laid[arm], arm, active, run)
                if run != WARMUP:
                    together = min(active, getattr(laid[arm].batch, "together", active))
                    row = make_row(arm, active, run, together, groups)
                    self.rows.append(row)
                    self.note(f"{active} active, run {run}, {arm}: {row['tok_s']:.1f} tok/s")

    def _lay_out(self, active: int) -> dict[str, Slots]:
        """Buffers of every arm that can have them."""
        from lumotree.prefix import PrefixStore
        from lumotree.serve.slots import make_slots

        laid = {}
        for arm, config in self.configs.items():
            try:
                # A store without room: every prompt is prefilled afresh.
                laid[arm] = make_slots(
                    self.engine, config, active, self.options.context, PrefixStore(0)
                )
            except CheckpointError:
                raise
            except LumoTreeError as error:
                self.unavailable.append({"active": active, "arm": arm, "reason": str(error)})
                self.note(f"{active} active, {arm}: {error}")
                _release()
        return laid

    def _serve(self, slots: Slots, arm: str, active: int, run: int) -> list[Group]:
        """All requests in groups; a warm-up takes one group."""
        from lumotree.bench.batch import groups_of, serve_group, settler

        settle, served = settler(self.engine.model.device), []
        for members in groups_of(len(self.prompts), active):
            prompts = [self.prompts[member] for member in members]
            served.append(serve_group(slots, [(p.ids, p.params) for p in prompts], settle))
            where = f"{arm} at {active} active ({f'run {run}' if run else 'warm-up'})"
            for prompt, ids in zip(prompts, served[-1].token_ids, strict=True):
                self.answers.take(where, prompt.request_id, ids)
            if run == WARMUP:
                break
        return served


def rotated(names: Sequence[str], shift: int) -> list[str]:
    """The same names, another one first."""
    shift %= max(1, len(names))
    return [*names[shift:], *names[:shift]]


def make_row(
    arm: str, active: int, run: int, together: int, served: Sequence[Group]
) -> dict[str, Any]:
    """Groups of one run pooled. together: requests of a forward."""
    windows = [group.window for group in served]
    rounds, tokens = sum(w.rounds for w in windows), sum(w.tokens for w in windows)
    seconds = sum(w.seconds for w in windows)
    ms_per_round = 1e3 * seconds / rounds
    phases, later = None, rounds - len(windows)
    if later:
        phases = {
            name: sum(w.phases_ms[name] for w in windows) / later for name in windows[0].phases_ms
        }
        phases["other"] = max(0.0, ms_per_round - sum(phases.values()))
    return {
        "active": active,
        "arm": arm,
        "run": run,
        "together": together,
        "tok_s": tokens / seconds,
        "tokens": tokens,
        "seconds": seconds,
        "rounds": rounds,
        "ms_per_round": ms_per_round,
        "tokens_per_step": tokens / (rounds * active),
        "ttft_s": median(ttft for group in served for ttft in group.ttft_s),
        "phases_ms_per_round": phases,
        "windows": [
            {"rounds": w.rounds, "tokens": w.tokens, "seconds": w.seconds} for w in windows
        ],
    }


def _release() -> None:
    """Gives memory of the last size back: seats and their batch refer to each other."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

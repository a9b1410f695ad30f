"""Sampler audit: tree decoding emits what autoregressive decoding would, in distribution.

Exact enumeration on small trees; on steps captured from a real run, the distribution of every
row against its definition, the draws against their noise, and many walks against the G-test.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lumotree.audit import target
from lumotree.audit.check import Check
from lumotree.audit.draws import Selector, recorded_draws
from lumotree.audit.enumeration import enumerations
from lumotree.audit.prompts import Prompt
from lumotree.audit.seeds import seed_checks
from lumotree.audit.walks import ALPHA, g_tests, reduced, tally
from lumotree.decoder import Decoder, DecoderConfig, Run, Verified
from lumotree.engine import Engine
from lumotree.errors import LumoTreeError
from lumotree.request import SamplingParams
from lumotree.sampling import TokenHistory, gumbel_noise
from lumotree.tree import TreeDescriptor

# Of a row's float64 probabilities.
TOLERANCE = 1e-12
# Direct draws per step that are compared with their noise, token by token.
DIRECT = 24
# Tokens of a prompt that a captured run starts from.
PROMPT_TOKENS = 384


@dataclass(frozen=True)
class SamplerPlan:
    """steps: how many are captured; runs: over how many prompts, of how many tokens each.

    walks per step; texts: length of the enumerated ones.
    """

    steps: int = 6
    runs: int = 3
    run_tokens: int = 96
    walks: int = 200_000
    texts: int = 4
    other_process: bool = True

    @classmethod
    def quick(cls) -> SamplerPlan:
        return cls(runs=2, run_tokens=48, walks=20_000, texts=3)

    @classmethod
    def probe(cls) -> SamplerPlan:
        """What one planted fault is looked for with."""
        return cls(2, 1, 24, 10_000, 3, other_process=False)


@dataclass(frozen=True)
class Captured:
    """One step of a real run, as selection met it. logits [rows, vocab].

    history is the run's own, copied; generated are the tokens it should stand for. path and
    pending are what the run took.
    """

    place: str
    tree: TreeDescriptor
    tokens: list[int]
    logits: Tensor
    params: SamplingParams
    prompt: tuple[int, ...]
    generated: tuple[int, ...]
    root_position: int
    history: TokenHistory
    path: tuple[int, ...]
    pending: int

    def targets(self) -> np.ndarray:
        """float64 [rows, vocab], by definition."""
        logits = self.logits.double().cpu().numpy()
        return target.tree_rows(
            logits, self.tree, self.tokens, self.params, self.generated, self.prompt
        )


def recording(decoder: Decoder, steps: list[Captured]) -> None:
    """Makes this decoder keep every step it selects from, with what was selected."""
    select = decoder.select

    def recorded(run: Run, verified: Verified) -> tuple[list[int], int]:
        tree, kept = verified.tree.restrict(tuple(map(bool, verified.active)))
        logits = verified.logits[list(kept)]
        history, prefix = copy.deepcopy(run.history), verified.rows.prefix
        path, pending = select(run, verified)
        place = {row: i for i, row in enumerate(kept)}
        steps.append(
            Captured(
                f"step {run.steps + 1}",
                tree,
                [verified.tokens[row] for row in kept],
                logits,
                run.params,
                tuple(run.tokens[: run.prompt_tokens]),
                tuple(run.tokens[run.prompt_tokens :]),
                prefix,
                history,
                tuple(place[row] for row in path),
                pending,
            )
        )
        return path, pending

    decoder.select = recorded


@torch.inference_mode()
def capture(
    engine: Engine, plan: SamplerPlan, prompts: Sequence[Prompt], seed: int
) -> list[Captured]:
    """The steps whose walks have most to decide, from sampled runs over a few prompts.

    Raises LumoTreeError when there is no prompt.
    """
    if not prompts:
        raise LumoTreeError("no prompt of the corpus can be decoded")
    decoder = engine.decoder(DecoderConfig("hydra27", 5 if engine.has_mtp else 0))
    steps: list[Captured] = []
    recording(decoder, steps)
    found: list[Captured] = []
    for i in range(plan.runs):
        prompt = prompts[(seed + i) % len(prompts)]
        params = SamplingParams(
            seed=seed * plan.runs + i, max_tokens=plan.run_tokens, ignore_eos=True
        )
        steps.clear()
        decoder.generate(prompt.tokens[-PROMPT_TOKENS:], params)
        found += [replace(s, place=f"{prompt.name}, {s.place}") for s in steps]
    # Steps without drafts have one row and no walk.
    found = [step for step in found if len(step.tree) > 1] or found
    return sorted(found, key=_entropy, reverse=True)[: plan.steps]


def _entropy(step: Captured) -> float:
    """About how many nats a walk decides: entropies of the rows, weighted by their reach."""
    rows = (step.logits / max(step.params.temperature, 0.1)).softmax(-1)
    each = torch.special.entr(rows).sum(-1).tolist()
    reach = [1.0] * len(step.tree)
    for row, parent in enumerate(step.tree.parents):
        if parent >= 0:
            reach[row] = reach[parent] * rows[parent, step.tokens[row]].item()
    return sum(r * e for r, e in zip(reach, each, strict=True))


def audit_sampler(
    engine: Engine,
    plan: SamplerPlan,
    prompts: Sequence[Prompt],
    seed: int,
    planted=nullcontext,
) -> Iterator[Check]:
    """Checks as they are made; captured steps first, since a fault acts in them step by step.

    Production code runs inside `planted()`, the definitions outside of it or untouched by it.
    """
    with planted():
        for number, step in enumerate(capture(engine, plan, prompts, seed)):
            yield from step_checks(step, number, plan, seed)
        yield from enumerations(seed, plan.texts, first_step=plan.steps)
    yield from seed_checks(seed, plan.other_process)


@torch.inference_mode()
def step_checks(step: Captured, number: int, plan: SamplerPlan, seed: int) -> Iterator[Check]:
    """Everything about one captured step."""
    yield _siblings(step, number)
    rows = step.targets()
    yield _rows(step, rows, number)
    yield _draws(step, rows, number, seed)
    yield walk_check(step, rows, number, plan, seed)


def _siblings(step: Captured, number: int) -> Check:
    """Two siblings with one token: the walk takes the first, and the second's subtree is dead."""
    doubles = [
        row
        for row, children in enumerate(step.tree.children)
        if len({step.tokens[child] for child in children}) < len(children)
    ]
    reason = f"children of row {doubles[0]} share a token" if doubles else ""
    return Check("drafts", step.place, not doubles, reason, step=number)


def _rows(step: Captured, rows: np.ndarray, number: int) -> Check:
    """Each row's distribution, its penalties from its own root path, and where its noise stands."""
    with recorded_draws() as draws:
        Selector(step.logits.device).choose(
            step.tree,
            step.tokens,
            step.logits.double(),
            step.params,
            step.history,
            step.root_position,
        )
    apart = np.abs(draws.probabilities(rows.shape[1]) - rows).max(1)
    wrong = np.flatnonzero(~(apart <= TOLERANCE))
    reasons = []
    if len(wrong):
        reasons.append(
            f"{len(wrong)} of {len(rows)} rows have another distribution, the first row {wrong[0]} "
            f"by {apart[wrong[0]]:.1e}"
        )
    if draws.positions != [step.root_position + 1 + depth for depth in step.tree.depth]:
        reasons.append("noise stands at other positions than the tokens")
    if draws.seed != step.params.seed:
        reasons.append("noise is keyed by another seed than the request's")
    return Check(
        "rows",
        f"{step.place}, {len(rows)} rows",
        not reasons,
        "; ".join(reasons),
        {"largest difference of a probability": float(apart.max())},
        number,
    )


def _draws(step: Captured, rows: np.ndarray, number: int, seed: int) -> Check:
    """Selected paths and tokens against Gumbel-max over the defined distributions: what the run
    itself took, by whatever code it runs here, and what other seeds take."""
    selector = Selector(step.logits.device)
    with np.errstate(divide="ignore"):
        log_rows = np.log(rows)
    took = list(step.path), step.pending
    wrong = _wrong_draw(step, log_rows, step.params.seed, took)
    for i in range(DIRECT):
        if wrong:
            break
        params = replace(step.params, seed=seed * DIRECT + i)
        took = selector.choose(
            step.tree, step.tokens, step.logits, params, step.history, step.root_position
        )
        wrong = _wrong_draw(step, log_rows, params.seed, took)
    return Check("draws", f"{step.place}, {DIRECT + 1} draws", not wrong, wrong, step=number)


def _wrong_draw(
    step: Captured, log_rows: np.ndarray, seed: int, took: tuple[list[int], int]
) -> str:
    """A sentence where the walk of this seed is another by definition."""
    depth = torch.tensor(step.tree.depth)
    positions = step.root_position + 1 + depth
    noise = gumbel_noise(seed, positions, log_rows.shape[1], torch.float64)
    best = (log_rows + noise.numpy()).argmax(1)
    row, wanted = 0, [0]
    while children := [c for c in step.tree.children[row] if step.tokens[c] == best[row]]:
        row = children[0]
        wanted.append(row)
    if took == (wanted, int(best[row])):
        return ""
    return f"seed {seed} took rows {took[0]} and token {took[1]}, not {wanted} and {best[row]}"


def walk_check(
    step: Captured, rows: np.ndarray, number: int, plan: SamplerPlan, seed: int
) -> Check:
    """Many walks; rows that fewer than one of a hundred visits are in no test and left out."""
    reach = target.reach(step.tree, step.tokens, rows)
    small = reduced(
        step.tree,
        step.tokens,
        step.logits,
        rows,
        step.params,
        step.prompt,
        step.generated,
        reach >= 0.01,
    )
    found = tally(small, plan.walks, seed * plan.walks)
    tests = g_tests(found, small.rows)
    level = ALPHA / plan.steps / max(1, len(tests))
    worst = min(tests, key=lambda t: t.p, default=None)
    low = worst is not None and worst.p < level
    reasons = []
    if low:
        reasons.append(f"G-test of row {worst.row}: p = {worst.p:.1e} below {level:.1e}")
    if not tests:
        reasons.append(f"{plan.walks} walks are too few for a test")
    return Check(
        "walks",
        f"{step.place}, {plan.walks} walks, {len(tests)} rows tested",
        not reasons,
        "; ".join(reasons),
        {"smallest p, as -log10": float(-np.log10(max(worst.p, 1e-300))) if worst else 0.0},
        number,
    )

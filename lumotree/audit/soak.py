"""Soak: one long continuation over random trees, and many short requests in one slot.

Everything is compared with plain decoding in a slot of its own: token ids, and where bits are
equal on this machine the states too.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from typing import Any

import torch

from lumotree.audit.check import Check
from lumotree.audit.continuation import ALLOWANCE
from lumotree.audit.fresh import FreshProcesses, load_engine, same_engine
from lumotree.audit.prompts import Prompt
from lumotree.audit.surfaces import STATE_FLOOR, Boundary, distances
from lumotree.decoder import Decoder, DecoderConfig, Run, prefill
from lumotree.draft.plan import Proposal
from lumotree.engine import Engine
from lumotree.errors import LumoTreeError
from lumotree.request import SamplingParams
from lumotree.state import HybridState
from lumotree.tree import TreeDescriptor, tree_from_name

PLAIN = DecoderConfig("root", 0, False)
# Share of draft tokens that are the text's, and of steps without drafts.
RIGHT = 0.85
EMPTY = 0.05
TREES = 48
TREE_ROWS = 16
# A divergence is rounding where the two best tokens were this close, in processed logits.
CLOSE = 0.5
# Tokens that the long continuation has room for past its end: more than two steps emit.
SPARE = 64
PROMPT_TOKENS = 320
# Requests of the soak are short: it is their number that counts.
REQUEST_TOKENS = (128, 16)


@dataclass(frozen=True)
class SoakPlan:
    """tokens of the one continuation, requests; progress is reported each `stretch` tokens.

    side_by_side: on a processor, requests run in a process of their own beside the continuation.
    """

    tokens: int = 10_000
    requests: int = 500
    stretch: int = 1000
    side_by_side: bool = True

    @classmethod
    def quick(cls) -> SoakPlan:
        return cls(160, 6, 80, side_by_side=False)

    @classmethod
    def probe(cls) -> SoakPlan:
        """What one planted fault is looked for with."""
        return cls(0, 8, side_by_side=False)


def scripting(
    decoder: Decoder, text: Sequence[int], seed: int, trees: Sequence[TreeDescriptor]
) -> None:
    """Makes this decoder draft along a known text over `trees`, right or wrong by chance.

    text: prompt and what is to follow it. The decoder's own drafters run as they
    always do; their drafts are thrown away.
    """
    propose, choose = decoder.propose, random.Random(seed)
    vocab = decoder.model.config.vocab_size

    def scripted(run: Run, state: HybridState) -> Proposal:
        propose(run, state)
        tree = choose.choice(trees)
        proposal = Proposal.root_only(tree, run.tokens[-1])
        if choose.random() < EMPTY:
            return proposal
        at = len(run.tokens)
        follows = {0}
        for row in range(1, len(tree)):
            parent, place = tree.parents[row], at + tree.depth[row] - 1
            taken = {proposal.tokens[r] for r in tree.children[parent] if proposal.active[r]}
            token = choose.randrange(vocab)
            right = parent in follows and place < len(text) and choose.random() < RIGHT
            if right:
                token = text[place]
            usable = tree.default_active[row] and proposal.active[parent]
            if usable and token not in taken:
                proposal.put(row, token, "spine")
                if right:
                    follows.add(row)
        return proposal

    decoder.propose = scripted


def _random_tree(choose: random.Random) -> TreeDescriptor:
    """`near` bounds how far back a parent lies, so small means deep."""
    rows, near = choose.randint(2, TREE_ROWS), choose.choice((1, 2, 4))
    parents = [-1, *(choose.randrange(max(0, row - near), row) for row in range(1, rows))]
    return tree_from_name(",".join(map(str, parents)))


@torch.inference_mode()
def audit_soak(
    engine: Engine,
    plan: SoakPlan,
    prompts: Sequence[Prompt],
    seed: int,
    planted=nullcontext,
) -> Iterator[Check]:
    """Checks as they are made; the decoder under audit runs inside `planted()`."""
    if not plan.side_by_side or engine.model.device.type != "cpu":
        yield from _requests(engine, plan, prompts, seed, planted)
        yield from _continuation(engine, plan, prompts, seed, planted)
        return
    if planted is not nullcontext:
        raise ValueError("a fault cannot be planted in a process of its own")
    beside = SoakBeside(engine, plan, prompts, seed, ("requests",))
    try:
        yield from _continuation(engine, plan, prompts, seed, planted)
        yield from beside.checks()
    finally:
        beside.close()


class SoakBeside:
    """A soak in processes of its own, one for each part, at work from the beginning.

    The checks are those of `audit_soak`. Where a process fails its part is one failed check, with
    the last words of that process.
    """

    def __init__(
        self,
        engine: Engine,
        plan: SoakPlan,
        prompts: Sequence[Prompt],
        seed: int,
        parts: Sequence[str] = ("long continuation", "requests"),
    ) -> None:
        self.plan = plan
        self.seconds = self.cpu_seconds = 0.0
        job = {
            "engine": same_engine(engine),
            "plan": asdict(plan),
            "prompts": [(prompt.name, prompt.tokens) for prompt in prompts],
            "seed": seed,
        }
        self._parts = {part: FreshProcesses("soak", job | {"part": part}, 1) for part in parts}

    def checks(self) -> Iterator[Check]:
        """Waits for each process. Then `seconds` holds how long the slowest worked, `cpu_seconds`
        how much all of them did."""
        for part, process in self._parts.items():
            try:
                (answer,) = process.answers()
            except LumoTreeError as error:
                yield Check(part, "in a process of its own", False, error.message)
                continue
            self.seconds = max(self.seconds, answer["seconds"])
            self.cpu_seconds += answer["cpu_seconds"]
            yield from (Check(**fields) for fields in answer["checks"])

    def close(self) -> None:
        """Ends what still runs."""
        for process in self._parts.values():
            process.close()


@torch.inference_mode()
def soak_job(job: dict[str, Any]) -> dict[str, Any]:
    """One part of a soak, in a process of its own: the fields of its checks, and its seconds."""
    if job["part"] == "requests":
        os.nice(5)  # the continuation takes longest: requests give way to it
    prompts = [Prompt(name, tuple(tokens)) for name, tokens in job["prompts"]]
    plan, engine = SoakPlan(**job["plan"]), load_engine(job)
    began, worked = time.perf_counter(), time.process_time()
    checks = PARTS[job["part"]](engine, plan, prompts, job["seed"], nullcontext)
    return {
        "checks": [asdict(check) for check in checks],
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - worked,
    }


def _continuation(
    engine: Engine, plan: SoakPlan, prompts: Sequence[Prompt], seed: int, planted
) -> Iterator[Check]:
    """One request of many tokens; a check per stretch, and one of the state at its end.

    Where bits may differ so may a token: the request then begins again after the reference's, so
    that every token is compared.
    """
    if not plan.tokens:
        return
    prompt = prompts[seed % len(prompts)].tokens[-PROMPT_TOKENS:]
    tokens = min(plan.tokens, engine.max_context - len(prompt) - SPARE)
    # Neither run ends: a captured step that ends a request may have published its path or not.
    params = SamplingParams(seed=seed, max_tokens=tokens + SPARE, ignore_eos=True)
    plain = engine.decoder(PLAIN)
    wanted, reference = plain.begin(prompt, params)
    while len(wanted.output) < tokens + SPARE // 2:
        plain.step(wanted, reference)
    decoder = engine.decoder(DecoderConfig("hydra27", 2 if engine.has_mtp else 0, suffix=False))
    choose = random.Random(seed)
    # Captured steps know one tree; which of its rows are active differs all the same.
    trees = [decoder.tree] if engine.model.kernels else [_random_tree(choose) for _ in range(TREES)]
    scripting(decoder, wanted.tokens, seed, trees)
    with planted():
        run, state = decoder.begin(prompt, params)
        told = 0
        while told < tokens:
            goal = min(told + plan.stretch, tokens)
            while len(run.tokens) < len(prompt) + goal:
                decoder.step(run, state)
            wrong = _first_difference(run.tokens, wanted.tokens[: len(run.tokens)])
            if wrong is not None:
                wrong -= len(prompt)
                goal = min(wrong + 1, tokens)
            place = f"tokens {told + 1} to {goal} of {len(prompt)} + {tokens}"
            check = _tokens_check("long continuation", place, wrong, engine, wanted, goal)
            yield check
            if not check.passed:
                return
            if wrong is not None:
                run, state = _begin_after(decoder, wanted, wrong + 1)
            told = goal
        yield _end_state(engine, decoder, run, state, wanted, reference)


def _begin_after(decoder: Decoder, wanted: Run, known: int) -> tuple[Run, HybridState]:
    """A request that goes on after the reference's first `known` generated tokens."""
    tokens = wanted.tokens[: wanted.prompt_tokens + known]
    params = replace(wanted.params, max_tokens=wanted.params.max_tokens - known)
    run, state = decoder.open(tokens, params)
    run.history.add(tokens[wanted.prompt_tokens :])  # penalties count them as generated
    while not decoder.advance_prompt(run, state):
        pass
    return run, state


def _end_state(
    engine: Engine,
    decoder: Decoder,
    run: Run,
    state: HybridState,
    wanted: Run,
    reference: HybridState,
) -> Check:
    """Both states at the same length, reached by steps without drafts from the last publication.

    Where bits may differ the distance may be twice that of a prefill of the same tokens.
    """
    while state.length < reference.length:
        token = wanted.tokens[state.length]
        verified = decoder.verify(state, Proposal.root_only(decoder.tree, token))
        verified.rows.publish([0], verified.hidden)
    figures = {}
    if engine.row_multiple is None:
        afresh = engine.model.new_state(reference.length, mtp=False)
        engine.model.reserve(reference.length)
        prefill(engine.model, afresh, wanted.tokens[: reference.length])
        limits = _distances(afresh, reference)
        figures = _distances(state, reference)
        different = [
            name
            for name, far in figures.items()
            if not (isfinite(far) and far <= ALLOWANCE * max(limits[name], STATE_FLOOR))
        ]
    else:
        different = _different(state, reference, state.length)
    return Check(
        "state at the end",
        f"{state.length} tokens, {run.steps} steps, {sum(run.accepted_by_depth)} drafts accepted",
        not different,
        f"{', '.join(different)} differ" if different else "",
        figures,
        len(run.output),
    )


def _requests(
    engine: Engine, plan: SoakPlan, prompts: Sequence[Prompt], seed: int, planted
) -> Iterator[Check]:
    """Requests of every kind, one after another in the slots of three decoders."""
    choose = random.Random(seed)
    # A captured decoder takes long to make: its slot is reused, by the reference too.
    lasting = engine.decoder(PLAIN) if engine.model.kernels else None
    passes = 5 if engine.has_mtp else 0
    decoders = [
        engine.decoder(DecoderConfig(tree, min(passes, most)))
        for tree, most in (("hydra27", 5), ("chain-3", 3), ("hydra27", 2))
    ]
    for number in range(plan.requests):
        source = choose.choice(prompts).tokens
        length = choose.randint(1, min(REQUEST_TOKENS[0], len(source)))
        start = choose.randint(0, len(source) - length)
        prompt = source[start : start + length]
        params = SamplingParams(
            temperature=choose.choice((0.0, 0.6, 1.0)),
            presence_penalty=choose.choice((0.0, 1.0)),
            repetition_penalty=choose.choice((1.0, 1.1)),
            seed=choose.randrange(2**31),
            max_tokens=choose.randint(1, REQUEST_TOKENS[1]),
            ignore_eos=choose.random() < 0.5,
        )
        wanted, reference = _decode(lasting or engine.decoder(PLAIN), prompt, params)
        decoder = decoders[number % len(decoders)]
        with planted():
            run, state = _decode(decoder, prompt, params)
        wrong = _first_difference(run.output, wanted.output)
        place = f"request {number + 1}, {length} + {params.max_tokens} tokens"
        if wrong is None and run.finish_reason != wanted.finish_reason:
            reason = f"ended by {run.finish_reason}, not by {wanted.finish_reason}"
            yield Check("requests", place, False, reason, step=number)
            continue
        check = _tokens_check("requests", place, wrong, engine, wanted, number)
        if check.passed and engine.row_multiple is not None:
            shared = min(state.length, reference.length)
            different = _different_kv(state, reference, shared)
            if different:
                reason = f"{', '.join(different)} of {shared} tokens differ"
                check = Check("requests", place, False, reason, step=number)
        yield check


PARTS: dict[str, Callable[..., Iterator[Check]]] = {
    "long continuation": _continuation,
    "requests": _requests,
}


def _decode(
    decoder: Decoder, prompt: Sequence[int], params: SamplingParams
) -> tuple[Run, HybridState]:
    run, state = decoder.begin(prompt, params)
    while run.finish_reason is None:
        decoder.step(run, state)
    return run, state


def _tokens_check(
    name: str, place: str, wrong: int | None, engine: Engine, wanted: Run, step: int
) -> Check:
    """Equal tokens; where bits may differ, another token that was as good is no failure."""
    if wrong is None:
        return Check(name, place, True, step=step)
    prompt = wanted.tokens[: wanted.prompt_tokens]
    margin = engine.margin(prompt, wanted.output[:wrong], wanted.params)
    passed = engine.row_multiple is None and margin <= CLOSE
    reason = f"token {wrong + 1} differs, where the two best are {margin:.2g} apart"
    return Check(name, place, passed, "" if passed else reason, {"divergences": 1.0}, step)


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def _distances(state: HybridState, reference: HybridState) -> dict[str, float]:
    """Relative L2 of the worst layer, by surface; infinite for states of different length."""
    none = torch.zeros(1, 1)
    ours, theirs = (Boundary.of(s, 0, none, none) for s in (state, reference))
    apart = distances(ours, theirs)
    names = ("GDN state", "conv history", "new KV")
    return {name: apart[name].value if name in apart else inf for name in names}


def _different(state: HybridState, reference: HybridState, length: int) -> list[str]:
    """Surfaces of two states of `length` tokens that differ in a bit."""
    found = [
        name
        for name, a, b in (
            ("GDN state", state.recurrent, reference.recurrent),
            ("conv history", state.conv, reference.conv),
        )
        if not torch.equal(a, b)
    ]
    return found + _different_kv(state, reference, length)


def _different_kv(state: HybridState, reference: HybridState, length: int) -> list[str]:
    sides = (
        ("keys", state.kv.keys, reference.kv.keys),
        ("values", state.kv.values, reference.kv.values),
    )
    return [n for n, a, b in sides if not torch.equal(a[:, :, :length], b[:, :, :length])]

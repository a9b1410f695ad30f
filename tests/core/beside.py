"""Requests decoded beside each other, and what of their results must not depend on it."""

import torch

from lumotree.batch import Active
from lumotree.draft.plan import fill
from lumotree.draft.suffix import SuffixAutomaton


def facts(generation):
    return (generation.token_ids, generation.text, generation.steps, generation.accepted_by_row,
            generation.accepted_by_source)  # fmt: skip


def noted_fill():
    """`fill`, and what it was given: pending token and candidates, by the request's automaton."""
    drafts: dict[SuffixAutomaton, list] = {}

    def noted(plan, pending, candidates, suffix):
        drafts.setdefault(suffix, []).append((pending, candidates))
        return fill(plan, pending, candidates, suffix)

    return noted, drafts


@torch.inference_mode()
def rounds_of_all(batch, prompts, samplings):
    """All requests enter, then take rounds together until the first of them ends."""
    active = [
        Active(decoder, *decoder.begin(prompt, params))
        for decoder, prompt, params in zip(batch.decoders, prompts, samplings, strict=True)
    ]
    while not any(a.run.finish_reason for a in active):
        assert batch.step(active) == {}
    return [a.run for a in active]


@torch.inference_mode()
def run_alone(decoder, prompt, params):
    """A request's run to its end, and the state it leaves."""
    run, state = decoder.begin(prompt, params)
    while run.finish_reason is None:
        decoder.step(run, state)
    return run, state


@torch.inference_mode()
def decode_together(batch, prompts, samplings):
    """Each request enters one round after the one before it; rounds until all have ended."""
    waiting = list(enumerate(zip(prompts, samplings, strict=True)))
    active, done = [], {}
    while waiting or active:
        if waiting:
            number, (prompt, params) = waiting.pop(0)
            decoder = batch.decoders[number]
            active.append((number, Active(decoder, *decoder.begin(prompt, params))))
        for number, a in [x for x in active if x[1].run.finish_reason]:
            done[number] = facts(a.decoder.finish(a.run))
            active.remove((number, a))
        if active:
            batch.step([a for _, a in active])
    return [done[number] for number in sorted(done)]

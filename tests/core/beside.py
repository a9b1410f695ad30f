"""Requests decoded beside each other, and what of their results must not depend on it."""

import torch

from lumotree.batch import Active


def facts(generation):
    return (generation.token_ids, generation.text, generation.steps, generation.accepted_by_row,
            generation.accepted_by_source)  # fmt: skip


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

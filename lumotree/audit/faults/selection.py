"""Faults of selection: what the rows are sampled from, the noise, and the walk.

They patch `sample_rows` and `accept_walk` where the decode loop looks them up. Each works on the
rows of one step and on rows of many steps put together, which is how walks are audited.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from lumotree import decoder, sampling
from lumotree.audit.faults.base import Fault, Mutation, replaced

# Correlated draws share noise over this many positions: no walk is longer.
SHARED_POSITIONS = 64


def _rows(mutation: Mutation, change) -> list[AbstractContextManager]:
    """Patches sample_rows: change(logits, params, history, paths, positions) -> the same.

    It counts where a row's distribution or the position of its noise becomes another.
    """

    def make(sample_rows):
        def wrapped(*arguments):
            changed = change(*arguments)
            mutation.count += _differ(arguments, changed)
            return sample_rows(*changed)

        return wrapped

    return [replaced(decoder, "sample_rows", make)]


def _differ(arguments, changed) -> bool:
    if not torch.equal(arguments[4], changed[4]):
        return True
    return not torch.equal(_distribution(*arguments[:4]), _distribution(*changed[:4]))


def _distribution(logits, params, history, paths):
    counts = sampling.path_counts(history, paths)
    processed = sampling.process_logits(logits, params, counts, history.prompt_seen)
    return processed.argmax(-1) if params.greedy else processed.softmax(-1)


def flattened_history(mutation: Mutation) -> list[AbstractContextManager]:
    def change(logits, params, history, paths, positions):
        drafted = paths[paths >= 0].unique()
        if drafted.numel() == 0 or not _penalises(params):
            return logits, params, history, paths, positions
        return logits, params, history, drafted.expand(len(paths), -1), positions

    return _rows(mutation, change)


def shifted_rows(mutation: Mutation) -> list[AbstractContextManager]:
    def change(logits, *rest):
        return (logits if len(logits) == 1 else logits.roll(1, 0), *rest)

    return _rows(mutation, change)


def temperature_twice(mutation: Mutation) -> list[AbstractContextManager]:
    def change(logits, params, *rest):
        if not params.greedy and params.temperature != 1:
            params = replace(params, temperature=params.temperature**2)
        return (logits, params, *rest)

    return _rows(mutation, change)


def correlated_draws(mutation: Mutation) -> list[AbstractContextManager]:
    def change(logits, params, history, paths, positions):
        if not params.greedy:
            positions = positions - positions % SHARED_POSITIONS
        return logits, params, history, paths, positions

    return _rows(mutation, change)


def fixed_residual(mutation: Mutation) -> list[AbstractContextManager]:
    """At each row, the first token that ever left the tree there is the one that always does."""
    first: dict[tuple, int] = {}

    def make(accept_walk):
        def wrapped(children, tokens, active, sampled):
            path, pending = accept_walk(children, tokens, active, sampled)
            fixed = first.setdefault((tuple(tokens), path[-1]), pending)
            mutation.count += fixed != pending
            return path, fixed

        return wrapped

    return [replaced(decoder, "accept_walk", make)]


def unconditional_accept(mutation: Mutation) -> list[AbstractContextManager]:
    def make(accept_walk):
        def wrapped(children, tokens, active, sampled):
            path = [0]
            while below := [row for row in children[path[-1]] if active[row]]:
                path.append(below[0])
            mutation.count += any(
                tokens[row] != sampled[before] for before, row in zip(path, path[1:], strict=False)
            )
            return path, sampled[path[-1]]

        return wrapped

    return [replaced(decoder, "accept_walk", make)]


def _penalises(params) -> bool:
    return (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
    )


FAULTS = (
    Fault(
        "flattened penalty history",
        "penalties",
        "sampler",
        "Every row is penalised for the drafts of all rows, not for those of its own root path.",
        flattened_history,
    ),
    Fault(
        "shifted rows",
        "target distribution",
        "sampler",
        "Each row samples from the logits of the row before it.",
        shifted_rows,
    ),
    Fault(
        "temperature twice",
        "target distribution",
        "sampler",
        "Logits are divided by the temperature twice.",
        temperature_twice,
    ),
    Fault(
        "fixed residual",
        "pending token",
        "sampler",
        "The token that follows a rejection is drawn once and for all.",
        fixed_residual,
    ),
    Fault(
        "unconditional accept",
        "acceptance",
        "sampler",
        "The walk descends whether or not the sampled token is the child's.",
        unconditional_accept,
    ),
    Fault(
        "correlated draws",
        "noise",
        "sampler",
        "Neighbouring positions share their noise.",
        correlated_draws,
    ),
)

"""Batch scaling: the rate of rounds in which every seat is taken.

A group of requests, one a seat, is prefilled; then rounds are timed until the first request ends.
The rest of the answers is decoded untimed, so that all of their token ids can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lumotree.request import PHASES, SamplingParams

if TYPE_CHECKING:
    from lumotree.serve.slots import Slot, Slots

# Phases that a request's clock books; `other` is what they leave of a round.
BOOKED = tuple(name for name in PHASES if name != "other")


@dataclass(frozen=True)
class Window:
    """Full rounds of one group: `tokens` of all its requests, wall-clock `seconds`.

    phases_ms: what the requests' own clocks booked after the first round, mean over requests. The
    first is left out because drafts that run ahead are booked a round after their launch.
    """

    rounds: int
    tokens: int
    seconds: float
    phases_ms: dict[str, float]


@dataclass(frozen=True)
class Group:
    """A group's window; of each request, in order, its seconds to the first token and its ids."""

    window: Window
    ttft_s: tuple[float, ...]
    token_ids: tuple[tuple[int, ...], ...]


def groups_of(count: int, size: int) -> Iterator[tuple[int, ...]]:
    """Groups of `size` different requests that hold each of 0..count-1; the last is filled up
    from the start. Needs size <= count."""
    for start in range(0, count, size):
        yield tuple((start + place) % count for place in range(size))


def serve_group(
    slots: Slots,
    requests: Sequence[tuple[Sequence[int], SamplingParams]],
    settle: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Group:
    """Serves as many requests as there are slots, (prompt ids, parameters) each.

    settle() returns once the device has nothing to do.
    """
    for slot, (ids, params) in zip(slots, requests, strict=True):
        slot.open(ids, params, None)
        while not slot.prompt_done:
            slot.advance_prompt()
    window = time_full_rounds(slots, settle, clock)
    while left := [slot for slot in slots if not slot.finished]:
        _round(slots, left)
    answers = [slot.result() for slot in slots]
    for slot in slots:
        slot.close()
    return Group(
        window,
        tuple(answer.ttft_s for answer in answers),
        tuple(tuple(answer.token_ids) for answer in answers),
    )


def time_full_rounds(
    slots: Slots, settle: Callable[[], None], clock: Callable[[], float]
) -> Window:
    """Rounds of all slots, whose prompts are done, until the first request ends."""
    runs = [slot.run for slot in slots]

    def booked() -> dict[str, float]:
        return {name: sum(run.phases_ms[name] for run in runs) / len(runs) for name in BOOKED}

    before, rounds, early = sum(run.completion_tokens for run in runs), 0, booked()
    settle()
    started = clock()
    while not any(slot.finished for slot in slots):
        _round(slots, slots)
        rounds += 1
        if rounds == 1:
            early = booked()
    settle()
    seconds = clock() - started
    tokens = sum(run.completion_tokens for run in runs) - before
    return Window(
        rounds, tokens, seconds, {name: ms - early[name] for name, ms in booked().items()}
    )


def settler(device: torch.device) -> Callable[[], None]:
    """What waits until a device has nothing to do."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def _round(slots: Slots, those: Sequence[Slot]) -> None:
    """A round; a request that fails alone makes the whole measurement fail."""
    for error in slots.step(those).values():
        raise error

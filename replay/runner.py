"""The replay loop: arms interleaved request by request, one request in flight.

For each run, for each request, each arm serves it, in an order that rotates with the request,
so that slow drifts of the machine fall on all arms alike.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from arms.protocol import Arm, ArmRequest, ArmResult
from lumotree.errors import ArmError
from lumotree.request import SamplingParams
from replay.rows import WARMUP_RUN, Row, RowKey, make_row

# Enough steps to build every buffer and graph; a whole warm-up request would only cost time.
WARMUP_TOKENS = 64


@dataclass(frozen=True)
class Item:
    """One request made ready: token ids and parameters that all arms and runs share."""

    request: ArmRequest
    params: SamplingParams


@dataclass(frozen=True)
class Slot:
    """One row to come."""

    run: int
    item: Item
    arm: Arm

    @property
    def key(self) -> RowKey:
        return (self.arm.name, self.run, self.item.request.request_id)


class Progress(Protocol):
    """Who wants to know how far the replay is."""

    def begin(self, total: int, done: int) -> None: ...

    def note(self, text: str) -> None: ...

    def advance(self, row: Row) -> None: ...


def start_arms(arms: Sequence[Arm]) -> tuple[list[Arm], dict[str, dict[str, Any]]]:
    """Start all arms: those that are available, and a status for each by name.

    An arm that is not available is a status with its reason, never a failure of the run.
    """
    ready: list[Arm] = []
    status: dict[str, dict[str, Any]] = {}
    for arm in arms:
        try:
            status[arm.name] = {"status": "ok", "description": arm.start()}
            ready.append(arm)
        except ArmError as error:
            status[arm.name] = {"status": "unavailable", "reason": error.message}
    return ready, status


def schedule(arms: Sequence[Arm], items: Sequence[Item], runs: int) -> Iterator[Slot]:
    """Every slot of a replay in order. It depends on nothing else, so a resume repeats it."""
    for run in range(1, runs + 1):
        for index, item in enumerate(items):
            shift = (index + run - 1) % len(arms)
            for arm in [*arms[shift:], *arms[:shift]]:
                yield Slot(run, item, arm)


def replay(
    arms: Sequence[Arm],
    items: Sequence[Item],
    *,
    runs: int,
    warmup: int,
    done: Collection[RowKey],
    append: Callable[[Row], None],
    progress: Progress,
) -> None:
    """Serve every slot whose row is not in `done`, and hand each row over as it ends.

    Raises what `append` raises. A request that fails is a row with `error`.
    """
    if not arms:
        return
    slots = list(schedule(arms, items, runs))
    pending = [slot for slot in slots if slot.key not in done]
    progress.begin(len(slots), len(slots) - len(pending))
    if not pending:
        return
    warm_up(arms, items[:warmup], done, append, progress)
    for run in range(1, runs + 1):
        todo = [slot for slot in pending if slot.run == run]
        if not todo:
            continue
        for arm in arms:
            arm.new_run()
            rewarm_prefixes(arm, run, items, done)
        progress.note(f"run {run} of {runs}")
        for slot in todo:
            result = serve(slot.arm, slot.item)
            row = make_row(slot.arm.name, run, slot.item.request.request_id, result)
            append(row)
            progress.advance(row)


def warm_up(
    arms: Sequence[Arm],
    items: Sequence[Item],
    done: Collection[RowKey],
    append: Callable[[Row], None],
    progress: Progress,
) -> None:
    """Serve the beginnings of `items` through each arm, as rows that are in no rate."""
    for arm in arms:
        progress.note(f"warm-up of {arm.name}")
        for item in items:
            warm = replace(
                item, params=_capped(item.params, min(WARMUP_TOKENS, item.params.max_tokens))
            )
            row = make_row(arm.name, WARMUP_RUN, item.request.request_id, serve(arm, warm))
            if row.key not in done:  # a resumed process warms up again but records it once
                append(row)


def rewarm_prefixes(arm: Arm, run: int, items: Sequence[Item], done: Collection[RowKey]) -> None:
    """Bring back the prefix snapshots that a killed process took with it.

    What a resumed run has served of conversations that it left open is prefilled again,
    unrecorded, in order; then the next request reuses as much as it would have without the
    break. Each prompt extends the one before, so this costs about one prefill per conversation.
    """
    served, still_open = [], set()
    for item in items:
        if (arm.name, run, item.request.request_id) in done:
            served.append(item)
        else:
            still_open.add(item.request.conversation)
    for item in served:
        conversation = item.request.conversation
        if arm.in_process and conversation is not None and conversation in still_open:
            serve(arm, replace(item, params=_capped(item.params, 1)))


def serve(arm: Arm, item: Item) -> ArmResult:
    """One request through one arm; whatever goes wrong becomes the reason of a failed result."""
    try:
        return arm.run(item.request, item.params)
    except Exception as error:
        if os.environ.get("LUMOTREE_DEBUG") == "1":
            raise
        return ArmResult.failed(f"{type(error).__name__}: {error}")


def _capped(params: SamplingParams, max_tokens: int) -> SamplingParams:
    return replace(params, max_tokens=max_tokens)

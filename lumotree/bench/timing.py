"""Timings of the mechanism protocol: warm-up, a large write between, medians with p10 and p90.

arXiv 2609.23900: 20 warm-up and 100 timed iterations, a 256 MiB buffer written before each, the
accepted path cycling over every frontier; one captured graph for verification, one for
publication, eager calls beside them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

FLUSH_BYTES = 256 * 2**20
# Device cycles of idling before the clock starts, so that launches are queued when it does.
HEAD_START = 200_000


@dataclass(frozen=True)
class Spread:
    """Milliseconds of one stage over the timed iterations."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        ordered = sorted(values)

        def at(share: float) -> float:
            return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

        return cls(at(0.5), at(0.1), at(0.9))

    def as_dict(self) -> dict[str, float]:
        return {"median": self.median, "p10": self.p10, "p90": self.p90}


@dataclass(frozen=True)
class Protocol:
    warmup: int = 20
    timed: int = 100
    flush_bytes: int = FLUSH_BYTES


def time_stages(
    stages: dict[str, Callable[[], object]],
    before: Callable[[int], object],
    device: torch.device,
    protocol: Protocol,
) -> dict[str, Spread]:
    """Times stages run back to back, each by itself and `total` from first to last.

    before(i) sets up iteration i and is not timed.
    """
    scratch = torch.empty(protocol.flush_bytes, dtype=torch.uint8, device=device)
    names = list(stages)
    seen: dict[str, list[float]] = {name: [] for name in [*names, "total"]}
    for i in range(protocol.warmup + protocol.timed):
        before(i)
        scratch.fill_(i % 251)
        marks = _marks_cuda(stages) if device.type == "cuda" else _marks_host(stages)
        if i < protocol.warmup:
            continue
        for name, start, stop in zip(names, marks, marks[1:], strict=False):
            seen[name].append(stop - start)
        seen["total"].append(marks[-1] - marks[0])
    return {name: Spread.of(values) for name, values in seen.items()}


def _marks_host(stages: dict[str, Callable[[], object]]) -> list[float]:
    marks = [time.perf_counter() * 1e3]
    for stage in stages.values():
        stage()
        marks.append(time.perf_counter() * 1e3)
    return marks


def _marks_cuda(stages: dict[str, Callable[[], object]]) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(stages) + 1)]
    torch.cuda._sleep(HEAD_START)
    events[0].record()
    for event, stage in zip(events[1:], stages.values(), strict=True):
        stage()
        event.record()
    torch.cuda.synchronize()
    return [events[0].elapsed_time(event) for event in events]

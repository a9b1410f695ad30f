"""Device milliseconds of a step's stages, by events between the launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lumotree.decoder import Run

START = "start"
MAX_LAPS = 64


class Clock:
    """An event at each stage's end; silent without CUDA.

    What lies between a stage's end and the next `start` is nobody's: the device waits there.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.laps: list[tuple[str, torch.cuda.Event, tuple[Run, ...]]] = []
        self.runs: tuple[Run, ...] = ()
        self.spare: list[torch.cuda.Event] = []

    def clear(self) -> None:
        """Forgets what nobody booked: the work behind a request's last token."""
        self.spare += [event for _, event, _ in self.laps]
        self.laps = []

    def start(self, runs: Sequence[Run] | None = None) -> None:
        """From here on laps belong to `runs`, if given, else to those of the last start."""
        self.runs = self.runs if runs is None else tuple(runs)
        if len(self.laps) >= MAX_LAPS:  # forced paths book nothing
            self.clear()
        self.lap(START)

    def lap(self, name: str) -> None:
        if self.cuda:
            event = self.spare.pop() if self.spare else torch.cuda.Event(enable_timing=True)
            event.record()
            self.laps.append((name, event, self.runs))

    def book(self, until: str | None = None) -> None:
        """Waits for a lap, the last one (of that name), and books all stages up to it, each to
        the requests that took it."""
        if not self.laps:
            return
        last = len(self.laps) - 1
        while until is not None and self.laps[last][0] != until:
            last -= 1
        self.laps[last][1].synchronize()
        for (_, before, _), (name, event, runs) in zip(
            self.laps[:last], self.laps[1 : last + 1], strict=True
        ):
            if name != START:
                spent = before.elapsed_time(event)
                for run in runs:
                    run.phases_ms[name] += spent
        self.spare += [event for _, event, _ in self.laps[:last]]
        self.laps = self.laps[last:]

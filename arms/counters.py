"""A server's Prometheus counters: read, and differenced around one request.

They count since the server's start, so only differences mean anything, and only when nobody
else used the server in between.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# The same names under either prefix: vLLM's, and this project's server.
PREFIXES = ("vllm:", "lumotree:")
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?$")
POSITION = re.compile(r'position="(\d+)"')
STEPS = "spec_decode_num_drafts_total"
DRAFTED = "spec_decode_num_draft_tokens_total"
ACCEPTED = "spec_decode_num_accepted_tokens_total"
BY_DEPTH = "spec_decode_num_accepted_tokens_per_pos_total"
GENERATED = "generation_tokens_total"


@dataclass(frozen=True)
class Counters:
    """One reading; sums over engines and models of a server. by_depth: from draft depth 1."""

    generated: int
    steps: int
    drafted: int
    accepted: int
    by_depth: tuple[int, ...]

    @classmethod
    def read(cls, page: str) -> Counters | None:
        """From the text of /metrics; None when it has no counters of speculative decoding."""
        sums: dict[str, float] = {}
        depths: dict[int, float] = {}
        for line in page.splitlines():
            found = SAMPLE.match(line)
            if found is None or not found[1].startswith(PREFIXES):
                continue
            name = found[1].partition(":")[2]
            try:
                value = float(found[3])
            except ValueError:
                continue
            if name == BY_DEPTH:
                place = POSITION.search(found[2] or "")
                if place is not None:
                    depths[int(place[1])] = depths.get(int(place[1]), 0) + value
            else:
                sums[name] = sums.get(name, 0) + value
        if not {STEPS, DRAFTED, ACCEPTED, GENERATED} <= sums.keys():
            return None
        by_depth = tuple(int(depths.get(i, 0)) for i in range(max(depths, default=-1) + 1))
        whole = (int(sums[name]) for name in (GENERATED, STEPS, DRAFTED, ACCEPTED))
        return cls(*whole, by_depth)

    def __sub__(self, before: Counters) -> Counters:
        width = max(len(self.by_depth), len(before.by_depth))
        depths = (
            own - other
            for own, other in zip(
                _padded(self.by_depth, width), _padded(before.by_depth, width), strict=True
            )
        )
        return Counters(
            self.generated - before.generated,
            self.steps - before.steps,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(depths),
        )

    @property
    def fell(self) -> bool:
        """True for a difference over a restart of the server."""
        return min(self.generated, self.steps, self.drafted, self.accepted, *self.by_depth) < 0

    def as_dict(self) -> dict[str, int]:
        """As a row keeps it, for the guards."""
        return {
            "completion_tokens": self.generated,
            "steps": self.steps,
            "draft_tokens": self.drafted,
            "accepted_tokens": self.accepted,
        }


def _padded(values: tuple[int, ...], width: int) -> tuple[int, ...]:
    return values + (0,) * (width - len(values))

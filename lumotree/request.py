"""What goes into the decoder and what comes out of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal

from lumotree.errors import RequestError

FinishReason = Literal["stop", "length"]
PHASES = ("draft", "verify", "select", "publish", "other")
SOURCES = ("spine", "runner-up", "suffix", "rescue")
GREEDY_BELOW = 1e-6
# Receives each step's emitted token ids and the text that has become safe to show, in order;
# the prefill's token first, and at the end no ids and the rest of the text.
TokenCallback = Callable[[tuple[int, ...], str], None]


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of one request. Defaults are the replay protocol's.

    temperature 0 is greedy (ties to the lowest token id). top_k 0 and top_p 1 are off.
    Presence and frequency penalties count generated tokens; the repetition penalty counts
    prompt and generated tokens. `seed` keys the noise together with the absolute position.
    """

    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 20
    min_p: float = 0.0
    presence_penalty: float = 1.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Raises RequestError naming the first field that is out of range."""
        whole = isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop)
        rules = {
            "temperature": (0 <= self.temperature < math.inf, "a finite number, at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (_is_int(self.top_k) and self.top_k >= 0, "a whole number, 0 for off"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "from -2 to 2"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "from -2 to 2"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "above 0"),
            "seed": (_is_int(self.seed), "a whole number"),
            "max_tokens": (
                _is_int(self.max_tokens) and self.max_tokens >= 1,
                "a whole number, at least 1",
            ),
            "stop": (whole, "a tuple of non-empty strings"),
        }
        for name, (ok, wanted) in rules.items():
            if not ok:
                raise RequestError(
                    f"{name}={getattr(self, name)!r} is out of range", f"it must be {wanted}"
                )

    @property
    def greedy(self) -> bool:
        """Below this temperature, 1 / temperature blows rounding errors up to logit size."""
        return self.temperature < GREEDY_BELOW

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))


@dataclass
class Generation:
    """One finished request. Times are wall-clock seconds; phases are milliseconds.

    `ttft_s` runs from the call to the first emitted token (prefill and its selection);
    `e2e_s` to the last one. `token_ids` never holds a token after a stop; the end-of-text
    token itself is not among them but is counted in `completion_tokens`, as servers count it.
    `accepted_by_depth[d]` is the number of steps whose accepted path reached depth d + 1;
    `accepted_by_row[i]` of those whose accepted path held row i of the tree (row 0 the root).
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    prefix_reused_tokens: int
    ttft_s: float
    e2e_s: float
    steps: int
    accepted_by_depth: list[int] = field(default_factory=list)
    accepted_by_row: list[int] = field(default_factory=list)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    phases_ms: dict[str, float] = field(default_factory=dict)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

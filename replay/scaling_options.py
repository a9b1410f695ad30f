"""Options of `lumotree bench batch`, checked before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from arms.spec import AUTO, IN_PROCESS, parse_arms
from lumotree.errors import ArmError, LumoTreeError
from replay.job import ReplayOptions

# A first token that the prompt gives, and one that a timed round emits.
LEAST_TOKENS = 2


@dataclass(frozen=True)
class ScalingOptions:
    """What decides a measurement; `replay` holds the options that a replay has too."""

    replay: ReplayOptions
    active: tuple[int, ...]
    prompt_tokens: int = 512

    def __post_init__(self) -> None:
        """Raises LumoTreeError naming the option."""
        if self.prompt_tokens < 1:
            raise LumoTreeError(
                f"--prompt-tokens is {self.prompt_tokens}; it takes a whole number from 1"
            )
        for spec in parse_arms(self.replay.arms):
            if spec.name not in IN_PROCESS:
                raise ArmError(
                    f"--arms: '{spec}' runs in another process",
                    f"arms that run in this one: {', '.join(IN_PROCESS)}",
                )
            if spec.options.get("tree") == AUTO:
                raise ArmError(
                    f"--arms: '{spec}' chooses its tree on a corpus",
                    "name the tree, such as the one that lumotree breakeven found",
                )

    @classmethod
    def of(
        cls, active: str, prompt_tokens: int, tokens: int, greedy: bool = False, **replay: Any
    ) -> ScalingOptions:
        """From what the command line says. Raises LumoTreeError naming the option."""
        if tokens < LEAST_TOKENS:
            raise LumoTreeError(f"--tokens is {tokens}; it takes a whole number from 2")
        overrides = {"temperature": 0.0} if greedy else {}
        return cls(
            ReplayOptions(cap=tokens, overrides=overrides, **replay),
            parse_active(active),
            prompt_tokens,
        )

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.replay.cap


def parse_active(text: str) -> tuple[int, ...]:
    """`1,2,4` as sizes, smallest first. Raises LumoTreeError."""
    words = text.split(",")
    if not all(word.strip().isascii() and word.strip().isdigit() and int(word) for word in words):
        raise LumoTreeError(
            f"--active is '{text}'; it takes whole numbers from 1, joined by commas"
        )
    return tuple(sorted({int(word) for word in words}))

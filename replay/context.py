"""What a run folder says about its requests, for guards and statistics; tolerant of old ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from replay.guards.check import Prompt


@dataclass(frozen=True)
class RunContext:
    """The part of run.json that guards and statistics read; older folders leave fields empty."""

    prompts: dict[str, Prompt] = field(default_factory=dict)
    greedy: bool = False
    equal_bits: bool | None = None

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> RunContext:
        """From run.json. `requests` is absent in folders of the first release."""
        known = ("conversation", "prompt_tokens", "max_tokens")
        return cls(
            prompts={
                name: Prompt(**{key: about.get(key) for key in known})
                for name, about in run.get("requests", {}).items()
            },
            greedy=run.get("sampling", {}).get("temperature") == 0,
            equal_bits=run.get("model", {}).get("equal_bits"),
        )

    @property
    def conversations(self) -> dict[str, str | None]:
        """Conversation by request id, for resampling."""
        return {name: prompt.conversation for name, prompt in self.prompts.items()}

"""Sampling of one request: the protocol's values, the recorded ones, and what flags override."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lumotree.errors import LumoTreeError, RequestError
from lumotree.request import SamplingParams

MODES = ("protocol", "recorded")
RECORDED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


@dataclass(frozen=True)
class SamplingRule:
    """How a run samples. `overrides` are the flags that were given, by SamplingParams name."""

    mode: str = "protocol"
    cap: int = 1024
    seed: int = 0
    overrides: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises LumoTreeError naming the option."""
        if self.mode not in MODES:
            raise LumoTreeError(f"--sampling is '{self.mode}'; it takes {' or '.join(MODES)}")
        if self.cap < 1:
            raise LumoTreeError(f"--cap is {self.cap}; it takes a whole number from 1")
        for name, value in self.overrides.items():
            try:
                SamplingParams(**{name: value})
            except RequestError:
                flag = f"--{name.replace('_', '-')}"
                raise LumoTreeError(f"{flag} is {value:g}, which is out of range") from None

    def params(self, request_id: str, recorded: dict[str, Any]) -> SamplingParams:
        """The parameters of one request, equal for every arm and run. Raises RequestError.

        Stop strings are part of the work and stay as recorded in both modes.
        """
        stop = recorded.get("stop") or ()
        params = SamplingParams(
            max_tokens=self.cap,
            seed=request_seed(self.seed, request_id),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
        )
        if self.mode == "recorded":
            given = {name: recorded[name] for name in RECORDED if name in recorded}
            limit = recorded.get("max_completion_tokens", recorded.get("max_tokens"))
            if limit is not None:
                given["max_tokens"] = min(limit, self.cap)
            if given.get("top_k", 0) < 0:
                given["top_k"] = 0  # clients of some servers write -1 for off
            params = replace(params, **given)
        return replace(params, **self.overrides)

    def as_dict(self) -> dict[str, Any]:
        """What run.json keeps: the rule and the values it starts from."""
        values = asdict(SamplingParams()) | self.overrides
        for per_request in ("seed", "max_tokens", "stop", "ignore_eos"):
            del values[per_request]
        return {"mode": self.mode, "cap": self.cap, "seed": self.seed, **values}


def request_seed(seed: int, request_id: str) -> int:
    """A seed of 32 bits for one request, the same in every process and on every machine."""
    digest = hashlib.blake2b(f"{seed}:{request_id}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")

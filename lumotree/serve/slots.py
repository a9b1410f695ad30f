"""State slots: one per active request, all made at start-up, so that admission allocates none.

What a prefill needs beside its slot is not counted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lumotree.errors import LumoTreeError, RequestError
from lumotree.prefix import PrefixStore
from lumotree.request import Generation, SamplingParams

if TYPE_CHECKING:
    from lumotree.decoder import Decoder, DecoderConfig, Run
    from lumotree.engine import Engine
    from lumotree.state import HybridState

# Everything that a server sees may share prefixes: the whole prompt is compared, token by token.
SCOPE = "server"


class Slot:
    """One request's place: a decoder with a state slot of its own over the shared weights.

    `advance` does one piece of the request's work, a chunk of the prompt or one step; after it
    `run.fresh` and `run.fresh_logprobs` say what was emitted.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.run: Run | None = None
        self._state: HybridState | None = None
        self._request: tuple[list[int], SamplingParams, int | None] | None = None
        self._prompt_done = False

    def open(self, prompt_ids: Sequence[int], params: SamplingParams, logprobs: int | None) -> None:
        """Takes a request; its work begins with `advance`, on the worker's thread."""
        self._request = (list(prompt_ids), params, logprobs)

    @torch.inference_mode()
    def advance(self) -> None:
        """Raises RequestError for a request that the decoder refuses."""
        if self.run is None:
            ids, params, logprobs = self._request
            self.run, self._state = self.decoder.open(ids, params, SCOPE, logprobs=logprobs)
        if self._prompt_done:
            self.decoder.step(self.run, self._state)
        else:
            self._prompt_done = self.decoder.advance_prompt(self.run, self._state)

    @property
    def finished(self) -> bool:
        return self.run is not None and self.run.finish_reason is not None

    @property
    def stop_id(self) -> int | None:
        """The end-of-text token that ended the request; it is counted and not shown."""
        run = self.run
        return run.tokens[-1] if run.completion_tokens > len(run.output) else None

    def result(self) -> Generation:
        """The finished request; the last of its text is in `run.fresh` afterwards."""
        return self.decoder.finish(self.run)

    def close(self) -> None:
        """Free for the next request."""
        self.run = self._state = self._request = None
        self._prompt_done = False


def make_slots(
    engine: Engine, config: DecoderConfig, active: int, context: int, store: PrefixStore
) -> list[Slot]:
    """`active` slots of `context` positions that share one prefix store.

    Raises LumoTreeError when they do not fit beside the store's budget.
    """
    slots: list[Slot] = []
    free = free_bytes(engine.model.device)
    hint = "lower --active, --max-context or --prefix-mib"
    for number in range(1, active + 1):
        decoder = engine.decoder(config)
        decoder.snapshots = store
        try:
            with torch.inference_mode():
                state = decoder.reserve(context)
        except RequestError as error:
            raise LumoTreeError(f"slot {number} of {active}: {error.message}", hint) from None
        left = active
        if engine.model.device.type == "cuda":
            # What the slots took is known, with the buffers and graphs of captured steps.
            free, left = free_bytes(engine.model.device), active - number
        needed = left * state.nbytes + store.budget
        if free is not None and needed > free:
            raise LumoTreeError(
                f"{left} {'more ' if left < active else ''}slots of {context} tokens and the "
                f"prefix store need {needed >> 20} MiB; {free >> 20} MiB are free",
                hint,
            )
        slots.append(Slot(decoder))
    return slots


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free for states; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None

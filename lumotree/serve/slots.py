"""Slots: one per active request, all made at start-up, so that admission allocates none.

What a prefill needs beside its slot is not counted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lumotree.batch import Active, Batch, probe_rows
from lumotree.errors import LumoTreeError, RequestError
from lumotree.prefix import PrefixStore
from lumotree.request import Generation, SamplingParams

if TYPE_CHECKING:
    from lumotree.captured.batch import CapturedBatch
    from lumotree.decoder import Decoder, DecoderConfig, Run
    from lumotree.engine import Engine
    from lumotree.state import HybridState

# Everything that a server sees may share prefixes: the whole prompt is compared, token by token.
SCOPE = "server"


class Slot:
    """One request's place: a decoder with a state of its own over the shared weights.

    Its prompt is materialised by `advance_prompt`, chunk by chunk; once `prompt_done`, it takes
    part in the rounds of `step`. After either, `run.fresh` and `run.fresh_logprobs` say what was
    emitted.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.run: Run | None = None
        self.prompt_done = False
        self._state: HybridState | None = None
        self._request: tuple[list[int], SamplingParams, int | None] | None = None

    def open(self, prompt_ids: Sequence[int], params: SamplingParams, logprobs: int | None) -> None:
        """Takes a request; its work begins with `advance_prompt`, on the worker's thread."""
        self._request = (list(prompt_ids), params, logprobs)

    @torch.inference_mode()
    def advance_prompt(self) -> None:
        """Raises RequestError for a request that the decoder refuses."""
        if self.run is None:
            ids, params, logprobs = self._request
            self.run, self._state = self.decoder.open(ids, params, SCOPE, logprobs=logprobs)
        self.prompt_done = self.decoder.advance_prompt(self.run, self._state)

    @property
    def active(self) -> Active:
        return Active(self.decoder, self.run, self._state)

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
        self.prompt_done = False


class Slots(list[Slot]):
    """All slots of a server, and the rounds that they take together."""

    def __init__(self, slots: Sequence[Slot], batch: Batch | CapturedBatch) -> None:
        super().__init__(slots)
        self.batch = batch

    def step(self, slots: Sequence[Slot]) -> dict[int, Exception]:
        """One round for slots whose prompts are done. Returns which of them failed alone."""
        return self.batch.step([slot.active for slot in slots])


def make_slots(
    engine: Engine, config: DecoderConfig, active: int, context: int, store: PrefixStore
) -> Slots:
    """`active` slots of `context` positions that share one prefix store.

    Raises LumoTreeError when they do not fit beside the store's budget.
    """
    if engine.model.kernels and active > 1:
        return _captured_slots(engine, config, active, context, store)
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
    return Slots(slots, Batch([slot.decoder for slot in slots]))


def _captured_slots(
    engine: Engine, config: DecoderConfig, active: int, context: int, store: PrefixStore
) -> Slots:
    """Slots in the seats of one batch of captured graphs."""
    from lumotree.captured.batch import CapturedBatch, can_batch, most_seats

    if not can_batch(config):
        raise LumoTreeError(
            "rounds of several requests have no kernels for this arm's options",
            "serve it with --active 1, or leave out verify, attention, selection and operands",
        )
    with torch.inference_mode():
        batch = CapturedBatch(
            engine.model, engine.tokenizer, config, engine.runner, active, context
        )
    if engine.row_multiple is not None:  # tokens are promised to be those of a request alone
        known = probe_rows(engine.model, engine.runner.multiple, batch.rows)
        if known < batch.rows[-1]:
            raise LumoTreeError(
                f"products of more than {known} rows are not known to have equal bits here",
                f"serve with --active {most_seats(config, engine.runner, known)}",
            )
    free = free_bytes(engine.model.device)
    if free is not None and store.budget > free:
        raise LumoTreeError(
            f"the prefix store needs {store.budget >> 20} MiB beside {active} slots of {context} "
            f"tokens; {free >> 20} MiB are free",
            "lower --active, --max-context or --prefix-mib",
        )
    for decoder in batch.decoders:
        decoder.snapshots = store
    return Slots([Slot(decoder) for decoder in batch.decoders], batch)


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

"""State slots: one per active request, all made at start-up, so that admission cannot fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lumotree.request import Generation, SamplingParams

if TYPE_CHECKING:
    from lumotree.decoder import Decoder, DecoderConfig, Run
    from lumotree.engine import Engine


class Slot:
    """One request's place. `advance` does one piece of its work: a prompt chunk or a step."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.run: Run | None = None
        self.logprobs: tuple = ()
        self._state = None
        self._request: tuple[list[int], SamplingParams] | None = None

    def open(self, prompt_ids: Sequence[int], params: SamplingParams, logprobs: int | None) -> None:
        self._request = (list(prompt_ids), params)

    @torch.inference_mode()
    def advance(self) -> None:
        if self.run is None:
            self.run, self._state = self.decoder.begin(*self._request)
            self.run.drafted = 0
        else:
            self.decoder.step(self.run, self._state)

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
        return self.decoder._result(self.run)

    def close(self) -> None:
        """Free for the next request."""
        self.run = self._state = self._request = None


def make_slots(engine: Engine, config: DecoderConfig, active: int) -> list[Slot]:
    return [Slot(engine.decoder(config)) for _ in range(active)]

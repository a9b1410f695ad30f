"""Loads a model once and hands out decoders over it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from lumotree.decoder import Decoder, DecoderConfig, prefill
from lumotree.errors import LumoTreeError
from lumotree.exactness import PROBED_ROWS, ROW_MULTIPLES, probe_row_multiple
from lumotree.model.drafter import DRAFT_WEIGHTS
from lumotree.model.hybrid import HybridModel
from lumotree.model.runner import RowRunner
from lumotree.model.source import ModelSource, open_source
from lumotree.request import SamplingParams
from lumotree.sampling import TokenHistory, gumbel_noise, process_logits
from lumotree.text import ChatTokenizer

__all__ = ["Decoder", "DecoderConfig", "Engine"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROW_MODES = ("natural", "matched")


def pick_device(device: str = "auto") -> str:
    """`cpu` or `cuda`; auto is cuda where torch finds one. Raises LumoTreeError."""
    if device not in ("auto", "cpu", "cuda"):
        raise LumoTreeError(f"device {device!r} is unknown", "use auto, cpu, cuda")
    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        raise LumoTreeError("device cuda: this torch finds no CUDA device", "use device cpu")
    return ("cuda" if found else "cpu") if device == "auto" else device


class Engine:
    """Weights, tokenizer and row mode shared by every in-process arm."""

    def __init__(self, source: ModelSource, model: HybridModel, rows: str) -> None:
        self.source, self.model, self.rows = source, model, rows
        self.row_multiple = self._probe()
        # Kernels treat every row alike, whatever their number.
        fallback = 1 if model.kernels else ROW_MULTIPLES[0]
        self.runner = RowRunner(model, rows, self.row_multiple or fallback)

    def _probe(self) -> int | None:
        """The row multiple that gives equal bits on this machine, None when none does."""
        if not self.model.kernels:
            return probe_row_multiple(self.model)
        from lumotree.captured.probe import probe_equal_bits

        return 1 if probe_equal_bits(self.model, RowRunner(self.model, "natural", 1)) else None

    @classmethod
    def load(
        cls,
        model: str = "embedded",
        *,
        dtype: str = "auto",
        device: str = "auto",
        rows: str = "natural",
        threads: int | None = None,
        max_context: int | None = None,
    ) -> Engine:
        """Loads `embedded`, `rehearsal:SHAPE`, a folder or a hub id.

        dtype auto: float32 on CPU, bfloat16 on CUDA. max_context: positions of a request, prompt
        and answer; by default what the config declares. More can be computed, but text past the
        declared positions is beyond the model's training. Raises CheckpointError for a checkpoint
        that cannot be loaded, LumoTreeError for an option value that means nothing here.
        """
        for option, value, valid in (
            ("dtype", dtype, ("auto", *DTYPES)),
            ("rows", rows, ROW_MODES),
        ):
            if value not in valid:
                raise LumoTreeError(f"{option} {value!r} is unknown", f"use {', '.join(valid)}")
        device = pick_device(device)
        if threads is not None:
            torch.set_num_threads(threads)
        kind = DTYPES.get(dtype, torch.float32 if device == "cpu" else torch.bfloat16)
        source = open_source(model)
        loaded = HybridModel.load(source, kind, torch.device(device), max_context)
        return cls(source, loaded, rows)

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """Loaded on first use. Raises CheckpointError."""
        return ChatTokenizer.load(self.source.folder)

    @cached_property
    def _about_weights(self) -> dict[str, Any]:
        return {"weights_sha256": self.source.sha256(), **self.source.about()}

    @property
    def max_context(self) -> int:
        """Positions of a request: prompt and generated tokens together."""
        return self.model.config.max_position_embeddings

    @property
    def declared_context(self) -> int:
        """Positions that the model's config declares: what it was trained for."""
        return self.source.config.max_position_embeddings

    @property
    def has_mtp(self) -> bool:
        return self.model.mtp is not None

    def decoder(self, config: DecoderConfig) -> Decoder:
        """A decoder with a state slot and prefix store of its own.

        Raises CheckpointError when `config` drafts with an MTP head the checkpoint lacks, and
        LumoTreeError when a value of it is no choice.
        """
        if config.draft_weights not in DRAFT_WEIGHTS:
            raise LumoTreeError(
                f"draft_weights {config.draft_weights!r} is unknown",
                f"use {', '.join(DRAFT_WEIGHTS)}",
            )
        for name in ("passes", "first_passes", "draft_vocab", "round_rows"):
            if getattr(config, name) < 0:
                raise LumoTreeError(f"{name}={getattr(config, name)} is negative")
        kind: type[Decoder] = Decoder
        if self.model.kernels:
            from lumotree.captured.decoder import CapturedDecoder

            kind = CapturedDecoder
        return kind(self.model, self.tokenizer, config, self.runner)

    def description(self) -> dict[str, Any]:
        """What run.json says of the model and of the exactness that holds on this machine."""
        declared = self.declared_context
        beyond = {} if self.max_context == declared else {"declared_context": declared}
        return {
            "name": self.source.name,
            **self._about_weights,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.model.device.type,
            "rows": self.rows,
            "row_multiple": self.runner.multiple,
            "equal_bits": self.row_multiple is not None,
            "kernels": self.model.kernels,
            "equal_bits_probed_rows": PROBED_ROWS,
            "max_context": self.max_context,
            "has_mtp": self.has_mtp,
            **beyond,
        }

    @torch.inference_mode()
    def margin(
        self, prompt_ids: Sequence[int], generated_ids: Sequence[int], params: SamplingParams
    ) -> float:
        """Gap between the best and second-best token after prompt and generated ids.

        In units of processed logits with their noise (inf when one token alone is left): a gap
        near the rounding error explains a divergence, a wide one means a fault. Computed by a
        prefill of everything.
        """
        tokens = [*prompt_ids, *generated_ids]
        model = self.model
        state = model.new_state(len(tokens), mtp=False)
        model.reserve(len(tokens))
        hidden = prefill(model, state, tokens)
        logits = model.logits(hidden)
        history = TokenHistory(model.config.vocab_size, prompt_ids, model.device)
        history.add(generated_ids)
        scores = process_logits(logits, params, history.generated[None], history.prompt_seen)
        if not params.greedy:
            position = torch.tensor([len(tokens)], device=model.device)
            scores = scores + gumbel_noise(params.seed, position, model.config.vocab_size)
        best, second = scores.topk(2).values[0].tolist()
        return best - second

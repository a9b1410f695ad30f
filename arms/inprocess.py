"""Arms that run this project's decoder: autoregressive, MTP chains and the tree.

They differ in one DecoderConfig and in nothing else: same weights, same loop.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from arms.protocol import ArmRequest, ArmResult
from arms.spec import ArmSpec
from lumotree.errors import LumoTreeError
from lumotree.request import SamplingParams

if TYPE_CHECKING:
    from lumotree.engine import Decoder, DecoderConfig, Engine
    from lumotree.text import ChatTokenizer


def load_engine(model: str, **options: Any) -> Engine:
    """The engine that all in-process arms of a run share. Raises CheckpointError."""
    from lumotree.engine import Engine

    return Engine.load(model, **options)


def load_tokenizer(model: str) -> ChatTokenizer:
    """The tokenizer of a model without its weights. Raises CheckpointError."""
    from lumotree.model.checkpoint import resolve_model
    from lumotree.text import ChatTokenizer

    return ChatTokenizer.load(resolve_model(model))


def decoder_config(spec: ArmSpec) -> DecoderConfig:
    """What an in-process spec means: a tree, the number of MTP passes, suffix drafts or not."""
    from lumotree.engine import DecoderConfig

    if spec.name == "ar":
        return DecoderConfig(tree="root", passes=0, suffix=False)
    if spec.name.startswith("mtp-"):
        depth = int(spec.name.removeprefix("mtp-"))
        return DecoderConfig(tree=f"chain-{depth}", passes=depth, suffix=False)
    given: dict[str, Any] = dict(spec.options)
    if "passes" in given:
        given["passes"] = int(given["passes"])
    if "suffix" in given:
        given["suffix"] = given["suffix"] == "on"
    return DecoderConfig(**given)


class InProcessArm:
    """One decoder over the shared weights, with prefix snapshots of its own."""

    in_process = True

    def __init__(self, spec: ArmSpec, engine: Engine) -> None:
        self.name = str(spec)
        self.config = decoder_config(spec)
        self._engine = engine
        self._decoder: Decoder | None = None

    def start(self) -> dict[str, Any]:
        """Build the decoder; raises CheckpointError when drafts need MTP and there is none."""
        self._decoder = self._engine.decoder(self.config)
        return {"kind": "in-process", **asdict(self.config)}

    def new_run(self) -> None:
        self._decoder.reset()

    def run(self, request: ArmRequest, params: SamplingParams) -> ArmResult:
        try:
            generation = self._decoder.generate(
                list(request.prompt_ids), params, conversation=request.conversation
            )
        except LumoTreeError as error:
            return ArmResult.failed(str(error))
        return ArmResult.from_generation(generation)

    def close(self) -> None:
        self._decoder = None

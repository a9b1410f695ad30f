"""Arms that run this project's decoder: autoregressive, MTP chains and the tree.

They differ in one DecoderConfig and in nothing else: same weights, same loop.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arms.choice import HINT, TreeChoice
from arms.protocol import ArmRequest, ArmResult
from arms.spec import AUTO, IN_PROCESS, ArmSpec
from lumotree.errors import ArmError, LumoTreeError
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

    values = IN_PROCESS[spec.name] | spec.values()
    if isinstance(values.get("passes"), tuple):
        values["first_passes"], values["passes"] = values["passes"]
    return DecoderConfig(**values)


class InProcessArm:
    """One decoder over the shared weights, with prefix snapshots of its own."""

    in_process = True

    def __init__(self, spec: ArmSpec, engine: Engine) -> None:
        self.name = str(spec)
        self.auto = spec.options.get("tree") == AUTO
        self.config = None if self.auto else decoder_config(spec)
        self.choice: TreeChoice | None = None
        self._plan = spec.options.get("plan")
        self._engine = engine
        self._decoder: Decoder | None = None

    def start(self) -> dict[str, Any]:
        """Build the decoder; raises CheckpointError when drafts need MTP and there is none.

        tree=auto decodes with `choice`, or with the choice of its `plan=` file. Raises ArmError
        when there is neither, or when it was made for another model or device.
        """
        chosen = {}
        if self.auto:
            chosen = {"choice": self._chosen().as_dict()}
        self._decoder = self._engine.decoder(self.config)
        return {"kind": "in-process", **asdict(self.config), **chosen}

    @property
    def needs_choice(self) -> bool:
        """True for tree=auto without a file: whoever has a corpus must calibrate first."""
        return self.auto and self._plan is None and self.choice is None

    def _chosen(self) -> TreeChoice:
        if self.choice is None:
            if self._plan is None:
                raise ArmError(f"arm '{self.name}' has no calibration", f"{HINT}, then plan=FILE")
            self.choice = TreeChoice.load(Path(self._plan))
        self.choice.check(self._engine.description())
        choice = self.choice
        self.config = decoder_config(
            ArmSpec(
                "lumotree",
                {
                    "tree": choice.tree,
                    "passes": str(choice.passes),
                    "suffix": "on" if choice.suffix else "off",
                },
            )
        )
        return choice

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

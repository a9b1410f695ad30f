"""Rehearsals: the embedded model widened to a published geometry.

`rehearsal:27b` costs what a 27B model costs and emits what the embedded model emits, so a run
shows real acceptance of drafts at the step times of the large shape. Figures of a rehearsal
carry LABEL: neither half says anything about what a trained model of that shape accepts.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lumotree.errors import CheckpointError
from lumotree.model.checkpoint import EMBEDDED, Checkpoint, weights_sha256
from lumotree.model.config import ModelConfig
from lumotree.model.rehearsal_layout import Layout
from lumotree.model.rehearsal_widen import WidenedWeights

PREFIX = "rehearsal:"
# Seed of the dead parts' random weights; no output depends on it beyond rounding.
SEED = 0
# Of the published models: what memory and cost are measured for, not what was trained.
POSITIONS = 262144


@dataclass(frozen=True)
class Shape:
    """What a geometry changes of the embedded model's config; head widths are the family's."""

    hidden_size: int
    num_hidden_layers: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool


# The text configs of the dense Qwen3.5 models; `tiny` is for tests.
SHAPES = {
    "27b": Shape(5120, 64, 16, 48, 24, 4, 17408, 248320, False),
    "9b": Shape(4096, 32, 16, 32, 16, 4, 12288, 248320, False),
    "4b": Shape(2560, 32, 16, 32, 16, 4, 9216, 248320, True),
    "2b": Shape(2048, 24, 16, 16, 8, 2, 6144, 248320, True),
    "0.8b": Shape(1024, 24, 16, 16, 8, 2, 3584, 248320, True),
    "tiny": Shape(1024, 12, 6, 12, 8, 2, 1664, 5000, False),
}


def label(shape: str) -> str:
    """Printed beside every figure of a rehearsal."""
    return f"acceptance of the embedded model, cost of the {shape.upper()} shape"


class RehearsalSource:
    """`rehearsal:SHAPE`: config and weights of that shape, tokenizer of the embedded model."""

    wrapped = False

    def __init__(self, name: str) -> None:
        self.name, self.folder = name, EMBEDDED
        self.shape = name.removeprefix(PREFIX)
        if self.shape not in SHAPES:
            raise CheckpointError(
                f"unknown rehearsal {name!r}", f"one of {', '.join(PREFIX + s for s in SHAPES)}"
            )
        self.small = ModelConfig.from_folder(EMBEDDED)
        embedded = json.loads((EMBEDDED / "config.json").read_text(encoding="utf-8"))
        self.raw = widen_config(embedded, SHAPES[self.shape])
        self.config = ModelConfig.from_dict(self.raw, name)

    def weights(self, device: torch.device, dtype: torch.dtype) -> WidenedWeights:
        """Made on `device` as they are taken; nothing of full size touches the host."""
        return WidenedWeights(Checkpoint(EMBEDDED), self.small, self.config, SEED, device, dtype)

    def has_mtp(self) -> bool:
        return Checkpoint(EMBEDDED).has_mtp()

    def sha256(self) -> str:
        """Over the embedded model's hash, the config and the seed: the weights follow from them."""
        recipe = [weights_sha256(EMBEDDED), self.raw, SEED]
        return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()

    def about(self) -> dict[str, Any]:
        placed = Layout.of(self.small, self.config).layers
        return {
            "label": label(self.shape),
            "rehearsal": {
                "shape": self.shape,
                "geometry": asdict(SHAPES[self.shape]),
                "seed": SEED,
                "embedded_sha256": weights_sha256(EMBEDDED),
                "live_layers": [i for i, source in enumerate(placed) if source >= 0],
                "trained_positions": self.small.max_position_embeddings,
                "note": "text past the trained positions is beyond the embedded model's training: "
                "its cost is real, its acceptance is not",
            },
        }


def widen_config(embedded: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """The embedded model's config.json at another shape, layers in its own repeating pattern."""
    interval = embedded["full_attention_interval"]
    kinds = [
        "linear_attention" if (i + 1) % interval else "full_attention"
        for i in range(shape.num_hidden_layers)
    ]
    changes = asdict(shape) | {"layer_types": kinds, "max_position_embeddings": POSITIONS}
    return embedded | changes

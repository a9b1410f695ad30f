"""What `--model` names: something with a config, a tokenizer folder and weights to take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lumotree.model.checkpoint import Checkpoint, resolve_model, weights_sha256
from lumotree.model.config import ModelConfig


class Weights(Protocol):
    """Tensors by the names of `lumotree.model.names`, with `trunk` as the trunk's prefix."""

    trunk: str

    def has_mtp(self) -> bool: ...

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Tensor `name`, on any device and in any float type. Raises CheckpointError."""


class ModelSource(Protocol):
    """folder: where tokenizer and chat template lie. raw: the text config as config.json has it.

    wrapped: whether it is a multimodal checkpoint on disk.
    """

    name: str
    folder: Path
    wrapped: bool
    config: ModelConfig
    raw: dict[str, Any]

    def weights(self, device: torch.device, dtype: torch.dtype) -> Weights:
        """Where tensors for a model of `dtype` on `device` come from. Raises CheckpointError."""

    def has_mtp(self) -> bool:
        """Whether there is a draft head. Raises CheckpointError."""

    def sha256(self) -> str:
        """Equal for sources of the same weights."""

    def about(self) -> dict[str, Any]:
        """What a reader of figures must know beyond the name."""


class FolderSource:
    """A Hugging Face folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.config = ModelConfig.from_folder(folder)
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.wrapped = "text_config" in raw
        self.raw = raw.get("text_config", raw)

    def weights(self, device: torch.device, dtype: torch.dtype) -> Checkpoint:
        return Checkpoint(self.folder)

    def has_mtp(self) -> bool:
        return Checkpoint(self.folder).has_mtp()

    def sha256(self) -> str:
        return weights_sha256(self.folder)

    def about(self) -> dict[str, Any]:
        return {}


def open_source(name: str) -> ModelSource:
    """`embedded`, `rehearsal:SHAPE`, a folder or a hub id. Raises CheckpointError."""
    from lumotree.model.rehearsal import PREFIX, RehearsalSource

    if name.startswith(PREFIX):
        return RehearsalSource(name)
    return FolderSource(name, resolve_model(name))

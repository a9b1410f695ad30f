"""Tensors of a Hugging Face checkpoint, by name and checked shape, from safetensors files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from lumotree.errors import CheckpointError

EMBEDDED = Path(__file__).resolve().parent.parent / "embedded"
# Text-only checkpoints name the trunk `model.`, multimodal ones `model.language_model.`.
TRUNK_PREFIXES = ("model.language_model.", "model.")


def resolve_model(name: str) -> Path:
    """Folder of `embedded`, of an existing path, or of a hub id (downloaded to the hub cache).

    Raises CheckpointError when it is none of these or the hub cannot be reached.
    """
    if name == "embedded":
        return EMBEDDED
    path = Path(name).expanduser()
    if path.exists():
        if not path.is_dir():
            raise CheckpointError(f"{name} is a file; a checkpoint is a folder with config.json")
        return path
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(
            f"no such folder: {name}", "give an existing folder, a hub id ORG/NAME, or 'embedded'"
        )
    from huggingface_hub import snapshot_download  # slow import, needed for hub ids only

    try:
        return Path(
            snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"])
        )
    except Exception as error:  # the hub raises many kinds; each means the same to the user
        raise CheckpointError(
            f"could not fetch {name} from the hub: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no reason given'}",
            "check the id and the network, or give a local folder",
        ) from error


class Checkpoint:
    """Lazy reader over the safetensors files of one folder.

    `take` checks every shape, so a wrong geometry is named before any arithmetic runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Path] = {}
        paths = self._weight_files()
        if not paths:
            raise CheckpointError(
                f"{folder} holds no .safetensors file", "convert the checkpoint to safetensors"
            )
        self._handles = {}
        for path in paths:
            try:
                self._handles[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
            for name in self._handles[path].keys():  # noqa: SIM118 - not a mapping
                if name in self._files:
                    raise CheckpointError(
                        f"{folder}: tensor {name} is in {self._files[name].name} and {path.name}",
                        "remove the stale file, or add model.safetensors.index.json",
                    )
                self._files[name] = path
        self.trunk = next(
            (p for p in TRUNK_PREFIXES if f"{p}embed_tokens.weight" in self._files), None
        )
        if self.trunk is None:
            raise CheckpointError(
                f"{folder}: no tensor named model.embed_tokens.weight",
                "only dense Qwen3.5-family text models can be loaded",
            )

    def _weight_files(self) -> list[Path]:
        """The files the index names, or every .safetensors file of a folder without one."""
        index = self.folder / "model.safetensors.index.json"
        if not index.is_file():
            return sorted(self.folder.glob("*.safetensors"))
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is no index: it has no weight_map") from error
        missing = sorted(name for name in names if not (self.folder / name).is_file())
        if missing:
            raise CheckpointError(f"{index} names {missing[0]}, which is not there")
        return sorted(self.folder / name for name in names)

    def has_mtp(self) -> bool:
        return "mtp.fc.weight" in self._files

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Tensor `name` on the CPU in its stored dtype. Raises CheckpointError."""
        if name not in self._files:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing")
        tensor = self._handles[self._files[name]].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self.folder}: tensor {name} has shape {tuple(tensor.shape)}, expected {shape}"
            )
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise CheckpointError(
                f"{self.folder}: tensor {name} is {tensor.dtype}; "
                "quantised weights are not supported"
            )
        return tensor


def weights_sha256(folder: Path) -> str:
    """SHA-256 over the names and contents of the folder's safetensors files."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()

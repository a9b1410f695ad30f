"""Writes a loadable model as a Hugging Face folder, one shard in memory at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lumotree.errors import CheckpointError, LumoTreeError
from lumotree.model.names import TRUNK, tensor_shapes
from lumotree.model.source import ModelSource
from lumotree.model.vision import vision_config, vision_tensors
from lumotree.text import ChatTokenizer

WRAPPERS = ("text", "multimodal")
MULTIMODAL_TRUNK = "model.language_model."
# A shard is whole on the host while it is written; one tensor may be larger than this alone.
SHARD_BYTES = 2 * 2**30
# What else a folder may hold of its tokenizer; only what is there is copied.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def export_model(
    source: ModelSource,
    folder: Path,
    *,
    wrapper: str = "text",
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device,
    note: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> list[Path]:
    """Weights in shards, config, tokenizer and chat template; returns the files written.

    wrapper `multimodal` names the tensors as servers of `Qwen3_5ForConditionalGeneration` want
    them and adds a vision tower of one tiny random layer; only text weights are exported.
    Matrices are stored in `dtype`, vectors too where that changes none of their values, else in
    float32. Tensors are made on `device`. `note` is called with a file's name and the bytes
    written so far and in all. config.json comes last, so that a broken export is no checkpoint.
    Raises LumoTreeError for a folder that is not empty or a disk too full.
    """
    if wrapper not in WRAPPERS:
        raise LumoTreeError(f"wrapper {wrapper!r} is unknown", f"use {' or '.join(WRAPPERS)}")
    shapes = tensor_shapes(source.config, source.has_mtp())
    shards = _plan(shapes, dtype.itemsize)
    total = sum(_count(shape) for shape in shapes.values()) * dtype.itemsize
    _prepare(folder, total)
    weights = source.weights(device, dtype)
    files, places, written = [], {}, 0
    for number, names in enumerate(shards, start=1):
        tensors = dict(_renamed(weights, names, shapes, wrapper, dtype))
        if wrapper == "multimodal" and number == len(shards):
            tensors |= vision_tensors(source.config.hidden_size, dtype)
        path = folder / (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{number:05}-of-{len(shards):05}.safetensors"
        )
        save_file(tensors, path, metadata={"format": "pt"})
        written += sum(t.numel() * t.element_size() for t in tensors.values())
        places |= dict.fromkeys(tensors, path.name)
        files.append(path)
        note(path.name, written, total)
        del tensors
    if len(shards) > 1:
        index = {"metadata": {"total_size": written}, "weight_map": places}
        files.append(_write(folder / "model.safetensors.index.json", index))
    for name in TOKENIZER_FILES:
        if (source.folder / name).is_file():
            files.append(Path(shutil.copyfile(source.folder / name, folder / name)))
    if source.about():
        files.append(_write(folder / "lumotree.json", {"model": source.name, **source.about()}))
    files.append(_write(folder / "config.json", export_config(source, wrapper, dtype)))
    return files


def export_config(source: ModelSource, wrapper: str, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of an export."""
    kind = str(dtype).removeprefix("torch.")
    text = source.raw | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": kind,
        "mtp_num_hidden_layers": int(source.has_mtp()),
        "tie_word_embeddings": source.config.tie_word_embeddings,
    }
    if wrapper == "text":
        return text
    # Ids behind the tokenizer's own, so that no text holds one.
    first = ChatTokenizer.load(source.folder).vocab_size
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": kind,
        "text_config": text,
        "vision_config": vision_config(source.config.hidden_size),
        "tie_word_embeddings": source.config.tie_word_embeddings,
        **{name: first + i for i, name in enumerate(names)},
    }


def _renamed(
    weights: Any, names: list[str], shapes: dict, wrapper: str, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        bare = name.removeprefix(TRUNK) if name.startswith(TRUNK) else None
        tensor = weights.take(name if bare is None else weights.trunk + bare, shapes[name])
        if bare is not None and wrapper == "multimodal":
            name = MULTIMODAL_TRUNK + bare
        yield name, _stored(tensor, dtype).cpu().contiguous()


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    narrow = tensor.to(dtype)
    if tensor.ndim == 1 and not torch.equal(narrow.float(), tensor.float()):
        return tensor.float()
    return narrow


def _plan(shapes: dict[str, tuple[int, ...]], itemsize: int) -> list[list[str]]:
    """Names by shard, in order, as many as fit SHARD_BYTES."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        size = _count(shape) * itemsize
        if shards[-1] and held + size > SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _prepare(folder: Path, total: int) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise LumoTreeError(f"{folder} is not empty", "name a new folder")
    except OSError as error:
        raise LumoTreeError(f"{folder} cannot be written: {error.strerror}") from None
    free = shutil.disk_usage(folder).free
    if free < total:
        raise LumoTreeError(
            f"{folder} has {free / 2**30:.1f} GiB free, the export needs {total / 2**30:.1f}"
        )


def _write(path: Path, content: dict[str, Any]) -> Path:
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}") from None
    return path

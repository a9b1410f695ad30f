"""What this machine can run, and why not the rest: facts for `lumotree doctor`."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lumotree.engine import DTYPES, pick_device
from lumotree.errors import LumoTreeError
from lumotree.model.config import ModelConfig
from lumotree.model.names import tensor_shapes
from lumotree.model.rehearsal import PREFIX, SHAPES
from lumotree.model.source import ModelSource, open_source
from lumotree.ops.table import has_kernels
from lumotree.state import StateBuffers
from lumotree.tree import MAX_ROWS
from replay.launching import launches
from replay.machine import describe_machine, describe_versions

# A model fits when it leaves this part of the free memory to activations and captured graphs.
FITS = 0.9
# Package, the name it is imported by, and what it is for here.
PACKAGES = (
    ("triton", "triton", "kernels on a GPU"),
    ("pyarrow", "pyarrow", "lumotree export --format parquet"),
    ("sglang", "sglang", "the server of arm sglang-eagle"),
    ("vllm", "vllm", "the server of arm vllm-mtp"),
)


def examine(
    model: str = "embedded",
    *,
    context: int = 32768,
    device: str = "auto",
    dtype: str = "auto",
    probe: bool = False,
) -> dict[str, Any]:
    """Everything the command prints, as JSON. Raises LumoTreeError for options without meaning.

    context: tokens of prompt and answer that a state must hold. probe: load `model` and find out
    whether tree rows have the bits of plain decoding here.
    """
    if dtype not in ("auto", *DTYPES):
        raise LumoTreeError(f"--dtype {dtype!r} is unknown", f"use auto, {', '.join(DTYPES)}")
    place = torch.device(pick_device(device))
    default = torch.float32 if place.type == "cpu" else torch.bfloat16
    kind = DTYPES.get(dtype, default)
    source = open_source(model)
    names = dict.fromkeys([model, "embedded", *(PREFIX + shape for shape in SHAPES)])
    gpus, free = graphics(), free_bytes(place)
    models = [about_model(open_source(name), context, place, kind, free) for name in names]
    external = launches(source, models[0]["context"], weight_bytes(source, torch.bfloat16), gpus)
    return {
        "machine": describe_machine() | {"memory": host_memory(), "gpus": gpus},
        "versions": describe_versions(),
        "packages": packages(),
        "device": place.type,
        "dtype": str(kind).removeprefix("torch."),
        "free_bytes": free,
        "kernels": kernel_path(place) | {"launches": kernel_launches(source.config, place, kind)},
        "models": models,
        "external": external,
        "probe": probe_model(model, place, dtype) if probe else None,
    }


def graphics() -> list[dict[str, Any]]:
    """Every CUDA device: what kernels ask of it, bytes and counts."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": p.name,
                "capability": f"{p.major}.{p.minor}",
                "multiprocessors": p.multi_processor_count,
                "shared_bytes_per_block": p.shared_memory_per_block_optin,
                "registers_per_multiprocessor": p.regs_per_multiprocessor,
                "l2_bytes": p.L2_cache_size,
                "total_bytes": p.total_memory,
                "free_bytes": torch.cuda.mem_get_info(index)[0],
            }
        )
    return found


def host_memory() -> dict[str, int]:
    """Bytes of this machine's memory, of a control group's limit where that is lower."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = (page * os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kib = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
        free = kib["MemAvailable"] * 1024
    except (OSError, ValueError, KeyError, IndexError):
        pass
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{n}").read_text()) for n in ("max", "current"))
        total, free = min(total, limit), min(free, limit - used)
    except (OSError, ValueError):  # no such group, or no limit: "max"
        pass
    return {"total_bytes": total, "available_bytes": free}


def free_bytes(device: torch.device) -> int:
    """Memory a model may take on `device`; the first GPU's where there are several."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host_memory()["available_bytes"]


def packages() -> list[dict[str, Any]]:
    """Optional packages, found without importing them."""
    found = []
    for package, module, use in PACKAGES:
        version = None
        if importlib.util.find_spec(module) is not None:
            try:
                version = metadata.version(package)
            except metadata.PackageNotFoundError:
                version = "unknown version"
        found.append({"name": package, "version": version, "use": use})
    return found


def kernel_path(device: torch.device) -> dict[str, str]:
    """Which operations a model on `device` runs, and why."""
    if has_kernels(device):
        interpreted = device.type != "cuda"
        why = "TRITON_INTERPRET is set: slow, for tests" if interpreted else "a CUDA device"
        return {"path": "triton", "why": why}
    if importlib.util.find_spec("triton") is None:
        return {"path": "torch", "why": "the package triton is not installed"}
    return {"path": "torch", "why": "Triton kernels need a CUDA device"}


def kernel_launches(
    config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> dict[str, dict[str, Any]]:
    """Block sizes that the kernels would choose on `device`; empty where they do not run."""
    if not has_kernels(device):
        return {}
    from lumotree.ops import attention_launch, gdn_triton, prefill
    from lumotree.ops.gdn import Geometry

    dk, dv = config.linear_key_head_dim, config.linear_value_head_dim
    chosen = {
        "gdn": gdn_triton.choose(Geometry.of(config), device),
        "attention": attention_launch.choose(config.head_dim, dtype, device),
        "prefill gdn": prefill.choose_delta(dk, dv, dtype, device),
        "prefill attention": prefill.choose_attention(config.head_dim, dtype, device),
    }
    return {name: asdict(launch) for name, launch in chosen.items()}


def about_model(
    source: ModelSource, context: int, device: torch.device, dtype: torch.dtype, free: int
) -> dict[str, Any]:
    """Whether weights and the state of `context` tokens fit `free` bytes."""
    config = source.config
    context = min(context, config.max_position_embeddings)
    weights = weight_bytes(source, dtype)
    if config.tie_word_embeddings and not has_kernels(device) and device.type == "cpu":
        # BLAS wants its own layout of lm_head, which then is no view of the embedding.
        weights += config.vocab_size * config.hidden_size * dtype.itemsize
    state = state_bytes(source, context, device, dtype)
    fixed = state_bytes(source, 0, device, dtype)
    per_token = (state - fixed) / context if context else 0.0
    room = FITS * free - weights - fixed
    return {
        "name": source.name,
        "context": context,
        "weights_bytes": weights,
        "state_bytes": state,
        "fits": weights + state <= FITS * free,
        "most_context": max(0, min(config.max_position_embeddings, int(room / per_token)))
        if per_token
        else 0,
        **{key: value for key, value in source.about().items() if key == "label"},
    }


def state_bytes(source: ModelSource, context: int, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes of one request's state at `context` tokens, rows of a tree past them included."""
    kv_dtype = dtype if has_kernels(device) else torch.float32
    capacity, meta = context + MAX_ROWS, torch.device("meta")
    has_mtp = source.has_mtp()
    return StateBuffers.empty(source.config, capacity, dtype, meta, has_mtp, kv_dtype).nbytes


def probe_model(model: str, device: torch.device, dtype: str) -> dict[str, Any]:
    """Loads the model and says whether equal bits hold, or why it could not be loaded."""
    from arms.inprocess import load_engine

    try:
        engine = load_engine(model, dtype=dtype, device=device.type, rows="natural", threads=None)
    except LumoTreeError as error:
        return {"error": str(error)}
    about = engine.description()
    return {key: about[key] for key in ("equal_bits", "row_multiple", "equal_bits_probed_rows")}


def weight_bytes(source: ModelSource, dtype: torch.dtype) -> int:
    """Bytes of all weights in `dtype`, the draft head's included."""
    shapes = tensor_shapes(source.config, source.has_mtp()).values()
    return sum(torch.Size(shape).numel() for shape in shapes) * dtype.itemsize

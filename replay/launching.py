"""Commands that start the external servers for a model, one request at a time.

SGLang: flags of 0.5.17. vLLM: documented options of `vllm serve` with native MTP drafts.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from arms.sglang import SglangArm
from arms.vllm import VllmArm
from lumotree.model.source import ModelSource

# The part of a GPU's memory that a server takes for weights, states and caches.
SHARE = 0.75
TENSOR_PARALLEL = (1, 2, 4, 8)
SGLANG_STEPS = 7
VLLM_DRAFTS = 5


def launches(
    source: ModelSource, context: int, weights_bytes: int, gpus: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """One entry an external arm: what to run, and what stands in the way here.

    weights_bytes in bfloat16. More GPUs are used when the weights outgrow one.
    """
    folder, prepare = _folder(source)
    parallel = _parallel(source, weights_bytes, gpus)
    found = []
    for arm, module, url, command in (
        ("sglang-eagle", "sglang", SglangArm.default_url, _sglang(folder, context, parallel, gpus)),
        ("vllm-mtp", "vllm", VllmArm.default_url, _vllm(folder, context, parallel)),
    ):
        words = ["lumotree", "replay", "CORPUS", "--model", source.name]
        words += ["--arms", f"ar lumotree {arm}:url={url}"]
        found.append(
            {
                "arm": arm,
                "prepare": prepare,
                "launch": command,
                "use": shlex.join(words),
                "tensor_parallel": parallel,
                "gpu_bytes": int(weights_bytes / SHARE / (parallel or 1)),
                "hindrances": _hindrances(source, module, parallel, gpus),
            }
        )
    return found


def _folder(source: ModelSource) -> tuple[str, str | None]:
    """A folder that servers can load, and the command that makes it where it must be made."""
    if source.name == str(source.folder) and source.wrapped:
        return source.name, None
    folder = source.name.rstrip("/").rsplit("/", 1)[-1].replace(":", "-") + "-export"
    return folder, shlex.join(["lumotree", "model", "export", source.name, folder])


def _parallel(
    source: ModelSource, weights_bytes: int, gpus: Sequence[dict[str, Any]]
) -> int | None:
    """The fewest GPUs that hold the weights and divide the key heads, None when none does."""
    if not gpus:
        return 1
    smallest = min(gpu["total_bytes"] for gpu in gpus)
    heads = source.config.linear_num_key_heads
    fitting = (
        n for n in TENSOR_PARALLEL if heads % n == 0 and weights_bytes <= SHARE * smallest * n
    )
    return next(fitting, None)


def _sglang(folder: str, context: int, parallel: int | None, gpus: Sequence[dict[str, Any]]) -> str:
    hopper = bool(gpus) and gpus[0]["capability"].startswith("9.")
    words = ["python3", "-m", "sglang.launch_server", "--model-path", folder]
    words += [*_address(SglangArm.default_url), "--dtype", "bfloat16"]
    words += ["--context-length", str(context), "--max-running-requests", "1"]
    words += ["--cuda-graph-max-bs", "1", "--mamba-ssm-dtype", "float32"]
    words += ["--attention-backend", "fa3" if hopper else "triton"]
    words += ["--sampling-backend", "pytorch", "--grammar-backend", "none"]
    words += ["--skip-tokenizer-init", "--disable-radix-cache", "--enable-metrics"]
    words += ["--mem-fraction-static", str(SHARE), "--speculative-algorithm", "NEXTN"]
    words += ["--speculative-num-steps", str(SGLANG_STEPS), "--speculative-eagle-topk", "1"]
    words += ["--speculative-num-draft-tokens", str(SGLANG_STEPS + 1)]
    if parallel and parallel > 1:
        words += ["--tp-size", str(parallel)]
    return shlex.join(words)


def _vllm(folder: str, context: int, parallel: int | None) -> str:
    words = ["vllm", "serve", folder, *_address(VllmArm.default_url)]
    words += ["--dtype", "bfloat16", "--max-model-len", str(context), "--max-num-seqs", "1"]
    words += ["--language-model-only", "--no-enable-prefix-caching"]
    drafts = {"method": "mtp", "num_speculative_tokens": VLLM_DRAFTS}
    words += ["--speculative-config", json.dumps(drafts)]
    if parallel and parallel > 1:
        words += ["--tensor-parallel-size", str(parallel)]
    return shlex.join(words)


def _address(url: str) -> list[str]:
    parts = urlsplit(url)
    return ["--host", str(parts.hostname), "--port", str(parts.port)]


def _hindrances(
    source: ModelSource, module: str, parallel: int | None, gpus: Sequence[dict[str, Any]]
) -> list[str]:
    found = []
    if importlib.util.find_spec(module) is None:
        found.append(f"{module} cannot be imported in this environment")
    if not gpus:
        found.append("no CUDA device here")
    elif parallel is None:
        found.append(f"too large for {TENSOR_PARALLEL[-1]} GPUs like these")
    elif parallel > len(gpus):
        found.append(f"needs {parallel} GPUs like these, {len(gpus)} found")
    if not source.has_mtp():
        found.append("the checkpoint has no mtp.* tensors to draft with")
    return found

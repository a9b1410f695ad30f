"""Compiles every kernel of a decode step and of a prefill for a GPU that need not be here.

python scripts/compile_step.py --gpu h200 --shape 27b

Nothing runs: launches are met by Triton's compiler and its own ptxas, on a machine with or
without a GPU. Two layers of the shape, one of each kind, and their MTP head; one request, several
requests and a prompt. Prints registers, bytes spilled and shared memory of every variant; exit
code 1 where one does not compile or asks for more shared memory than the GPU has.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lumotree.model.config import ModelConfig
from lumotree.model.rehearsal import SHAPES, widen_config
from lumotree.ops import device as devices
from lumotree.ops import table
from lumotree.ops.device import Limits

KIB = 1024
GPUS = {
    "h200": Limits(132, 227 * KIB, 65536, (9, 0)),
    "4090": Limits(128, 99 * KIB, 65536, (8, 9)),
    "gb10": Limits(48, 99 * KIB, 65536, (12, 1)),
}
CPU = torch.device("cpu")


class Absent:
    """Stands for the driver of a GPU that is not there."""

    def __init__(self, limits: Limits) -> None:
        major, minor = limits.capability
        self.target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CPU


class Compiled(dict):
    """Kernels by name and hash, as launches ask for them."""

    def watch(self) -> None:
        run = JITFunction.run

        def compile_only(function, *args, grid, warmup, **named):
            kernel = run(function, *args, grid=grid, warmup=True, **named)
            if hasattr(kernel, "result"):
                kernel = kernel.result()
            self[kernel.metadata.name, kernel.metadata.hash] = kernel
            return kernel

        JITFunction.run = compile_only


def resources(cubin: bytes) -> dict[str, int]:
    """REG (a thread's), STACK (bytes spilled) and the like of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    words = (word.split(":") for word in done.stdout.split() if word.count(":") == 1)
    return {name: int(value) for name, value in words if value.isdigit()}


class NoWeights:
    """Memory that nobody reads."""

    trunk = "model."

    def has_mtp(self) -> bool:
        return True

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)


class NoTokenizer:
    eos_ids = ()


def two_layers(shape: str, vocab: int) -> ModelConfig:
    import json

    from lumotree.model.checkpoint import EMBEDDED

    embedded = json.loads((EMBEDDED / "config.json").read_text(encoding="utf-8"))
    config = ModelConfig.from_dict(widen_config(embedded, SHAPES[shape]))
    return replace(config, layer_types=("linear_attention", "full_attention"), vocab_size=vocab)


def launch_all(config: ModelConfig, dtype: torch.dtype, tree: str, seats: int) -> None:
    """Everything that a server of this model would launch."""
    from lumotree.captured.batch import CapturedBatch
    from lumotree.captured.decoder import CapturedDecoder
    from lumotree.decoder import DecoderConfig, prefill
    from lumotree.model.hybrid import HybridModel
    from lumotree.model.runner import RowRunner

    model = HybridModel(config, NoWeights(), dtype, CPU)
    runner = RowRunner(model, "natural", 1)
    arms = [DecoderConfig("root", 0, False), DecoderConfig(tree, first_passes=3)]
    if devices.limits_of(CPU).capability >= (8, 9):
        arms.insert(1, DecoderConfig(tree, draft_weights="fp8"))
    for arm in arms:
        decoder = CapturedDecoder(model, NoTokenizer(), arm, runner)
        state = decoder.reserve(512)
        for name in decoder.graphs.launches:
            decoder.graphs.launch(name)
    batch = CapturedBatch(model, NoTokenizer(), arms[-1], runner, seats, 512)
    for captured in batch.rounds.values():
        for name in captured.launches:
            captured.launch(name)
    prefill(model, state, [0] * 300)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", choices=GPUS, default="h200")
    parser.add_argument("--shape", choices=SHAPES, default="27b")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tree", default="hydra27")
    parser.add_argument("--seats", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=8192, help="a stand-in: memory is made for it")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET=1 compiles nothing: unset it")
    limits = GPUS[args.gpu]
    driver.set_active(Absent(limits))
    devices.assumed, table.has_kernels = limits, lambda device: True
    compiled = Compiled()
    compiled.watch()
    with torch.inference_mode():
        launch_all(two_layers(args.shape, args.vocab), getattr(torch, args.dtype), args.tree,
                   args.seats)  # fmt: skip
    too_large = 0
    print(f"{'kernel':20} {'registers':>9} {'spilled':>8} {'shared':>8}")
    for (name, _), kernel in sorted(compiled.items()):
        found, shared = resources(kernel.asm["cubin"]), kernel.metadata.shared
        too_large += shared > limits.shared
        mark = "  does not fit" if shared > limits.shared else ""
        print(f"{name:20} {found.get('REG', 0):9} {found.get('STACK', 0):8} {shared:8}{mark}")
    print(f"{len(compiled)} variants for {args.gpu}, {too_large} too large")
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())

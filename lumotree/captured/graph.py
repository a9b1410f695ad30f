"""A run of launches, captured once and replayed; where there is no CUDA, simply called."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Captured:
    """`work` as a CUDA graph, called on construction to warm up and again to be captured.

    `work` takes nothing, returns nothing and reads fixed addresses; tensors that it leaves
    behind as attributes are those of the capture. Graphs of one `pool` may share memory that
    none of them leaves behind, so they run one at a time, on one stream.
    """

    def __init__(self, work: Callable[[], None], device: torch.device, pool=None) -> None:
        self._run = work
        if device.type != "cuda":
            return
        with torch.cuda.device(device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                work()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                work()
        self._run = graph.replay

    def __call__(self) -> None:
        self._run()

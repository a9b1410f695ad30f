"""A run of launches, captured once and replayed; where there is no CUDA, simply called."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture(work: Callable[[], object], pool=None) -> torch.cuda.CUDAGraph:
    """A graph of `work`, after runs on a side stream that load and allocate what it needs.

    Tensors that `work` leaves behind are those of the capture. Graphs of one `pool` may share
    memory that none of them leaves behind, so they run one at a time, on one stream.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph


def replayable(work: Callable[[], None], device: torch.device, pool=None) -> Callable[[], None]:
    """`work`, which reads fixed addresses, as the replay of a graph on CUDA; itself elsewhere."""
    if device.type != "cuda":
        return work
    with torch.cuda.device(device):
        return capture(work, pool).replay

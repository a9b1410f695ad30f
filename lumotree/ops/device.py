"""What a GPU gives its programs, as far as kernels choose their sizes by it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Limits:
    """multiprocessors; bytes of shared memory a program may have; registers of a multiprocessor;
    compute capability. The defaults are those of a kernel that no device runs (the interpreter):
    the smallest shared memory since 2017.
    """

    processors: int = 132
    shared: int = 99 * 1024
    registers: int = 65536
    capability: tuple[int, int] = (8, 0)

    @property
    def early_start(self) -> bool:
        """Whether a kernel may begin before the one in front ends (dependent launch), and load
        blocks through tensor descriptors."""
        return self.capability >= (9, 0)

    @property
    def hopper(self) -> bool:
        return self.capability[0] == 9


# What every device is taken to be, for compiling kernels on a machine without one.
assumed: Limits | None = None


def limits_of(device: torch.device) -> Limits:
    return assumed or _read(device)


@lru_cache(maxsize=64)
def _read(device: torch.device) -> Limits:
    if device.type != "cuda":
        return Limits()
    found = torch.cuda.get_device_properties(device)
    return Limits(
        found.multi_processor_count,
        found.shared_memory_per_block_optin,
        found.regs_per_multiprocessor,
        (found.major, found.minor),
    )

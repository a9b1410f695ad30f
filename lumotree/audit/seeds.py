"""Whether draws of different requests, positions and boots are independent, and repeatable."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from scipy.stats import kstest

from lumotree.audit.check import Check
from lumotree.audit.fresh import FreshProcesses
from lumotree.sampling import gumbel_noise

REQUESTS = 12
POSITIONS = 16
TOKENS = 1024
# Correlations of N independent pairs stay within this many times 1 / sqrt(N).
SIGMAS = 6.0
LEAST_P = 1e-6


def noise(seed: int, start: int = 100) -> np.ndarray:
    """Uniform numbers behind the noise of a request: float64 [POSITIONS, TOKENS]."""
    positions = torch.arange(start, start + POSITIONS)
    gumbel = gumbel_noise(seed, positions, TOKENS, torch.float64)
    return torch.exp(-torch.exp(-gumbel)).numpy()


def noise_digest(job: dict) -> list[str]:
    """SHA-256 of the noise of each seed, as a process finds it."""
    return [hashlib.sha256(noise(seed).tobytes()).hexdigest() for seed in job["seeds"]]


def seed_checks(seed: int, other_process: bool) -> Iterator[Check]:
    """Requests against each other, positions against the next, one boot against another."""
    seeds = [seed * REQUESTS + i for i in range(REQUESTS)]
    fresh = FreshProcesses("noise", {"seeds": seeds}, 1) if other_process else None
    try:
        rows = np.stack([noise(s).flatten() for s in seeds])
        yield _within("requests", rows)
        yield _within("positions", noise(seeds[0]))
        p = kstest(rows.flatten(), "uniform").pvalue
        yield Check(
            "seeds",
            "noise is uniform",
            bool(p > LEAST_P),
            f"p = {p:.1e}" if p <= LEAST_P else "",
        )
        ours = noise_digest({"seeds": seeds})
        again = noise_digest({"seeds": seeds[::-1]})[::-1]
        yield _same("another order of requests", ours, again)
        if fresh is not None:
            yield _same("another boot", ours, fresh.answers()[0])
    finally:
        if fresh is not None:
            fresh.close()


def _within(what: str, rows: np.ndarray) -> Check:
    """Rows of uniform numbers must be uncorrelated, and none may be another's copy."""
    r = np.abs(np.corrcoef(rows) - np.eye(len(rows))).max() * np.sqrt(rows.shape[1])
    return Check(
        "seeds",
        f"{len(rows)} {what} are independent",
        bool(r < SIGMAS),
        f"a correlation of {r:.1f} sigmas" if r >= SIGMAS else "",
        {"largest correlation, sigmas": float(r)},
    )


def _same(what: str, ours: list[str], theirs: list[str]) -> Check:
    same = ours == theirs and len(set(ours)) == len(ours)
    return Check(
        "seeds",
        f"{what} gives each request the same noise",
        same,
        "" if same else "it does not",
    )

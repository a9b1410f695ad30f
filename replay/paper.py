"""The LumoTree paper's figures (arXiv 2609.23900), to stand beside ours. Never our results.

All were measured by its authors on one DGX Spark (GB10) with Qwen3.8-27B at batch 1, over two
recorded corpora of 43 requests each. Ours come from other machines, models and corpora: the
tables show shapes side by side, not a race.
"""

from __future__ import annotations

from dataclasses import dataclass

MACHINE = "DGX Spark (GB10)"
MODEL = "Qwen3.8-27B"
SOURCE = f"its authors' figures, on {MACHINE} with {MODEL} and their corpora"


@dataclass(frozen=True)
class Rate:
    """A pooled decode rate in tok/s over `runs` runs, with the lowest and highest run."""

    tok_s: float
    low: float | None = None
    high: float | None = None
    runs: int | None = None


@dataclass(frozen=True)
class Step:
    """What an average step costs and emits."""

    ms: float
    tokens: float


@dataclass(frozen=True)
class Spans:
    """Milliseconds of a step by span; they do not add up to the step in the paper either."""

    target: float
    draft: float
    dispatch: float
    step: float


@dataclass(frozen=True)
class Drafting:
    """One drafting variant."""

    tok_s: float
    accepted: float
    draft_ms: float
    step_ms: float


# By role of the corpus: the one used during development, and the disjoint one.
RATES = {
    "first": {
        "ar": Rate(10.54, runs=1),
        "mtp-1": Rate(15.37, runs=1),
        "mtp-3": Rate(22.44, 22.06, 22.66, 3),
        "mtp-5": Rate(26.12, 26.04, 26.23, 3),
        "mtp-7": Rate(25.39, 24.00, 26.47, 3),
        "lumotree": Rate(28.13, 27.40, 28.78, 3),
        "sglang-eagle": Rate(29.69, 28.91, 30.90, 3),
    },
    "disjoint": {
        "ar": Rate(10.78),
        "mtp-5": Rate(27.52, 27.41, 27.71),
        "lumotree": Rate(30.76, 30.38, 31.14),
        "sglang-eagle": Rate(30.49, 30.24, 30.88),
    },
}

STEPS = {
    "ar": Step(94.9, 1.00),
    "mtp-1": Step(122.5, 1.88),
    "mtp-3": Step(142.9, 3.21),
    "mtp-5": Step(159.0, 4.15),
    "mtp-7": Step(180.7, 4.59),
    "lumotree": Step(189.0, 5.32),
    "lumotree:attention=stock": Step(204.2, 5.48),
}

# The exploratory variants, a series of their own: its deployed rate is not the one of RATES.
VARIANTS = {
    "lumotree": 28.79,
    "lumotree:attention=stock": 26.82,
    "lumotree:selection=separate": 29.40,
    "lumotree:operands=inline": 29.02,
}
SPANS = {
    "lumotree": Spans(112.14, 49.84, 20.81, 189.35),
    "lumotree:attention=stock": Spans(126.78, 49.94, 21.13, 204.44),
    "lumotree:selection=separate": Spans(112.32, 50.57, 21.08, 190.38),
    "lumotree:operands=inline": Spans(111.85, 49.85, 20.75, 188.97),
}
DRAFTING = {
    "lumotree": Drafting(28.69, 4.45, 49.84, 189.35),
    "lumotree:passes=3": Drafting(28.94, 3.97, 32.01, 171.27),
    "lumotree:passes=3/5": Drafting(27.05, 4.09, 47.71, 187.55),
}


def role(corpus: str) -> str:
    """Which of the paper's corpora a corpus of ours stands for."""
    return "disjoint" if corpus.startswith("disjoint") else "first"

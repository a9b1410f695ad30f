"""Repetition: a looping arm accepts nearly everything and looks twice as fast."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replay.guards.check import Check, Evidence
from replay.guards.paired import Excess, excess

MAX_PERIOD = 64
# A loop repeats its period at least this often and covers at least this share of the output.
REPEATS = 4
SHARE = 0.5
# Shorter outputs cannot be told from a list or a table.
MIN_TOKENS = 24
GRAM = 4
# Text has mostly distinct 4-grams; a loop with small variations has few. Above CLEAR no period
# can cover half of the output, which spares the search.
DISTINCT, CLEAR = 0.2, 0.75
BASELINE_SHARE = 0.5


def loops(ids: Sequence[int] | None) -> bool:
    """True when at least half of an output is one period repeated, or hardly any of it is new."""
    if ids is None or len(ids) < MIN_TOKENS:
        return False
    distinct = distinct_grams(ids)
    if distinct > CLEAR:
        return False
    return distinct < DISTINCT or longest_loop(ids) >= SHARE * len(ids)


def distinct_grams(ids: Sequence[int]) -> float:
    """Share of an output's 4-grams that are distinct."""
    x = np.asarray(ids, dtype=np.uint64)
    grams = x[: len(x) - GRAM + 1].copy()
    for shift in range(1, GRAM):
        # One odd multiplier: two 4-grams meet by chance once in 2^64 or so.
        grams = grams * np.uint64(0x9E3779B97F4A7C15) + x[shift : len(x) - GRAM + 1 + shift]
    return len(np.unique(grams)) / len(grams)


def longest_loop(ids: Sequence[int]) -> int:
    """Tokens of the longest stretch that repeats a period of up to MAX_PERIOD tokens."""
    x = np.asarray(ids)
    best = 0
    for period in range(1, min(MAX_PERIOD, len(x) // REPEATS) + 1):
        breaks = np.flatnonzero(x[period:] != x[:-period])
        edges = np.concatenate(([-1], breaks, [len(x) - period]))
        length = int(np.diff(edges).max()) - 1 + period
        if length >= REPEATS * period:
            best = max(best, length)
    return best


def check_loops(evidence: Evidence) -> Check:
    """Fails an arm that loops where the baseline does not.

    Looping that both share is the model's and the prompts': a warning, because it flatters
    every speculative arm alike.
    """
    known = [row for row in evidence.rows if row.token_ids is not None]
    if not known:
        return Check("repetition", "skip", "the arm reports no token ids")
    own = sum(loops(row.token_ids) for row in known)
    figures = {"looping": own, "outputs": len(known)}
    if evidence.baseline and not evidence.same_output:
        found = excess(evidence, lambda row: loops(row.token_ids))
        figures |= found.as_dict()
        if found.significant():
            return Check("repetition", "fail", _sentence(found, evidence), figures)
    share = own / len(known)
    if share >= BASELINE_SHARE:
        # Nobody beside it shows that the model itself loops, and drafts gain from it.
        alone = evidence.baseline_arm is None and any(row.accepted_by_depth for row in known)
        reason = f"{own} of {len(known)} outputs repeat themselves, which inflates acceptance"
        return Check("repetition", "fail" if alone else "warn", reason, figures)
    return Check("repetition", "pass", None, figures)


def _sentence(found: Excess, evidence: Evidence) -> str:
    return (
        f"{found.ours} of {found.requests} outputs repeat themselves, "
        f"{found.base} of {evidence.baseline_arm}'s"
    )

"""Empty outputs, stops at the cap, and a shift of output lengths against the baseline."""

from __future__ import annotations

import numpy as np

from replay.guards.check import Check, Evidence
from replay.guards.paired import excess
from replay.rows import Row

P_VALUE = 0.01
# A smaller shift of the mean log length does not change what a rate means.
SHIFT = 0.1
# With few requests no test is significant: then every output must have moved by this much.
EVERY = 0.25
MIN_REQUESTS = 4
EXACT = 12
RESAMPLES = 4000


def check_empty(evidence: Evidence) -> Check:
    """Fails an arm that answers nothing where the baseline answers."""
    own = sum(map(_empty, evidence.rows))
    figures = {"empty": own, "outputs": len(evidence.rows)}
    if evidence.baseline and not evidence.same_output:
        found = excess(evidence, _empty)
        figures |= found.as_dict()
        if found.significant():
            reason = (
                f"{found.ours} of {found.requests} outputs are empty, "
                f"{found.base} of {evidence.baseline_arm}'s"
            )
            return Check("empty_outputs", "fail", reason, figures)
    elif not evidence.baseline and own and 2 * own >= len(evidence.rows):
        reason = f"{own} of {len(evidence.rows)} outputs are empty"
        return Check("empty_outputs", "fail", reason, figures)
    return Check("empty_outputs", "pass", None, figures)


def check_length_stops(evidence: Evidence) -> Check:
    """Fails an arm that ends at the cap clearly more, or clearly less, often than the baseline.

    Both ways are tried, so each has to be rarer than a guard that looks one way.
    """
    own = sum(row.finish_reason == "length" for row in evidence.rows)
    figures = {"length_stops": own, "outputs": len(evidence.rows)}
    if not evidence.baseline or evidence.same_output:
        return Check("length_stops", "pass", None, figures)
    for word, wanted in (("reach the cap", True), ("end before the cap", False)):
        found = excess(
            evidence, lambda row, wanted=wanted: (row.finish_reason == "length") == wanted
        )
        if found.significant(P_VALUE):
            reason = (
                f"{found.ours} of {found.requests} outputs {word}, "
                f"{found.base} of {evidence.baseline_arm}'s"
            )
            return Check("length_stops", "fail", reason, figures | found.as_dict())
    return Check("length_stops", "pass", None, figures)


def check_lengths(evidence: Evidence) -> Check:
    """Two-sample permutation test of log output lengths, labels swapped within requests."""
    if not evidence.baseline or evidence.same_output:
        return Check("length_shift", "skip", "there is no other output to compare with")
    logs = np.array([_mean_log(ours) - _mean_log(base) for ours, base in evidence.by_request()])
    if len(logs) < MIN_REQUESTS:
        return Check("length_shift", "skip", f"fewer than {MIN_REQUESTS} shared requests")
    shift, p = float(logs.mean()), swap_test(logs)
    figures = {"ratio": float(np.exp(shift)), "p_value": p, "requests": len(logs)}
    every = bool((logs > np.log1p(EVERY)).all() or (logs < -np.log1p(EVERY)).all())
    if every or (p <= P_VALUE and abs(shift) > SHIFT):
        word = "longer" if shift > 0 else "shorter"
        reason = (
            f"outputs are {word} than {evidence.baseline_arm}'s: "
            f"{np.exp(shift):.2f} of its length (p {p:.2g}, {len(logs)} requests)"
        )
        return Check("length_shift", "fail", reason, figures)
    return Check("length_shift", "pass", None, figures)


def swap_test(differences: np.ndarray) -> float:
    """Two-sided p of the mean difference when signs are exchangeable (Fisher's permutation test).

    Exact up to EXACT pairs; beyond that RESAMPLES seeded draws, the observed one included.
    """
    n = len(differences)
    if n <= EXACT:
        signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        extra = 0
    else:
        signs = 1 - 2 * np.random.default_rng(0).integers(2, size=(RESAMPLES, n))
        extra = 1
    means = np.abs(signs @ differences)
    reached = int((means >= abs(differences.sum()) - 1e-12).sum())
    return (reached + extra) / (len(signs) + extra)


def _empty(row: Row) -> bool:
    if row.token_ids is not None:
        return not row.token_ids
    return row.completion_tokens <= 1 and row.finish_reason == "stop"


def _mean_log(rows: list[Row]) -> float:
    return float(np.mean([np.log(max(row.completion_tokens, 1)) for row in rows]))

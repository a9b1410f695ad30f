"""Was the arm given the prompt it should have been given?"""

from __future__ import annotations

from replay.guards.check import Check, Evidence, at

# Greedy arms of one model share most first tokens even across precisions.
FIRST_TOKEN_SHARE = 0.5
MIN_REQUESTS = 4


def check_prompts(evidence: Evidence) -> Check:
    """Fails when an arm counted other prompt tokens than the run sent, or than the baseline did.

    A chat template of its own, a truncated prompt or a wrong request shows here. What an arm
    does not report cannot be checked, and the check says so.
    """
    base = {row.request_id: row.prompt_tokens for row in evidence.baseline}
    wrong: dict[str, int] = {}
    compared = 0
    for row in evidence.rows:
        prompt = evidence.prompts.get(row.request_id)
        expected = prompt.prompt_tokens if prompt is not None else None
        if expected is None:
            expected = base.get(row.request_id)
        if not row.prompt_tokens or not expected:
            continue
        compared += 1
        if row.prompt_tokens != expected:
            wrong[row.request_id] = row.prompt_tokens - expected
    figures = {"compared": compared, "mismatched": len(wrong)}
    if wrong:
        low, high = min(wrong.values()), max(wrong.values())
        span = f"{low:+d}" if low == high else f"{low:+d} to {high:+d}"
        reason = (
            f"prompt tokens differ from what was sent in {len(wrong)} requests "
            f"({span}): {at(sorted(wrong))}"
        )
        return Check("prompt_tokens", "fail", reason, figures | {"low": low, "high": high})
    if not compared:
        if evidence.baseline_arm is None:
            return Check("prompt_tokens", "skip", "nothing says how long the prompts were")
        return Check("prompt_tokens", "skip", "the arm reports no prompt tokens")
    return Check("prompt_tokens", "pass", None, figures)


def check_first_tokens(evidence: Evidence) -> Check:
    """Greedy arms only: a prompt of the right length and the wrong words shows in first tokens."""
    if not evidence.greedy or not evidence.baseline:
        return Check("first_tokens", "skip", "only greedy arms must share first tokens")
    pairs = [
        (ours[0].token_ids[0], base[0].token_ids[0])
        for ours, base in evidence.by_request()
        if ours[0].token_ids and base[0].token_ids
    ]
    if len(pairs) < MIN_REQUESTS:
        return Check("first_tokens", "skip", f"fewer than {MIN_REQUESTS} shared outputs")
    equal = sum(ours == base for ours, base in pairs)
    figures = {"equal": equal, "requests": len(pairs)}
    if equal < FIRST_TOKEN_SHARE * len(pairs):
        reason = (
            f"only {equal} of {len(pairs)} greedy outputs begin with {evidence.baseline_arm}'s "
            "first token: another prompt or another model"
        )
        return Check("first_tokens", "fail", reason, figures)
    return Check("first_tokens", "pass", None, figures)

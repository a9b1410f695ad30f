"""All guards of all arms of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from replay.guards.check import Check, Evidence, Prompt
from replay.guards.counters import check_counts, check_first_burst, check_lifetime, check_resets
from replay.guards.equality import Equality
from replay.guards.lengths import check_empty, check_length_stops, check_lengths
from replay.guards.loops import check_loops
from replay.guards.prompts import check_first_tokens, check_prompts
from replay.rows import Row

CHECKS = (
    check_prompts,
    check_first_tokens,
    check_counts,
    check_lifetime,
    check_resets,
    check_first_burst,
    check_empty,
    check_length_stops,
    check_lengths,
    check_loops,
)
# Logits within this gap may change places by rounding alone, where bits are not equal: two
# units in the last place of a bfloat16 logit of 16 to 32.
ROUNDING_MARGIN = 0.25


def guard_arm(evidence: Evidence) -> list[Check]:
    """Every guard of one arm, in a fixed order."""
    return [check(evidence) for check in CHECKS]


def judge(
    rows: Sequence[Row],
    arms: Sequence[str],
    baseline: str | None,
    *,
    equality: Equality | None = None,
    prompts: Mapping[str, Prompt] | None = None,
    greedy: bool = False,
    equal_bits: bool | None = None,
) -> dict[str, dict[str, Any]]:
    """The `guards` entry of each arm for summary.json.

    Keys: those of the equality check (when it ran), `checks` (name, status, reason, figures)
    and `failed`, the names of the checks that withhold the headline.
    """
    done: dict[str, list[Row]] = {arm: [] for arm in arms}
    for row in rows:
        if row.completed and row.arm in done:
            done[row.arm].append(row)
    found = {}
    for arm in arms:
        other = [] if arm == baseline or baseline is None else done[baseline]
        entry = equality.of(arm) if equality is not None else {}
        evidence = Evidence(
            arm=arm,
            rows=done[arm],
            baseline_arm=baseline if sum(map(bool, done.values())) > 1 else None,
            baseline=other,
            prompts=prompts or {},
            greedy=greedy,
            same_output=bool(entry.get("token_ids_equal")) and bool(other),
        )
        checks = [] if equality is None else [equality_check(equality, arm, equal_bits)]
        checks += guard_arm(evidence) if done[arm] else []
        found[arm] = entry | {
            "checks": [check.as_dict() for check in checks],
            "failed": [check.name for check in checks if check.status == "fail"],
        }
    return found


def equality_check(equality: Equality, arm: str, equal_bits: bool | None) -> Check:
    """Token ids against the reference arm's.

    Where this machine does not give equal bits, divergences at near-ties are rounding and only
    warn, and so does a margin that was not measured, which says nothing; everywhere else one
    wrong token is a fault.
    """
    own = [mismatch for mismatch in equality.mismatches if mismatch.arm == arm]
    figures = {"compared": equality.compared.get(arm, 0), "mismatched": len(own)}
    if not own:
        if not figures["compared"]:
            return Check("token_ids", "skip", "nothing to compare with")
        return Check("token_ids", "pass", None, figures)
    measured = [m for m in own if m.margin is not None]
    wide = [m for m in measured if not m.margin <= ROUNDING_MARGIN]
    figures["unmeasured"] = len(own) - len(measured)
    status = "warn" if equal_bits is False and not wide else "fail"
    shown = (wide or own)[0]
    reason = f"token ids differ in {len(own)} of {figures['compared']} rows: {shown.sentence()}"
    return Check("token_ids", status, reason, figures)

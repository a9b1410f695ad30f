"""Sentences of the report: who won and why, what to be careful about. Plain words, no hedging."""

from __future__ import annotations

from typing import Any

from replay.report.arm import ArmView
from replay.report.view import RunView

# Below this many requests a 95 % interval is more a hint than a measure.
FEW = 20


def headline(view: RunView) -> str:
    """Which arm won on this machine, also when plain decoding did."""
    best = view.winner
    if best is None:
        if view.measured:
            return "No speed can be quoted: a guard withholds every arm that was measured."
        return "No arm completed a request, so there is no rate."
    base = view.baseline
    rate = f"{best.quoted:.1f} tokens per second"
    if base is None or len(view.measured) == 1:
        return f"Only {best.name} was measured: {rate}."
    if best is base:
        others = [a for a in view.measured if a is not best and not a.withheld]
        second = max(others, key=lambda arm: arm.rate or 0, default=None)
        if second is None:
            return f"{best.name} reaches {rate}; no other arm may be quoted."
        share = 100 * (second.rate or 0) / (best.quoted or 1)
        return (
            f"On this machine plain decoding wins: {best.name} reaches {rate}. The best other arm, "
            f"{second.name}, reaches {share:.0f} % of that."
        )
    if base.withheld:
        return f"The fastest arm that may be quoted is {best.name}: {rate}."
    ratio = (best.quoted or 0) / (base.rate or 1)
    entry = next((e for e in view.comparisons if e.get("arm") == best.name), None)
    if entry is not None and verdict_of(view, entry) == "not separated":
        reason = f" ({entry['reason']})" if entry.get("reason") else ""
        return (
            f"The highest rate on this machine is that of {best.name}: {rate}, {ratio:.2f} times "
            f"{base.name}. The two are not separated{reason}."
        )
    text = f"On this machine {best.name} wins: {rate}, {ratio:.2f} times {base.name}."
    others = [arm for arm in view.arms.values() if arm.quoted and arm not in (best, base)]
    if others:
        second = max(others, key=lambda arm: arm.quoted or 0.0)
        text += f" Next is {second.name} with {second.quoted:.1f}."
    return text


def why(view: RunView) -> str | None:
    """What the winner's lead (or the runner-up's lag) is made of: tokens and time per step."""
    best, base = view.winner, view.baseline
    if best is None or base is None or base.withheld:
        return None
    if best is base:
        others = [a for a in view.measured if a is not best and not a.withheld]
        best = max(others, key=lambda arm: arm.rate or 0, default=None)
        if best is None:
            return None
    tokens, ms = best.number("tokens_per_step"), best.number("ms_per_step")
    base_tokens, base_ms = base.number("tokens_per_step"), base.number("ms_per_step")
    if not (tokens and ms and base_tokens and base_ms):
        return None
    dearer = ms / base_ms
    text = (
        f"A step of {best.name} emits {tokens:.2f} tokens in {ms:.1f} ms; a step of {base.name} "
        f"emits {base_tokens:.2f} in {base_ms:.1f} ms. "
    )
    gain = tokens / base_tokens
    if dearer >= 1.005:
        text += f"So {gain:.2f} times the tokens for {dearer:.2f} times the time: "
    else:
        text += f"So {gain:.2f} times the tokens in {dearer:.2f} of the time: "
    text += f"{gain / dearer:.2f} times the rate."
    share = _beyond_the_spine(best)
    if share is not None:
        text += f" Of its accepted drafts {share:.0f} % are not the draft head's first choice."
    return text


def _beyond_the_spine(arm: ArmView) -> float | None:
    drafts = sum(arm.accepted_by_source.values())
    if not drafts or set(arm.accepted_by_source) <= {"spine"}:
        return None
    return 100 * (drafts - arm.accepted_by_source.get("spine", 0)) / drafts


def verdict_of(view: RunView, entry: dict[str, Any]) -> str:
    """The verdict of a comparison; folders of the first version have an interval at most."""
    if any(arm.withheld for arm in view.arms.values() if arm.name in _sides(entry)):
        return "withheld"
    if entry.get("verdict"):
        return str(entry["verdict"])
    low, high = entry.get("ci_low"), entry.get("ci_high")
    if low is None or high is None:
        return "no interval"
    return "faster" if low > 1 else "slower" if high < 1 else "not separated"


def _sides(entry: dict[str, Any]) -> tuple[str, str]:
    return entry["arm"], entry["baseline"]


def floor_of(entry: dict[str, Any]) -> tuple[float, float] | None:
    """The band of ratios around 1 that two runs of one arm span; the floor is saved as its half."""
    floor = entry.get("aa_floor")
    if isinstance(floor, int | float) and floor >= 0:
        return 1 / (1 + floor), 1 + floor
    return None


def warnings(view: RunView) -> list[str]:
    """What a reader must know before quoting a figure of this run."""
    found = [str(text) for text in view.summary.get("warnings") or ()]
    for arm in view.arms.values():
        if arm.withheld:
            found.append(f"The speed of {arm.name} is withheld: {_sentence(arm.withheld)}")
        elif arm.entry.get("status") != "ok":
            reason = arm.entry.get("reason") or "no reason was saved"
            found.append(f"{arm.name} is {arm.entry.get('status')}: {_sentence(reason)}")
    shared: dict[str, list[str]] = {}
    for arm in view.arms.values():
        for check in arm.checks:
            if check["status"] == "warn":
                shared.setdefault(str(check["reason"]), []).append(arm.name)
    found += [f"{', '.join(names)}: {_sentence(reason)}" for reason, names in shared.items()]
    model = view.run.get("model") or {}
    if model.get("equal_bits") is False:
        found.append(
            "The start-up probe found that equal bits do not hold on this machine, so arms may "
            "differ in their tokens."
        )
    if not view.run.get("ended_at"):
        found.append("The run has not ended; these are the rows it has so far.")
    options = view.run.get("options") or {}
    if options.get("runs") == 1:
        found.append("One run only: there is no noise floor from repeating an arm.")
    requests = len({row.request_id for arm in view.measured for row in arm.rows})
    if 0 < requests < FEW:
        found.append(f"Only {requests} different requests: intervals from so few are rough.")
    if str(view.run.get("git_commit") or "").endswith("+"):
        found.append("Files differed from the named commit when this was measured.")
    return found


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."

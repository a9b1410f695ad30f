"""Sentences of the report: who won and why, what to be careful about. Plain words, no hedging."""

from __future__ import annotations

from typing import Any

from replay.report.arm import ArmView
from replay.report.view import RunView

# Below this many requests a 95 % interval is more a hint than a measure.
FEW = 20


def headline(summary: dict[str, Any]) -> str:
    """Which arm won on this machine, also when plain decoding did, or why none is said to.

    Only arms with status ok are ranked. `wins` needs verdicts; ratios are the paired ones. Keys
    that a summary of an earlier version lacks may be missing. A model whose figures mean less
    than they seem carries a label, which goes with every headline.
    """
    label = summary.get("label")
    return f"{_headline(summary)} Read it as: {label}." if label else _headline(summary)


def _headline(summary: dict[str, Any]) -> str:
    arms = {name: ArmView(name, entry, {}, []) for name, entry in summary["arms"].items()}
    measured = [arm for arm in arms.values() if arm.rate is not None]
    ranked = [arm for arm in measured if is_ranked(arm)]
    if not measured:
        return "No arm completed a request, so there is no rate."
    if not ranked:
        if all(arm.withheld for arm in measured):
            return "No speed can be quoted: a guard withholds every arm that was measured."
        return f"No arm completed all its requests, so none is ahead.{_left_out(measured)}"
    best = max(ranked, key=lambda arm: arm.quoted or 0.0)
    return _lead(summary, arms, measured, best) + _left_out(measured)


def is_ranked(arm: ArmView) -> bool:
    """Whether the arm may be said to be ahead: complete, and withheld by no guard."""
    return arm.quoted is not None and arm.entry.get("status", "ok") == "ok"


def _lead(
    summary: dict[str, Any], arms: dict[str, ArmView], measured: list[ArmView], best: ArmView
) -> str:
    rate = f"{best.quoted:.1f} tokens per second"
    entries = list(summary.get("comparisons") or ())
    bases = [summary.get("baseline"), *(entry["baseline"] for entry in entries), "ar"]
    base = next((arms[name] for name in bases if name in arms), None)
    if len(measured) == 1:
        return f"Only {best.name} was measured: {rate}."
    if best is base:
        return _baseline_leads(arms, measured, best, entries)
    if base is None or base.withheld:
        return f"The fastest arm that may be quoted is {best.name}: {rate}."
    entry = next((e for e in entries if e["arm"] == best.name), None)
    if entry is None or entry.get("ratio") is None:
        return (
            f"{best.name} has the highest rate on this machine: {rate}. It was not compared with "
            f"{base.name}."
        )
    times = f"{entry['ratio']:.2f} times {base.name}"
    verdict = _verdict(arms, entry)
    if verdict == "slower":
        return (
            f"{best.name} has the highest rate on this machine: {rate}. On the requests both "
            f"completed it is slower than {base.name}: {times}."
        )
    if verdict != "faster":
        return (
            f"{best.name} is ahead on this machine: {rate}, {times}. "
            f"{best.name} and {base.name} are not separated{_because(entry)}."
        )
    return _against_second(summary, arms, best, base, f"{rate}, {times}")


def _against_second(
    summary: dict[str, Any], arms: dict[str, ArmView], best: ArmView, base: ArmView, figures: str
) -> str:
    """The winner is faster than the baseline: is it also faster than the arm behind it?"""
    others = [arm for arm in arms.values() if is_ranked(arm) and arm not in (best, base)]
    second = max(others, key=lambda arm: arm.quoted or 0.0, default=None)
    wins = f"On this machine {best.name} wins: {figures}."
    if second is None or (second.quoted or 0.0) < (base.quoted or 0.0):
        return wins
    ahead = f"On this machine {best.name} is ahead of {base.name}: {figures}."
    entry = summary.get("runner_up") or {}
    if (entry.get("arm"), entry.get("baseline")) != (best.name, second.name):
        return f"{ahead} {best.name} and {second.name} were not compared with each other."
    if _verdict(arms, entry) != "faster":
        return f"{ahead} {best.name} and {second.name} are not separated{_because(entry)}."
    return f"{wins} Next is {second.name}: {best.name} is {entry['ratio']:.2f} times as fast."


def _baseline_leads(
    arms: dict[str, ArmView], measured: list[ArmView], best: ArmView, entries: list[dict[str, Any]]
) -> str:
    rate = f"{best.name} reaches {best.quoted:.1f} tokens per second"
    others = {arm.name for arm in measured if arm is not best and not arm.withheld}
    if not others:
        return f"{rate}; no other arm may be quoted."
    found = {e["arm"]: e for e in entries if e["arm"] in others and e.get("ratio") is not None}
    unsure = [arm for arm in others if arm not in found]
    if not found:
        return f"{rate}, the highest rate on this machine. It was compared with no other arm."
    second = max(found.values(), key=lambda entry: entry["ratio"])
    share = (
        f"The best other arm, {second['arm']}, reaches {100 * second['ratio']:.0f} % of that on "
        "the requests both completed."
    )
    verdicts = {name: _verdict(arms, entry) for name, entry in found.items()}
    if not unsure and set(verdicts.values()) == {"slower"}:
        who = "plain decoding" if best.name == "ar" else best.name
        return f"On this machine {who} wins: {rate}. {share}"
    texts = [f"{best.name} and {name} were not compared." for name in sorted(unsure)]
    for name, entry in found.items():
        if verdicts[name] == "faster":
            texts.append(f"On the requests both completed {name} is faster than {best.name}.")
        elif verdicts[name] != "slower":
            texts.append(f"{best.name} and {name} are not separated{_because(entry)}.")
    return f"{best.name} is ahead on this machine: {rate}. {share} {' '.join(texts)}"


def _because(entry: dict[str, Any]) -> str:
    return f": {entry['reason']}" if entry.get("reason") else ""


def _left_out(measured: list[ArmView]) -> str:
    withheld = [arm.name for arm in measured if arm.withheld]
    partial = [arm.name for arm in measured if not arm.withheld and not is_ranked(arm)]
    text = f" Withheld: {', '.join(withheld)}." if withheld else ""
    return text + (f" Incomplete, so not ranked: {', '.join(partial)}." if partial else "")


def why(view: RunView) -> str | None:
    """What the winner's lead (or the runner-up's lag) is made of: tokens and time per step."""
    best, base = view.winner, view.baseline
    if best is None or base is None or not is_ranked(base):
        return None
    if best is base:
        others = [a for a in view.measured if a is not best and is_ranked(a)]
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
    return _verdict(view.arms, entry)


def _verdict(arms: dict[str, ArmView], entry: dict[str, Any]) -> str:
    if any(arms[name].withheld for name in _sides(entry) if name in arms):
        return "withheld"
    if entry.get("verdict"):
        return str(entry["verdict"])
    low, high = entry.get("ci_low"), entry.get("ci_high")
    if low is None or high is None:
        return "no interval"
    return "faster" if low > 1 else "slower" if high < 1 else "not separated"


def interval_of(entry: dict[str, Any]) -> str | None:
    """How the interval came about, short: `t, 6 conversations`; None without an interval."""
    if entry.get("ci_low") is None:
        return None
    clusters, method = entry.get("clusters"), entry.get("method")
    if clusters is None:
        return method
    sample = f"{clusters} conversation{'s' * (clusters != 1)}"
    if str(entry.get("resampled")).startswith("requests"):
        return f"only {sample}: over requests, a description"
    return f"{method}, {sample}" if method else sample


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

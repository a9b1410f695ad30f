"""The page of an agent study, from its saved files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replay.agent.store import StudyFolder
from replay.agent.table import not_counted, tables
from replay.report.about import command, fact_groups, machine_facts, moment
from replay.report.template import render_page, write_page

NAME = "report.html"


def write_study_report(study: Path, out: Path | None = None) -> Path:
    """Writes report.html into `out`, by default the study's folder.

    Raises CorpusError when `study` is no study, or has not come to its end.
    """
    folder = StudyFolder.open(study)
    return write_page((out or study) / NAME, render(folder.run, folder.summary()))


def render(run: dict[str, Any], summary: dict[str, Any]) -> str:
    """The page as text, from run.json and summary.json."""
    return render_page(
        "study.html.j2",
        where=_where(run),
        headline=headline(summary),
        caution=summary["caution"],
        warnings=warnings(run, summary),
        tables=tables(summary),
        about=_about(run),
    )


def headline(summary: dict[str, Any]) -> str:
    """What each arm resolved. Arms are not ranked: one attempt per task cannot do that."""
    ran = {name: arm for name, arm in summary["arms"].items() if arm["status"] == "ran"}
    if not ran:
        return "No arm could be reached, so no task was attempted."
    found = [f"{name} {arm['resolved']} of {arm['tasks']}" for name, arm in ran.items()]
    return f"Tasks resolved: {', '.join(found)}."


def warnings(run: dict[str, Any], summary: dict[str, Any]) -> list[str]:
    """What a reader must know first."""
    found = not_counted(summary)
    for name, arm in summary["arms"].items():
        missing = arm["tasks"] - arm["attempts"]
        if arm["status"] == "ran" and missing:
            found.append(f"{name}: {missing} of {arm['tasks']} tasks have no attempt that counts.")
    if not summary["contained"]:
        found.append("Commands were not contained in a sandbox.")
    if str(run.get("commit") or "").endswith("+"):
        found.append("Files differed from the named commit when this was run.")
    return found


def _where(run: dict[str, Any]) -> str:
    machine = run["machine"]
    device = machine.get("gpu") or f"{machine.get('cpu')}, {machine.get('cores')} cores"
    tasks = f"{len(run['tasks'])} task{'s' * (len(run['tasks']) != 1)}"
    return f"{tasks} · {device} · {run['start'][:10]}"


def _about(run: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    options = run["options"]
    budget = options["budget"]
    kinds = sorted(set(run["sets"].values()))
    return fact_groups(
        {
            "Study": {
                "started": moment(run["start"]),
                "ended": moment(run.get("end")),
                "tasks": f"{len(run['tasks'])} ({', '.join(kinds)})",
                "arms": ", ".join(run["arms"]),
                "servers": command(options["server_options"]),
                "agent": "of your own" if options["agent_cmd"] else "the built-in loop",
                "sandbox": run["sandbox"],
                "seed": options["seed"],
            },
            "One attempt": {
                "seconds": f"{budget['seconds']:g}",
                "requests": budget["steps"] or "no limit",
                "tokens of a response": budget["max_tokens"],
                "seconds of a command": f"{budget['command_s']:g}",
                "characters shown": options["output_cap"],
            },
            "Machine": machine_facts(run["machine"]),
            "Versions": {**run["versions"], "commit": run.get("commit")},
        }
    )

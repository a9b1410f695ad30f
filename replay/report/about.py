"""What was run, on what, with what: the part of a report that makes its figures repeatable."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from replay.report.view import RunView


def about(view: RunView) -> dict[str, list[tuple[str, str]]]:
    """Facts by group, only those that were saved."""
    run = view.run
    model, machine = run.get("model") or {}, run.get("machine") or {}
    corpus, options = run.get("corpus") or {}, run.get("options") or {}
    sampling = run.get("sampling") or {}
    equal = model.get("equal_bits")
    probe = {
        True: f"equal bits hold (row counts padded to a multiple of {model.get('row_multiple')})",
        False: "equal bits do not hold",
    }.get(equal)
    return fact_groups(
        {
            "Run": {
                "started": moment(run.get("started_at")),
                "ended": moment(run.get("ended_at")),
                "runs": options.get("runs"),
                "warm-up requests": options.get("warmup"),
                "command": command(run.get("command")),
                "schema version": run.get("schema_version"),
            },
            "Corpus": {
                "file": view.corpus,
                "requests": corpus.get("requests"),
                "selected": len(run["selected"]) if run.get("selected") else None,
                "SHA-256": corpus.get("sha256"),
            },
            "Model": {
                "name": view.model,
                "read as": model.get("label"),
                "weights SHA-256": model.get("weights_sha256"),
                "type": model.get("dtype"),
                "positions": _positions(model),
                "device": model.get("device"),
                "rows": model.get("rows"),
                "exactness probe": probe,
            },
            "Sampling": {str(key).replace("_", " "): value for key, value in sampling.items()},
            "Machine": machine_facts(machine),
            "Versions": {**(run.get("versions") or {}), "commit": run.get("git_commit")},
        }
    )


def fact_groups(groups: dict[str, dict[str, Any]]) -> dict[str, list[tuple[str, str]]]:
    """What is known, as text; facts and groups that are not known are left out."""
    return {
        name: [(key, str(value)) for key, value in facts.items() if value not in (None, "", {})]
        for name, facts in groups.items()
        if any(value not in (None, "", {}) for value in facts.values())
    }


def _positions(model: dict[str, Any]) -> str | None:
    served, declared = model.get("max_context"), model.get("declared_context")
    return f"{served} (the model declares {declared})" if declared else served


def command(words: list[str] | None) -> str | None:
    """The command line without the folders of the machine it ran on."""
    if not words:
        return None
    return shlex.join(map(_without_folders, words))


def _without_folders(word: str) -> str:
    """A path by its last part: alone, as --option=PATH, or as key=PATH within arm specs."""
    option = re.fullmatch(r"(--[\w-]+=)?([/~].*)", word, re.DOTALL)
    if option:
        return (option[1] or "") + (Path(option[2]).name or option[2])
    return re.sub(r"(?<==)[/~][^\s,]*", lambda path: Path(path[0]).name or path[0], word)


def machine_facts(machine: dict[str, Any]) -> dict[str, Any]:
    """run.json's `machine` for readers."""
    return {str(key).replace("_", " "): _flat(value) for key, value in machine.items()}


def moment(text: str | None) -> str | None:
    """A time of run.json, which is UTC, to the second."""
    return f"{text[:10]} {text[11:19]} UTC" if text else None


def _flat(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else value

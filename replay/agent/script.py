"""A script: what the developer asks, and what the scripted agent answers turn by turn.

Scripts are Markdown files, because their commands hold whole source files and should be readable
without escapes. A level-two heading opens each part, a fence of four backticks holds a command:

    ## user
    The developer's words.
    ## agent
    One or two sentences.
    ````sh
    the command
    ````
    ## agent, exit 1
    A turn whose command is meant to fail with that code.
    ## fix
    A sentence; the command is the task's own fix. Only in scripts of agent-study tasks.
    ## done
    The closing summary. A further `## user` may follow it.

The script of an agent-study task has no `## user`: the task's problem statement stands there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = "````"
HEADING = re.compile(r"## (?:(user)|(agent)(?:, exit (\d+))?|(fix)|(done))")


class ScriptError(Exception):
    """A script file that does not follow the form, or whose commands did not do as it says."""


@dataclass(frozen=True)
class Step:
    """One answer of the agent. `command` is None for a summary, which ends the agent's go."""

    say: str
    command: str | None
    exit_code: int = 0


@dataclass(frozen=True)
class Go:
    """A message of the developer and the agent's answers to it; the last one is a summary."""

    user: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Script:
    """One conversation. `name` is the task's file name without its ending."""

    name: str
    goes: tuple[Go, ...]

    @property
    def requests(self) -> int:
        """How many requests the agent sends: one for each of its answers."""
        return sum(len(go.steps) for go in self.goes)


def read_script(path: Path, user: str | None = None, fix: str | None = None) -> Script:
    """Raises ScriptError naming the file and line of the first fault."""
    return parse_script(path.stem, path.read_text(encoding="utf-8"), user, fix)


def parse_script(name: str, text: str, user: str | None = None, fix: str | None = None) -> Script:
    """`user` is the first message where the script has none, `fix` the command of `## fix`."""
    goes: list[tuple[str, list[Step]]] = [] if user is None else [(user, [])]
    for line, heading, body in _parts(name, text):
        asked, agent, exit_code, fixes, _done = heading.groups()
        where = f"{name}:{line}"
        if asked:
            if goes and not _ended(goes[-1][1]):
                raise ScriptError(f"{where}: a user message before the agent was done")
            goes.append((_prose(where, body), []))
            continue
        if not goes or _ended(goes[-1][1]):
            raise ScriptError(f"{where}: the agent speaks and nobody asked it")
        if agent:
            say, command = _split_command(where, body)
            goes[-1][1].append(Step(say, command, int(exit_code or 0)))
        elif fixes:
            if fix is None:
                raise ScriptError(f"{where}: there is no task whose fix this could be")
            goes[-1][1].append(Step(_prose(where, body), fix))
        else:
            goes[-1][1].append(Step(_prose(where, body), None))
    if not goes or not _ended(goes[-1][1]):
        raise ScriptError(f"{name}: the last part must be '## done'")
    return Script(name, tuple(Go(said, tuple(steps)) for said, steps in goes))


def _ended(steps: list[Step]) -> bool:
    return bool(steps) and steps[-1].command is None


def _parts(name: str, text: str) -> list[tuple[int, re.Match[str], list[str]]]:
    """The file cut at its headings: (line number, heading, body lines). Fences hide headings."""
    parts: list[tuple[int, re.Match[str], list[str]]] = []
    fenced = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith(FENCE):
            fenced = not fenced
        heading = None if fenced else HEADING.fullmatch(line)
        if heading:
            parts.append((number, heading, []))
        elif parts:
            parts[-1][2].append(line)
        elif line.strip():
            raise ScriptError(f"{name}:{number}: text before the first heading")
    if fenced:
        raise ScriptError(f"{name}: a fence is left open")
    return parts


def _prose(where: str, body: list[str]) -> str:
    text = "\n".join(body).strip()
    if not text or any(line.startswith(FENCE) for line in body):
        raise ScriptError(f"{where}: this part is words only, and not empty")
    return text


def _split_command(where: str, body: list[str]) -> tuple[str, str]:
    fences = [i for i, line in enumerate(body) if line.startswith(FENCE)]
    if len(fences) != 2 or "".join(body[fences[1] + 1 :]).strip():
        raise ScriptError(f"{where}: an agent part is words, then one fenced command")
    return _prose(where, body[: fences[0]]), "\n".join(body[fences[0] + 1 : fences[1]])

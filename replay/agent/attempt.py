"""One attempt: one task, one arm, one agent, until it is done or its budget is."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lumotree.errors import LumoTreeError
from replay.agent.client import ChatClient, EndpointError, OutOfTime
from replay.agent.loop import Exchange, converse
from replay.agent.shell import Result
from replay.agent.supervise import end_tree
from replay.agent.workspace import TaskShell

# How an attempt ended, in mini-swe-agent's words where it has one.
SUBMITTED, STEPS, TIME, REFUSED = "Submitted", "LimitsExceeded", "TimeExceeded", "RequestRefused"
BROKEN = "EndpointError"
# A command that begins at the very end of the budget has as long as this.
LEAST_S = 0.1


@dataclass(frozen=True)
class Budget:
    """What one attempt may use. steps: requests, 0 for no limit; max_tokens: per response."""

    seconds: float = 9000.0
    steps: int = 0
    max_tokens: int = 24_000
    command_s: float = 120.0


@dataclass
class Attempt:
    """What happened. With `error` the server, not the agent, ended it, and nothing counts."""

    exchanges: list[Exchange] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)
    exit_status: str = SUBMITTED
    model_s: float = 0.0
    tools_s: float = 0.0
    seconds: float = 0.0
    error: str | None = None
    # Whether a request was sent that did not come to its end.
    broke_off: bool = False

    @property
    def prompt_tokens(self) -> int | None:
        """Of all requests, from the server's usage; None when an answer did not say."""
        return self._sum("prompt_tokens")

    @property
    def completion_tokens(self) -> int | None:
        return self._sum("completion_tokens")

    def _sum(self, key: str) -> int | None:
        counts = [exchange.answer.usage.get(key) for exchange in self.exchanges]
        return None if None in counts else sum(counts)


class TimedShell:
    """A shell that adds up its time; no command goes on after `deadline` (time.monotonic)."""

    def __init__(self, shell: TaskShell, deadline: float) -> None:
        self._shell, self._deadline = shell, deadline
        self.seconds = 0.0

    def run(self, command: str) -> Result:
        began = time.monotonic()
        limits = self._shell.limits
        left = round(max(self._deadline - began, LEAST_S), 1)
        limits = replace(limits, wall_s=min(limits.wall_s, left))
        try:
            return replace(self._shell, limits=limits).run(command)
        finally:
            self.seconds += time.monotonic() - began


def attempt(
    statement: str,
    client: ChatClient,
    shell: TaskShell,
    budget: Budget,
    request: Mapping[str, Any],
    heard: Callable[[Attempt], None] = lambda so_far: None,
) -> Attempt:
    """Runs the agent loop. `heard` is told after every exchange."""
    made = Attempt()
    began = time.monotonic()
    client.deadline = began + budget.seconds
    timed = TimedShell(shell, client.deadline)
    conversation = converse(
        [statement], client, timed, {**request, "max_tokens": budget.max_tokens}
    )
    try:
        for exchange in conversation:
            made.exchanges.append(exchange)
            made.clock.append(time.time())
            made.model_s += exchange.answer.e2e_s
            made.tools_s = timed.seconds
            heard(made)
            if not exchange.results:
                break
            if budget.steps and len(made.exchanges) >= budget.steps:
                made.exit_status = STEPS
                break
    except OutOfTime as late:
        made.exit_status, made.broke_off = TIME, late.asked
    except EndpointError as error:
        if error.status is not None and error.status in (400, 413, 422):
            # As when the conversation outgrew the model's context: the agent cannot go on.
            made.exit_status = REFUSED
        else:
            made.exit_status, made.error, made.broke_off = BROKEN, str(error), True
    finally:
        conversation.close()
    made.tools_s = timed.seconds
    made.seconds = time.monotonic() - began
    # What is no command is waiting for the model, answers that broke off included.
    made.model_s = made.seconds - made.tools_s
    return made


def external_attempt(
    command: str,
    statement: str,
    url: str,
    model: str,
    key: str | None,
    workspace: Path,
    environment: Path,
    budget: Budget,
    log: Path,
) -> Attempt:
    """Runs somebody else's agent in the workspace; its `git diff` is taken afterwards.

    It finds the endpoint in OPENAI_BASE_URL and OPENAI_API_BASE, the model in LUMOTREE_MODEL, the
    problem statement in the file LUMOTREE_PROBLEM_FILE and on stdin, and the virtual environment
    first on the PATH. It is not contained: what it may do is its own business. Its process tree is
    ended with the budget.
    """
    made = Attempt()
    problem = log.with_suffix(".problem.txt")
    problem.write_text(statement, encoding="utf-8")
    known = {
        **os.environ,
        "PATH": f"{environment / 'bin'}:{os.environ.get('PATH', '/usr/bin:/bin')}",
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": key or "none",
        "LUMOTREE_MODEL": model,
        "LUMOTREE_PROBLEM_FILE": str(problem),
        "LUMOTREE_BUDGET": json.dumps({"seconds": budget.seconds, "steps": budget.steps}),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    began = time.monotonic()
    with log.open("ab") as output, problem.open("rb") as given:
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                cwd=workspace,
                env=known,
                stdin=given,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            raise LumoTreeError(f"--agent-cmd does not start: {error.strerror}") from None
        try:
            code = process.wait(budget.seconds)
            made.exit_status = SUBMITTED if code == 0 else f"ExitCode{code}"
        except subprocess.TimeoutExpired:
            # Nobody knows what it was waiting for.
            made.exit_status, made.broke_off = TIME, True
        finally:
            end_tree(process)
    made.seconds = time.monotonic() - began
    return made

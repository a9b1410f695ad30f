"""Runs a written script through the agent loop in a workspace of this repository.

The loop is the agent study's own. Only its model is unusual: a script that was written down
beforehand, so that the requests are real and every recording is the same.
"""

from __future__ import annotations

from replay.agent.loop import Answer, Body, Exchange, call_message, converse
from replay.agent.prompt import SAMPLING
from replay.agent.script import Script, ScriptError
from scripts.record.workspace import Workspace

REQUEST = {**SAMPLING, "max_tokens": 1024}


class ScriptedModel:
    """Answers with the script's steps in order, whatever it is asked."""

    def __init__(self, script: Script) -> None:
        self._steps = [step for go in script.goes for step in go.steps]
        self._turn = 0

    def __call__(self, body: Body) -> Answer:
        step = self._steps[self._turn]
        self._turn += 1
        return Answer(call_message(step.say, step.command, self._turn))


def run_script(script: Script, workspace: Workspace) -> list[Exchange]:
    """Runs a task. Raises ScriptError at the first command that did not end as the script says."""
    steps = [step for go in script.goes for step in go.steps]
    exchanges = []
    users = [go.user for go in script.goes]
    conversation = converse(users, ScriptedModel(script), workspace, REQUEST)
    for step, exchange in zip(steps, conversation, strict=True):
        for result in exchange.results:
            if result.exit_code != step.exit_code:
                raise ScriptError(
                    f"{script.name}, turn {len(exchanges) + 1}: exit code {result.exit_code} "
                    f"where {step.exit_code} was due\n$ {step.command}\n{result.output}"
                )
        exchanges.append(exchange)
    return exchanges

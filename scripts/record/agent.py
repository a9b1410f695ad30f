"""The coding agent: ask the model, run its tool calls in the workspace, show it the output.

The loop is an ordinary one over OpenAI-style messages. Only its model is unusual: a script that
was written down beforehand, so that the requests are real and every recording is the same.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from scripts.agent_format import BASH_TOOL, SYSTEM_PROMPT
from scripts.record.script import Script, ScriptError, Step
from scripts.record.workspace import Result, Workspace

Message = dict[str, Any]
Body = dict[str, Any]
# Takes the body of a chat completion request, returns the assistant message.
Model = Callable[[Body], Message]

# The replay protocol's sampling; `model` is a placeholder, every replay sets its own.
REQUEST = {
    "model": "lumotree",
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "presence_penalty": 1.0,
    "max_tokens": 1024,
}


@dataclass(frozen=True)
class Exchange:
    """One request as it was sent, the answer, and what the answer's command did (None: none)."""

    body: Body
    answer: Message
    result: Result | None


class ScriptedModel:
    """Answers with the script's steps in order, whatever it is asked."""

    def __init__(self, script: Script) -> None:
        self._steps = [step for go in script.goes for step in go.steps]
        self._turn = 0

    def __call__(self, body: Body) -> Message:
        step = self._steps[self._turn]
        self._turn += 1
        return answer(step, self._turn)


def answer(step: Step, turn: int) -> Message:
    """The assistant message of a step. Ids of tool calls count turns: no chance in them."""
    message: Message = {"role": "assistant", "content": step.say}
    if step.command is not None:
        arguments = json.dumps({"command": step.command}, ensure_ascii=False)
        function = {"name": BASH_TOOL["function"]["name"], "arguments": arguments}
        message["tool_calls"] = [{"id": f"call_{turn}", "type": "function", "function": function}]
    return message


def converse(users: list[str], model: Model, workspace: Workspace) -> Iterator[Exchange]:
    """Runs a conversation; yields each exchange once its tool call, if any, has run."""
    messages: list[Message] = [{"role": "system", "content": SYSTEM_PROMPT}]
    for user in users:
        messages.append({"role": "user", "content": user})
        calls: list[Message] | None = []
        while calls is not None:
            body = copy.deepcopy({**REQUEST, "messages": messages, "tools": [BASH_TOOL]})
            reply = model(body)
            messages.append(reply)
            calls = reply.get("tool_calls")
            result = None
            for call in calls or []:
                result = workspace.run(json.loads(call["function"]["arguments"])["command"])
                messages.append(tool_message(call["id"], result))
            yield Exchange(body, reply, result)


def tool_message(call_id: str, result: Result) -> Message:
    content = f"exit code: {result.exit_code}\n{result.output}".rstrip("\n")
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def run_script(script: Script, workspace: Workspace) -> list[Exchange]:
    """Runs a task. Raises ScriptError at the first command that did not end as the script says."""
    steps = [step for go in script.goes for step in go.steps]
    exchanges = []
    users = [go.user for go in script.goes]
    for step, exchange in zip(
        steps, converse(users, ScriptedModel(script), workspace), strict=True
    ):
        if exchange.result is not None and exchange.result.exit_code != step.exit_code:
            raise ScriptError(
                f"{script.name}, turn {len(exchanges) + 1}: exit code {exchange.result.exit_code} "
                f"where {step.exit_code} was due\n$ {step.command}\n{exchange.result.output}"
            )
        exchanges.append(exchange)
    return exchanges

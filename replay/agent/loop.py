"""The coding agent: ask the model, run its tool calls in the workspace, show it the output.

An ordinary loop over OpenAI-style messages with one tool. It knows neither servers nor sandboxes:
`Model` answers a request, `Shell` runs a command.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replay.agent.prompt import BASH_TOOL, SYSTEM_PROMPT
from replay.agent.shell import Result, Shell

Message = dict[str, Any]
Body = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What a model said: the assistant message and, where a server told, how it went.

    `usage` is the server's token counts; times are this client's, in seconds.
    """

    message: Message
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    ttft_s: float = 0.0
    e2e_s: float = 0.0


# Takes the body of a chat completion request.
Model = Callable[[Body], Answer]


@dataclass(frozen=True)
class Exchange:
    """One request as it was sent, the answer, and what each of its tool calls did."""

    body: Body
    answer: Answer
    results: tuple[Result, ...]
    observations: tuple[Message, ...]


def converse(
    users: Sequence[str], model: Model, shell: Shell, request: Mapping[str, Any]
) -> Iterator[Exchange]:
    """Runs a conversation; yields each exchange once its tool calls have run.

    `request` is the rest of every body: model name, sampling, limits. An answer without a tool
    call ends the agent's go. Exceptions of `model` and `shell` pass through.
    """
    messages: list[Message] = [{"role": "system", "content": SYSTEM_PROMPT}]
    for user in users:
        messages.append({"role": "user", "content": user})
        calls: list[Message] | None = []
        while calls is not None:
            body = copy.deepcopy({**request, "messages": messages, "tools": [BASH_TOOL]})
            answer = model(body)
            messages.append(answer.message)
            calls = answer.message.get("tool_calls") or None
            results, observations = [], []
            for call in calls or []:
                result = run_call(call, shell)
                results.append(result)
                observations.append(tool_message(call.get("id", ""), result))
            messages += observations
            yield Exchange(body, answer, tuple(results), tuple(observations))


def run_call(call: Message, shell: Shell) -> Result:
    """Runs one tool call; what cannot be run is told to the agent as a failed command."""
    command = command_of(call)
    if command is None:
        name = call.get("function", {}).get("name")
        return Result(2, f"no command was run: '{name}' needs JSON arguments with 'command'\n")
    return shell.run(command)


def command_of(call: Message) -> str | None:
    """The command of a tool call; None for another tool or malformed arguments."""
    function = call.get("function") or {}
    if function.get("name") != BASH_TOOL["function"]["name"]:
        return None
    try:
        arguments = json.loads(function.get("arguments") or "")
    except (ValueError, TypeError, RecursionError):
        return None
    command = arguments.get("command") if isinstance(arguments, dict) else None
    return command if isinstance(command, str) and "\0" not in command else None


def tool_message(call_id: str, result: Result) -> Message:
    """The observation: exit code, what ended the command if something did, and the output."""
    fault = f"[{result.fault}]\n" if result.fault else ""
    content = f"exit code: {result.exit_code}\n{fault}{result.output}".rstrip("\n")
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def call_message(say: str, command: str | None, turn: int) -> Message:
    """The assistant message of a written step. Ids of tool calls count turns: no chance in them."""
    message: Message = {"role": "assistant", "content": say}
    if command is not None:
        arguments = json.dumps({"command": command}, ensure_ascii=False)
        function = {"name": BASH_TOOL["function"]["name"], "arguments": arguments}
        message["tool_calls"] = [{"id": f"call_{turn}", "type": "function", "function": function}]
    return message

"""The words and the request that every coding-agent conversation of this project shares.

The transcript generator (training), the corpus recorder and the agent study speak to the model in
this format, so that the embedded model has seen the form, and only the form, of what it replays.
"""

from __future__ import annotations

from typing import Any

SYSTEM_PROMPT = (
    "You are a coding agent at work in a software repository. "
    "Each command runs in a fresh shell at the root of the repository. "
    "Look before you change, change as little as the task needs, check the result, "
    "then say in a few sentences what was done."
)

BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in a fresh shell and return its output and exit code.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command to run."}},
            "required": ["command"],
        },
    },
}

# The replay protocol's sampling. `model` is a placeholder in recorded requests.
SAMPLING: dict[str, Any] = {
    "model": "lumotree",
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "presence_penalty": 1.0,
}

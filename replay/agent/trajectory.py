"""An attempt written down: a mini-swe-agent-1.1 trajectory and a SWE-bench prediction."""

from __future__ import annotations

import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from replay.agent.loop import Exchange, command_of

FORMAT = "mini-swe-agent-1.1"


def trajectory(
    task_id: str,
    exchanges: list[Exchange],
    *,
    exit_status: str,
    submission: str,
    config: dict[str, Any],
    clock: list[float],
) -> dict[str, Any]:
    """The trajectory of an attempt. `clock` is the wall-clock time at which each exchange ended.

    Messages keep the form in which they were sent; what the loop knows besides is in `extra`.
    """
    messages: list[dict[str, Any]] = []
    for exchange, ended in zip(exchanges, clock, strict=True):
        if not messages:
            messages += [dict(message) for message in exchange.body["messages"]]
        answer = exchange.answer
        calls = answer.message.get("tool_calls") or []
        actions = [
            {"command": command, "tool_call_id": call.get("id", "")}
            for call in calls
            if (command := command_of(call)) is not None
        ]
        messages.append(
            {
                **answer.message,
                "extra": {
                    "actions": actions,
                    "response": {"usage": answer.usage, "finish_reason": answer.finish_reason},
                    "cost": 0.0,
                    "timestamp": ended,
                    "ttft_s": answer.ttft_s,
                    "e2e_s": answer.e2e_s,
                },
            }
        )
        for observation, result in zip(exchange.observations, exchange.results, strict=True):
            messages.append(
                {
                    **observation,
                    "extra": {
                        "raw_output": result.output,
                        "returncode": result.exit_code,
                        "timestamp": ended,
                        "exception_info": result.fault or "",
                    },
                }
            )
    messages.append(
        {
            "role": "exit",
            "content": submission,
            "extra": {"exit_status": exit_status, "submission": submission},
        }
    )
    return {
        "info": {
            "model_stats": {"instance_cost": 0.0, "api_calls": len(exchanges)},
            "config": config,
            "mini_version": "",
            "written_by": f"lumotree {_version()}",
            "written_at": time.time(),
            "exit_status": exit_status,
            "submission": submission,
        },
        "messages": messages,
        "trajectory_format": FORMAT,
        "instance_id": task_id,
    }


def prediction(task_id: str, model: str, patch: str) -> dict[str, str]:
    """One entry of preds.json."""
    return {"model_name_or_path": model, "instance_id": task_id, "model_patch": patch}


def _version() -> str:
    try:
        return version("lumotree")
    except PackageNotFoundError:
        return "0"

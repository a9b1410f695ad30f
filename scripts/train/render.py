"""The chat template in Python, for training text at speed; a test holds the two equal."""

from __future__ import annotations

import json

TOOLS_HEAD = "# Tools\n\nYou can call these functions:\n\n<tools>"
CALL_FORM = (
    "To call a function, end your message with:\n\n<tool_call>\n<function=NAME>\n"
    "<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"
)


def call_text(call: dict) -> str:
    """One tool call with mapping arguments."""
    function = call["function"]
    fields = "".join(
        f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in function["arguments"].items()
    )
    return f"<tool_call>\n<function={function['name']}>\n{fields}</function>\n</tool_call>"


def render(messages: list[dict], tools: list[dict]) -> str:
    """A whole conversation; contents are strings, a system message comes first."""
    listed = "".join("\n" + json.dumps(t, ensure_ascii=False) for t in tools)
    head = f"<|im_start|>system\n{messages[0]['content']}\n\n{TOOLS_HEAD}{listed}\n</tools>"
    out = [f"{head}\n\n{CALL_FORM}<|im_end|>\n"]
    for i, message in enumerate(messages[1:], 1):
        role, content = message["role"], message["content"]
        if role == "tool":
            first = messages[i - 1]["role"] != "tool"
            last = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
            out.append(
                ("<|im_start|>user\n" if first else "\n")
                + f"<tool_response>\n{content}\n</tool_response>"
            )
            out.append("<|im_end|>\n" if last else "")
        elif role == "assistant":
            calls = "\n".join(call_text(c) for c in message.get("tool_calls", []))
            gap = "\n\n" if content and calls else ""
            out.append(f"<|im_start|>assistant\n{content}{gap}{calls}<|im_end|>\n")
        else:
            out.append(f"<|im_start|>{role}\n{content}<|im_end|>\n")
    return "".join(out)

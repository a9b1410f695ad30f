"""The family's tool calls, from generated text to `tool_calls`.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A block that is not of this form, or calls what was not offered, stays text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION = re.compile(r"<function=([^<>\n]+)>\s*")
PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"


@dataclass(frozen=True)
class ToolCall:
    """One call. `arguments` is JSON text, as OpenAI's clients expect it."""

    id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolCallParser:
    """Splits text that arrives in pieces into content and calls.

    A call is handed out whole, when its last character is there. White space around calls is
    theirs and no content; text without a call comes out as it went in. With `single`, what
    follows the first call is left out.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], single: bool = False) -> None:
        self._schemas = {
            tool["function"]["name"]: _properties(tool["function"].get("parameters"))
            for tool in tools
        }
        self._single = single
        self._held = ""  # an unfinished block, or what may become its opening
        self._space = ""  # white space that is content unless a call follows
        self._inside = False
        self._after_call = False
        self.calls: list[ToolCall] = []

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The content and the calls that have become certain."""
        before = len(self.calls)
        text, content = self._held + text, ""
        while not (self._single and self.calls):
            marker = CLOSE if self._inside else OPEN
            head, found, tail = text.partition(marker)
            if not found:
                break
            content += self._close(head) if self._inside else self._content(head)
            text, self._inside = tail, not self._inside
        else:
            text = ""
        keep = len(text) if self._inside else _possible(text, OPEN)
        if not self._inside:
            content += self._content(text[: len(text) - keep])
        self._held = text[len(text) - keep :]
        return content, self.calls[before:]

    def finish(self) -> str:
        """The text still held back. No push may follow."""
        rest = self._space + (OPEN if self._inside else "") + self._held
        self._held = self._space = ""
        return rest

    def _content(self, text: str) -> str:
        text = self._space + text
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return kept

    def _close(self, block: str) -> str:
        """Ends a block: a call, or the text that it is after all."""
        space, self._space = self._space, ""
        call = self._call(block)
        if call is None:
            return space + OPEN + block + CLOSE
        self.calls.append(call)
        self._after_call = True
        return ""

    def _call(self, block: str) -> ToolCall | None:
        text = block.strip()
        head = FUNCTION.match(text)
        if head is None or not text.endswith(END_FUNCTION) or head[1] not in self._schemas:
            return None
        schema, arguments = self._schemas[head[1]], {}
        rest = text[head.end() : -len(END_FUNCTION)]
        while rest.strip():
            start = PARAMETER.match(rest)
            end = rest.find(END_PARAMETER, start.end()) if start else -1
            if end < 0 or start[1] in arguments:
                return None
            value = rest[start.end() : end].removeprefix("\n").removesuffix("\n")
            arguments[start[1]] = _value(value, schema.get(start[1]))
            rest = rest[end + len(END_PARAMETER) :]
        arguments = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(f"call_{secrets.token_hex(12)}", head[1], arguments)


def _value(text: str, schema: Any) -> Any:
    """The inverse of the template, which writes text as it is and everything else as JSON."""
    kinds = _kinds(schema)
    if not kinds or kinds == {"string"}:
        return text
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return text
    kind = _kind(value)
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    return text if "string" in kinds and not fits else value


def _kinds(schema: Any) -> set[str]:
    """The types that a schema names: its own, its alternatives', or those of its values."""
    kinds, left = set(), [schema]
    while left:
        schema = left.pop()
        if not isinstance(schema, Mapping):
            continue
        named = schema.get("type")
        if isinstance(named, str):
            kinds.add(named)
        elif isinstance(named, list):
            kinds |= {name for name in named if isinstance(name, str)}
        elif isinstance(schema.get("enum"), list):
            kinds |= set(map(_kind, schema["enum"]))
        elif "const" in schema:
            kinds.add(_kind(schema["const"]))
        else:
            for key in ("anyOf", "oneOf"):
                left += schema[key] if isinstance(schema.get(key), list) else ()
    return kinds


def _finite(text: str) -> float:
    """Raises ValueError for NaN and infinities, which Python reads and JSON has not."""
    value = float(text)
    if not isfinite(value):
        raise ValueError(text)
    return value


def _kind(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null" if value is None else "string")


def _properties(parameters: Any) -> Mapping[str, Any]:
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _possible(text: str, marker: str) -> int:
    """Length of the longest end of `text` that `marker` begins with."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0

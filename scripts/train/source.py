"""Files as the synthetic conversations see them: what can be edited, and what it is called."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

import phrases as say

LONGEST_FUNCTION, LONGEST_CLASS = 130, 400


@dataclass
class Function:
    """A function or class of a file, by its lines (first is zero-based, end exclusive)."""

    name: str
    node: ast.AST
    first: int
    end: int
    body: int
    indent: str

    @property
    def is_class(self) -> bool:
        """Whether this is a class."""
        return isinstance(self.node, ast.ClassDef)


@dataclass
class Source:
    """A file of the repository under edit."""

    path: str
    text: str
    items: list[Function] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """Lines without their ends."""
        return self.text.split("\n")


def inspect(path: str, text: str) -> Source | None:
    """Parse a file and list what can be edited in it."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    lines = text.split("\n")
    items = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        longest = LONGEST_CLASS if isinstance(node, ast.ClassDef) else LONGEST_FUNCTION
        body = node.body[0].lineno - 1
        if node.end_lineno and body > node.lineno - 1 and node.end_lineno - node.lineno <= longest:
            indent = re.match(r"\s*", lines[body]).group()
            if indent:
                found = Function(node.name, node, node.lineno - 1, node.end_lineno, body, indent)
                items.append(found)
    return Source(path, text, items) if items else None


def words(name: str) -> str:
    """A sentence out of a function's name."""
    parts = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_")
    parts = [p for p in parts if p] or ["this"]
    verb = say.VERBS.get(parts[0])
    rest = " ".join(parts[1:] if verb else parts)
    if verb and rest:
        return f"{verb} the {rest}."
    return f"Return the {rest}." if rest else f"{verb}."


def arguments(item: Function) -> list[str]:
    """Argument names without self and cls."""
    if item.is_class:
        return []
    return [a.arg for a in item.node.args.args if a.arg not in ("self", "cls")]


def local_names(item: Function) -> list[str]:
    """Names assigned in the body that a rename can reach safely."""
    stored = [
        n.id
        for n in ast.walk(item.node)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    ]
    taken = arguments(item)
    return sorted({n for n in stored if n not in taken and 1 <= len(n) <= 14 and n != "_"})


def own_attributes(item: Function) -> list[str]:
    """Attributes a class sets on self, in order."""
    stored = [
        n.attr
        for n in ast.walk(item.node)
        if isinstance(n, ast.Attribute)
        and isinstance(n.ctx, ast.Store)
        and isinstance(n.value, ast.Name)
        and n.value.id == "self"
    ]
    return list(dict.fromkeys(stored))


def called_names(item: Function) -> list[str]:
    """What a function calls, in order, long expressions left out."""
    calls = [
        ast.unparse(n.func)
        for n in ast.walk(item.node)
        if isinstance(n, ast.Call) and isinstance(n.func, (ast.Name, ast.Attribute))
    ]
    return [x for x in dict.fromkeys(x for x in calls if len(x) < 40) if x]


def simple_defaults(item: Function) -> list[tuple[str, str, str]]:
    """(argument, old default, new default) for plain constants on one line."""
    args = item.node.args
    named = args.args[-len(args.defaults) :] if args.defaults else []
    out = []
    for arg, value in zip(named, args.defaults, strict=False):
        if not isinstance(value, ast.Constant) or value.lineno != value.end_lineno:
            continue
        v = value.value
        if isinstance(v, bool):
            new = str(not v)
        elif v is None:
            new = "True"
        else:
            new = str(v * 2 or 1) if isinstance(v, int) else None
        if new:
            out.append((arg.arg, repr(v), new))
    return out

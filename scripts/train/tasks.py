"""The kinds of task of a synthetic conversation, each as the change it makes to a function."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass

import phrases as say
from conversation import Conversation
from source import (
    Function,
    Source,
    arguments,
    called_names,
    local_names,
    own_attributes,
    simple_defaults,
    words,
)

SWAPS = [
    (" == ", " != "),
    (" is None", " is not None"),
    (" < ", " <= "),
    (" and ", " or "),
    (" not in ", " in "),
    (" + ", " - "),
    ("True", "False"),
    (" > ", " < "),
    (" is not None", " is None"),
    ("[0]", "[1]"),
    ("return not ", "return "),
    (" or ", " and "),
    ("if not ", "if "),
    ("+ 1", "- 1"),
    (" >= ", " > "),
]
NEW_NAMES = (
    "result value items found rows entry current total names pieces target output index kept parts"
    " number first source"
).split()
HINTS = {bool: "bool", int: "int", float: "float", str: "str", type(None): "object | None"}
GREEN = "." + " " * 65 + "[100%]\n1 passed in {seconds:.2f}s"
RED = (
    f"F{' ' * 65}[100%]\n"
    "=================================== FAILURES ===================================\n"
    "{title:_^80}\n\n{path}:{line}: in {name}\n    {text}\nE   AssertionError\n"
    "=========================== short test summary info ============================\n"
    "FAILED {test}::test_{name} - AssertionError\n1 failed in {seconds:.2f}s"
)
TEST_FILE = (
    "import inspect\n\nfrom {mod} import {name}\n\n\n{note}def test_{name}_arguments():\n"
    "    found = list(inspect.signature({name}).parameters)\n"
    "    assert found[:{count}] == [{names}]\n"
)


@dataclass
class Work:
    """A task on one function: its lines before and after, and where its body starts."""

    c: Conversation
    src: Source
    item: Function
    args: list[str]
    doc: str | None
    old: list[str]
    new: list[str]
    offset: int


def docstring(w: Work) -> None:
    """Add a docstring made of the function's name."""
    text = words(w.item.name)
    if w.args and w.c.rng.random() < 0.4:
        text = text[:-1] + f" for the given {w.args[0]}."
    w.new[w.offset : w.offset] = [f'{w.item.indent}"""{text}"""']


def rename(w: Work) -> None:
    """Rename a local variable."""
    names = local_names(w.item)
    if not names:
        return
    old = w.c.rng.choice(names)
    text = "\n".join(w.old)
    fresh = [n for n in [*NEW_NAMES, old + "s", "new_" + old] if n not in text] or ["renamed"]
    new = w.c.rng.choice(fresh)
    w.c.facts |= {"old": old, "new": new}
    use = re.compile(rf"(?<![\w.\"']){re.escape(old)}\b(?!\s*=[^=].*,$)")
    w.new = [use.sub(new, line) for line in w.old]


def guard(w: Work) -> None:
    """Refuse None for an argument."""
    arg, pad = w.c.facts["arg"], w.item.indent
    raised = w.c.rng.choice(
        [
            f'raise ValueError("{arg} must not be None")',
            f'raise ValueError(f"{w.item.name} needs {arg}")',
        ]
    )
    w.new[w.offset : w.offset] = [f"{pad}if {arg} is None:", f"{pad}    {raised}"]


def log(w: Work) -> None:
    """Log an argument at debug level."""
    arg = w.c.facts["arg"]
    line = f'{w.item.indent}logger.debug("{w.item.name}: {arg}=%r", {arg})'
    w.new[w.offset : w.offset] = [line]


def hints(w: Work) -> None:
    """Annotate the arguments on the first line."""
    line = w.old[0]
    for arg in w.item.node.args.args:
        if arg.annotation is not None or arg.arg in ("self", "cls"):
            continue
        default = re.search(rf"\b{arg.arg}=([\w.'\"]+)", line)
        hint = w.c.rng.choice(["str", "int", "object", "list", "dict"])
        if default:
            try:
                hint = HINTS.get(type(ast.literal_eval(default.group(1))), "object")
            except (ValueError, SyntaxError):
                hint = "object"
            line = line.replace(default.group(), f"{arg.arg}: {hint} = {default.group(1)}")
        else:
            line = re.sub(rf"([(,] ?){arg.arg}(?=[,)])", rf"\g<1>{arg.arg}: {hint}", line, count=1)
    if line.endswith("):") and "->" not in line and "return " not in "\n".join(w.old):
        line = line[:-1] + " -> None:"
    w.new[0] = line


def default(w: Work) -> None:
    """Change the default of an argument."""
    arg, before, after = w.c.rng.choice(simple_defaults(w.item))
    w.c.facts |= {"arg": arg, "old": before, "new": after}
    use = re.compile(rf"\b{arg}(\s*(?::[^=,]+)?=\s*){re.escape(before)}")
    w.new = [
        use.sub(rf"{arg}\g<1>{after}", line) if i <= w.offset else line
        for i, line in enumerate(w.old)
    ]


def bug(w: Work) -> None:
    """Plant a fault in the file; the task is to take it out again."""
    spots = [
        (i, a, b)
        for i in range(w.offset, len(w.old))
        for a, b in SWAPS
        if a in w.old[i] and not w.old[i].lstrip().startswith(("#", '"', ">>>"))
    ]
    if not spots:
        return
    i, a, b = w.c.rng.choice(spots)
    wrong = list(w.old)
    wrong[i] = w.old[i].replace(a, b, 1)
    w.c.facts |= {"old": bare(wrong[i].strip()), "new": bare(w.old[i].strip())}
    lines, item = w.src.lines, w.item
    text = "\n".join(lines[: item.first] + wrong + lines[item.end :])
    w.src = Source(w.src.path, text, w.src.items)
    w.old, w.new = wrong, w.old


def method(w: Work) -> None:
    """Give a class a __repr__."""
    if "__repr__" in "\n".join(w.old):
        return
    shown = ", ".join(f"{a}={{self.{a}!r}}" for a in own_attributes(w.item)[:3])
    pad = w.item.indent
    body = f'{pad}    return f"{{type(self).__name__}}({shown})"'
    w.new += ["", f"{pad}def __repr__(self):", body]


def constant(w: Work) -> None:
    """Choose a new name for the function itself."""
    name = w.item.name
    fresh = [f"{name}_of", f"do_{name}", f"{name}_impl", f"_{name}", f"{name}_from"]
    w.c.facts["new"] = w.c.rng.choice(fresh)


CHANGES: dict[str, Callable[[Work], None]] = {
    "docstring": docstring,
    "rewrite": docstring,
    "rename": rename,
    "guard": guard,
    "log": log,
    "hints": hints,
    "default": default,
    "bug": bug,
    "method": method,
    "constant": constant,
}


def bare(text: str) -> str:
    """Text without braces, which ``str.format`` would read."""
    return text.replace("{", "").replace("}", "")


def kinds_for(w: Work) -> list[str]:
    """The kinds of task that fit the function, repeated by weight."""
    if w.item.is_class:
        return ["explain"] + ["method"] * 4
    kinds = ["explain"] + ["bug"] * 3 + ["test", "constant"] + ["rename"] * 2
    if not w.doc:
        kinds += ["docstring"] * 3
    if w.args:
        kinds += ["guard"] * 2 + ["log", "hints"]
    if simple_defaults(w.item):
        kinds += ["default"] * 2
    if not w.doc and len(w.src.text) < 4000:
        kinds += ["rewrite"] * 2
    return kinds


def begin(c: Conversation, src: Source) -> Work:
    """Choose a function and note the facts about it."""
    item = c.rng.choice(src.items)
    doc = ast.get_docstring(item.node)
    args = arguments(item)
    stem = src.path.rsplit("/", 1)[-1].removesuffix(".py").strip("_") or "init"
    c.facts = {
        "fn": item.name,
        "path": src.path,
        "mod": src.path.removesuffix(".py").replace("/", "."),
        "pkg": c.pkg,
        "test": f"tests/test_{stem}.py",
        "arg": c.rng.choice(args) if args else "",
        "old": "",
        "new": "",
        "n": "",
    }
    old = src.lines[item.first : item.end]
    offset = item.body - item.first
    if doc is not None and not item.is_class:
        after = item.node.body[1:]
        offset = after[0].lineno - 1 - item.first if after else len(old)
    return Work(c, src, item, args, doc, old, list(old), offset)


def task(c: Conversation, src: Source) -> Source | None:
    """Write one task over a file; the file after it, or None if the file offers nothing."""
    w = begin(c, src)
    rng = c.rng
    kind = rng.choice(kinds_for(w))
    if kind in CHANGES:
        CHANGES[kind](w)
    if kind not in ("explain", "test", "constant") and w.new == w.old:
        return None
    c.facts = {k: bare(v) for k, v in c.facts.items()}
    request = rng.choice(say.REQUESTS[kind]).format(**c.facts)
    request += rng.choice(say.EXTRA if kind != "explain" else [""])
    c.user((rng.choice(say.FOLLOW) if len(c.messages) > 1 else "") + request)
    if kind == "bug" and rng.random() < 0.6:
        reproduce(w)
    c.look(w.src, w.item)
    if kind == "explain":
        return explain(w)
    if kind == "test":
        return write_test(w)
    if kind == "constant":
        return rename_everywhere(w)
    return change(w, kind)


def reproduce(w: Work) -> None:
    """Run the failing test first."""
    at = next(n for n, (x, y) in enumerate(zip(w.old, w.new, strict=True)) if x != y)
    name, test = w.item.name, w.c.facts["test"]
    output = RED.format(
        title=f"_ test_{name} _",
        path=w.src.path,
        line=w.item.first + at + 1,
        name=name,
        text=w.old[at].strip(),
        test=test,
        seconds=w.c.rng.uniform(0.02, 2),
    )
    w.c.call(say.REPRODUCE, f"python -m pytest -q {test}", output, 1)


def explain(w: Work) -> Source:
    """Say what the function does, out of its docstring, arguments and calls."""
    if w.c.rng.random() < 0.6:
        w.c.grep(w.src, w.item.name, say.CALLERS)
    about = (w.doc or words(w.item.name)).strip().split("\n\n")[0].replace("\n", " ")
    about = re.sub(r"\s+", " ", about)
    takes = f" It takes {', '.join(f'`{a}`' for a in w.args)}." if w.args else ""
    calls = called_names(w.item)
    uses = f" It calls {', '.join(f'`{x}`' for x in calls)}." if calls else ""
    w.c.answer(f"`{w.item.name}` in `{w.src.path}`: {about}{takes}{uses[:400]}")
    return w.src


def write_test(w: Work) -> Source:
    """Write a new test file and run it."""
    c, args = w.c, w.item.node.args.args
    body = TEST_FILE.format(
        mod=c.facts["mod"],
        name=w.item.name,
        note="" if w.item.indent == "    " else "# a method: found through its module\n",
        count=len(args),
        names=", ".join(f'"{a.arg}"' for a in args),
    )
    c.heredoc(say.EDIT, f"cat > {c.facts['test']}", body.removesuffix("\n"))
    green = GREEN.format(seconds=c.rng.uniform(0.02, 2))
    c.call(say.CHECK, f"python -m pytest -q {c.facts['test']}", green)
    c.end("test")
    return w.src


def rename_everywhere(w: Work) -> Source:
    """Rename the function in its file with sed."""
    c, src, name = w.c, w.src, w.item.name
    after = Source(src.path, re.sub(rf"\b{re.escape(name)}\b", c.facts["new"], src.text))
    c.facts["n"] = str(sum(x != y for x, y in zip(src.lines, after.lines, strict=True)))
    c.call(say.EDIT, f"sed -i 's/\\b{name}\\b/{c.facts['new']}/g' {src.path}", "")
    c.call(say.CHECK, "git diff", c.diff(src, after))
    c.end("constant")
    return after


def change(w: Work, kind: str) -> Source:
    """Write the change, check it and say so."""
    c, src, item, start = w.c, w.src, w.item, w.item.first
    if kind == "rewrite":
        lines = src.lines
        after = Source(src.path, "\n".join(lines[: item.first] + w.new + lines[item.end :]))
        c.heredoc(say.EDIT, f"cat > {src.path}", after.text.rstrip())
    else:
        old, new = w.old, w.new
        if c.rng.random() < 0.55 and kind != "rename":
            old, new, lead = narrowed(w)
            start += lead
        if old and c.rng.random() < 0.06:
            stumble(w, old[0])
        after = c.edit(src, old, new, start, say.BUG_EDIT if kind == "bug" else say.EDIT, item)
    c.check(src, after, item)
    c.end(kind)
    return after


def narrowed(w: Work) -> tuple[list[str], list[str], int]:
    """Only the lines around the change, and how many were cut off the front."""
    old, new = w.old, w.new
    shorter = min(len(old), len(new))
    same = 0
    while same < shorter and old[same] == new[same]:
        same += 1
    tail = 0
    while tail < shorter - same and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    lead, trail = max(0, same - w.c.rng.randrange(4)), max(0, tail - w.c.rng.randrange(3))
    return old[lead : len(old) - trail], new[lead : len(new) - trail], lead


def stumble(w: Work, line: str) -> None:
    """An edit whose pattern does not match, and a second look."""
    script = f"text = open(\"{w.src.path}\").read()\nassert '''{line} ''' in text"
    error = 'Traceback (most recent call last):\n  File "<stdin>", line 2, in <module>\n'
    mark = w.c.mark
    command = f"python - <<'{mark}'\n{script}\n{mark}"
    w.c.call(say.EDIT, command, error + "AssertionError", 1)
    w.c.show(w.src, w.item, say.FAILED)

"""Synthetic conversations of a coding agent over the training packages.

Every file, search result, diff and edit is made of the real text of a training file; the test runs
and the remarks are invented. The point is the form: a request, looking, an edit that quotes code
verbatim, a check, a summary. A model trained on them learns to copy out of its context.

    python scripts/train/transcripts.py .train/corpus/train-00.jsonl.xz --show 2
"""

from __future__ import annotations

import argparse
import ast
import difflib
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import phrases as say  # noqa: E402
from agent_format import BASH_TOOL, SYSTEM_PROMPT  # noqa: E402
from data import read_shard  # noqa: E402
from render import render  # noqa: E402

MAX_CHARS = 40_000
OUTPUT_CHARS = 9_000


@dataclass
class Function:
    """A function or class of a file, by its lines (first is zero-based, end exclusive)."""

    name: str
    node: ast.AST
    first: int
    end: int
    body: int
    indent: str


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
        if (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            and node.end_lineno
        ):
            body = node.body[0].lineno - 1
            if body > node.lineno - 1 and node.end_lineno - node.lineno <= (
                130 if not isinstance(node, ast.ClassDef) else 400
            ):
                indent = re.match(r"\s*", lines[body]).group()
                if indent:
                    items.append(
                        Function(node.name, node, node.lineno - 1, node.end_lineno, body, indent)
                    )
    return Source(path, text, items) if items else None


class Conversation:
    """Writes one conversation about the files of a package."""

    def __init__(self, rng: random.Random, pkg: str, files: list[Source], names: list[str]) -> None:
        self.rng, self.pkg, self.files, self.names = rng, pkg, files, names
        self.messages: list[dict] = [{"role": "system", "content": SYSTEM_PROMPT}]
        self.mark = rng.choice(["EOF", "EOF", "PY", "PY", "END"])
        self.remarks = rng.random() < 0.9
        self.facts: dict[str, str] = {}

    # -- turns

    def user(self, text: str) -> None:
        """A request."""
        self.messages.append({"role": "user", "content": text})

    def call(self, options: list[str], command: str, output: str, code: int = 0) -> None:
        """A remark, a command and its result."""
        remark = self.rng.choice(options).format(**self.facts) if self.remarks else ""
        call = {"type": "function", "function": {"name": "bash", "arguments": {"command": command}}}
        self.messages.append({"role": "assistant", "content": remark, "tool_calls": [call]})
        if len(output) > OUTPUT_CHARS:
            cut = len(output) - OUTPUT_CHARS
            output = (
                output[: OUTPUT_CHARS // 2]
                + f"\n[... {cut} characters left out ...]\n"
                + output[-OUTPUT_CHARS // 2 :]
            )
        self.messages.append(
            {"role": "tool", "content": f"exit code: {code}\n{output}".rstrip("\n")}
        )

    def end(self, options: list[str]) -> None:
        """The closing message of a task."""
        self.messages.append(
            {"role": "assistant", "content": self.rng.choice(options).format(**self.facts)}
        )

    # -- looking

    def grep(self, src: Source, word: str, remark: list[str]) -> None:
        """Search one file, or the package with a few more hits."""
        hit = re.compile(rf"\b{re.escape(word)}\b")
        rows = [(src.path, i + 1, line) for i, line in enumerate(src.lines) if hit.search(line)]
        if self.rng.random() < 0.6:
            self.call(
                remark,
                f'grep -n "{word}" {src.path}',
                "\n".join(f"{n}:{line}" for _, n, line in rows[:40]),
            )
            return
        for other in self.files[:12]:
            if other is not src:
                rows += [
                    (other.path, i + 1, line)
                    for i, line in enumerate(other.lines)
                    if hit.search(line)
                ][:4]
        flag = self.rng.choice(["grep -rn", "grep -rnw", "git grep -n"])
        place = "" if flag.startswith("git") else f" {self.pkg}/"
        tail = self.rng.choice(["", " | head -20"])
        rows = sorted(rows)[:20]
        self.call(
            remark,
            f'{flag} "{word}"{place}{tail}',
            "\n".join(f"{p}:{n}:{line}" for p, n, line in rows),
        )

    def show(self, src: Source, item: Function, remark: list[str]) -> None:
        """Print the function, the surroundings or the file."""
        rng, lines = self.rng, src.lines
        if len(src.text) < OUTPUT_CHARS and rng.random() < 0.5:
            self.call(remark, f"cat {src.path}", src.text)
            return
        first = max(0, item.first - rng.choice([0, 0, 1, 3, 5, 10, 25, 60]))
        last = min(len(lines), item.end + rng.choice([0, 0, 1, 2, 5, 10, 30, 60]))
        window = lines[first:last]
        kind = rng.random()
        if kind < 0.75:
            self.call(remark, f"sed -n '{first + 1},{last}p' {src.path}", "\n".join(window))
        elif kind < 0.9:
            numbered = "\n".join(f"{i:6}\t{line}" for i, line in enumerate(window, first + 1))
            self.call(remark, f"cat -n {src.path} | sed -n '{first + 1},{last}p'", numbered)
        else:
            head = min(last, 12)
            command = f"head -{head} {src.path}; sed -n '{first + 1},{last}p' {src.path}"
            self.call(remark, command, "\n".join(lines[:head] + window))

    def look(self, src: Source, item: Function) -> None:
        """One to four commands that find and read the function."""
        rng = self.rng
        if rng.random() < 0.2:
            folder = src.path.rsplit("/", 1)[0]
            near = sorted(
                {
                    n[len(folder) + 1 :].split("/")[0]
                    for n in self.names
                    if n.startswith(folder + "/")
                }
            )
            self.call(say.LOOK, f"ls {folder}", "\n".join(near[:60]))
        if rng.random() < 0.65:
            self.grep(
                src,
                rng.choice([f"def {item.name}", item.name, item.name])
                if not isinstance(item.node, ast.ClassDef)
                else f"class {item.name}",
                say.LOOK,
            )
            self.show(src, item, say.MORE)
        else:
            self.show(src, item, say.LOOK)
        if rng.random() < 0.15:
            self.grep(src, item.name, say.CALLERS)

    # -- editing

    def edit(
        self,
        src: Source,
        old: list[str],
        new: list[str],
        start: int,
        remark: list[str],
        item: Function,
    ) -> Source:
        """Turn old lines into new ones with one of several kinds of command; return the new file."""
        rng, path, mark = self.rng, src.path, self.mark
        lines = src.lines
        after = Source(path, "\n".join(lines[:start] + new + lines[start + len(old) :]))
        old_text, new_text = "\n".join(old), "\n".join(new)
        unique = src.text.count(old_text) == 1
        kind = rng.random()
        if len(src.text) < 3500 and kind < 0.25:
            self.call(remark, f"cat > {path} <<'{mark}'\n{after.text.rstrip()}\n{mark}", "")
            return after
        if kind < 0.4 or not unique or "'''" in old_text + new_text or "\\" in old_text + new_text:
            block = after.lines[item.first : item.end + len(new) - len(old)]
            body = "\n".join(block)
            command = (
                f"cat > /tmp/new.py <<'{mark}'\n{body}\n{mark}\n"
                f"sed -i -e '{item.end}r /tmp/new.py' -e '{item.first + 1},{item.end}d' {path}"
            )
            self.call(remark, command, "")
            return after
        if (
            kind < 0.5
            and len(old) == 1
            and len(new) == 1
            and not re.search(r"[/&\\\[\]*.^$']", old_text + new_text)
        ):
            self.call(
                remark, f"sed -i '{start + 1}s/{old_text.strip()}/{new_text.strip()}/' {path}", ""
            )
            return after
        style = rng.randrange(3)
        if style == 0:
            script = f"from pathlib import Path\n\npath = Path(\"{path}\")\ntext = path.read_text()\n\nold = '''{old_text}\n'''\nnew = '''{new_text}\n'''\nassert text.count(old) == 1\npath.write_text(text.replace(old, new))"
        elif style == 1:
            script = f"import pathlib\n\np = pathlib.Path(\"{path}\")\ns = p.read_text()\nold = '''{old_text}\n'''\nassert old in s\nnew = '''{new_text}\n'''\np.write_text(s.replace(old, new, 1))\nprint(\"ok\")"
        else:
            script = f"path = \"{path}\"\ntext = open(path).read()\nold = '''\\\n{old_text}\n'''\nnew = '''\\\n{new_text}\n'''\nassert text.count(old) == 1, text.count(old)\nopen(path, \"w\").write(text.replace(old, new))"
        self.call(remark, f"python - <<'{mark}'\n{script}\n{mark}", "ok" if style == 1 else "")
        return after

    def diff(self, before: Source, after: Source) -> str:
        """What git diff prints."""
        a, b = before.lines, after.lines
        rows = list(
            difflib.unified_diff(a, b, f"a/{before.path}", f"b/{before.path}", lineterm="", n=3)
        )
        index = f"index {self.rng.getrandbits(28):07x}..{self.rng.getrandbits(28):07x} 100644"
        return "\n".join([f"diff --git a/{before.path} b/{before.path}", index, *rows])

    def check(self, before: Source, after: Source, item: Function) -> None:
        """One or two commands that look at the result."""
        rng = self.rng
        kinds = rng.sample(
            ["diff", "compile", "pytest", "reread"], k=rng.choice([1, 1, 2]), counts=[4, 2, 3, 1]
        )
        for kind in dict.fromkeys(kinds):
            if kind == "diff":
                self.call(
                    say.CHECK,
                    rng.choice(["git diff", "git diff", f"git diff {before.path}"]),
                    self.diff(before, after),
                )
            elif kind == "compile":
                self.call(say.CHECK, f"python -m py_compile {before.path}", "")
            elif kind == "pytest":
                self.call(
                    say.CHECK,
                    f"python -m pytest -q {rng.choice([self.facts['test'], 'tests'])}",
                    self.passed(),
                )
            else:
                last = item.end + len(after.lines) - len(before.lines)
                self.call(
                    say.CHECK,
                    f"sed -n '{item.first + 1},{last}p' {before.path}",
                    "\n".join(after.lines[item.first : last]),
                )

    def passed(self) -> str:
        """A green test run."""
        count = self.rng.choice([1, 2, 3, 4, 6, 8, 11, 14, 19, 23, 37, 52])
        return (
            "." * count
            + " " * 0
            + f"{' ' * max(1, 66 - count)}[100%]\n{count} passed in {self.rng.uniform(0.02, 4):.2f}s"
        )


def words(name: str) -> str:
    """A sentence out of a function's name."""
    parts = [p for p in re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_") if p] or [
        "this"
    ]
    verb = say.VERBS.get(parts[0])
    rest = " ".join(parts[1:] if verb else parts)
    return f"{verb} the {rest}." if verb and rest else f"Return the {rest}." if rest else f"{verb}."


def arguments(item: Function) -> list[str]:
    """Argument names without self and cls."""
    return [
        a.arg
        for a in getattr(item.node, "args", ast.arguments([], [], None, [], [], None, [])).args
        if a.arg not in ("self", "cls")
    ]


def local_names(item: Function) -> list[str]:
    """Names assigned in the body that a rename can reach safely."""
    found = [
        n.id
        for n in ast.walk(item.node)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    ]
    return sorted({n for n in found if n not in arguments(item) and 1 <= len(n) <= 14 and n != "_"})


def simple_default(item: Function) -> list[tuple[str, str, str]]:
    """(argument, old default, new default) for plain constants on one line."""
    args = item.node.args
    out = []
    for arg, value in zip(
        args.args[-len(args.defaults) :] if args.defaults else [], args.defaults, strict=False
    ):
        if isinstance(value, ast.Constant) and value.lineno == value.end_lineno:
            v = value.value
            new = (
                {True: "False", False: "True"}.get(v)
                if isinstance(v, bool)
                else "True"
                if v is None
                else str(v * 2 or 1)
                if isinstance(v, int)
                else None
            )
            if new:
                out.append((arg.arg, repr(v), new))
    return out


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
NEW_NAMES = [
    "result",
    "value",
    "items",
    "found",
    "rows",
    "entry",
    "current",
    "total",
    "names",
    "pieces",
    "target",
    "output",
    "index",
    "kept",
    "parts",
    "number",
    "first",
    "source",
]
HINTS = {bool: "bool", int: "int", float: "float", str: "str", type(None): "object | None"}


def task(c: Conversation, src: Source) -> Source | None:
    """Write one task over a file; return the file after it, or None if the file offers nothing."""
    rng = c.rng
    item = rng.choice(src.items)
    is_class = isinstance(item.node, ast.ClassDef)
    doc = ast.get_docstring(item.node)
    lines = src.lines
    args = [] if is_class else arguments(item)
    stem = src.path.rsplit("/", 1)[-1].removesuffix(".py").strip("_") or "init"
    c.facts = {
        "fn": item.name,
        "path": src.path,
        "mod": src.path.removesuffix(".py").replace("/", "."),
        "pkg": c.pkg,
        "test": f"tests/test_{stem}.py",
        "arg": rng.choice(args) if args else "",
        "old": "",
        "new": "",
        "n": "",
    }
    kinds = ["explain"]
    if is_class:
        kinds += ["method"] * 4
    else:
        kinds += ["bug"] * 3 + ["test", "constant"] + ["rename"] * 2
        kinds += ["docstring"] * 3 if not doc else []
        kinds += ["guard"] * 2 + ["log", "hints"] if args else []
        kinds += ["default"] * 2 if simple_default(item) else []
        kinds += ["rewrite"] * 2 if not doc and len(src.text) < 4000 else []
    kind = rng.choice(kinds)
    old = lines[item.first : item.end]
    new = list(old)
    offset = item.body - item.first
    start = item.first
    if doc is not None and not is_class:
        offset = item.node.body[1].lineno - 1 - item.first if len(item.node.body) > 1 else len(old)
    if kind in ("docstring", "rewrite"):
        text = words(item.name)
        if args and rng.random() < 0.4:
            text = text[:-1] + f" for the given {args[0]}."
        new[offset:offset] = [f'{item.indent}"""{text}"""']
    elif kind == "rename":
        names = local_names(item)
        if not names:
            return None
        c.facts["old"] = rng.choice(names)
        c.facts["new"] = rng.choice(
            [
                n
                for n in NEW_NAMES + [c.facts["old"] + "s", "new_" + c.facts["old"]]
                if n not in "\n".join(old)
            ]
            or ["renamed"]
        )
        new = [
            re.sub(
                rf"(?<![\w.\"']){re.escape(c.facts['old'])}\b(?!\s*=[^=].*,$)", c.facts["new"], line
            )
            for line in old
        ]
    elif kind == "guard":
        check = rng.choice(
            [
                f'raise ValueError("{c.facts["arg"]} must not be None")',
                f'raise ValueError(f"{item.name} needs {c.facts["arg"]}")',
            ]
        )
        new[offset:offset] = [
            f"{item.indent}if {c.facts['arg']} is None:",
            f"{item.indent}    {check}",
        ]
    elif kind == "log":
        new[offset:offset] = [
            f'{item.indent}logger.debug("{item.name}: {c.facts["arg"]}=%r", {c.facts["arg"]})'
        ]
    elif kind == "hints":
        line = old[0]
        for arg in item.node.args.args:
            if arg.annotation is None and arg.arg not in ("self", "cls"):
                default = re.search(rf"\b{arg.arg}=([\w.'\"]+)", line)
                hint = rng.choice(["str", "int", "object", "list", "dict"])
                if default:
                    try:
                        hint = HINTS.get(type(ast.literal_eval(default.group(1))), "object")
                    except (ValueError, SyntaxError):
                        hint = "object"
                    line = line.replace(default.group(), f"{arg.arg}: {hint} = {default.group(1)}")
                else:
                    line = re.sub(
                        rf"([(,] ?){arg.arg}(?=[,)])", rf"\g<1>{arg.arg}: {hint}", line, count=1
                    )
        if line.endswith("):") and "->" not in line and "return " not in "\n".join(old):
            line = line[:-1] + " -> None:"
        new[0] = line
    elif kind == "default":
        arg, before, after = rng.choice(simple_default(item))
        c.facts |= {"arg": arg, "old": before, "new": after}
        new = [
            re.sub(rf"\b{arg}(\s*(?::[^=,]+)?=\s*){re.escape(before)}", rf"{arg}\g<1>{after}", line)
            if i <= offset
            else line
            for i, line in enumerate(old)
        ]
    elif kind == "bug":
        spots = [
            (i, a, b)
            for i in range(offset, len(old))
            for a, b in SWAPS
            if a in old[i] and not old[i].lstrip().startswith(("#", '"', ">>>"))
        ]
        if not spots:
            return None
        i, a, b = rng.choice(spots)
        wrong = list(old)
        wrong[i] = old[i].replace(a, b, 1)
        c.facts |= {
            "old": wrong[i].strip().replace("{", "").replace("}", ""),
            "new": old[i].strip().replace("{", "").replace("}", ""),
        }
        src = Source(
            src.path, "\n".join(lines[: item.first] + wrong + lines[item.end :]), src.items
        )
        old, new = wrong, old
    elif kind == "method":
        stores = [
            n.attr
            for n in ast.walk(item.node)
            if isinstance(n, ast.Attribute)
            and isinstance(n.ctx, ast.Store)
            and isinstance(n.value, ast.Name)
            and n.value.id == "self"
        ]
        shown = ", ".join(f"{a}={{self.{a}!r}}" for a in list(dict.fromkeys(stores))[:3])
        if "__repr__" in "\n".join(old):
            return None
        new += [
            "",
            f"{item.indent}def __repr__(self):",
            f'{item.indent}    return f"{{type(self).__name__}}({shown})"',
        ]
    elif kind == "constant":
        fresh = rng.choice(
            [
                f"{item.name}_of",
                f"do_{item.name}",
                f"{item.name}_impl",
                f"_{item.name}",
                f"{item.name}_from",
            ]
        )
        c.facts["new"] = fresh
    if kind not in ("explain", "test", "constant") and new == old:
        return None
    c.facts = {k: v.replace("{", "").replace("}", "") for k, v in c.facts.items()}
    request = rng.choice(say.REQUESTS[kind]).format(**c.facts) + rng.choice(
        say.EXTRA if kind not in ("explain",) else [""]
    )
    c.user((rng.choice(say.FOLLOW) if len(c.messages) > 1 else "") + request)
    if kind == "bug" and rng.random() < 0.6:
        line = next(n for n, (x, y) in enumerate(zip(old, new, strict=True)) if x != y)
        fail = (
            f"F{' ' * 65}[100%]\n=================================== FAILURES ===================================\n"
            f"{'_ test_' + item.name + ' _':_^80}\n\n{src.path}:{item.first + line + 1}: in {item.name}\n    {old[line].strip()}\n"
            f"E   AssertionError\n=========================== short test summary info ============================\n"
            f"FAILED {c.facts['test']}::test_{item.name} - AssertionError\n1 failed in {rng.uniform(0.02, 2):.2f}s"
        )
        c.call(
            [
                "I run the test to see how it fails.",
                "First the failure.",
                "Let me reproduce it.",
                "",
            ],
            f"python -m pytest -q {c.facts['test']}",
            fail,
            1,
        )
    c.look(src, item)
    if kind == "explain":
        if rng.random() < 0.6:
            c.grep(src, item.name, say.CALLERS)
        about = (doc or words(item.name)).strip().split("\n\n")[0].replace("\n", " ")
        about = re.sub(r"\s+", " ", about)
        takes = f" It takes {', '.join(f'`{a}`' for a in args)}." if args else ""
        calls = [
            ast.unparse(n.func)
            for n in ast.walk(item.node)
            if isinstance(n, ast.Call) and isinstance(n.func, (ast.Name, ast.Attribute))
        ]
        uses = (
            f" It calls {', '.join(f'`{x}`' for x in dict.fromkeys(x for x in calls if len(x) < 40) if x)}."
            if calls
            else ""
        )
        c.messages.append(
            {
                "role": "assistant",
                "content": f"`{item.name}` in `{src.path}`: {about}{takes}{uses[:400]}",
            }
        )
        return src
    if kind == "test":
        names = ", ".join(f'"{a.arg}"' for a in item.node.args.args)
        holder = "" if item.indent == "    " else "# a method: found through its module\n"
        body = (
            f"import inspect\n\nfrom {c.facts['mod']} import {item.name}\n\n\n{holder}def test_{item.name}_arguments():\n"
            f"    found = list(inspect.signature({item.name}).parameters)\n    assert found[:{len(item.node.args.args)}] == [{names}]\n"
        )
        c.call(say.EDIT, f"cat > {c.facts['test']} <<'{c.mark}'\n{body}{c.mark}", "")
        c.call(
            say.CHECK,
            f"python -m pytest -q {c.facts['test']}",
            "." + " " * 65 + f"[100%]\n1 passed in {rng.uniform(0.02, 2):.2f}s",
        )
        c.end(say.DONE[kind])
        return src
    if kind == "constant":
        text = re.sub(rf"\b{re.escape(item.name)}\b", c.facts["new"], src.text)
        after = Source(src.path, text)
        c.facts["n"] = str(sum(x != y for x, y in zip(src.lines, after.lines, strict=True)))
        c.call(say.EDIT, f"sed -i 's/\\b{item.name}\\b/{c.facts['new']}/g' {src.path}", "")
        c.call(say.CHECK, "git diff", c.diff(src, after))
        c.end(say.DONE[kind])
        return after
    if kind == "rewrite":
        after = Source(src.path, "\n".join(src.lines[: item.first] + new + src.lines[item.end :]))
        c.call(say.EDIT, f"cat > {src.path} <<'{c.mark}'\n{after.text.rstrip()}\n{c.mark}", "")
    else:
        if rng.random() < 0.55 and kind not in ("rename",):  # only the lines around the change
            same = 0
            while same < min(len(old), len(new)) and old[same] == new[same]:
                same += 1
            tail = 0
            while tail < min(len(old), len(new)) - same and old[-1 - tail] == new[-1 - tail]:
                tail += 1
            lead, trail = max(0, same - rng.randrange(4)), max(0, tail - rng.randrange(3))
            start += lead
            old, new = old[lead : len(old) - trail], new[lead : len(new) - trail]
        if old and rng.random() < 0.06:
            c.call(
                say.EDIT,
                f"python - <<'{c.mark}'\ntext = open(\"{src.path}\").read()\nassert '''{old[0]} ''' in text\n{c.mark}",
                'Traceback (most recent call last):\n  File "<stdin>", line 2, in <module>\nAssertionError',
                1,
            )
            c.show(src, item, say.FAILED)
        after = c.edit(src, old, new, start, say.BUG_EDIT if kind == "bug" else say.EDIT, item)
    c.check(src, after, item)
    c.end(say.DONE[kind])
    return after


def conversation(rng: random.Random, pkg: str, files: list[Source], names: list[str]) -> list[dict]:
    """A conversation of one to four tasks."""
    c = Conversation(rng, pkg, files, names)
    src = rng.choice(files)
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 4])):
        after = None
        for _attempt in range(4):
            after = task(c, src)
            if after is not None:
                break
        if sum(len(m["content"]) for m in c.messages) > MAX_CHARS:
            break
        fresh = inspect(after.path, after.text) if after is not None else None
        src = fresh if fresh and rng.random() < 0.5 else rng.choice(files)
    return c.messages


def generate(rows: list[dict], seed: int, target_chars: int) -> Iterator[str]:
    """Rendered conversations over the packages of a shard until target_chars are written."""
    rng = random.Random(seed)
    names: dict[str, list[str]] = {}
    pools: dict[str, list[dict]] = {}
    for row in rows:
        names.setdefault(row["pkg"], []).append(row["path"])
        if row["path"].endswith(".py") and len(row["text"]) < 60_000:
            pools.setdefault(row["pkg"], []).append(row)
    order = [p for p, pool in pools.items() if len(pool) >= 3]
    weights = [len(pools[p]) for p in order]
    written = 0
    while written < target_chars:
        pkg = rng.choices(order, weights)[0]
        at = rng.randrange(len(pools[pkg]))
        files = [s for r in pools[pkg][at : at + 6] if (s := inspect(r["path"], r["text"]))]
        if not files:
            continue
        for _ in range(6):
            try:
                messages = conversation(rng, pkg.replace("_core", ""), files, names[pkg])
            except (IndexError, KeyError, ValueError):  # a file of unusual form; take another
                continue
            if len(messages) < 4:
                continue
            text = render(messages, [BASH_TOOL])
            written += len(text)
            yield text


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shard", type=Path)
    parser.add_argument("--show", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for i, text in enumerate(generate(read_shard(args.shard), args.seed, 10**9)):
        if i == args.show:
            break
        print(text)
        print("=" * 100)


if __name__ == "__main__":
    main()

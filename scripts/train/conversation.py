"""One conversation in the making: requests, commands with their results, closing words."""

from __future__ import annotations

import difflib
import random
import re
import sys
from pathlib import Path

import phrases as say
from source import Function, Source

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from agent_format import BASH_TOOL, SYSTEM_PROMPT  # noqa: E402, F401

OUTPUT_CHARS = 9_000
SMALL_FILE = 3500

EDIT_SCRIPTS = (
    (
        'from pathlib import Path\n\npath = Path("{path}")\ntext = path.read_text()\n\n'
        "old = '''{old}\n'''\nnew = '''{new}\n'''\n"
        "assert text.count(old) == 1\npath.write_text(text.replace(old, new))"
    ),
    (
        'import pathlib\n\np = pathlib.Path("{path}")\ns = p.read_text()\n'
        "old = '''{old}\n'''\nassert old in s\nnew = '''{new}\n'''\n"
        'p.write_text(s.replace(old, new, 1))\nprint("ok")'
    ),
    (
        'path = "{path}"\ntext = open(path).read()\n'
        "old = '''\\\n{old}\n'''\nnew = '''\\\n{new}\n'''\n"
        "assert text.count(old) == 1, text.count(old)\n"
        'open(path, "w").write(text.replace(old, new))'
    ),
)


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
        function = {"name": "bash", "arguments": {"command": command}}
        call = {"type": "function", "function": function}
        self.messages.append({"role": "assistant", "content": remark, "tool_calls": [call]})
        if len(output) > OUTPUT_CHARS:
            note = f"\n[... {len(output) - OUTPUT_CHARS} characters left out ...]\n"
            output = output[: OUTPUT_CHARS // 2] + note + output[-OUTPUT_CHARS // 2 :]
        content = f"exit code: {code}\n{output}".rstrip("\n")
        self.messages.append({"role": "tool", "content": content})

    def heredoc(self, remark: list[str], head: str, body: str, output: str = "") -> None:
        """A command that is fed ``body``."""
        self.call(remark, f"{head} <<'{self.mark}'\n{body}\n{self.mark}", output)

    def answer(self, text: str) -> None:
        """The closing message of a task."""
        self.messages.append({"role": "assistant", "content": text})

    def end(self, kind: str) -> None:
        """A closing message in the words of the kind of task."""
        self.answer(self.rng.choice(say.DONE[kind]).format(**self.facts))

    # -- looking

    def grep(self, src: Source, word: str, remark: list[str]) -> None:
        """Search one file, or the package with a few more hits."""
        hit = re.compile(rf"\b{re.escape(word)}\b")
        rows = [(src.path, i + 1, line) for i, line in enumerate(src.lines) if hit.search(line)]
        if self.rng.random() < 0.6:
            shown = "\n".join(f"{n}:{line}" for _, n, line in rows[:40])
            self.call(remark, f'grep -n "{word}" {src.path}', shown)
            return
        for other in self.files[:12]:
            if other is not src:
                found = [(i + 1, line) for i, line in enumerate(other.lines) if hit.search(line)]
                rows += [(other.path, i, line) for i, line in found[:4]]
        flag = self.rng.choice(["grep -rn", "grep -rnw", "git grep -n"])
        place = "" if flag.startswith("git") else f" {self.pkg}/"
        tail = self.rng.choice(["", " | head -20"])
        shown = "\n".join(f"{p}:{n}:{line}" for p, n, line in sorted(rows)[:20])
        self.call(remark, f'{flag} "{word}"{place}{tail}', shown)

    def show(self, src: Source, item: Function, remark: list[str]) -> None:
        """Print the function, the surroundings or the file."""
        rng, lines = self.rng, src.lines
        if len(src.text) < OUTPUT_CHARS and rng.random() < 0.5:
            self.call(remark, f"cat {src.path}", src.text)
            return
        first = max(0, item.first - rng.choice([0, 0, 1, 3, 5, 10, 25, 60]))
        last = min(len(lines), item.end + rng.choice([0, 0, 1, 2, 5, 10, 30, 60]))
        window = lines[first:last]
        cut = f"sed -n '{first + 1},{last}p'"
        kind = rng.random()
        if kind < 0.75:
            self.call(remark, f"{cut} {src.path}", "\n".join(window))
        elif kind < 0.9:
            numbered = [f"{i:6}\t{line}" for i, line in enumerate(window, first + 1)]
            self.call(remark, f"cat -n {src.path} | {cut}", "\n".join(numbered))
        else:
            head = min(last, 12)
            command = f"head -{head} {src.path}; {cut} {src.path}"
            self.call(remark, command, "\n".join(lines[:head] + window))

    def look(self, src: Source, item: Function) -> None:
        """One to four commands that find and read the function."""
        rng = self.rng
        if rng.random() < 0.2:
            folder = src.path.rsplit("/", 1)[0]
            inside = [n[len(folder) + 1 :] for n in self.names if n.startswith(folder + "/")]
            near = sorted({n.split("/")[0] for n in inside})
            self.call(say.LOOK, f"ls {folder}", "\n".join(near[:60]))
        if rng.random() < 0.65:
            if item.is_class:
                word = f"class {item.name}"
            else:
                word = rng.choice([f"def {item.name}", item.name, item.name])
            self.grep(src, word, say.LOOK)
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
        """Turn old lines into new ones with one of several kinds of command; the new file."""
        rng, path = self.rng, src.path
        lines = src.lines
        after = Source(path, "\n".join(lines[:start] + new + lines[start + len(old) :]))
        before_text, after_text = "\n".join(old), "\n".join(new)
        both = before_text + after_text
        kind = rng.random()
        if len(src.text) < SMALL_FILE and kind < 0.25:
            self.heredoc(remark, f"cat > {path}", after.text.rstrip())
        elif kind < 0.4 or src.text.count(before_text) != 1 or "'''" in both or "\\" in both:
            block = "\n".join(after.lines[item.first : item.end + len(new) - len(old)])
            command = (
                f"cat > /tmp/new.py <<'{self.mark}'\n{block}\n{self.mark}\n"
                f"sed -i -e '{item.end}r /tmp/new.py' -e '{item.first + 1},{item.end}d' {path}"
            )
            self.call(remark, command, "")
        elif (
            kind < 0.5
            and len(old) == 1
            and len(new) == 1
            and not re.search(r"[/&\\\[\]*.^$']", both)
        ):
            swap = f"{start + 1}s/{before_text.strip()}/{after_text.strip()}/"
            self.call(remark, f"sed -i '{swap}' {path}", "")
        else:
            style = rng.randrange(3)
            script = EDIT_SCRIPTS[style].format(path=path, old=before_text, new=after_text)
            self.heredoc(remark, "python -", script, "ok" if style == 1 else "")
        return after

    def diff(self, before: Source, after: Source) -> str:
        """What git diff prints."""
        a, b = f"a/{before.path}", f"b/{before.path}"
        rows = difflib.unified_diff(before.lines, after.lines, a, b, lineterm="", n=3)
        index = f"index {self.rng.getrandbits(28):07x}..{self.rng.getrandbits(28):07x} 100644"
        return "\n".join([f"diff --git {a} {b}", index, *rows])

    def check(self, before: Source, after: Source, item: Function) -> None:
        """One or two commands that look at the result."""
        rng, path = self.rng, before.path
        kinds = ["diff", "compile", "pytest", "reread"]
        for kind in dict.fromkeys(rng.sample(kinds, k=rng.choice([1, 1, 2]), counts=[4, 2, 3, 1])):
            if kind == "diff":
                command = rng.choice(["git diff", "git diff", f"git diff {path}"])
                self.call(say.CHECK, command, self.diff(before, after))
            elif kind == "compile":
                self.call(say.CHECK, f"python -m py_compile {path}", "")
            elif kind == "pytest":
                where = rng.choice([self.facts["test"], "tests"])
                self.call(say.CHECK, f"python -m pytest -q {where}", self.passed())
            else:
                last = item.end + len(after.lines) - len(before.lines)
                shown = "\n".join(after.lines[item.first : last])
                self.call(say.CHECK, f"sed -n '{item.first + 1},{last}p' {path}", shown)

    def passed(self) -> str:
        """A green test run."""
        count = self.rng.choice([1, 2, 3, 4, 6, 8, 11, 14, 19, 23, 37, 52])
        dots = "." * count + " " * max(1, 66 - count)
        return f"{dots}[100%]\n{count} passed in {self.rng.uniform(0.02, 4):.2f}s"

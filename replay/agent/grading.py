"""Grading: a fresh workspace, the agent's diff less the tests, the hidden tests, their outcomes."""

from __future__ import annotations

import json
import secrets
import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lumotree.errors import LumoTreeError
from replay.agent.patch import apply, without_tests
from replay.agent.sandbox import HERE, Sandbox
from replay.agent.supervise import Limits
from replay.agent.tasks import Edit, Task
from replay.agent.workspace import TaskShell, Workspaces

INSIDE = "/grading"
LIMITS = Limits(wall_s=900.0)
RESOLVED, FAILED, EMPTY = "R", "F", "E"
# How many failed tests a grade names.
NAMED = 10


@dataclass(frozen=True)
class Grade:
    """R: every test passes. F: the reason says which do not. E: no change outside the tests."""

    outcome: str
    reason: str | None
    failed: tuple[str, ...]
    tests: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "failed": list(self.failed)}


@dataclass(frozen=True)
class Grader:
    """Judges patches of tasks."""

    workspaces: Workspaces
    sandbox: Sandbox

    def grade(self, task: Task, patch: str) -> Grade:
        """Judges the agent's whole diff. Raises LumoTreeError when the task itself is broken."""
        began = time.monotonic()
        wanted = (*task.fail_to_pass, *task.pass_to_pass)
        if not task.fail_to_pass:
            raise LumoTreeError(
                f"task {task.id} has no FAIL_TO_PASS", "lumotree agent-study --compute FILE"
            )

        def verdict(outcome: str, reason: str | None, failed: Sequence[str] = ()) -> Grade:
            return Grade(
                outcome, reason, tuple(failed[:NAMED]), len(wanted), time.monotonic() - began
            )

        fix = without_tests(patch)
        if not fix:
            why = "the diff is empty" if not patch else "only tests were changed"
            return verdict(EMPTY, why)
        try:
            outcomes, ended = self.run_tests(task, fix)
        except LumoTreeError as error:
            return verdict(FAILED, f"the diff does not apply: {error.message}")
        if ended is not None:
            return verdict(FAILED, ended)
        failed = [name for name in wanted if outcomes.get(name) != "passed"]
        if not failed:
            return verdict(RESOLVED, None)
        still = sum(name in task.fail_to_pass for name in failed)
        reason = f"{still} of {len(task.fail_to_pass)} tests still fail"
        if len(failed) > still:
            reason += f", {len(failed) - still} that passed fail now"
        return verdict(FAILED, reason, failed)

    def run_tests(
        self, task: Task, patch: str = "", edits: Sequence[Edit] = ()
    ) -> tuple[dict[str, str], str | None]:
        """Outcome by test id in a fresh workspace with a change; and why there are none, or None.

        Raises LumoTreeError when the change does not apply.
        """
        with tempfile.TemporaryDirectory(prefix="lumotree-grade-") as place:
            root = self.workspaces.checkout(task, Path(place) / "testbed")
            if patch:
                apply(patch, root)
            for edit in edits:
                edit.apply(root)
            self.workspaces.restore_tests(task, root)
            shell = TaskShell(
                self.sandbox,
                root,
                self.workspaces.environment(task),
                LIMITS,
                readonly=((HERE, INSIDE),),
            )
            inside = INSIDE if self.sandbox.contains else str(HERE)
            words = ["python", "-P", f"{inside}/grade.py", "-q", "--rootdir=."]
            if task.workspace.mirror is None:
                # A wheel has no configuration of its own, and the agent may not bring one.
                words.append(f"-c={inside}/pytest.ini")
            # Outcomes come by a file without a name, and only with the word that stood in it.
            word = secrets.token_hex(16).encode()
            with tempfile.TemporaryFile(buffering=0) as kept:
                kept.write(word)
                ended = shell.raw(shlex.join([*words, *task.test_files]), kept.fileno())
                kept.seek(0)
                told = kept.read()
            try:
                if not told.startswith(word):
                    raise ValueError
                outcomes = json.loads(told.removeprefix(word))
            except ValueError:
                lines = ended.output.decode(errors="replace").strip().splitlines()
                last = lines[-1][:200] if lines else f"exit code {ended.exit_code}"
                return {}, f"the tests did not run to their end: {ended.fault or last}"
        return outcomes, None

    def compute(self, task: Task) -> Task:
        """The task with FAIL_TO_PASS and PASS_TO_PASS from runs before and after its fix.

        Raises LumoTreeError when the tests do not run, or the fix makes no test pass.
        """
        task = task.model_copy(update={"fail_to_pass": [], "pass_to_pass": []})
        before, fault = self.run_tests(task)
        after, later = self.run_tests(task, edits=task.reference_fix)
        if fault or later:
            raise LumoTreeError(f"task {task.id}: {fault or later}")
        passing = [name for name, outcome in after.items() if outcome == "passed"]
        mended = [name for name in passing if before.get(name) != "passed"]
        if not mended:
            raise LumoTreeError(f"task {task.id}: no test fails before the fix and passes after")
        kept = [name for name in passing if before.get(name) == "passed"]
        return task.model_copy(update={"fail_to_pass": mended, "pass_to_pass": kept})

    def check(self, task: Task) -> str | None:
        """Whether the task is red before and green after its fix; None, or what is wrong."""
        before, fault = self.run_tests(task)
        if fault:
            return f"before the fix {fault}"
        early = [name for name in task.fail_to_pass if before.get(name) == "passed"]
        if early:
            return f"{len(early)} tests pass before the fix, such as {early[0]}"
        broken = [name for name in task.pass_to_pass if before.get(name) != "passed"]
        if broken:
            return f"{len(broken)} tests fail before the fix that should not, such as {broken[0]}"
        after, fault = self.run_tests(task, edits=task.reference_fix)
        if fault:
            return f"after the fix {fault}"
        red = [n for n in (*task.fail_to_pass, *task.pass_to_pass) if after.get(n) != "passed"]
        return f"{len(red)} tests fail after the fix, such as {red[0]}" if red else None

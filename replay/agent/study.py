"""The study: every task once through every arm, graded, recorded, and summed up."""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from lumotree.errors import ArmError
from replay.agent.attempt import Attempt, Budget, attempt, external_attempt
from replay.agent.boundaries import Boundaries
from replay.agent.client import ChatClient
from replay.agent.grading import Grader
from replay.agent.loop import Exchange
from replay.agent.patch import diff
from replay.agent.prompt import SAMPLING
from replay.agent.sandbox import Sandbox
from replay.agent.servers import ServedArm, arm_names, make_arm
from replay.agent.store import StudyFolder
from replay.agent.summary import summarise
from replay.agent.supervise import Limits
from replay.agent.table import markdown
from replay.agent.tasks import Task
from replay.agent.trajectory import trajectory
from replay.agent.workspace import TaskShell, Workspaces
from replay.corpus import CHAT_URL
from replay.machine import describe_machine, describe_versions, git_commit
from replay.report.study import write_study_report

SPOILED = "X"
# As much as other agents show; long enough to read a function, short enough for many turns.
OUTPUT_CAP = 10_000
AGENT = "lumotree"


@dataclass(frozen=True)
class StudyOptions:
    """What a study is asked to do; all of it is saved, and a resumed study must ask the same."""

    arms: str
    budget: Budget = Budget()
    seed: int = 0
    sandbox: str | None = None
    agent_cmd: str | None = None
    output_cap: int = OUTPUT_CAP
    server_options: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "server_options": list(self.server_options)}


class Progress(Protocol):
    """Hears what goes on."""

    def note(self, arm: str, task: str, words: str) -> None: ...

    def finished(self, row: dict[str, Any]) -> None: ...

    def say(self, words: str) -> None: ...


@dataclass
class Study:
    """Runs into a folder. Attempts that stand there already are not run again."""

    folder: StudyFolder
    tasks: Sequence[Task]
    options: StudyOptions
    workspaces: Workspaces
    sandbox: Sandbox
    progress: Progress
    parallel: int = 1
    make: Callable[..., ServedArm] = make_arm
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> dict[str, Any]:
        """Returns the summary. Raises LumoTreeError; an arm that does not start is a row."""
        arms = arm_names(self.options.arms)
        for arm in arms:
            self._arm(arm)
            self.folder.write_predictions(arm)
        self.folder.write_corpora(arms)
        self.folder.run["end"] = datetime.now(UTC).isoformat(timespec="seconds")
        self.folder.write_run()
        summary = summarise(self.folder.run, self.folder.rows())
        self.folder.write("summary.json", json.dumps(summary, indent=2) + "\n")
        self.folder.write("study.md", markdown(summary))
        write_study_report(self.folder.path)
        return summary

    def _arm(self, name: str) -> None:
        done = self.folder.finished()
        tasks = [task for task in self.tasks if (name, task.id) not in done]
        if not tasks:
            return
        logs = self.folder.path / "logs"
        options = (*self.options.server_options, "--active", str(self.parallel))
        arm = self.make(name, self.tasks, options, logs)
        known = self.folder.run.setdefault("arms", {}).setdefault(name, {})
        self.progress.say(f"{name}: starting")
        try:
            known["description"] = arm.start()
            known.pop("unavailable", None)
        except ArmError as error:
            known["unavailable"] = str(error)
            self.progress.say(f"{name}: unavailable: {error}")
            self.folder.write_run()
            return
        known["decodes"] = arm.decodes
        self.folder.write_run()
        try:
            with Boundaries(arm, known, self.parallel) as boundaries:
                if self.parallel == 1:
                    for task in tasks:
                        self._task(arm, task, boundaries)
                else:
                    with ThreadPoolExecutor(self.parallel) as pool:
                        for _ in pool.map(lambda task: self._task(arm, task, boundaries), tasks):
                            pass
        finally:
            arm.stop()
            self.folder.write_run()

    def _task(self, arm: ServedArm, task: Task, boundaries: Boundaries) -> None:
        with tempfile.TemporaryDirectory(
            prefix="lumotree-task-", ignore_cleanup_errors=True
        ) as place:
            root = self.workspaces.checkout(task, Path(place) / "testbed")
            before = boundaries.before()
            made = self._attempt(arm, task, root)
            seen = boundaries.after(before, made)
            patch = diff(root, self.workspaces.pristine(task))
        self.progress.note(arm.name, task.id, "grading")
        grade = Grader(self.workspaces, self.sandbox).grade(task, patch)
        row = {
            "arm": arm.name,
            "task": task.id,
            "set": task.set,
            "outcome": SPOILED if made.error else grade.outcome,
            "reason": made.error or grade.reason,
            "error": made.error,
            "failed_tests": list(grade.failed),
            "exit_status": made.exit_status,
            "requests": self._requests(made, seen),
            "prompt_tokens": made.prompt_tokens if made.exchanges else None,
            "completion_tokens": self._tokens(made, seen),
            "model_s": made.model_s,
            "tools_s": made.tools_s,
            "agent_s": made.seconds,
            "grading_s": grade.seconds,
            "patch_sha256": hashlib.sha256(patch.encode(errors="surrogateescape")).hexdigest(),
            "counters": seen,
            "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        with self._lock:
            self._keep(arm, task, made, patch)
            self.folder.append(row)
        self.progress.finished(row)

    def _attempt(self, arm: ServedArm, task: Task, root: Path) -> Attempt:
        environment = self.workspaces.environment(task)
        if self.options.agent_cmd is not None:
            log = self.folder.path / self.folder.place("logs", arm.name, f"{task.id}.log")
            log.parent.mkdir(parents=True, exist_ok=True)
            return external_attempt(
                self.options.agent_cmd,
                task.problem_statement.strip(),
                arm.url,
                arm.model,
                arm.key,
                root,
                environment.folder,
                self.options.budget,
                log,
            )
        shell = TaskShell(
            self.sandbox,
            root,
            environment,
            Limits(wall_s=self.options.budget.command_s),
            self.options.output_cap,
        )

        def heard(so_far: Attempt) -> None:
            answer = so_far.exchanges[-1].answer
            tokens = answer.usage.get("completion_tokens") or 0
            decode_s = answer.e2e_s - answer.ttft_s
            rate = f", {(tokens - 1) / decode_s:.1f} tok/s" if decode_s > 0 and tokens > 1 else ""
            words = f"step {len(so_far.exchanges)}{rate if arm.decodes else ''}"
            self.progress.note(arm.name, task.id, words)

        request = {**SAMPLING, "model": arm.model, "seed": self.options.seed}
        self.progress.note(arm.name, task.id, "step 0")
        client = ChatClient(arm.url, arm.key)
        try:
            return attempt(
                task.problem_statement.strip(), client, shell, self.options.budget, request, heard
            )
        finally:
            client.close()

    def _requests(self, made: Attempt, seen: dict[str, Any] | None) -> int | None:
        if self.options.agent_cmd is None:
            return len(made.exchanges)
        return int(seen["difference"]["requests"]) if seen else None

    def _tokens(self, made: Attempt, seen: dict[str, Any] | None) -> int | None:
        """Output tokens: the server's counters where they hold, else the sum of its answers."""
        if seen and not seen["faults"]:
            return int(seen["difference"]["generation_tokens"])
        return made.completion_tokens if self.options.agent_cmd is None else None

    def _keep(self, arm: ServedArm, task: Task, made: Attempt, patch: str) -> None:
        def place(kind: str, ending: str) -> str:
            return self.folder.place(kind, arm.name, f"{task.id}.{ending}")

        self.folder.write(place("attempts", "diff"), patch)
        if made.exchanges:
            written = trajectory(
                task.id,
                made.exchanges,
                exit_status=made.exit_status,
                submission=patch,
                config={
                    "agent": {"budget": asdict(self.options.budget)},
                    "agent_type": AGENT,
                    "model": {"model_name": arm.model, "model_kwargs": SAMPLING},
                    "model_type": "chat completions",
                    "environment": {"sandbox": self.sandbox.kind},
                    "environment_type": self.sandbox.kind,
                },
                clock=made.clock,
            )
            # All of it ASCII: a diff may hold bytes that are no text.
            text = json.dumps(written, indent=1)
            self.folder.write(place("attempts", "traj.json"), text + "\n")
            lines = corpus_lines(task.id, made.exchanges)
            encoded = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            self.folder.write(place("recorded", "jsonl"), encoded)


def corpus_lines(task_id: str, exchanges: Sequence[Exchange]) -> list[dict[str, Any]]:
    """The requests of an attempt as corpus lines. Nothing in them depends on the clock."""
    return [
        {
            "custom_id": f"{task_id}-{turn:02d}",
            "method": "POST",
            "url": CHAT_URL,
            "body": exchange.body,
            "lumotree": {
                "conversation": task_id,
                "turn": turn,
                "task": task_id,
                "agent": AGENT,
                # A logical clock, a second for each message: recordings are the same every time.
                "recorded_at": len(exchange.body["messages"]) - 2,
                "finish_reason": exchange.answer.finish_reason,
                "completion": exchange.answer.message,
            },
        }
        for turn, exchange in enumerate(exchanges, start=1)
    ]


def describe(options: StudyOptions, tasks: Sequence[Task], sandbox: Sandbox) -> dict[str, Any]:
    """run.json of a new study."""
    hashes = {
        task.id: hashlib.sha256(task.model_dump_json(by_alias=True).encode()).hexdigest()
        for task in tasks
    }
    return {
        "options": options.as_dict(),
        "tasks": hashes,
        "sets": {task.id: task.set for task in tasks},
        "sandbox": sandbox.kind,
        "contained": sandbox.contains and options.agent_cmd is None,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "commit": git_commit(),
        "start": datetime.now(UTC).isoformat(timespec="seconds"),
        "arms": {},
    }


def default_folder() -> Path:
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-agent-study"

"""Runs a study of the tiny tasks in a process of its own, so that a test can kill it.

python -m tests.agent.small_study TASKS CACHE FOLDER ARMS [resume]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from replay.agent.attempt import Budget
from replay.agent.progress import Line
from replay.agent.sandbox import Sandbox
from replay.agent.store import StudyFolder
from replay.agent.study import Study, StudyOptions, describe
from replay.agent.tasks import load_tasks
from tests.agent.conftest import SmallWorkspaces


def small_study(
    tasks: Path, cache: Path, folder: Path, arms: str, resume: bool = False, **changes: Any
) -> Study:
    chosen = load_tasks([tasks])
    parallel = changes.pop("parallel", 1)
    changes.setdefault("budget", Budget(seconds=120.0))
    options = StudyOptions(arms=arms, **changes)
    sandbox = Sandbox.choose(options.sandbox)
    run = describe(options, chosen, sandbox)
    if resume:
        kept = StudyFolder.open(folder)
        kept.check_same(run)
    else:
        kept = StudyFolder.create(folder, run)
    line = Line(quiet=False, total=len(chosen))
    return Study(kept, chosen, options, SmallWorkspaces(cache), sandbox, line, parallel)


if __name__ == "__main__":
    places = [Path(word) for word in sys.argv[1:4]]
    small_study(*places, sys.argv[4], "resume" in sys.argv[5:]).run()

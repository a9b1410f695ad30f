"""Three of the twenty Astropy tasks for real: red before, green after, resolved by the script.

They need Python 3.11, an environment of 260 MB and a wheel of 11 MB, so they run where
`lumotree agent-study --prepare` has been run, or where LUMOTREE_ASTROPY=1 allows a first time.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lumotree.errors import LumoTreeError
from replay.agent.cache import DONE, cache_folder, read_environment
from replay.agent.grading import Grader
from replay.agent.progress import Line
from replay.agent.sandbox import Sandbox
from replay.agent.store import StudyFolder
from replay.agent.study import Study, StudyOptions, describe
from replay.agent.tasks import load_tasks
from replay.agent.workspace import Workspaces

ASTROPY = Path(__file__).resolve().parents[2] / "corpora" / "astropy"
SUBSET = ("astropy-14365", "astropy-14309", "astropy-b1-cdot")


@pytest.fixture(scope="module")
def ready() -> Workspaces:
    cache = cache_folder()
    if not os.environ.get("LUMOTREE_ASTROPY"):
        if not list(cache.glob(f"environments/astropy-*/{DONE}")):
            pytest.skip("no Astropy environment: lumotree agent-study --prepare makes it")
        if not list(cache.glob("wheels/astropy-*.whl")):
            pytest.skip("no Astropy wheel: lumotree agent-study --prepare fetches it")
    workspaces = Workspaces(cache)
    try:
        workspaces.environment(load_tasks([ASTROPY], SUBSET)[0])
    except LumoTreeError as error:
        version = read_environment(ASTROPY / "environment.json").python
        pytest.skip(f"no environment with Python {version}: {error}")
    return workspaces


@pytest.mark.astropy
@pytest.mark.parametrize("name", SUBSET)
def test_red_before_and_green_after(ready: Workspaces, name: str) -> None:
    (task,) = load_tasks([ASTROPY], [name])
    assert Grader(ready, Sandbox.choose()).check(task) is None


@pytest.mark.astropy
def test_the_scripted_agent_resolves_them(ready: Workspaces, tmp_path: Path) -> None:
    tasks = load_tasks([ASTROPY], SUBSET)
    options, sandbox = StudyOptions(arms="scripted"), Sandbox.choose()
    folder = StudyFolder.create(tmp_path / "run", describe(options, tasks, sandbox))
    found = Study(folder, tasks, options, ready, sandbox, Line(quiet=True, total=3)).run()
    assert found["arms"]["scripted"]["resolved"] == 3, found["arms"]["scripted"]["cells"]

"""The agent's diff: whole, free of litter, and taken without trusting the agent's repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lumotree.errors import LumoTreeError
from replay.agent.patch import apply, commit_all, diff, is_test_path, without_tests


@pytest.fixture
def pristine(tmp_path: Path) -> Path:
    root = tmp_path / "pristine"
    (root / "pkg/tests").mkdir(parents=True)
    (root / "pkg/a.py").write_text("a = 1\n")
    (root / "pkg/b.bin").write_bytes(bytes(range(256)))
    (root / "pkg/tests/test_a.py").write_text("x\n")
    (root / ".gitignore").write_text("*.log\n")
    (root / "kept.log").write_text("part of the start although ignored\n")
    commit_all(root)
    return root


@pytest.fixture
def work(pristine: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "work"
    subprocess.run(["cp", "-a", pristine, copy], check=True)
    return copy


def test_a_diff_carries_every_kind_of_change(pristine: Path, work: Path, tmp_path: Path) -> None:
    (work / "pkg/a.py").write_text("a = 2\n")
    (work / "pkg/b.bin").write_bytes(b"\0\xff" * 40)
    (work / "pkg/latin.py").write_bytes("# \xe9\n".encode("latin-1"))
    (work / "new file é.py").write_text("new\n")
    (work / "kept.log").unlink()
    patch = diff(work, pristine)
    fresh = tmp_path / "fresh"
    subprocess.run(["cp", "-a", pristine, fresh], check=True)
    apply(patch, fresh)
    for name in ("pkg/a.py", "pkg/b.bin", "pkg/latin.py", "new file é.py"):
        assert (fresh / name).read_bytes() == (work / name).read_bytes()
    assert not (fresh / "kept.log").exists()


def test_no_change_is_an_empty_diff(pristine: Path, work: Path) -> None:
    (work / "pkg/__pycache__").mkdir()
    (work / "pkg/__pycache__/a.pyc").write_bytes(b"x")
    assert diff(work, pristine) == ""


@pytest.mark.parametrize(
    "trick",
    [
        "git add -A && git -c user.name=x -c user.email=x@example.com commit -qm hide",
        "rm -rf .git",
        "git config core.fsmonitor 'touch ../owned; false'; git config filter.f.clean 'touch "
        "../owned; cat'; echo '*.py filter=f diff=f' > .gitattributes; git config diff.f.textconv "
        "'touch ../owned; cat'",
        "mkdir .git/hooks; printf '#!/bin/sh\\ntouch ../owned\\n' > .git/hooks/post-index-change; "
        "chmod +x .git/hooks/post-index-change",
        "git update-index --assume-unchanged pkg/a.py",
    ],
    ids=["commit", "no-git", "config", "hook", "assume-unchanged"],
)
def test_what_the_agent_does_to_its_git_changes_nothing(
    pristine: Path, work: Path, trick: str
) -> None:
    (work / "pkg/a.py").write_text("a = 2\n")
    subprocess.run(["sh", "-c", trick], cwd=work, check=True, capture_output=True)
    patch = diff(work, pristine)
    assert "+a = 2" in patch
    assert not (work.parent / "owned").exists()


@pytest.mark.parametrize(
    "trick",
    ["git init -q inner", "mkfifo pipe", "ln -s /etc/passwd link", "ln -s . loop", "chmod 0 pkg"],
)
def test_odd_things_in_the_workspace_do_not_spoil_the_diff(
    pristine: Path, work: Path, trick: str
) -> None:
    (work / "pkg/a.py").write_text("a = 2\n")
    subprocess.run(["sh", "-c", trick], cwd=work, check=True, capture_output=True)
    patch = diff(work, pristine)
    assert "+a = 2" in patch and "root:" not in patch


def test_files_of_tests_are_dropped(pristine: Path, work: Path) -> None:
    (work / "pkg/tests/test_a.py").write_text("y\n")
    (work / "conftest.py").write_text("z\n")
    assert without_tests(diff(work, pristine)) == ""
    (work / "pkg/a.py").write_text("a = 2\n")
    (work / "pkg/tests/é.py").write_text("quoted name\n")
    kept = without_tests(diff(work, pristine))
    assert kept.count("diff --git") == 1 and "+a = 2" in kept


def test_a_diff_that_does_not_fit_is_refused(work: Path) -> None:
    with pytest.raises(LumoTreeError, match="git apply failed"):
        apply("diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n", work)


def test_a_diff_cannot_write_outside(work: Path) -> None:
    head = "diff --git a/../out b/../out\nnew file mode 100644\n"
    patch = f"{head}--- /dev/null\n+++ b/../out\n@@ -0,0 +1 @@\n+b\n"
    with pytest.raises(LumoTreeError):
        apply(patch, work)
    assert not (work.parent / "out").exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pkg/tests/data.txt", True),
        ("pkg/test/x.py", True),
        ("test_a.py", True),
        ("a_test.py", True),
        ("pkg/conftest.py", True),
        ("tox.ini", True),
        ("pkg/testing.py", False),
        ("pkg/latest.py", False),
        ("tests.py", False),
        ("pkg/contest.py", False),
    ],
)
def test_test_paths(name: str, expected: bool) -> None:
    assert is_test_path(name) is expected


NAMES = st.lists(
    st.sampled_from(["pkg", "tests", "a", "test_a.py", "b c.py", "conftest.py"]),
    min_size=1,
    max_size=4,
).map("/".join)


@given(st.lists(NAMES, max_size=5))
def test_exactly_the_parts_of_tests_go(names: list[str]) -> None:
    parts = [
        f"diff --git a/{name} b/{name}\n--- a/{name}\n+++ b/{name}\n@@ -1 +1 @@\n-x\n+y\n"
        for name in names
    ]
    kept = [part for part, name in zip(parts, names, strict=True) if not is_test_path(name)]
    assert without_tests("".join(parts)) == "".join(kept)

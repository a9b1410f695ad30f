"""Processes are bounded by the kernel, also for root and where the watch looks too late."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from replay.agent import supervise
from replay.agent.sandbox import KINDS, Place, Sandbox, _can_cap, namespaces_have_limits, unshare
from replay.agent.supervise import Limits

LIMITS = Limits(wall_s=60.0, processes=48)
# More than these allow, and no more than a machine bears should there be none.
# The reader ends it all at the first refusal: bash itself would try again for many seconds.
MANY = (
    "{ for i in {1..900}; do sleep 60 & done; echo all; } 2>&1 | while read -r line; do "
    'echo "$line"; case $line in *unavailable*|all) kill -KILL 0 ;; esac; done'
)


def bounded(kind: str) -> Sandbox:
    """The sandbox of a kind, where the kernel bounds it."""
    found = Sandbox(kind)
    if fault := found.fault():
        pytest.skip(fault)
    if os.geteuid() == 0 and not (namespaces_have_limits() if kind == "unshare" else _can_cap()):
        pytest.skip("only the watch binds root here")
    return found


@pytest.mark.parametrize("kind", KINDS[:2])
def test_more_cannot_be_started(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "WATCH_S", 600.0)
    done = bounded(kind).run(MANY, Place(tmp_path), LIMITS)
    assert b"Resource temporarily unavailable" in done.output, done


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_fork_bomb_without_an_end(kind: str, tmp_path: Path) -> None:
    done = bounded(kind).run("f() { f | f & }; f; sleep 60", Place(tmp_path), LIMITS)
    assert done.fault == "killed: more than 48 processes"


@pytest.mark.parametrize(
    ("release", "own"),
    [("6.14.0", True), ("6.18.44-x", True), ("7.0", True), ("6.13.9", False), ("5.15.0", False)],
)
def test_the_whole_machines_limit_is_left_alone(
    release: str, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Linux 6.14 the same file sets it."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    words = unshare(Place(tmp_path), tmp_path, "777")
    assert ("777" in words) == own
    _can_cap.cache_clear()
    ran = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(
        subprocess, "run", lambda words, **how: ran.append(words) or SimpleNamespace(returncode=1)
    )
    assert not _can_cap() and bool(ran) == own
    _can_cap.cache_clear()

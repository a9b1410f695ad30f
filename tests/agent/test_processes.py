"""Processes are bounded by the kernel, also for root and where the watch looks too late."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from replay.agent import supervise
from replay.agent.sandbox import KINDS, Place, Sandbox
from replay.agent.supervise import Limits

# More than the limit below allows, and no more than a machine bears should there be none.
# The reader ends it all at the first refusal: bash itself would try again for many seconds.
MANY = (
    "{ for i in {1..900}; do sleep 60 & done; echo all; } 2>&1 | while read -r line; do "
    'echo "$line"; case $line in *unavailable*|all) kill -KILL 0 ;; esac; done'
)


def numbered() -> bool:
    """Whether PID namespaces have a limit of their own: Linux 6.14."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int(minor)) >= (6, 14)


@pytest.mark.skipif(os.geteuid() == 0 and not numbered(), reason="only the watch binds root here")
@pytest.mark.parametrize("kind", KINDS[:2])
def test_more_cannot_be_started(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Sandbox(kind)
    if fault := sandbox.fault():
        pytest.skip(fault)
    monkeypatch.setattr(supervise, "WATCH_S", 600.0)
    done = sandbox.run(MANY, Place(tmp_path), Limits(wall_s=60.0, processes=48))
    assert b"Resource temporarily unavailable" in done.output, done

"""An in-process arm behind `lumotree serve`, started and stopped by the study."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lumotree.errors import ArmError
from replay.agent.attempt import Budget
from replay.agent.servers import LumoTreeServer
from tests.agent.small_study import small_study


def serving(mark: str) -> list[str]:
    """Command lines of processes that serve and have the mark in them."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if " serve " in line and mark in line:
            found.append(line)
    return found


def test_a_study_of_the_embedded_model(tiny_folder: Path, workspaces, tmp_path: Path, sandbox):
    study = small_study(
        tiny_folder,
        workspaces.cache,
        tmp_path / "run",
        "ar",
        budget=Budget(seconds=300.0, steps=2, max_tokens=12),
        server_options=("--threads", "1", "--request-timeout", f"299.{os.getpid()}"),
    )
    found = study.run()
    arm = found["arms"]["ar"]
    assert arm["attempts"] == 3 and arm["outcomes"]["X"] == 0 and arm["warnings"] == []
    assert arm["tok_s"] > 0 and arm["tok_s_tasks"] == 3
    rows = [json.loads(line) for line in (tmp_path / "run/attempts.jsonl").open()]
    assert arm["output_tokens"] == sum(row["completion_tokens"] for row in rows) > 3
    # One server for all three tasks: their counters go on where the last one ended.
    ends = [row["counters"]["after"]["requests"] for row in rows]
    assert ends == sorted(ends) and ends[-1] == arm["requests"]
    assert re.search(
        r"\| ar \| \d of 3 \| \d \| \d+\.\d\d \|", (tmp_path / "run/study.md").read_text()
    )
    assert not serving(f"299.{os.getpid()}")


def test_an_arm_that_does_not_start_says_what_the_server_said(tmp_path: Path) -> None:
    server = LumoTreeServer("ar", ["--model", "no/such/folder"], tmp_path / "ar.log")
    with pytest.raises(ArmError, match="arm 'ar' did not start: .*no/such/folder"):
        server.start()


def test_advice_of_the_server_names_options_of_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(
        "#!/bin/sh\necho 'lumotree: it is too big (lower --active or --prefix-mib)'\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ArmError, match="arm 'ar' did not start: it is too big") as caught:
        LumoTreeServer("ar", [], tmp_path / "ar.log").start()
    assert caught.value.message.endswith("too big")
    assert caught.value.hint == "lower --parallel or --max-context"


def test_a_killed_study_leaves_no_server(tmp_path: Path) -> None:
    mark = f"298.{os.getpid()}"
    code = (
        "import sys, time; from pathlib import Path\n"
        "from replay.agent.servers import LumoTreeServer\n"
        f"server = LumoTreeServer('ar', ['--request-timeout', '{mark}'], Path(sys.argv[1]))\n"
        "print(server.start(), server.url, flush=True); time.sleep(300)"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "log"], stdout=subprocess.PIPE, text=True
    )
    assert "http://127.0.0.1:" in caller.stdout.readline()
    assert serving(mark)
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    caller.stdout.close()
    deadline = time.monotonic() + 60
    while serving(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not serving(mark)

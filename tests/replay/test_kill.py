"""A replay killed with SIGKILL at random moments and resumed has the rows of an unbroken one."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.replay.fakes import corpus_lines, write_corpus

FAKE_CLI = Path(__file__).with_name("fake_cli.py")
ARMS = ["--arms", "ar mtp-5 lumotree", "--runs", "2", "--cap", "9"]


def start(folder, pause, *arguments):
    return subprocess.Popen(
        [sys.executable, str(FAKE_CLI), str(pause), "replay", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Background jobs of a shell ignore Ctrl-C, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(process):
    out, err = process.communicate(timeout=180)
    return process.returncode, out, err


def rows(folder, name):
    lines = (folder / name / "requests.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def wait_for_rows(path, count):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.002)
    raise AssertionError(f"{path} never had {count} rows")


def test_kills_lose_and_repeat_nothing(tmp_path):
    write_corpus(tmp_path / "c.jsonl", corpus_lines())
    code, _, err = finish(start(tmp_path, 0, "c.jsonl", *ARMS, "--out", "whole"))
    assert code == 0, err
    whole = rows(tmp_path, "whole")
    assert len(whole) == 3 * (6 * 2 + 1)

    chance = random.Random()
    arguments = ["c.jsonl", *ARMS, "--out", "broken"]
    for target in sorted(chance.sample(range(len(whole)), 2)):
        process = start(tmp_path, 0.01, *arguments)
        wait_for_rows(tmp_path / "broken" / "requests.jsonl", target)
        time.sleep(chance.uniform(0, 0.012))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        arguments = ["--resume", "broken"]
    code, _, err = finish(start(tmp_path, 0, "--resume", "broken"))
    assert code == 0, err
    assert rows(tmp_path, "broken") == whole
    summaries = [
        json.loads((tmp_path / n / "summary.json").read_text()) for n in ("whole", "broken")
    ]
    assert summaries[0] == summaries[1]
    run = json.loads((tmp_path / "broken" / "run.json").read_text())
    assert run["ended_at"] and run["resumed_at"]


def test_ctrl_c_says_how_to_go_on(tmp_path):
    write_corpus(tmp_path / "c.jsonl", corpus_lines())
    process = start(tmp_path, 0.05, "c.jsonl", *ARMS, "--out", "my run")
    wait_for_rows(tmp_path / "my run" / "requests.jsonl", 2)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130 and out == ""
    assert "lumotree replay --resume 'my run'" in err and "Traceback" not in err
    code, _, err = finish(start(tmp_path, 0, "--resume", "my run"))
    assert code == 0, err
    assert len(rows(tmp_path, "my run")) == 3 * (6 * 2 + 1)

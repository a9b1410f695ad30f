"""The escape suite: each attempt is contained, and what was stopped is said."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lumotree.errors import LumoTreeError
from replay.agent.attempt import TimedShell
from replay.agent.cache import own_environment
from replay.agent.sandbox import INSIDE, KINDS, Place, Sandbox
from replay.agent.supervise import Limits, descendants
from replay.agent.workspace import TaskShell

LIMITS = Limits(wall_s=60.0, memory_mib=400, processes=48, output_mib=16, file_mib=8)
# A time to sleep that no other run of these tests beside this one has.
NAP = f"44.{os.getpid():07}"


def faults() -> dict[str, str | None]:
    if sys.platform != "linux":
        return dict.fromkeys(KINDS[:2], "not Linux")
    return {kind: Sandbox(kind).fault() for kind in KINDS[:2]}


FAULTS = faults()


@pytest.fixture(params=KINDS[:2])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    if FAULTS[request.param]:
        pytest.skip(FAULTS[request.param])
    return Sandbox(request.param)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    return Place(workspace)


def run(sandbox: Sandbox, place: Place, command: str, limits: Limits = LIMITS):
    done = sandbox.run(command, place, limits)
    return done, done.output.decode(errors="replace")


def test_one_kind_works_where_the_tests_run() -> None:
    """A machine that contains nothing must not pass this suite by skipping it."""
    if sys.platform == "linux" and not os.environ.get("LUMOTREE_NO_SANDBOX"):
        assert None in FAULTS.values(), FAULTS


def test_the_workspace_is_writable_and_nothing_else(sandbox: Sandbox, place: Place) -> None:
    victim = place.workspace.parent / "victim"
    victim.write_text("untouched")
    done, output = run(
        sandbox,
        place,
        f"echo new > made; for f in /usr/x /etc/x /bin/x /x {victim} ../x; do echo bad > $f; done; "
        "ls /usr/x /x; echo end",
    )
    assert (place.workspace / "made").read_text() == "new\n"
    assert victim.read_text() == "untouched" and not (victim.parent / "x").exists()
    assert output.count("Read-only file system") + output.count("No such file") >= 6
    assert output.endswith("end\n") and done.exit_code == 0


def test_the_environment_given_is_the_environment_seen(sandbox: Sandbox, place: Place) -> None:
    known = {"PATH": "/own/bin:/usr/bin:/bin", "NAME": "a b"}
    done = sandbox.run('echo "$PATH|$NAME|$HOME"', place, LIMITS, known)
    assert done.output.decode() == "/own/bin:/usr/bin:/bin|a b|/tmp\n"


def test_a_link_out_of_the_workspace_leads_nowhere(sandbox: Sandbox, place: Place) -> None:
    (place.workspace.parent / "victim").write_text("secret")
    (place.workspace / "way").symlink_to(place.workspace.parent / "victim")
    done, output = run(sandbox, place, "cat way; echo bad > way")
    assert "secret" not in output and done.exit_code != 0
    assert (place.workspace.parent / "victim").read_text() == "secret"


def test_the_kernels_settings_are_read_only(sandbox: Sandbox, place: Place) -> None:
    before = Path("/proc/sys/kernel/domainname").read_text()
    done, output = run(sandbox, place, "echo x > /proc/sys/kernel/domainname; echo $?")
    assert output.endswith("1\n")
    assert Path("/proc/sys/kernel/domainname").read_text() == before


def test_the_home_folder_and_the_environment_are_not_there(
    sandbox: Sandbox, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "shown")
    home = Path.home()
    done, output = run(
        sandbox, place, f'ls {home} /root /home; echo "[$SECRET]"; cat /proc/1/environ'
    )
    assert "[]" in output and "shown" not in output
    assert output.count("cannot access") >= 2
    assert done.exit_code is not None


def test_no_network(sandbox: Sandbox, place: Place) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    done, output = run(
        sandbox,
        place,
        f"(echo hi > /dev/tcp/127.0.0.1/{port}) 2>&1; (: > /dev/tcp/192.0.2.1/80) 2>&1",
    )
    server.settimeout(0.05)
    with pytest.raises(TimeoutError):
        server.accept()
    assert "unreachable" in output.lower() or "refused" in output.lower()


def test_no_right_is_left(sandbox: Sandbox, place: Place) -> None:
    _, output = run(
        sandbox, place, "grep -E 'CapEff|NoNewPrivs' /proc/self/status; mount -o remount,rw /usr"
    )
    assert "CapEff:\t0000000000000000" in output and "NoNewPrivs:\t1" in output
    assert "superuser" in output or "denied" in output or "permitted" in output


def test_processes_outside_are_neither_seen_nor_hit(sandbox: Sandbox, place: Place) -> None:
    other = subprocess.Popen(["sleep", "60"])
    try:
        _, output = run(sandbox, place, f"kill -9 {other.pid}; kill -9 -1; echo /proc/[0-9]*")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_dev_is_read_only_and_its_memory_is_bounded(sandbox: Sandbox, place: Place) -> None:
    command = "echo x > /dev/x; echo x > /dev/null && df -k --output=size /dev/shm | tail -1"
    _, output = run(sandbox, place, f"{command}; echo x > /dev/shm/x && cat /dev/shm/x")
    first, size, written = output.strip().splitlines()
    assert "Read-only file system" in first and written == "x"
    assert int(size) == 64 << 10


def test_a_limit_that_cannot_be_set_leaves_the_others() -> None:
    words = ["no number", "1000", "8192", "ulimit -f; ulimit -c"]
    outer = ["bash", "-c", 'exec bash -c "$0" inside "$@" 3>/dev/null', INSIDE]
    done = subprocess.run([*outer, *words], capture_output=True, text=True)
    assert done.stdout == "8192\n0\n", done.stderr


def test_a_command_that_cannot_start_is_told_to_the_agent(place: Place) -> None:
    shell = TaskShell(Sandbox("none"), place.workspace, own_environment())
    before = os.listdir("/proc/self/fd")
    long = shell.run("echo " + "a" * 200_000)
    assert (long.exit_code, long.output) == (
        126,
        "the command could not be started: Argument list too long\n",
    )
    lone = shell.run("echo \ud800")
    assert (lone.exit_code, lone.output) == (
        126,
        "the command could not be started: it is no valid text\n",
    )
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_command_ends_with_the_budget(place: Place) -> None:
    shell = TaskShell(Sandbox("none"), place.workspace, own_environment(), Limits(wall_s=20.0))
    timed = TimedShell(shell, time.monotonic() + 0.5)
    for most, least in ((0.5, 0.1), (0.1, 0.1)):
        fault = timed.run(f"sleep {NAP}").fault
        left = float(fault.removeprefix("killed: no end after ").removesuffix(" s"))
        assert least <= left <= most
    assert timed.seconds < 40


def test_fork_bomb(sandbox: Sandbox, place: Place) -> None:
    """Doubles seven times and no more: on a busy machine the watch may look too late for others."""
    bomb = "f() { if [ $1 = 0 ]; then sleep 60; else f $(($1 - 1)) | f $(($1 - 1)); fi; }; f 7"
    done, _ = run(sandbox, place, bomb)
    assert done.fault == "killed: more than 48 processes"


def test_memory_bomb_in_one_process(sandbox: Sandbox, place: Place) -> None:
    done, output = run(sandbox, place, "head -c 900M /dev/zero | tail")
    assert "memory" in (output + str(done.fault)).lower()


def test_memory_bomb_in_many_processes(sandbox: Sandbox, place: Place) -> None:
    """Each one stays below the limit of a process; together they do not."""
    hog = "(x=$(head -c 120M /dev/zero | tr '\\0' a); sleep 30)"
    done, _ = run(sandbox, place, " & ".join([hog] * 5) + " & wait")
    assert done.fault == "killed: more than 400 MiB of memory"


def test_a_gigabyte_of_output(sandbox: Sandbox, place: Place) -> None:
    done, output = run(sandbox, place, "echo first; head -c 1G /dev/zero | tr '\\0' a")
    assert done.fault == "killed: more than 16 MiB of output"
    assert output.startswith("first\n") and "bytes left out" in output
    assert len(output) < 4 << 20


def test_a_file_that_is_too_big(sandbox: Sandbox, place: Place) -> None:
    done, _ = run(sandbox, place, "head -c 64M /dev/zero > big")
    assert done.exit_code != 0
    assert (place.workspace / "big").stat().st_size <= 8 << 20


def test_a_background_process_is_ended_and_reported(sandbox: Sandbox, place: Place) -> None:
    done, output = run(
        sandbox, place, f"(sleep {NAP}; echo late) & setsid sleep {NAP} & echo begun; exit 3"
    )
    assert (done.exit_code, output) == (3, "begun\n")
    assert done.left and done.left >= 2
    assert done.wall_s < 40
    assert not _running()


def test_no_end_is_made_one(sandbox: Sandbox, place: Place) -> None:
    began = time.monotonic()
    done, output = run(
        sandbox,
        place,
        f"trap '' TERM INT HUP; echo on; sleep {NAP} & wait; sleep {NAP}",
        Limits(wall_s=1.0),
    )
    assert done.fault == "killed: no end after 1 s" and output == "on\n"
    assert time.monotonic() - began < 40 and not _running()


def test_a_killed_caller_leaves_no_command_behind(sandbox: Sandbox, place: Place) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from replay.agent.sandbox import Place, Sandbox\n"
        "from replay.agent.supervise import Limits\n"
        "place = Place(Path(sys.argv[2]))\n"
        f"Sandbox(sys.argv[1]).run('echo on > begun; sleep {NAP}', place, Limits())"
    )
    caller = subprocess.Popen([sys.executable, "-c", code, sandbox.kind, place.workspace])
    while not (place.workspace / "begun").exists():
        assert caller.poll() is None
        time.sleep(0.02)
    caller.kill()
    caller.wait()
    assert not _running()


def _running() -> list[int]:
    """Processes that sleep for NAP seconds; allows the kernel a while to end them."""
    deadline = time.monotonic() + 20
    while True:
        found = []
        for name in os.listdir("/proc"):
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if name.isdigit() and words[:2] == [b"sleep", NAP.encode()]:
                found.append(int(name))
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def test_without_a_sandbox_nothing_is_claimed_and_the_watch_still_ends_things(place: Place) -> None:
    bare = Sandbox.choose("none")
    assert not bare.contains
    done, output = run(bare, place, f"pwd; sleep {NAP}", Limits(wall_s=1.0))
    assert done.fault == "killed: no end after 1 s" and output == f"{place.workspace}\n"
    assert not _running()


def test_what_cannot_be_contained_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *a, **k: None)
    with pytest.raises(
        LumoTreeError, match="cannot be contained .*bwrap is not installed"
    ) as caught:
        Sandbox.choose()
    assert "--sandbox none" in caught.value.hint
    with pytest.raises(LumoTreeError, match="unknown sandbox 'jail'"):
        Sandbox.choose("jail")


def test_descendants_are_the_whole_tree() -> None:
    child = subprocess.Popen(["bash", "-c", "sleep 48.5 & sleep 48.5"])
    try:
        deadline = time.monotonic() + 20
        while len(found := descendants(child.pid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(found) == 3 and all(mib >= 0 for mib in found.values())
    finally:
        for pid in found:
            os.kill(pid, 9)
        child.wait()

"""Runs one command under watch: wall time, memory, processes and output have limits.

The kernel's own limits (set inside the sandbox) act on single processes, and some not at all for
root; the watch acts on the whole tree of processes, and says what it did.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.05
WATCH_S = 0.15
CHUNK = 1 << 16
PR_SET_PDEATHSIG = 1
FIRST_FD = 3
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
# Of long output the beginning and the end are kept, each as much as this.
KEEP_BYTES = 1 << 20
PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20 if hasattr(os, "sysconf") else 4096 / 2**20


@dataclass(frozen=True)
class Limits:
    """What one command may use. Memory and processes count its whole tree of processes."""

    wall_s: float = 120.0
    memory_mib: int = 4096
    processes: int = 256
    output_mib: int = 16
    file_mib: int = 512


@dataclass(frozen=True)
class Ended:
    """How a watched command ended: exit code (negative: signal), raw output, what was wrong.

    `left` counts processes that were still there when the command itself had ended; None: unknown.
    """

    exit_code: int
    output: bytes
    fault: str | None
    wall_s: float
    left: int | None = None


def supervise(
    argv: Sequence[str],
    limits: Limits,
    *,
    environment: Mapping[str, str],
    folder: Path | None = None,
    report_fd: bool = False,
    keep: int | None = None,
) -> Ended:
    """Runs `argv` in a session of its own and ends the whole tree when a limit is passed.

    What left session and tree is beyond its reach, unless `argv` makes a PID namespace, which the
    kernel ends with its first process.

    With `report_fd` the command finds a pipe at descriptor 3 where it writes `left`, and beside it
    at 4 the caller's descriptor `keep`, if there is one.
    """
    report = os.pipe() if report_fd else None
    given = [fd for fd in (report[1] if report else None, keep) if fd is not None]
    began = time.monotonic()
    try:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: _in_child(given),
            pass_fds=range(FIRST_FD, FIRST_FD + len(given)),
        )
    except BaseException:
        if report:
            os.close(report[0])
        raise
    finally:
        if report:
            os.close(report[1])
    watch = _Watch(process, limits, began)
    try:
        watch.follow()
    finally:
        # Also on Ctrl-C. Inside a PID namespace nothing outlives this call; without one a process
        # that left both the session and the tree (setsid, and its parent ended) does.
        end_tree(process)
        process.stdout.close()
        told = _read_all(report[0]) if report else b""
    left = int(told) if told.strip().isdigit() else None
    return Ended(
        process.returncode, watch.output(), watch.fault, time.monotonic() - began, left or None
    )


def _in_child(given: Sequence[int]) -> None:
    end_with_parent(signal.SIGKILL)
    # Copies first: a descriptor may have the number that another is to get.
    for number, copy in enumerate([os.dup(fd) for fd in given], start=FIRST_FD):
        os.dup2(copy, number)


def end_with_parent(sign: int) -> None:
    """For a new process: have the kernel send it a signal when its parent is gone, on Linux."""
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, sign)


class _Watch:
    """Drains the output and looks at the clock and the process tree."""

    def __init__(self, process: subprocess.Popen, limits: Limits, began: float) -> None:
        self._process, self._limits, self._began = process, limits, began
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = self._total = 0
        self.fault: str | None = None

    def follow(self) -> None:
        """Returns when the command has ended, or at the first limit that it passed."""
        stream = self._process.stdout
        os.set_blocking(stream.fileno(), False)
        selector = selectors.DefaultSelector()
        selector.register(stream, selectors.EVENT_READ)
        look_at = self._began + WATCH_S
        ended_at = None
        with selector:
            while self.fault is None:
                if selector.select(POLL_S):
                    data = os.read(stream.fileno(), CHUNK)
                    if not data:
                        self._wait_for_exit()
                        return
                    self._keep(data)
                elif self._process.poll() is not None:
                    # The command ended, but a process that it left behind holds its output open.
                    ended_at = ended_at or time.monotonic()
                    if time.monotonic() - ended_at > 2 * POLL_S:
                        self.fault = "ended with a process left behind in the background"
                now = time.monotonic()
                if now - self._began > self._limits.wall_s:
                    self.fault = f"killed: no end after {self._limits.wall_s:g} s"
                elif now > look_at:
                    look_at = now + WATCH_S
                    self.fault = self.fault or self._over()

    def output(self) -> bytes:
        gone = self._total - len(self._head) - self._tail_bytes
        between = b"\n[%d bytes left out]\n" % gone if gone > 0 else b""
        return bytes(self._head) + between + b"".join(self._tail)

    def _wait_for_exit(self) -> None:
        remaining = self._limits.wall_s - (time.monotonic() - self._began)
        try:
            self._process.wait(max(remaining, POLL_S))
        except subprocess.TimeoutExpired:
            self.fault = f"killed: no end after {self._limits.wall_s:g} s"

    def _keep(self, data: bytes) -> None:
        self._total += len(data)
        if len(self._head) < KEEP_BYTES:
            self._head += data
            return
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self._tail[0]) > KEEP_BYTES:
            self._tail_bytes -= len(self._tail.popleft())
        if self._total > self._limits.output_mib << 20:
            self.fault = f"killed: more than {self._limits.output_mib} MiB of output"

    def _over(self) -> str | None:
        tree = descendants(self._process.pid)
        if len(tree) > self._limits.processes:
            return f"killed: more than {self._limits.processes} processes"
        if sum(tree.values()) > self._limits.memory_mib:
            return f"killed: more than {self._limits.memory_mib} MiB of memory"
        return None


def descendants(pid: int) -> dict[int, float]:
    """The process and all below it, each with its resident memory in MiB; empty without /proc."""
    parents: dict[int, list[int]] = {}
    memory: dict[int, float] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return {}
    for name in names:
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        parents.setdefault(int(fields[1]), []).append(int(name))
        memory[int(name)] = int(fields[21]) * PAGE_MIB
    found: dict[int, float] = {}
    waiting = [pid]
    while waiting:
        current = waiting.pop()
        if current in memory and current not in found:
            found[current] = memory[current]
            waiting += parents.get(current, [])
    return found


def end_tree(process: subprocess.Popen) -> None:
    """Kills the command's session and every process below it, and waits for the command."""
    for pid in descendants(process.pid) if process.poll() is None else ():
        if pid != process.pid:
            kill(os.kill, pid)
    kill(os.killpg, process.pid)
    process.wait()


def kill(how: Callable[[int, int], None], pid: int) -> None:
    """SIGKILL by `os.kill` or `os.killpg`; who is gone already is no fault."""
    try:
        how(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _read_all(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        os.set_blocking(file.fileno(), False)
        return file.read() or b""

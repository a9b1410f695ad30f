"""Where the agent's commands run: no network, nothing of this machine to write, no home folder.

Two kinds are known, tried in this order: bubblewrap, and the same from util-linux's `unshare` and
`mount` alone. Both work without root where the kernel allows user namespaces. What cannot be
contained is refused, unless the caller says so by name.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lumotree.errors import LumoTreeError
from replay.agent.supervise import Ended, Limits, supervise

WORKSPACE = "/testbed"
HOME = "/tmp"
UID = "1000"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
SETTINGS = (
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/nsswitch.conf",
)
KINDS = ("bubblewrap", "unshare", "none")
HERE = Path(__file__).parent / "inside"
SETUP = HERE / "setup.sh"
# The same names for the same numbers on every machine.
USERS = ((HERE / "passwd", "/etc/passwd"), (HERE / "group", "/etc/group"))
# Root is not bound by `ulimit -u`. The limit of a PID namespace, which Linux knows from 6.14 on,
# binds everybody: a fork bomb does not outrun the watch.
CAPPED = ["unshare", "--pid", "--fork", "--kill-child=KILL", "--mount", "--propagation", "private"]
CAPPED += ["--", "/bin/bash", "-c"]
CAPPED += ['mount -t proc proc /proc && echo "$0" > /proc/sys/kernel/pid_max && exec "$@"']
# Numbers below this one are not given to new processes again.
FIRST_PIDS = 300
# What runs inside: the kernel's limits, the command, then a count of what it left behind.
INSIDE = r"""
ulimit -c 0 2>/dev/null
ulimit -v "$1" 2>/dev/null
ulimit -u "$2" 2>/dev/null
ulimit -f "$3" 2>/dev/null
alive() {
  n=0
  for stat in /proc/[0-9]*/stat; do
    read -r line 2>/dev/null < "$stat" && case $line in *") Z "*) ;; *) n=$((n + 1)) ;; esac
  done
  echo $n
}
before=$(alive)
bash -c "$4" 3>&-
code=$?
echo $(($(alive) - before)) >&3
exit $code
"""


@dataclass(frozen=True)
class Place:
    """What a command sees: the workspace (writable) and read-only folders at (real, seen as)."""

    workspace: Path
    readonly: tuple[tuple[Path, str], ...] = ()


class Sandbox:
    """One kind of containment. `run` runs one shell command in a place."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @classmethod
    def choose(cls, kind: str | None = None) -> Sandbox:
        """The first kind that works here, or the named one. Raises LumoTreeError."""
        if kind is not None and kind not in KINDS:
            raise LumoTreeError(f"unknown sandbox '{kind}'", f"valid kinds: {', '.join(KINDS)}")
        if kind == "none":
            return cls("none")
        reasons = []
        for name in (kind,) if kind else KINDS[:2]:
            reason = cls(name).fault()
            if reason is None:
                return cls(name)
            reasons.append(f"{name}: {reason}")
        raise LumoTreeError(
            f"commands cannot be contained on this machine ({'; '.join(reasons)})",
            "install bubblewrap and allow user namespaces, or run in a machine you can lose with "
            "--sandbox none",
        )

    @property
    def contains(self) -> bool:
        """Whether containment may be claimed."""
        return self.kind != "none"

    def fault(self) -> str | None:
        """Why this kind does not work here; None when a probe came back from inside."""
        program = {"bubblewrap": "bwrap", "unshare": "unshare"}[self.kind]
        if shutil.which(program) is None:
            return f"{program} is not installed"
        with tempfile.TemporaryDirectory(prefix="lumotree-") as folder:
            done = self.run("echo inside > probe && cat probe", Place(Path(folder)), Limits(10.0))
        if done.exit_code == 0 and done.output == b"inside\n":
            return None
        words = done.output.decode(errors="replace").strip().splitlines()
        return words[-1][:200] if words else done.fault or f"exit code {done.exit_code}"

    def run(
        self,
        command: str,
        place: Place,
        limits: Limits,
        environment: Mapping[str, str] | None = None,
        keep: int | None = None,
    ) -> Ended:
        """Runs `bash -c command` at the root of the workspace; it has `keep` as descriptor 4."""
        inside = [
            "/bin/bash" if self.contains else shutil.which("bash") or "bash",
            "-c",
            INSIDE,
            "inside",
            str(limits.memory_mib << 10),
            # A backstop: threads count too. The watch is exact.
            str(4 * limits.processes),
            str(limits.file_mib << 10),
            command,
        ]
        known = {"HOME": HOME, "PATH": "/usr/bin:/bin", "TMPDIR": "/tmp", **(environment or {})}
        how = {"environment": known, "report_fd": True, "keep": keep}
        pids = str(FIRST_PIDS + 4 * limits.processes)
        if self.kind == "bubblewrap":
            capped = [*CAPPED, pids] if _can_cap() else []
            return supervise([*capped, *bubblewrap(place), *inside], limits, **how)
        if self.kind == "unshare":
            # An empty folder for the new root to be mounted on; nothing is ever written there.
            with tempfile.TemporaryDirectory(prefix="lumotree-root-") as root:
                argv = [*unshare(place, Path(root), pids), *inside]
                return supervise(argv, limits, **how)
        ended = supervise(inside, limits, folder=place.workspace, **how)
        # Others' processes are counted too without a namespace of its own.
        return Ended(ended.exit_code, ended.output, ended.fault, ended.wall_s)


def bubblewrap(place: Place) -> list[str]:
    """bwrap and its options, up to the command."""
    argv = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    argv += ["--uid", UID, "--gid", UID, "--hostname", "testbed"]
    for path in SYSTEM:
        if os.path.islink(path):
            argv += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            argv += ["--ro-bind", path, path]
    for path in SETTINGS:
        argv += ["--ro-bind-try", path, path]
    # For a caller who is root the kernel's settings would stay writable.
    argv += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]
    argv += ["--size", str(64 << 20), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    argv += ["--size", str(512 << 20), "--tmpfs", "/tmp"]
    for real, seen in (*USERS, *place.readonly):
        argv += ["--ro-bind", str(real), seen]
    argv += ["--bind", str(place.workspace), WORKSPACE, "--chdir", WORKSPACE]
    return [*argv, "--remount-ro", "/", "--"]


def namespaces_have_limits() -> bool:
    """Whether pid_max is a namespace's own. Before Linux 6.14 it is the whole machine's."""
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return version is not None and (int(version[1]), int(version[2])) >= (6, 14)


@cache
def _can_cap() -> bool:
    """Whether CAPPED is needed and works: for root, with the rights of the machine's own root."""
    if os.geteuid() or not namespaces_have_limits() or shutil.which("unshare") is None:
        return False
    return not subprocess.run([*CAPPED, "1000", "true"], capture_output=True).returncode


def unshare(place: Place, root: Path, pids: str) -> list[str]:
    """unshare, and the script that builds the new root at `root`, up to the command.

    pids: most processes of the namespace, where it can have such a limit.
    """
    if not namespaces_have_limits():
        pids = ""
    argv = ["unshare", "--user", "--map-root-user", "--mount", "--net", "--ipc", "--uts", "--pid"]
    argv += ["--fork", "--kill-child=KILL", "--propagation", "private", "--"]
    argv += ["/bin/bash", str(SETUP), str(root), str(place.workspace), WORKSPACE, UID, pids]
    for path in (*SYSTEM, *SETTINGS):
        if os.path.exists(path):
            argv += [path, path]
    for real, seen in (*USERS, *place.readonly):
        argv += [str(real), seen]
    return [*argv, "--"]

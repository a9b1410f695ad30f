"""The arms of a study as servers: started and stopped by the study, or named by an address."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx

from arms.spec import ArmSpec, parse_arm, parse_arms
from lumotree.errors import ArmError
from replay.agent.scripted import NAME as SCRIPTED
from replay.agent.scripted import ScriptedEndpoint, idle_script, task_scripts
from replay.agent.supervise import end_with_parent
from replay.agent.tasks import Task

IDLE = "idle"
# Arms of a study alone.
OWN = (SCRIPTED, IDLE)
# Arms behind an address that somebody else started; their defaults.
EXTERNAL = {
    "openai": "http://127.0.0.1:8000",
    "sglang-eagle": "http://127.0.0.1:30000",
    "vllm-mtp": "http://127.0.0.1:8000",
}
START_S = 900.0
STOP_S = 30.0
PROBE_S = 5.0
SERVING = re.compile(rb"serving .* on (http://\S+?)(?:/v1)?\s")


class ServedArm(Protocol):
    """One serving arm. `start` blocks until requests are answered; `url`, `model` are set then."""

    name: str
    url: str
    model: str
    key: str | None
    # Whether its counters are of a model's decoding, so that a rate may be made from them.
    decodes: bool

    def start(self) -> dict[str, Any]:
        """Returns what the arm is, for the run's record. Raises ArmError."""
        ...

    def stop(self) -> None: ...


class LumoTreeServer:
    """An in-process arm behind `lumotree serve` in a process of its own."""

    key = None
    decodes = True

    def __init__(self, spec: str, options: Sequence[str], log: Path) -> None:
        """`options` are further words for `lumotree serve`; `log` takes what the server says."""
        self.name, self.model, self.url = spec, spec, ""
        self._options, self._log = list(options), log
        self._process: subprocess.Popen | None = None

    def start(self) -> dict[str, Any]:
        argv = [sys.executable, "-m", "replay.cli", "serve", "--arm", self.name, "--port", "0"]
        argv += ["--name", self.model, *self._options]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with self._log.open("ab") as log:
            start = log.tell()
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # A study that is killed leaves no server behind.
                preexec_fn=lambda: end_with_parent(signal.SIGTERM),
            )
        while time.monotonic() - began < START_S:
            told = self._log.read_bytes()[start:]
            if matched := SERVING.search(told):
                self.url = matched[1].decode()
                return {"kind": "lumotree serve", "arm": self.name, "options": self._options}
            if self._process.poll() is not None:
                lines = told.decode(errors="replace").strip().splitlines()
                last = lines[-1] if lines else f"exit code {self._process.returncode}"
                hint = None
                if " (lower --active" in last:
                    # The advice of `lumotree serve`, in the words of who started it.
                    last, hint = last.rpartition(" (lower")[0], "lower --parallel or --max-context"
                raise ArmError(
                    f"arm '{self.name}' did not start: {last.removeprefix('lumotree: ')}", hint
                )
            time.sleep(0.1)
        self.stop()
        raise ArmError(f"arm '{self.name}' was not serving after {START_S:g} s")

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class ExternalServer:
    """A server that somebody else started. Options: `url=`, `model=`, `key=`."""

    decodes = True

    def __init__(self, name: str, url: str, model: str | None, key: str | None) -> None:
        self.name, self.url, self.key = name, url.rstrip("/").removesuffix("/v1"), key
        self._wanted = model
        self.model = model or ""

    def start(self) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        address = f"{self.url}/v1/models"
        try:
            answer = httpx.get(address, headers=headers, timeout=PROBE_S, trust_env=False)
            known = [str(entry["id"]) for entry in answer.json()["data"]]
        except httpx.HTTPError:
            raise ArmError(f"arm '{self.name}': no server reached at {self.url}") from None
        except (ValueError, KeyError, TypeError):
            raise ArmError(
                f"arm '{self.name}': {address} answered {answer.status_code} without a model list"
            ) from None
        if not known:
            raise ArmError(f"arm '{self.name}': {address} names no model")
        self.model = self._wanted or known[0]
        return {"kind": "external", "url": self.url, "model": self.model}

    def stop(self) -> None:
        """It goes on for whoever started it."""


class ScriptServer:
    """The scripted agent, or one that does nothing: an endpoint in this process."""

    key = None
    decodes = False

    def __init__(self, name: str, tasks: Sequence[Task]) -> None:
        # The placeholder that recorded requests have in place of a model's name.
        self.name, self.model, self.url = name, "lumotree", ""
        self._tasks = tasks
        self._endpoint: ScriptedEndpoint | None = None

    def start(self) -> dict[str, Any]:
        if self.name == IDLE:
            scripts = [idle_script(task) for task in self._tasks]
        else:
            scripts = task_scripts(self._tasks)
        self._endpoint = ScriptedEndpoint(scripts)
        self.url = self._endpoint.start()
        return {"kind": self.name}

    def stop(self) -> None:
        if self._endpoint is not None:
            self._endpoint.stop()


def arm_names(text: str) -> list[str]:
    """The specs of an --arms text, as `replay` reads them, and the study's own two arms.

    Options have one order, so that one arm has one name. Raises ArmError.
    """
    return [str(spec) for spec in parse_arms([text], OWN)]


def make_arm(spec: str, tasks: Sequence[Task], options: Sequence[str], logs: Path) -> ServedArm:
    """The server of an arm, not yet started. Raises ArmError on an unknown arm or option."""
    parsed = parse_arm(spec, OWN)
    if parsed.name in OWN:
        return ScriptServer(parsed.name, tasks)
    if parsed.name in EXTERNAL:
        return _external(parsed)
    log = logs / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', spec)}.log"
    return LumoTreeServer(str(parsed), options, log)


def _external(spec: ArmSpec) -> ExternalServer:
    given = spec.values()
    for name in given.keys() - {"url", "model", "key"}:
        raise ArmError(
            f"arm '{spec.name}': {name}= means nothing to a study",
            "an agent asks for chat completions; options here: url, model, key",
        )
    url, *more = given.get("url", [EXTERNAL[spec.name]])
    if more:
        raise ArmError(f"arm '{spec.name}': a study asks one server; name one address in url=")
    key = None
    if variable := given.get("key"):
        key = os.environ.get(variable)
        if key is None:
            raise ArmError(f"arm '{spec.name}': there is no environment variable {variable}")
    return ExternalServer(str(spec), url, given.get("model"), key)

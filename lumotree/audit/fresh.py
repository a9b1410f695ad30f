"""Parts of audits that must run in a process of their own: `python -m lumotree.audit.fresh`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lumotree.errors import LumoTreeError

if TYPE_CHECKING:
    from lumotree.engine import Engine

# What a fresh process may be asked for: module and function of lumotree.audit.
JOBS = {
    "component": ("component", "digests_job"),
    "sequential": ("reference", "sequential_job"),
    "noise": ("seeds", "noise_digest"),
    "soak": ("soak", "soak_job"),
}


def same_engine(engine: Engine) -> dict[str, Any]:
    """What `load_engine` needs to load the same model elsewhere."""
    return {
        "model": engine.source.name,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "device": engine.model.device.type,
        "rows": engine.rows,
    }


def load_engine(job: dict[str, Any]) -> Engine:
    from lumotree.engine import Engine

    return Engine.load(**job["engine"])


def fits_beside(engine: Engine) -> bool:
    """Whether a process of its own finds memory on the device for the same weights and a slot."""
    device = engine.model.device
    if device.type != "cuda":
        return True
    return torch.cuda.mem_get_info(device)[0] > torch.cuda.memory_allocated(device)


class FreshProcesses:
    """`count` processes at work on one job, side by side with each other and with this one."""

    def __init__(self, job: str, given: dict[str, Any], count: int) -> None:
        # Sums may depend on how many threads share them.
        given = given | {"threads": torch.get_num_threads()}
        self._folder = tempfile.TemporaryDirectory()
        self._places = [Path(self._folder.name) / f"{i}.json" for i in range(count)]
        self._running = []
        for place in self._places:
            place.with_suffix(".in").write_text(json.dumps(given))
            command = [sys.executable, "-m", "lumotree.audit.fresh", job, str(place)]
            with place.with_suffix(".err").open("w") as said:
                self._running.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=said)
                )

    def answers(self) -> list[Any]:
        """What each process found. Raises LumoTreeError with the last words of one that failed."""
        try:
            found = []
            for process, place in zip(self._running, self._places, strict=True):
                if process.wait() != 0:
                    said = place.with_suffix(".err").read_text().strip().splitlines()
                    last = said[-1] if said else f"exit code {process.returncode}"
                    raise LumoTreeError(f"a fresh process of the audit ended with: {last}")
                found.append(json.loads(place.read_text()))
            return found
        finally:
            self.close()

    def close(self) -> None:
        """Ends what still runs."""
        for process in self._running:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdin.close()
        self._folder.cleanup()


def _end_with_the_asker() -> None:
    """Ends this process once its standard input does: whoever asked is gone, however it went."""
    os.read(sys.stdin.fileno(), 1)  # nothing is ever written to it
    os._exit(1)


def main(job: str, out: str) -> None:
    threading.Thread(target=_end_with_the_asker, daemon=True).start()
    module, function = JOBS[job]
    given = json.loads(Path(out).with_suffix(".in").read_text())
    torch.set_num_threads(given["threads"])
    answer = getattr(import_module(f"lumotree.audit.{module}"), function)(given)
    Path(out).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""`lumotree serve` as a process: signals, wrong use."""

import json
import re
import signal
import subprocess
import sys
import threading

import httpx
import pytest
from typer.testing import CliRunner

from replay.cli import app
from tests.serve.support import speaking_folder

BODY = {"prompt": [1, 2, 3], "ignore_eos": True, "stream": True}


class Process:
    def __init__(self, folder, *words):
        command = [sys.executable, "-m", "replay.cli", "serve", "--arm", "ar", "--port", "0"]
        self.run = subprocess.Popen(
            [*command, "--model", str(folder), *words], stderr=subprocess.PIPE, text=True
        )
        self.said = []
        for line in self.run.stderr:
            self.said.append(line)
            found = re.search(r"on (http://\S+)/v1", line)
            if found:
                self.url = found[1]
                return
        raise AssertionError("no address was said")

    def stream(self, tokens, told):
        """Streams in a thread; `told` gets the events, the first of which sets `begun`."""
        begun = threading.Event()

        def read():
            body = BODY | {"max_tokens": tokens}
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as got:
                for line in got.iter_lines():
                    if line:
                        told.append(line)
                        begun.set()

        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(60)
        return thread


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return speaking_folder(tmp_path_factory)


def test_more_positions_than_the_model_declares_come_with_a_warning(folder):
    process = Process(folder, "--max-context", "5000")
    (model,) = httpx.get(f"{process.url}/v1/models").json()["data"]
    assert model["max_model_len"] == 5000
    assert any("warning: the model declares 4096 positions" in line for line in process.said)
    process.run.send_signal(signal.SIGTERM)
    assert process.run.wait(30) == 0


def test_the_first_signal_drains_and_the_second_stops(folder):
    process, told = Process(folder, "--max-context", "4000"), []
    thread = process.stream(60, told)
    process.run.send_signal(signal.SIGTERM)
    thread.join(60)
    assert told[-1] == "data: [DONE]" and json.loads(told[-2][6:])["usage"]["completion_tokens"]
    assert process.run.wait(60) == 0

    process, told = Process(folder, "--max-context", "4000"), []
    thread = process.stream(3900, told)
    process.run.send_signal(signal.SIGTERM)
    # Refused, or reset where it waited to be accepted as the listener closed.
    with pytest.raises(httpx.TransportError):
        for _ in range(10_000):
            answer = httpx.get(f"{process.url}/health")
            assert answer.status_code in (200, 503)
    process.run.send_signal(signal.SIGTERM)
    thread.join(60)
    assert told[-1] == "data: [DONE]"
    assert json.loads(told[-2][6:])["error"]["code"] == "shutting_down"
    assert process.run.wait(60) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--arm", "openai"], "runs elsewhere and cannot be served"),
        (["--arm", "oak"], "unknown arm 'oak'"),
        (["--active", "0"], "--active is 0"),
        (["--idle-timeout", "0"], "--idle-timeout is 0"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "there is no variable NO_SUCH_VARIABLE"),
        (["--host", "256.1.1.1"], "cannot listen on 256.1.1.1"),
        (["--arm", "lumotree:tree=auto", "--port", "0"], "has no calibration"),
    ],
    ids=str,
)
def test_wrong_use_is_a_sentence(words, says):
    done = CliRunner().invoke(app, ["serve", *words])
    assert done.exit_code == 2 and says in done.stderr

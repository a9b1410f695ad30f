"""A small storm on the server in a process of its own; scripts/serve_storm.py is the large one."""

import subprocess
import sys
from pathlib import Path

from tests.serve.support import speaking_folder

SCRIPT = Path(__file__).parents[2] / "scripts" / "serve_storm.py"


def test_a_small_storm(tmp_path_factory):
    words = ["--model", str(speaking_folder(tmp_path_factory)), "--arm", "ar"]
    words += ["--warmup", "20", "--requests", "60", "--clients", "16"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("passed")

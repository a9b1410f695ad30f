"""`lumotree` over the fake engine, as a process of its own: fake_cli.py PAUSE_S ARGS..."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from replay.cli import main  # noqa: E402
from tests.replay.fakes import FakeEngine, install  # noqa: E402

if __name__ == "__main__":
    install(FakeEngine(pause_s=float(sys.argv.pop(1))))
    main()

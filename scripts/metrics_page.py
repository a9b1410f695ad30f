"""Writes docs/metrics.md from the registry; --check says whether it is current instead."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from replay.metrics import page

TARGET = Path(__file__).parents[1] / "docs" / "metrics.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit code 1 when it is not current")
    wanted = page()
    if parser.parse_args().check:
        current = TARGET.exists() and TARGET.read_text() == wanted
        if not current:
            print("docs/metrics.md is not current: python scripts/metrics_page.py", file=sys.stderr)
        return 0 if current else 1
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Fill the results tables of Markdown files from the stored runs, or check that they match.

    python scripts/build_results.py            # fill README.md, results/*.md, docs/*.md, summaries
    python scripts/build_results.py --check    # exit 1 when a table or a summary differs
    python scripts/build_results.py --print    # all tables on stdout

Stored runs are the run folders under results/. A block in a Markdown file looks like

    <!-- results:cpu-first -->            the sentence and the table of one stored run
    <!-- /results -->

or, in the paper's shape, `results:replay cpu-first`, `results:replay` for every stored run, and
the same with steps, phases and drafting.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lumotree.errors import LumoTreeError  # noqa: E402
from replay.paper_tables import TABLES  # noqa: E402
from replay.results import block, fill, overview, stored_runs  # noqa: E402

PAGES = ("README.md", "results/**/*.md", "docs/**/*.md")


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, 1 when a check fails, 2 for wrong use."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing, say what differs")
    parser.add_argument("--print", action="store_true", help="print the tables and change nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args(arguments)
    try:
        return run(options.root, options.check, options.print)
    except LumoTreeError as error:
        print(f"build_results: {error}", file=sys.stderr)
        return error.exit_code


def run(root: Path, check: bool, show: bool) -> int:
    runs = stored_runs(root / "results")
    if show:
        for stored in runs:
            print(f"## {stored.name}\n\n{overview(stored)}\n")
        for name in TABLES:
            print(f"## {name}\n\n{block(name, runs)}\n")
        return 0
    faults = []
    for stored in runs:
        fault = stored.fault()
        if fault is not None and check:
            faults.append(fault)
        elif fault is not None:
            stored.rewrite()
            print(f"rewrote {fault}")
    for path in sorted({path for pattern in PAGES for path in root.glob(pattern)}):
        where = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        new = fill(text, runs, where)
        if new == text:
            continue
        if check:
            lines = difflib.unified_diff(
                text.splitlines(),
                new.splitlines(),
                where,
                f"{where} from the rows",
                lineterm="",
                n=0,
            )
            faults.append("\n".join(lines))
        else:
            path.write_text(new, encoding="utf-8")
            print(f"filled {where}")
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        print("build_results: run python scripts/build_results.py", file=sys.stderr)
    elif check:
        print(f"{len(runs)} stored runs, all tables match")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

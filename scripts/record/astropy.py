"""Records the Astropy corpora on this machine and compares them with their committed manifests.

python -m scripts.record.astropy           # writes corpora/astropy/astropy-*.jsonl
python -m scripts.record.astropy --freeze  # also replaces the manifests

What the tools print is Astropy's text, so the corpora themselves are not committed: each user makes
them from pinned wheels and the scripted agent. The same is done by hand with
`lumotree agent-study --task ... --arms scripted --record ALL` and
`lumotree corpus select ALL --rule proportional --n 43 --out CORPUS`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lumotree.errors import LumoTreeError
from replay.agent.cache import cache_folder
from replay.agent.progress import Line
from replay.agent.sandbox import Sandbox
from replay.agent.store import StudyFolder
from replay.agent.study import Study, StudyOptions, describe
from replay.agent.tasks import load_tasks
from replay.agent.workspace import Workspaces
from replay.corpus import load_corpus, manifest_path
from replay.formats.choosing import select_corpus
from replay.formats.writing import write_corpus

FOLDER = Path(__file__).resolve().parents[2] / "corpora" / "astropy"
REQUESTS = 43


@dataclass(frozen=True)
class Plan:
    """One corpus: its name and the tasks it is recorded from, in order."""

    name: str
    tasks: tuple[str, ...]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.jsonl"


PLANS = (
    Plan("astropy-first", ("astropy-13977", "astropy-14508")),
    Plan(
        "astropy-disjoint",
        ("astropy-14182", "astropy-14995", "astropy-b11-hadec", "astropy-c5-compunit"),
    ),
)


def record(plan: Plan, out: Path) -> str:
    """Writes the corpus and its manifest to `out`; returns its SHA-256. Raises LumoTreeError."""
    tasks = load_tasks([FOLDER], plan.tasks)
    options, sandbox = StudyOptions(arms="scripted"), Sandbox.choose()
    with tempfile.TemporaryDirectory(prefix="lumotree-record-") as place:
        folder = StudyFolder.create(Path(place) / "run", describe(options, tasks, sandbox))
        line = Line(quiet=False, total=len(tasks))
        study = Study(folder, tasks, options, Workspaces(cache_folder()), sandbox, line)
        resolved = study.run()["arms"]["scripted"]["resolved"]
        if resolved != len(tasks):
            raise LumoTreeError(f"{resolved} of {len(tasks)} tasks were resolved; nothing is kept")
        captured = Path(place) / "all.jsonl"
        about = {"recorded_from": "agent study, arm scripted"}
        write_corpus(folder.recorded(["scripted"]), captured, about)
        _, sha256 = select_corpus(load_corpus(captured), "proportional", REQUESTS, out, force=True)
    return sha256


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--freeze", action="store_true", help="replace the committed manifests")
    options = parser.parse_args()
    wrong = 0
    for plan in PLANS:
        frozen = manifest_path(plan.path)
        try:
            with tempfile.TemporaryDirectory(dir=FOLDER) as place:
                made = Path(place) / plan.path.name
                sha256 = record(plan, made)
                if not options.freeze and json.loads(frozen.read_bytes())["sha256"] != sha256:
                    print(f"{plan.name}: sha256 {sha256}, not as frozen", file=sys.stderr)
                    wrong += 1
                    continue
                made.replace(plan.path)
                manifest_path(made).replace(frozen)
        except (LumoTreeError, OSError) as error:
            print(f"record: {error}", file=sys.stderr)
            return 1
        print(f"{plan.path.name}: sha256 {sha256}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

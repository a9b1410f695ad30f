"""A run folder as the first release wrote it, kept as it was: later versions must read it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from replay.cli import app
from replay.compare import Loaded, compare_folders
from replay.runfolder import RunFolder

FOLDER = Path(__file__).parent / "fixtures" / "run-schema-1"


def test_every_row_loads_with_defaults_for_what_is_newer():
    folder = RunFolder.open(FOLDER)
    rows = folder.rows()
    assert len(rows) == 3 * (2 * 5 + 1)
    assert all(row.accepted_by_row == [] for row in rows)
    assert "requests" not in folder.run, "the fixture must stay as the first release wrote it"


def test_its_figures_are_those_it_was_saved_with():
    saved = RunFolder.open(FOLDER).summary()
    anew = Loaded.read(FOLDER).summary
    for name, arm in saved["arms"].items():
        for key, value in arm.items():
            if key not in ("guards", "run_range_tok_s", "survival_by_depth"):
                assert anew["arms"][name][key] == value, (name, key)
    for old, new in zip(saved["comparisons"], anew["comparisons"], strict=True):
        assert new["ratio"] == pytest.approx(old["ratio"])


def test_it_can_be_compared():
    done = CliRunner().invoke(app, ["compare", str(FOLDER)])
    assert done.exit_code == 0, done.output
    assert "names no conversations" in done.stdout
    found = json.loads(CliRunner().invoke(app, ["compare", str(FOLDER), "--json"]).stdout)
    assert [entry["arm"] for entry in found["comparisons"]] == ["mtp-5", "lumotree"]
    assert all(
        entry["ci_low"] <= entry["ratio"] <= entry["ci_high"] for entry in found["comparisons"]
    )
    assert compare_folders([FOLDER, FOLDER])["comparisons"][0]["ratio"] == 1

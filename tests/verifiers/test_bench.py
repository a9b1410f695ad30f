"""The mechanism benchmark: gates before timings, memory figures, the command."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from lumotree.bench import gdn as bench
from lumotree.bench.memory import cut_state_mib, operand_bytes, store_every_node_mib
from lumotree.bench.table import HEADER, markdown, plain
from lumotree.bench.timing import Protocol, Spread
from lumotree.ops.gdn import GEOMETRIES
from lumotree.verifiers import NAMES, path_scan, verifier_class
from replay.cli import app

QUICK = Protocol(warmup=1, timed=3, flush_bytes=2**16)


def tiny_case() -> bench.Case:
    return bench.Case(GEOMETRIES["tiny"], bench.active_tree("-1,0,0,1"), torch.device("cpu"))


def test_the_paper_s_memory_figures_come_out_of_its_policies():
    parts = cut_state_mib(GEOMETRIES["27b"])
    assert parts["cut buffer"] == 96
    assert parts["operand rings"] == pytest.approx(24.3, abs=0.05)
    assert parts["publication staging"] == pytest.approx(12.1, abs=0.05)
    # The paper prints 132.5; its own parts add up to 132.4.
    assert sum(parts.values()) == pytest.approx(132.5, abs=0.1)
    assert store_every_node_mib(GEOMETRIES["27b"]) == 5040


def test_buffers_at_27b_stay_within_32_mib():
    geometry, rows = GEOMETRIES["27b"], 28
    ring = 4 * geometry.key_heads * geometry.dk + 2 * geometry.heads * geometry.dv
    ring += 2 * 4 * geometry.heads
    assert ring * rows * geometry.layers / 2**20 < 32
    assert operand_bytes(geometry) < ring


def test_named_buffers_are_what_a_verifier_allocates():
    case = tiny_case()
    g, rows = case.geometry, len(case.tree)
    ring = g.layers * rows * (4 * g.key_heads * g.dk + 2 * g.heads * g.dv + 8 * g.heads)
    assert case.make("path-scan").buffers_mib == ring / 2**20
    stored = g.layers * rows * g.state_bytes
    assert case.make("native-path").buffers_mib == stored / 2**20


def test_every_row_is_checked_and_then_timed():
    rows = list(bench.run(tiny_case(), protocol=QUICK))
    assert [row.name for row in rows] == list(NAMES)
    for row in rows:
        assert row.gate.green and row.graph_ms is None
        assert {"verify", "publish", "total"} <= set(row.eager_ms)
    table = plain([row.as_dict() for row in rows])
    assert len(table.splitlines()) == 1 + len(NAMES) and HEADER[0] in table


def test_a_red_gate_withholds_timings(monkeypatch):
    def forgetful(self, recurrent, path):
        """Publishes nothing."""

    monkeypatch.setattr(path_scan.PathScan, "publish", forgetful)
    (row,) = bench.run(tiny_case(), ["path-scan"], QUICK)
    assert not row.gate.green and row.eager_ms is None
    assert "state error" in markdown([row.as_dict()])


def test_a_verifier_that_writes_to_the_state_is_red(monkeypatch):
    honest = verifier_class("weaver").verify

    def careless(self, layer, recurrent, operands):
        out = honest(self, layer, recurrent, operands)
        recurrent[layer, 0, 0, 0] += 1e-6
        return out

    monkeypatch.setattr(verifier_class("weaver"), "verify", careless)
    (row,) = bench.run(tiny_case(), ["weaver"], QUICK)
    assert "verification changed the persistent state" in row.gate.reasons


def test_an_error_that_is_not_a_number_is_red(monkeypatch):
    monkeypatch.setattr(
        verifier_class("torch-node"),
        "verify",
        lambda self, layer, recurrent, operands: torch.full((4, 4, 32), float("nan")),
    )
    (row,) = bench.run(tiny_case(), ["torch-node"], QUICK)
    assert not row.gate.green


def test_percentiles():
    assert Spread.of([float(i) for i in range(100)]) == Spread(50.0, 10.0, 90.0)


def test_the_command_prints_json():
    arguments = ["bench", "gdn", "--tree", "-1,0,0", "--device", "cpu", "--iterations", "2"]
    done = CliRunner().invoke(app, [*arguments, "--verifier", "weaver", "--json", "--quiet"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["schema_version"] == 1 and result["active_rows"] == 3
    assert [row["name"] for row in result["rows"]] == ["weaver"]
    assert result["rows"][0]["gate"]["green"]


def test_the_command_names_what_it_knows():
    done = CliRunner().invoke(app, ["bench", "gdn", "--geometry", "huge"])
    assert done.exit_code == 2 and "27b" in done.stderr

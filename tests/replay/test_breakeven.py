"""The break-even map: arithmetic of its rows, and a small measurement."""

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from replay.breakeven import Cost, Shape, add_best_chain, conclude, map_row, shapes
from replay.cli import app
from replay.prediction import Reach
from replay.tables import print_breakeven
from tests.replay.fakes import corpus_lines, write_corpus
from tests.tiny import save_speaking

ROW = {
    "kind", "name", "tree", "passes", "suffix", "rows", "mean_rows", "depth", "draft_ms",
    "verify_ms", "select_ms", "publish_root_ms", "publish_deep_ms", "publish_ms", "ms_per_step",
    "tokens_per_step", "tok_s", "tok_s_free_publish", "advantage_ms",
    "publish_share_of_advantage", "publish_share_of_step", "break_even_tokens_per_step",
    "over_best_chain", "over_best_chain_free_publish", "round_spread",
}  # fmt: skip


def row(kind="pruned", tree="chain-4", tokens=3.0, draft=4.0, verify=12.0, publish=(1.0, 5.0)):
    shape = Shape(kind, f"{kind} {tree}", tree, 2, False, tokens)
    return map_row(shape, Cost(draft, verify, 0.0, *publish), per_token=10.0)


def test_the_arithmetic_of_a_row():
    found = row()
    # Two of four drafts accepted: half way between publishing the root and the whole path.
    assert found["publish_ms"] == pytest.approx(3.0)
    assert found["ms_per_step"] == pytest.approx(19.0)
    assert found["tok_s"] == pytest.approx(3000 / 19)
    assert found["tok_s_free_publish"] == pytest.approx(3000 / 16)
    assert found["break_even_tokens_per_step"] == pytest.approx(1.9)
    assert found["advantage_ms"] == pytest.approx(14.0)
    assert found["publish_share_of_advantage"] == pytest.approx(3 / 14)
    assert (found["rows"], found["depth"]) == (5, 4)


def test_a_slow_round_is_scaled_by_the_root_beside_it():
    calm = {"draft_ms": [1.0, 9.0, 1.0], "verify_ms": [2.0], "select_ms": [0.5],
            "publish_root_ms": [0.5], "publish_deep_ms": [1.0], "reference": [4.0]}  # fmt: skip
    busy = {name: [3 * ms for ms in values] for name, values in calm.items()}
    for rounds in ([calm, busy, busy], [busy, calm]):
        found = Cost.of(rounds, reference=4.0)
        assert (found.draft_ms, found.verify_ms) == pytest.approx((1.0, 2.0))
        assert found.round_spread == pytest.approx(1.0)


def test_a_tree_that_saves_nothing_has_no_share_and_unknown_gain_no_rate():
    assert row(tokens=1.5)["publish_share_of_advantage"] is None
    wide = row(tokens=None)
    assert wide["tok_s"] is None and wide["publish_ms"] == 1.0 and wide["ms_per_step"] == 17.0


def test_conclusions_name_what_publishing_eats():
    rows = [
        row("root", "root", 1.0, 0.0, 9.0, (1.0, 1.0)),
        row("chain", "chain-2", 2.4, 2.0, 9.0, (1.0, 2.0)),
        row("pruned", "chain-4", 2.5, 4.0, 7.4, (9.0, 30.0)),
        row("pruned", "-1,0,0", 1.2, 4.0, 12.0, (1.0, 2.0)),
    ]
    add_best_chain(rows)
    said = " ".join(conclude(rows))
    assert "Fastest here: chain chain-2" in said
    assert "If publishing cost nothing: pruned chain-4" in said
    assert "Faster than every chain but for publishing: pruned chain-4." in said
    assert "Publishing eats the whole advantage of: pruned chain-4." in said
    assert "No advantage before publishing: pruned -1,0,0." in said
    assert rows[1]["over_best_chain"] == 1


def test_shapes_cover_chains_parts_and_wide_trees():
    chain = Reach("chain-11", 11, False, 10, (1.0,) + (0.5,) * 11, (1.0,) * 12)
    found = shapes([chain])
    assert [s.name for s in found if s.kind == "chain"] == [f"chain-{d}" for d in range(1, 12)]
    assert found[3].tokens_per_step == pytest.approx(2.5)
    wide = {s.name: s for s in found if s.kind == "wide"}
    assert wide["wide-2x4"].tree == "-1,0,0,1,1,3,3,5,5"
    assert all(s.tokens_per_step is None for s in wide.values())


def test_a_small_study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_speaking(tmp_path / "model")
    corpus = write_corpus(tmp_path / "c.jsonl", corpus_lines(2, 2))
    monkeypatch.setattr("replay.breakeven.CHAINS", (1, 3))
    monkeypatch.setattr("replay.breakeven.PRUNED_SIZES", (4, 8))
    monkeypatch.setattr("replay.breakeven.WIDE", ((4, 1),))
    done = CliRunner().invoke(
        app,
        ["breakeven", str(corpus), "--model", "model", "--requests", "2", "--tokens", "24",
         "--repeats", "2", "--out", "map.json", "--json"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "map.json").read_text())
    assert all(one.keys() == ROW for one in found["map"])
    kinds = {one["kind"] for one in found["map"]}
    assert kinds >= {"root", "chain", "wide"}
    assert all(one["ms_per_step"] > 0 for one in found["map"])
    assert found["map"][0]["break_even_tokens_per_step"] == pytest.approx(1.0)
    assert found["cost_model"]["per_row_ms"] is not None
    assert found["choice"]["weights_sha256"] == found["model"]["weights_sha256"]
    out = io.StringIO()
    print_breakeven(Console(file=out, width=100), found)
    assert "A step costs" in out.getvalue() and "tree=auto would decode with" in out.getvalue()


def test_wrong_use_is_one_sentence(tmp_path):
    done = CliRunner().invoke(app, ["breakeven", str(tmp_path / "none.jsonl")])
    assert done.exit_code == 2 and "does not exist" in done.stderr

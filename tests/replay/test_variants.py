"""Sets of variants, and the command that replays them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from arms.spec import parse_arms
from lumotree.errors import LumoTreeError
from replay.cli import app
from replay.variants import SETS, variant_set
from tests.replay.fakes import corpus_lines, write_corpus
from tests.tiny import save_speaking


@pytest.mark.parametrize("name", SETS)
def test_every_spec_of_a_set_is_an_arm(name):
    specs = parse_arms(variant_set(name, 4096))
    assert [str(spec) for spec in specs] == list(variant_set(name, 4096))
    assert str(specs[0]) == "lumotree"


def test_a_small_vocabulary_is_not_reduced():
    assert not any("draft_vocab" in spec for spec in variant_set("drafting", 97))
    assert "lumotree:draft_weights=fp8" in variant_set("drafting")
    assert not any("fp8" in spec for spec in variant_set("drafting", eight_bits=False))


def test_an_unknown_set_names_those_there_are():
    with pytest.raises(LumoTreeError, match="unknown set 'draft'") as error:
        variant_set("draft")
    assert "optimisations, drafting" in error.value.hint


def test_drafting_variants_are_replayed_and_tabled(tmp_path):
    out, corpus = tmp_path / "run", write_corpus(tmp_path / "c.jsonl", corpus_lines(1, 2))
    save_speaking(tmp_path / "model")
    arguments = ["variants", str(corpus), "--model", str(tmp_path / "model"), "--set", "drafting"]
    arguments += ["--runs", "1", "--cap", "12", "--out", str(out), "--device", "cpu"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary["arms"]) == list(variant_set("drafting", 4096))
    assert "Drafting passes" in result.output
    assert "lumotree:draft_vocab=512" in result.output


def test_a_kernel_option_without_kernels_is_refused_in_a_sentence(tmp_path):
    arguments = ["variants", "corpora/first.jsonl", "--arm", "lumotree"]
    arguments += ["--arm", "lumotree:attention=stock", "--runs", "1", "--limit", "1", "--cap", "8"]
    arguments += ["--device", "cpu", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "attention=stock takes a kernel away" in result.output

"""`lumotree model export` as people and scripts call it."""

import json

import pytest
from typer.testing import CliRunner

from lumotree.model.source import open_source
from replay.cli import app


def run(*words):
    return CliRunner().invoke(app, ["model", "export", *map(str, words)])


def test_the_folder_is_a_model_for_the_next_command(tmp_path):
    done = run("embedded", tmp_path / "out", "--wrapper", "text", "--json", "--device", "cpu")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bytes"]["model.safetensors"] > 2e7 and "config.json" in found["bytes"]
    assert "model.safetensors: 0.02 of 0.02 GiB" in done.stderr
    assert open_source(str(tmp_path / "out")).config == open_source("embedded").config


def test_the_files_are_named_one_a_line(tmp_path):
    done = run("embedded", tmp_path / "out", "--quiet", "--device", "cpu")
    assert done.exit_code == 0 and done.stderr == ""
    assert str(tmp_path / "out" / "config.json") in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("rehearsal:70b", "out"), "rehearsal:27b"),
        (("embedded", "out", "--wrapper", "gguf"), "text or multimodal"),
        (("embedded", "out", "--dtype", "int4"), "--dtype 'int4'"),
        (("embedded", "out", "--device", "tpu"), "device 'tpu'"),
    ],
)
def test_wrong_use_is_one_sentence(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    done = run(*words)
    assert done.exit_code == 2 and said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()

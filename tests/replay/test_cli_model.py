"""The command line over the real engine and the embedded model."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from replay.cli import app
from tests.replay.fakes import corpus_lines, write_corpus

EMBEDDED = Path(__file__).parents[2] / "lumotree" / "embedded"


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_corpus(tmp_path / "c.jsonl", corpus_lines(1, 2))


def test_arms_agree_on_the_embedded_model(corpus, tmp_path):
    arms = "ar mtp-3 lumotree lumotree:tree=-1,0,0,1,suffix=off"
    done = call("replay", corpus, "--arms", arms, "--cap", 8, "--runs", 1, "--out", "r", "--json")
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    for arm in summary["arms"].values():
        assert arm["status"] == "ok" and arm["requests"] == 2
        assert arm["guards"]["token_ids_equal"] is not False
    model = json.loads((tmp_path / "r" / "run.json").read_text())["model"]
    assert len(model["weights_sha256"]) == 64


def test_a_folder_that_is_no_checkpoint(corpus, tmp_path):
    (tmp_path / "folder").mkdir()
    done = call("replay", corpus, "--model", tmp_path / "folder")
    assert done.exit_code == 2 and "is no checkpoint" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_mtp_arm_on_a_checkpoint_without_mtp(corpus, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "bare"
    shutil.copytree(EMBEDDED, folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    done = call("replay", corpus, "--model", folder, "--arms", "ar mtp-5")
    assert done.exit_code == 2 and "no mtp.* tensors" in done.stderr
    assert not (tmp_path / "runs").exists()
    done = call("replay", corpus, "--model", folder, "--arms", "ar", "--cap", 2, "--runs", 1)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--device", "tpu"], "device"), (["--model", "no-such-model"], "no-such-model")],
)
def test_a_bad_model_option_is_one_sentence(corpus, words, says):
    done = call("replay", corpus, *words)
    assert done.exit_code == 2, done.output
    assert says in done.stderr and "Traceback" not in done.output
    assert done.stderr.count("\n") == 1

"""Prompts longer than the model declares: refused, unless the run asks for more positions."""

import json

import pytest

from lumotree.errors import LumoTreeError
from replay.job import ReplayOptions, run_warnings
from replay.runfolder import RunFolder
from tests.replay.fakes import write_corpus
from tests.replay.test_cli import call
from tests.tiny import save_speaking

DECLARED = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_speaking(folder)
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": DECLARED})
    )
    return folder


def line(number, words):
    messages = [{"role": "user", "content": "alpha " * words}]
    known = {"conversation": f"c{number}"}
    return {"custom_id": f"r{number}", "body": {"messages": messages}, "lumotree": known}


def test_more_positions_are_served_when_asked_for_and_said(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    corpus = write_corpus(tmp_path / "c.jsonl", [line(1, 8), line(2, 400)])
    words = ["replay", corpus, "--arms", "ar mtp-5 lumotree", "--model", model, "--runs", 1]
    words += ["--cap", 6, "--out", "r"]
    done = call(*words)
    assert done.exit_code == 2 and "c.jsonl line 2: the prompt has 4" in done.stderr
    assert "context holds 300 (--max-context serves" in done.stderr
    done = call(*words, "--max-context", 600)
    assert done.exit_code == 0, done.output
    folder = RunFolder.open(tmp_path / "r")
    assert folder.run["model"]["max_context"] == 600
    assert folder.run["model"]["declared_context"] == DECLARED
    assert folder.run["options"]["max_context"] == 600
    far = {r.arm: r.token_ids for r in folder.rows() if r.request_id == "r2" and not r.warmup}
    assert len(far) == 3 and len(far["ar"]) == 6 and far["ar"] == far["mtp-5"] == far["lumotree"]
    (said,) = [text for text in folder.summary()["warnings"] if "training" in text]
    assert said.startswith("1 of 2 requests go past the 300 positions that the model declares")
    assert said in (tmp_path / "r" / "report.html").read_text()


def test_within_the_declared_positions_nothing_is_said():
    asked = {"a": {"prompt_tokens": 100, "max_tokens": 28}}
    run = {"model": {"declared_context": 128}, "requests": asked}
    assert run_warnings(run) == []
    asked["a"]["max_tokens"] = 29
    assert len(run_warnings(run)) == 1
    assert run_warnings({"requests": asked, "model": {"max_context": 64}}) == []


def test_folders_from_before_the_option_compare():
    assert "max_context" not in ReplayOptions(corpus="c").as_dict()
    assert json.loads(json.dumps(ReplayOptions(max_context=9).as_dict()))["max_context"] == 9
    with pytest.raises(LumoTreeError, match="--max-context is 1; it takes a whole number from 2"):
        ReplayOptions(max_context=1)

"""How a replay ends and goes on: order of what is said, faults of the report, resumes elsewhere."""

import json

import pytest

from replay import job
from replay.report import page
from replay.runfolder import RunFolder
from tests.replay.fakes import FakeEngine, corpus_lines, install, write_corpus
from tests.replay.test_cli import call, corpus  # noqa: F401

WORDS = ("--arms", "ar lumotree", "--runs", 1, "--cap", 9, "--out", "r")


def breaking(error):
    def write_report(path):
        raise error

    return write_report


@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyError("rows")])
@pytest.mark.parametrize(("stray", "code"), [(None, 0), ("hydra27", 1)])
def test_a_report_that_fails_is_a_warning_and_changes_no_exit_code(
    corpus,  # noqa: F811
    monkeypatch,
    error,
    stray,
    code,
):
    install(FakeEngine(stray=stray), monkeypatch)
    monkeypatch.setattr(page, "write_report", breaking(error))
    done = call("replay", corpus, *WORDS)
    assert done.exit_code == code
    last = done.stderr.splitlines()[-1]
    assert last.startswith("warning: no report was written: ")
    assert last.endswith("; write it with: lumotree report r")


def test_a_broken_map_beside_the_run_is_a_warning(corpus, tmp_path):  # noqa: F811
    call("replay", corpus, *WORDS)
    (tmp_path / "r" / "breakeven.json").write_text("{")
    done = call("replay", "--resume", "r")
    assert done.exit_code == 0 and "breakeven.json is no break-even map" in done.stderr
    # A map of the right shape at first sight.
    (tmp_path / "r" / "breakeven.json").write_text('{"map": [{}]}')
    done = call("replay", "--resume", "r")
    assert done.exit_code == 0 and "warning: no report was written" in done.stderr


def test_reasons_come_before_the_report(corpus, monkeypatch):  # noqa: F811
    install(FakeEngine(stray="hydra27"), monkeypatch)
    done = call("replay", corpus, *WORDS, "--quiet")
    assert done.exit_code == 1 and "token ids differ" in done.stderr
    install(FakeEngine(stray="hydra27"), monkeypatch)
    done = call("replay", corpus, *WORDS[:-1], "s")
    said = done.stderr
    assert said.index("withheld: ") < said.index("token ids differ") < said.index("report: ")


def test_ctrl_c_in_the_report_says_how_to_go_on(corpus, monkeypatch):  # noqa: F811
    monkeypatch.setattr(page, "write_report", breaking(KeyboardInterrupt()))
    done = call("replay", corpus, *WORDS)
    assert done.exit_code == 130
    assert "continue with: lumotree replay --resume r" in done.stderr


def test_a_resume_elsewhere_is_kept_and_said(corpus, tmp_path, monkeypatch):  # noqa: F811
    call("replay", corpus, *WORDS)
    before = RunFolder.open(tmp_path / "r").run
    monkeypatch.setattr(job, "git_commit", lambda: "other")
    monkeypatch.setattr(job, "describe_machine", lambda: before["machine"] | {"cpu": "Z80"})
    done = call("replay", "--resume", "r")
    assert done.exit_code == 0, done.output
    run = RunFolder.open(tmp_path / "r").run
    assert run["machine"] == before["machine"] and run["ended_at"] == before["ended_at"]
    (resumed,) = run["resumed_on"]
    assert resumed.keys() == {"at", "machine", "git_commit"} and resumed["git_commit"] == "other"
    said = "now it is Z80"
    assert said in " ".join(done.stdout.split())
    assert said in (tmp_path / "r" / "report.html").read_text()
    assert any(said in text for text in RunFolder.open(tmp_path / "r").summary()["warnings"])


def test_a_run_that_never_ended_gets_its_end_at_the_resume(corpus, tmp_path):  # noqa: F811
    call("replay", corpus, *WORDS)
    path = tmp_path / "r" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"ended_at": None}))
    call("replay", "--resume", "r")
    assert RunFolder.open(tmp_path / "r").run["ended_at"]


@pytest.mark.parametrize("error", [TypeError("not a str"), UnicodeEncodeError("u", "x", 0, 1, "s")])
def test_text_that_is_none_names_file_and_line(corpus, tmp_path, monkeypatch, error):  # noqa: F811
    engine = FakeEngine()

    def encode_chat(messages, tools):
        raise error

    engine.tokenizer.encode_chat = encode_chat
    install(engine, monkeypatch)
    done = call("replay", corpus, *WORDS)
    assert done.exit_code == 2 and "c.jsonl line 1: the tokenizer cannot take" in done.stderr
    assert not (tmp_path / "r").exists()


def test_half_a_surrogate_pair_names_file_and_line(tmp_path, monkeypatch):
    """With the real tokenizer."""
    from arms import inprocess

    monkeypatch.chdir(tmp_path)
    engine = FakeEngine()
    engine.tokenizer = inprocess.load_tokenizer("embedded")
    install(engine, monkeypatch)
    lines = corpus_lines(1, 2)
    lines[1]["body"]["messages"][0]["content"] = "\ud83d"
    done = call("replay", write_corpus(tmp_path / "c.jsonl", lines), *WORDS)
    assert done.exit_code == 2 and "c.jsonl line 2: " in done.stderr, done.output

"""The command line in process, over the fake engine: output, exit codes, sentences."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from replay.cli import app
from tests.replay.fakes import FakeEngine, corpus_lines, install, write_corpus

COMMANDS = [
    "replay", "plot", "report", "export", "corpus inspect", "corpus validate", "corpus import",
    "corpus export", "corpus select", "tree show", "compare", "breakeven", "serve", "record",
]  # fmt: skip
INTERFACE = {
    "schema_version", "command", "arms", "model", "corpus", "machine", "versions", "git_commit",
    "seed", "started_at", "ended_at",
}  # fmt: skip
ROW = {
    "arm", "run", "request_id", "prompt_tokens", "completion_tokens", "ttft_s", "e2e_s", "decode_s",
    "steps", "accepted_by_depth", "phases_ms", "finish_reason", "output_sha256",
    "prefix_reused_tokens", "error",
}  # fmt: skip


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    install(FakeEngine(), monkeypatch)
    return write_corpus(tmp_path / "c.jsonl", corpus_lines())


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def only_run(tmp_path):
    (path,) = (tmp_path / "runs").iterdir()
    return path


def test_help_loads_nothing_heavy():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom replay.cli import app\n"
        "for words in ([], *[w.split() for w in sys.argv[1:]]):\n"
        "    done = CliRunner().invoke(app, [*words, '--help'])\n"
        "    assert done.exit_code == 0 and 'Example' in done.output, (words, done.output)\n"
        "bad = {'torch', 'transformers', 'matplotlib', 'numpy', 'pandas', 'jinja2', 'httpx', "
        "'fastapi', 'uvicorn', 'prometheus_client'}\n"
        "assert not bad & set(sys.modules), bad & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *COMMANDS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_replay_prints_its_tables_and_leaves_a_run_folder(corpus, tmp_path):
    done = call("replay", corpus, "--arms", "all", "--runs", 2, "--cap", 9)
    assert done.exit_code == 0, done.output
    assert "Pooled decode rate" in done.stdout and "Phases, ms per step" in done.stdout
    assert "no server reached at http://127.0.0.1:30000" in done.stdout
    said = " ".join(done.stdout.split())
    assert "on this machine" in said and "only 2 conversations" in said
    path = only_run(tmp_path)
    assert f"run folder: {path.relative_to(tmp_path)}" in done.stderr
    assert f"report: {path.relative_to(tmp_path) / 'report.html'}" in done.stderr
    assert (path / "report.html").exists()
    run = json.loads((path / "run.json").read_text())
    assert run.keys() >= INTERFACE and run["ended_at"]
    assert run["arms"]["sglang-eagle"]["status"] == "unavailable"
    rows = [json.loads(line) for line in (path / "requests.jsonl").read_text().splitlines()]
    assert all(row.keys() >= ROW for row in rows)
    assert len(rows) == 3 * (2 * 6 + 1)
    assert {row["run"] for row in rows if row["warmup"]} == {0}
    outputs = {}
    for row in rows:
        if not row["warmup"]:
            outputs.setdefault(row["request_id"], set()).add(row["output_sha256"])
    assert all(len(hashes) == 1 for hashes in outputs.values())
    # Later turns reuse the prefix, and the second run reuses no more than the first.
    reused = [
        [r["prefix_reused_tokens"] for r in rows if r["arm"] == "ar" and r["run"] == run]
        for run in (1, 2)
    ]
    assert reused[0] == reused[1] and sum(reused[0]) > 0


def test_json_is_data_on_stdout(corpus):
    done = call("replay", corpus, "--arm", "ar", "--arm", "lumotree", "--cap", 5, "--json")
    summary = json.loads(done.stdout)
    assert list(summary["arms"]) == ["ar", "lumotree"]
    assert summary["arms"]["lumotree"]["guards"]["token_ids_equal"] is True
    assert summary["comparisons"][0]["baseline"] == "ar"


def test_limit_takes_evenly_spaced_requests(corpus, tmp_path):
    call("replay", corpus, "--arms", "ar", "--limit", 4, "--cap", 5)
    run = json.loads((only_run(tmp_path) / "run.json").read_text())
    assert run["selected"] == ["c0-t0", "c1-t0", "c0-t2", "c1-t2"]


def test_a_token_mismatch_is_printed_and_fails(corpus, monkeypatch, tmp_path):
    install(FakeEngine(stray="hydra27"), monkeypatch)
    words = ("replay", corpus, "--arms", "ar lumotree", "--runs", 1, "--cap", 9)
    done = call(*words)
    assert done.exit_code == 1
    assert "token ids differ: request c0-t0: lumotree (run 1) leaves ar at token 2" in done.stderr
    assert "top-2 margin 0.125" in done.stderr
    summary = json.loads((only_run(tmp_path) / "summary.json").read_text())
    assert summary["arms"]["lumotree"]["guards"]["token_ids_equal"] is False
    assert call(*words, "--no-check-tokens").exit_code == 0


def test_a_failed_request_is_a_row_and_fails_the_check(corpus, monkeypatch):
    install(FakeEngine(fail_on=3), monkeypatch)
    done = call("replay", corpus, "--arms", "ar", "--runs", 1, "--cap", 9)
    assert done.exit_code == 1
    assert "2 of 6 failed: this request cannot be served" in done.stdout


def test_a_finished_run_resumes_to_the_same_summary(corpus, tmp_path):
    call("replay", corpus, "--arms", "ar lumotree", "--cap", 9)
    path = only_run(tmp_path)
    before = [(path / name).read_bytes() for name in ("requests.jsonl", "summary.json")]
    done = call("replay", "--resume", path)
    assert done.exit_code == 0, done.output
    assert before == [(path / name).read_bytes() for name in ("requests.jsonl", "summary.json")]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--cap", 64], "options cap was 9, now it is 64"),
        (["--arms", "ar"], "options arms was"),
        (["--greedy"], "options overrides temperature was null, now it is 0"),
        (["--out", "x"], "--resume and --out exclude each other"),
    ],
)
def test_a_resume_refuses_other_options(corpus, tmp_path, words, says):
    call("replay", corpus, "--arms", "ar lumotree", "--cap", 9)
    done = call("replay", "--resume", only_run(tmp_path), *words)
    assert done.exit_code == 2 and says in done.stderr


def test_a_resume_refuses_another_model_or_corpus(corpus, tmp_path, monkeypatch):
    call("replay", corpus, "--arms", "ar", "--cap", 9)
    path = only_run(tmp_path)
    install(FakeEngine(weights="w2"), monkeypatch)
    done = call("replay", "--resume", path)
    assert done.exit_code == 2 and "model weights_sha256 was w1, now it is w2" in done.stderr
    install(FakeEngine(), monkeypatch)
    write_corpus(corpus, corpus_lines(turns=2))
    done = call("replay", "--resume", path)
    assert done.exit_code == 2 and "corpus sha256 was" in done.stderr


def long_prompt():
    lines = corpus_lines()
    lines[4]["body"]["messages"][0]["content"] = "word " * 64
    return lines


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no corpus is named"),
        (["none.jsonl"], "none.jsonl does not exist"),
        (["empty.jsonl"], "empty.jsonl is empty"),
        (["broken.jsonl"], "broken.jsonl line 17: broken JSON"),
        (["long.jsonl"], "long.jsonl line 5: the prompt has 65 tokens"),
        (["wild.jsonl", "--sampling", "recorded"], "wild.jsonl line 1: top_p=3.0 is out of range"),
        (["c.jsonl", "--arms", "eagle"], "unknown arm 'eagle'"),
        (["c.jsonl", "--sampling", "x"], "--sampling is 'x'"),
        (["c.jsonl", "--rows", "x"], "--rows is 'x'"),
        (["c.jsonl", "--dtype", "x"], "--dtype is 'x'"),
        (["c.jsonl", "--cap", "0"], "--cap is 0"),
        (["c.jsonl", "--runs", "0"], "--runs is 0"),
        (["c.jsonl", "--cap", "x"], "--cap"),
        (["c.jsonl", "--top-p", "7"], "--top-p is 7"),
        (["c.jsonl", "--greedy", "--temperature", "1"], "--greedy and --temperature 1"),
        (["c.jsonl", "--out", "c.jsonl"], "c.jsonl exists"),
        (["--resume", "nowhere"], "nowhere is not a run folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_sentence_and_leaves_nothing(corpus, tmp_path, words, says):
    (tmp_path / "empty.jsonl").touch()
    good = "".join(json.dumps(line) + "\n" for line in corpus_lines(16, 1))
    (tmp_path / "broken.jsonl").write_text(good + '{"custom_id": \n')
    write_corpus(tmp_path / "long.jsonl", long_prompt())
    wild = corpus_lines(1, 1)
    wild[0]["body"]["top_p"] = 3
    write_corpus(tmp_path / "wild.jsonl", wild)
    done = call("replay", *words)
    assert done.exit_code == 2, done.output
    assert says in done.stderr and "Traceback" not in done.output
    assert done.stdout == "" and not (tmp_path / "runs").exists()


def test_an_mtp_arm_without_mtp_is_wrong_use(corpus, monkeypatch, tmp_path):
    install(FakeEngine(has_mtp=False), monkeypatch)
    done = call("replay", corpus, "--arms", "ar mtp-5")
    assert done.exit_code == 2 and "no mtp.* tensors" in done.stderr
    assert not (tmp_path / "runs").exists()
    assert call("replay", corpus, "--arms", "ar", "--cap", 5).exit_code == 0


def test_debug_shows_the_traceback(corpus, monkeypatch):
    monkeypatch.setenv("LUMOTREE_DEBUG", "1")
    assert type(call("replay", "none.jsonl").exception).__name__ == "CorpusError"


def test_corpus_inspect(corpus):
    text = call("corpus", "inspect", corpus).stdout
    assert "requests       6" in text and "conversations  2" in text and "t (6)" in text
    figures = json.loads(call("corpus", "inspect", corpus, "--json").stdout)
    assert figures["turns_per_conversation"] == {"c0": 3, "c1": 3}
    length = figures["prompt_length"]
    assert (length["p0"], length["p100"], length["unit"]) == (3, 5, "tokens of embedded")


def test_corpus_validate(corpus, tmp_path):
    done = call("corpus", "validate", corpus)
    assert done.exit_code == 0 and "6 requests; it has no manifest" in done.stdout
    (tmp_path / "c.manifest.json").write_text('{"count": 5, "sha256": ""}')
    done = call("corpus", "validate", corpus, "--json")
    assert done.exit_code == 1 and json.loads(done.stdout)["valid"] is False
    assert "its manifest says 5" in done.stderr
    assert call("replay", corpus).exit_code == 2
    assert call("corpus", "validate", "none.jsonl").exit_code == 2


@pytest.mark.pictures
def test_plot(corpus, tmp_path):
    call("replay", corpus, "--arms", "all", "--cap", 9, "--out", "r", "--no-report")
    assert not (tmp_path / "r" / "report.html").exists()
    pictures = json.loads(call("plot", "r", "--json").stdout)["pictures"]
    assert pictures[0] == "r/rates.png" and "r/phases.png" in pictures
    for path in pictures:
        assert (tmp_path / path).read_bytes().startswith(b"\x89PNG")
    assert call("plot", "nowhere").exit_code == 2


def test_plot_of_a_run_without_rates(corpus, tmp_path):
    call("replay", corpus, "--arms", "sglang-eagle:url=http://127.0.0.1:9", "--out", "r")
    done = call("plot", "r")
    assert done.exit_code == 2 and "no measured arm" in done.stderr


def test_tree_show():
    text = call("tree", "show").stdout
    assert "27 active drafts and the root, depth 11" in text
    assert "level 1  from row 14      19 24 26 28 29 30 31" in text
    assert "active rows by depth: 1 3 5 5 4 4 1 1 1 1 1 1" in text
    figures = json.loads(call("tree", "show", "-1,0,0,1", "--json").stdout)
    assert figures["parents"] == [-1, 0, 0, 1] and figures["spine"] == [0, 1, 3]
    assert call("tree", "show", "oak").exit_code == 2

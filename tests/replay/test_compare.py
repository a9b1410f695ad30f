"""Comparisons across run folders: what is refused, what is said, and what pairs with what."""

import json

import pytest
from typer.testing import CliRunner

from lumotree.errors import CorpusError
from replay.cli import app
from replay.compare import compare_folders
from replay.rows import Row
from replay.runfolder import RunFolder

BASE = {
    "options": {"cap": 48},
    "corpus": {"sha256": "c"},
    "model": {"weights_sha256": "w", "dtype": "float32", "device": "cpu", "rows": "natural"},
    "sampling": {"mode": "protocol", "temperature": 0.6},
    "machine": {"cpu": "X", "cores": 2},
}
KEYS = {
    "arm", "baseline", "ratio", "ci_low", "ci_high", "verdict", "aa_floor", "wins", "losses",
    "ties", "request_ratio", "pooled_tok_s", "mean_request_tok_s", "baseline_pooled_tok_s",
    "baseline_mean_request_tok_s", "reason", "requests", "resampled", "clusters",
}  # fmt: skip


def folder(path, speeds, changes=None):
    """A run of two interleaved runs; `speeds` maps arms to tokens per second."""
    run = BASE | {
        "arms": {arm: {"status": "ok"} for arm in speeds},
        "requests": {f"r{i}": {"conversation": f"c{i // 2}"} for i in range(12)},
    }
    made = RunFolder.create(path, run | (changes or {}))
    for repeat in (1, 2):
        for i in range(12):
            for arm, speed in speeds.items():
                noise = 1 + 0.01 * ((7 * i + 3 * repeat + len(arm)) % 5)
                made.append(
                    Row(
                        arm=arm,
                        run=repeat,
                        request_id=f"r{i}",
                        prompt_tokens=10,
                        completion_tokens=41,
                        ttft_s=0.1,
                        decode_s=40 / speed * noise,
                        finish_reason="stop",
                    )
                )
    made.close()
    return path


def call(*words):
    return CliRunner().invoke(app, ["compare", *map(str, words)])


def test_one_run_compares_its_arms(tmp_path):
    one = folder(tmp_path / "one", {"ar": 50, "mtp-5": 100, "lumotree": 100})
    found = json.loads(call(one, "--json").stdout)
    assert [(e["arm"], e["verdict"]) for e in found["comparisons"]] == [
        ("mtp-5", "faster"),
        ("lumotree", "faster"),
    ]
    assert all(entry.keys() >= KEYS for entry in found["comparisons"])
    assert found["comparisons"][0]["resampled"] == "conversations, then requests"
    other = json.loads(call(one, "--json", "--baseline", "mtp-5").stdout)
    assert [(e["arm"], e["verdict"]) for e in other["comparisons"]] == [
        ("ar", "slower"),
        ("lumotree", "not separated"),
    ]
    text = call(one).stdout
    assert "95 % interval" in text and "per-request equal" in text and "12/0/0" in text


def test_across_runs_an_arm_meets_its_namesake(tmp_path):
    one = folder(tmp_path / "one", {"ar": 50, "lumotree": 100})
    two = folder(tmp_path / "two", {"ar": 50, "lumotree": 130, "mtp-5": 90})
    found = compare_folders([one, two])
    by_arm = {entry["arm"]: entry for entry in found["comparisons"]}
    assert by_arm["two/lumotree"]["baseline"] == "one/lumotree"
    assert by_arm["two/lumotree"]["ratio"] == pytest.approx(1.3)
    assert by_arm["two/ar"]["verdict"] == "not separated"
    assert by_arm["two/mtp-5"]["baseline"] == "one/ar"
    assert any("not interleaved" in note for note in found["notes"])
    named = compare_folders([one, two], baseline="ar")
    assert {entry["baseline"] for entry in named["comparisons"]} == {"one/ar"}
    assert len(named["comparisons"]) == 4


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"corpus": {"sha256": "d"}}, "corpus sha256 was c, now it is d"),
        ({"model": BASE["model"] | {"weights_sha256": "v"}}, "model weights_sha256 was w"),
        ({"model": BASE["model"] | {"dtype": "bfloat16"}}, "model dtype was float32"),
        ({"sampling": {"mode": "recorded"}}, "sampling mode was protocol, now it is recorded"),
        ({"options": {"cap": 64}}, "options cap was 48, now it is 64"),
    ],
)
def test_other_experiments_are_refused_unless_told(tmp_path, changes, says):
    one = folder(tmp_path / "one", {"ar": 50})
    two = folder(tmp_path / "two", {"ar": 60}, changes)
    done = call(one, two)
    assert done.exit_code == 2 and says in done.stderr and "--force" in done.stderr
    assert done.stdout == ""
    done = call(one, two, "--force")
    assert done.exit_code == 0, done.output
    assert f"Not the same experiment: {says}" in done.stdout
    assert "(of runs that differ)" in done.stdout
    assert json.loads(call(one, two, "--force", "--json").stdout)["differences"]


def test_another_machine_is_a_note(tmp_path):
    one = folder(tmp_path / "one", {"ar": 50})
    two = folder(tmp_path / "two", {"ar": 60}, {"machine": {"cpu": "Y", "cores": 2}})
    assert "machine cpu was X, now it is Y" in compare_folders([one, two])["notes"]


def test_wrong_use_is_one_sentence(tmp_path):
    one = folder(tmp_path / "one", {"ar": 50})
    assert "is not a run folder" in call(tmp_path / "none").stderr
    with pytest.raises(CorpusError, match="has no arm 'mtp-5'"):
        compare_folders([one], baseline="mtp-5")
    empty = RunFolder.create(tmp_path / "empty", BASE | {"arms": {}})
    empty.close()
    assert "no completed request" in call(tmp_path / "empty").stderr

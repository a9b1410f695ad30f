"""Comparisons across run folders: what is refused, what is said, and what pairs with what."""

import json

import pytest
from typer.testing import CliRunner

from lumotree.errors import CorpusError
from replay.cli import app
from replay.compare import Loaded, compare_folders, resummarise
from replay.guards import check_equality
from replay.rows import Row
from replay.runfolder import RunFolder
from replay.summary import summarise

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
    "baseline_mean_request_tok_s", "reason", "requests", "resampled", "clusters", "method", "drift",
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
    assert (found["comparisons"][0]["method"], found["comparisons"][0]["clusters"]) == ("t", 6)
    assert found["comparisons"][0]["resampled"] == "conversations"
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
    assert by_arm["two/lumotree"]["verdict"] == "faster" and by_arm["two/lumotree"]["drift"] < 1e-9
    assert any("not interleaved" in note for note in found["notes"])
    named = compare_folders([one, two], baseline="ar")
    assert {entry["baseline"] for entry in named["comparisons"]} == {"one/ar"}
    assert len(named["comparisons"]) == 4


def test_the_drift_of_a_shared_arm_is_part_of_the_floor(tmp_path):
    one = folder(tmp_path / "one", {"ar": 50, "lumotree": 100})
    two = folder(tmp_path / "two", {"ar": 65, "lumotree": 130})
    entries = {e["arm"]: e for e in compare_folders([one, two])["comparisons"]}
    entry = entries["two/lumotree"]
    assert entry["drift"] == pytest.approx(0.3) and entry["verdict"] == "not separated"
    assert "drift of 30.0 % between the runs" in entry["reason"]
    assert entry["ratio"] == pytest.approx(1.3), "the ratio itself is told"
    text = call(one, two).stdout
    assert "+ 30.0 %" in text and "t, 6 conversations" in text


def test_without_a_shared_arm_runs_are_never_separated(tmp_path):
    one, two = folder(tmp_path / "one", {"lumotree": 100}), folder(tmp_path / "two", {"mtp-5": 50})
    same = folder(tmp_path / "same", {"lumotree": 200})
    for entry in compare_folders([one, two, same])["comparisons"]:
        assert entry["verdict"] == "not separated" and entry["drift"] is None
        assert entry["reason"] == "the runs are not interleaved"
    other = folder(
        tmp_path / "other",
        {"ar": 50, "lumotree": 200},
        {"arms": {a: {"status": "ok", "description": {"tree": "x"}} for a in ("ar", "lumotree")}},
    )
    full = folder(tmp_path / "full", {"ar": 50, "lumotree": 100})
    for entry in compare_folders([full, other])["comparisons"]:
        assert entry["drift"] is None, "an arm with another spec is no measure of drift"


@pytest.mark.parametrize(("given", "same"), [({"new": 32}, True), ({"tree": "x"}, False)])
def test_an_option_that_an_older_version_had_not_is_no_other_arm(tmp_path, given, same):
    saved = {"kind": "in-process", "tree": "root"}

    def run(name: str, description: dict):
        arms = {"ar": {"status": "ok", "description": description}, "lumotree": {"status": "ok"}}
        return folder(tmp_path / name, {"ar": 50, "lumotree": 100}, {"arms": arms})

    found = compare_folders([run("one", saved), run("two", saved | given)])["comparisons"]
    drift = {entry["arm"]: entry["drift"] for entry in found}["two/lumotree"]
    assert (drift is not None) is same


@pytest.mark.parametrize(("margin", "withheld"), [(0.01, False), (1.0, True)])
def test_compare_withholds_what_the_run_did(tmp_path, margin, withheld):
    """Near-ties pass by their margin, which only the model can measure: the saved one counts."""
    run = BASE | {"model": BASE["model"] | {"equal_bits": False}}
    run["requests"] = {f"r{i}": {"conversation": f"c{i}"} for i in range(6)}
    described = {"status": "ok", "description": {"kind": "in-process"}}
    run["arms"] = {"ar": described, "lumotree": described}
    made = RunFolder.create(tmp_path / "near", run)
    for arm, seconds in (("ar", 2.0), ("lumotree", 1.0)):
        for i in range(6):
            ids = list(range(41))
            if arm == "lumotree" and i == 3:
                ids[20:] = range(100, 121)
            made.append(
                Row(arm=arm, run=1, request_id=f"r{i}", completion_tokens=41, ttft_s=0.1,
                    decode_s=seconds, finish_reason="stop", token_ids=ids)
            )  # fmt: skip
    rows = made.rows()
    made.close()
    equality = check_equality(rows, ["ar", "lumotree"], lambda request, ids: margin)
    saved = summarise(run["arms"], rows, equality, run)
    assert bool(saved["withheld"]) is withheld
    assert resummarise(run, rows) != saved, "the margin is not in the rows"
    made.write_json("summary.json", saved)
    again = Loaded.read(tmp_path / "near").summary
    assert again["withheld"] == saved["withheld"]
    assert json.loads(json.dumps(again)) == json.loads(json.dumps(saved))


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

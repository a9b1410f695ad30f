"""Planted defects: each trips its guard, withholds the headline, and is said aloud.

The arms are servers: nothing demands their token ids to equal the baseline's, so every defect
must be seen by the guard that is there for it.
"""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from replay.cli import app
from replay.guards import check_equality
from replay.rows import Row
from replay.runfolder import RunFolder
from replay.summary import summarise
from tests.replay.fakes import FakeEngine, corpus_lines, install, write_corpus

REQUESTS, RUNS, CAP = 12, 2, 200


def served(arm, seed, rate=100.0, drafts=2):
    """A healthy arm: text of its own, natural lengths, some requests that reach the cap."""
    random = np.random.default_rng(seed)
    rows = []
    texts = {}
    for i in range(REQUESTS):
        # The length belongs to the request, but for what another sample of it changes.
        usual = 40 + 15 * i if i < 9 else 400
        n = min(CAP, max(2, int(usual * np.exp(random.normal(0, 0.15)))))
        texts[i] = random.integers(0, 500, n).tolist()
    for run in range(1, RUNS + 1):
        for i in range(REQUESTS):
            ids = texts[i]
            n, steps = len(ids), -(-(len(ids) - 1) // (1 + drafts))
            rows.append(
                Row(
                    arm=arm,
                    run=run,
                    request_id=f"r{i}",
                    prompt_tokens=100 + i,
                    completion_tokens=n,
                    ttft_s=0.1,
                    decode_s=(n - 1) / rate * float(np.exp(random.normal(0, 0.02))),
                    steps=steps,
                    accepted_by_depth=[steps] * drafts,
                    finish_reason="length" if n == CAP else "stop",
                    token_ids=ids,
                )
            )
    return rows


def change(row, **fields):
    return row.model_copy(update=fields)


def looping(rows):
    """Three tokens over and over, twice as fast: everything is accepted."""
    found = []
    for row in rows:
        n = row.completion_tokens
        ids = row.token_ids[:9] + [11, 12, 13] * n
        found.append(change(row, token_ids=ids[:n], decode_s=row.decode_s / 2))
    return found


def near_loop(rows):
    """A loop that counts: one token of each period changes."""
    found = []
    for row in rows:
        n = row.completion_tokens
        ids = [t for i in range(n) for t in (11, 12, 13, 14, 15, 16, 17, 100 + i % 3)]
        found.append(change(row, token_ids=ids[:n]))
    return found


def stopping_early(rows):
    found = []
    for row in rows:
        n = max(2, row.completion_tokens // 3)
        steps = -(-(n - 1) // 3)
        found.append(
            change(
                row,
                completion_tokens=n,
                token_ids=row.token_ids[:n],
                decode_s=row.decode_s / 3,
                steps=steps,
                accepted_by_depth=[steps] * 2,
                finish_reason="stop",
            )
        )
    return found


def another_prompt(rows):
    return [change(row, prompt_tokens=row.prompt_tokens + 33) for row in rows]


def lifetime(rows):
    """Counters since start-up instead of this request's."""
    found, tokens, steps = [], 0, 0
    for row in rows:
        tokens, steps = tokens + row.completion_tokens, steps + row.steps
        found.append(
            change(row, completion_tokens=tokens, steps=steps, accepted_by_depth=[steps, steps])
        )
    return found


def lifetime_without_ids(rows):
    return [change(row, token_ids=None) for row in lifetime(rows)]


def chunks(rows):
    """One count per stream event; a step's tokens come in one event."""
    return [change(row, completion_tokens=1 + row.steps) for row in rows]


def chunks_without_ids(rows):
    return [change(row, token_ids=None) for row in chunks(rows)]


def chunks_without_ids_or_steps(rows):
    return [change(row, token_ids=None, steps=None, accepted_by_depth=[]) for row in chunks(rows)]


def empty(rows):
    return [
        change(row, token_ids=[], completion_tokens=1, finish_reason="stop", steps=0,
               accepted_by_depth=[], decode_s=0.0)
        if row.request_id in ("r1", "r2", "r3", "r4", "r5", "r6", "r7")
        else row
        for row in rows
    ]  # fmt: skip


def never_stopping(rows):
    return [
        change(
            row,
            completion_tokens=CAP,
            token_ids=[(7 * i * i + i) % 499 for i in range(CAP)],
            finish_reason="length",
            steps=67,
            accepted_by_depth=[67, 66],
        )
        for row in rows
    ]


def reset(rows):
    """The server started anew in the middle: its counter falls."""
    found, total = [], 0
    for i, row in enumerate(rows):
        if i == 5:
            total = 0
        before, total = total, total + row.completion_tokens
        read = {"before": {"completion_tokens": before}, "after": {"completion_tokens": total}}
        found.append(change(row, details={"counters": read}))
    return found


def run_json():
    return {
        "schema_version": 1,
        "arms": {"ar": {"status": "ok"}, "server": {"status": "ok"}},
        "requests": {
            f"r{i}": {
                "conversation": f"c{i % 6}",
                "prompt_tokens": 100 + i,
                "max_tokens": CAP,
            }
            for i in range(REQUESTS)
        },
    }


def summary_of(rows, run=None):
    run = run_json() if run is None else run
    return summarise(run["arms"], rows, check_equality(rows, ["ar"]), run)


DEFECTS = {
    "looping": (looping, "repetition", "outputs repeat themselves"),
    "near-loop": (near_loop, "repetition", "outputs repeat themselves"),
    "early": (stopping_early, "length_shift", "outputs are shorter than ar's"),
    "prompt": (another_prompt, "prompt_tokens", "in 12 requests (+33)"),
    "lifetime": (lifetime, "lifetime_counters", "lifetime counters, not this request's"),
    "lifetime-no-ids": (lifetime_without_ids, "lifetime_counters", "completion_tokens, steps"),
    "chunks": (chunks, "counts", "fewer completion tokens than token ids"),
    "chunks-no-ids": (chunks_without_ids, "counts", "fewer tokens than steps and accepted"),
    "chunks-bare": (chunks_without_ids_or_steps, "counts", "stopped by length below the cap"),
    "empty": (empty, "empty_outputs", "7 of 12 outputs are empty, 0 of ar's"),
    "never-stopping": (never_stopping, "length_stops", "12 of 12 outputs reach the cap"),
    "reset": (reset, "counter_resets", "completion_tokens was reset"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_withholds_the_headline(defect):
    plant, guard, says = DEFECTS[defect]
    rows = served("ar", 1, rate=50, drafts=0) + plant(served("server", 2))
    summary = summary_of(rows)
    arm = summary["arms"]["server"]
    assert guard in arm["guards"]["failed"]
    (check,) = [check for check in arm["guards"]["checks"] if check["name"] == guard]
    assert says in check["reason"] and check["reason"] in arm["reason"]
    assert arm["status"] == "withheld" and summary["withheld"] == ["server"]
    assert arm["pooled_tok_s"] is arm["run_range_tok_s"] is arm["mean_request_tok_s"] is None
    assert arm["withheld"]["pooled_tok_s"] > 0
    (entry,) = summary["comparisons"]
    assert entry["verdict"] == "withheld" and entry["ratio"] is entry["ci_low"] is None
    assert "server: " in entry["reason"] and summary["fastest"] == "ar"
    assert summary["arms"]["ar"]["status"] == "ok"


def test_a_healthy_server_keeps_its_headline():
    """Guards that cry wolf get switched off: other samples of the same text trip none."""
    tripped = []
    for seed in range(200):
        rows = served("ar", 2 * seed, rate=50, drafts=0) + served("server", 2 * seed + 1)
        tripped += summary_of(rows)["arms"]["server"]["guards"]["failed"]
    assert len(tripped) <= 6, tripped
    (entry,) = summary_of(served("ar", 1, 50, 0) + served("server", 2))["comparisons"]
    assert entry["verdict"] == "faster" and entry["wins"] == REQUESTS


def test_a_defect_of_the_baseline_withholds_the_comparison_too():
    summary = summary_of(another_prompt(served("ar", 1, 50, 0)) + served("server", 2))
    assert summary["withheld"] == ["ar"] and summary["fastest"] == "server"
    (entry,) = summary["comparisons"]
    assert entry["verdict"] == "withheld" and entry["reason"].startswith("ar: prompt tokens")


def test_prompts_of_two_servers_are_compared_when_nothing_says_what_was_sent():
    run = run_json()
    del run["requests"]
    summary = summary_of(served("ar", 1) + another_prompt(served("server", 2)), run)
    assert summary["arms"]["server"]["guards"]["failed"] == ["prompt_tokens"]


def test_other_words_of_the_same_length_show_in_greedy_first_tokens():
    run = run_json() | {"sampling": {"temperature": 0}}
    base = served("ar", 1)
    same = [change(row, arm="server") for row in base]
    assert not summary_of(base + same, run)["withheld"]
    other = [change(row, token_ids=[501, *row.token_ids[1:]]) for row in same]
    failed = summary_of(base + other, run)["arms"]["server"]["guards"]["failed"]
    assert failed == ["first_tokens"]


def test_a_loop_that_the_baseline_shares_is_a_warning():
    rows = looping(served("ar", 1)) + looping(served("server", 1))
    summary = summary_of(rows)
    assert not summary["withheld"]
    checks = {c["name"]: c["status"] for c in summary["arms"]["server"]["guards"]["checks"]}
    assert checks["repetition"] == "warn"


def test_a_single_looping_arm_has_nothing_to_hide_behind():
    run = run_json() | {"arms": {"server": {"status": "ok"}}}
    summary = summarise(run["arms"], looping(served("server", 1)), None, run)
    assert summary["withheld"] == ["server"]


def test_compare_prints_and_exits_with_the_defect(tmp_path):
    folder = RunFolder.create(tmp_path / "r", run_json())
    for row in served("ar", 1, 50, 0) + looping(served("server", 2)):
        folder.append(row)
    folder.close()
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "r")])
    assert done.exit_code == 1
    assert "withheld: server: " in done.stderr and "repeat themselves" in done.stdout
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "r"), "--json"])
    assert json.loads(done.stdout)["comparisons"][0]["verdict"] == "withheld"


def test_a_replay_with_a_planted_defect_ends_with_exit_code_1(tmp_path, monkeypatch):
    """The whole command: an arm that is fed another prompt, in this process."""

    class Misled(FakeEngine):
        def decoder(self, config):
            decoder = super().decoder(config)
            if config.tree == "hydra27":
                honest = decoder.generate
                decoder.generate = lambda ids, *words, **named: honest([1, *ids], *words, **named)
            return decoder

    monkeypatch.chdir(tmp_path)
    install(Misled(), monkeypatch)
    corpus = write_corpus(tmp_path / "c.jsonl", corpus_lines())
    words = ["replay", str(corpus), "--arms", "ar lumotree", "--cap", "9", "--out", "r"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1, done.output
    assert "withheld: lumotree: prompt tokens differ from what was sent in 6 req" in done.stderr
    summary = RunFolder.open(tmp_path / "r").summary()
    assert summary["arms"]["lumotree"]["guards"]["failed"] == ["prompt_tokens"]
    assert summary["arms"]["lumotree"]["pooled_tok_s"] is None

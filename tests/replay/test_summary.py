import io

import pytest
from rich.console import Console

from replay.guards import check_equality
from replay.report.words import headline
from replay.rows import Row
from replay.summary import summarise
from replay.tables import print_run

INTERFACE = {
    "pooled_tok_s",
    "run_range_tok_s",
    "mean_request_tok_s",
    "tokens_per_step",
    "ms_per_step",
    "survival_by_depth",
    "phases_ms",
    "completion_tokens",
    "requests",
    "status",
    "guards",
}


def rows(arm, decode, error=None):
    return [
        Row(
            arm=arm,
            run=run,
            request_id=f"r{i}",
            completion_tokens=11,
            decode_s=decode * (1 + i / 10),
            steps=5,
            phases_ms={"draft": 1.0},
            token_ids=list(range(11)),
            error=error,
        )
        for run in (1, 2)
        for i in range(6)
    ]


def summary(ar=1.0, tree=0.5):
    status = {
        "ar": {"status": "ok"},
        "tree": {"status": "ok"},
        "sglang-eagle": {"status": "unavailable", "reason": "no server reached at http://x"},
        "late": {"status": "ok"},
    }
    all_rows = rows("ar", ar) + rows("tree", tree) + rows("late", 1.0, "gone")
    return summarise(status, all_rows, check_equality(all_rows, ["ar", "tree"]))


def test_every_arm_has_the_keys_of_the_interface():
    result = summary()
    for arm in result["arms"].values():
        assert arm.keys() >= INTERFACE
    assert result["arms"]["sglang-eagle"]["status"] == "unavailable"
    assert result["arms"]["late"]["status"] == "failed"
    assert result["arms"]["late"]["reason"] == "12 of 12 failed: gone"


def test_comparisons_are_ratios_of_pooled_rates():
    (entry,) = summary()["comparisons"]
    assert (entry["arm"], entry["baseline"]) == ("tree", "ar")
    assert abs(entry["ratio"] - 2) < 1e-12
    assert entry["ci_low"] <= entry["ratio"] + 1e-9 and entry["ratio"] <= entry["ci_high"] + 1e-9


def test_a_comparison_uses_only_what_both_completed():
    status = {"ar": {"status": "ok"}, "b": {"status": "ok"}}
    mine = rows("b", 1.0)
    mine[0] = mine[0].model_copy(update={"error": "gone"})
    (entry,) = summarise(status, rows("ar", 1.0) + mine, None)["comparisons"]
    assert entry["ratio"] == 1
    assert summarise(status, rows("ar", 1.0) + mine, None)["arms"]["b"]["status"] == "partial"


def timed(arms, spread=0.0, requests=8, runs=2):
    """Rows of `arms`, seconds by name; `spread` makes the second half of the requests slower."""
    return [
        Row(
            arm=arm,
            run=run,
            request_id=f"r{i}",
            completion_tokens=11,
            decode_s=seconds * (1 + 0.001 * run) * (1 + (spread if len(arm) % 2 == i % 2 else 0)),
            steps=5,
        )
        for run in range(1, runs + 1)
        for i in range(requests)
        for arm, seconds in arms.items()
    ]


def said(arms, rows=None, run=None, status=None, **options):
    status = {name: {"status": "ok"} for name in arms} | (status or {})
    return headline(summarise(status, timed(arms, **options) if rows is None else rows, None, run))


def test_the_headline_names_the_winner_also_when_it_is_ar():
    assert "On this machine tree wins" in headline(summary())
    assert "2.00 times ar" in headline(summary())
    slow = headline(summary(tree=2.0))
    assert "plain decoding wins: ar reaches" in slow and "tree, reaches 50 % of that" in slow
    assert "no rate" in headline(summarise({}, [], None))


def test_a_lead_that_is_not_separated_is_no_win():
    text = said({"ar": 1.0, "tree5": 0.99}, spread=0.3)
    assert text.startswith("tree5 is ahead on this machine: ") and "wins" not in text
    assert "tree5 and ar are not separated: the interval includes 1" in text
    few = said({"ar": 1.0, "tree": 0.5}, requests=5)
    assert "tree is ahead on this machine" in few and "only 5 conversations" in few
    once = said({"ar": 1.0, "tree": 0.5}, runs=1)
    assert "tree and ar are not separated: one run of each arm" in once and "wins" not in once


def test_ar_wins_only_when_every_arm_is_slower():
    text = said({"ar": 1.0, "slow": 2.0, "near": 1.0005})
    assert text.startswith("ar is ahead on this machine: ar reaches") and "wins" not in text
    assert "ar and near are not separated" in text and "ar and slow" not in text


def test_the_winner_is_compared_with_the_arm_behind_it():
    text = said({"ar": 1.0, "tree": 0.5, "mtp-5": 0.7})
    assert "tree wins" in text and "Next is mtp-5: tree is 1.40 times as fast." in text
    near = {"ar": 1.0, "tree": 0.5, "mtp-5": 0.5004}
    text = said(near)
    assert text.startswith("On this machine tree is ahead of ar:") and "wins" not in text
    assert "tree and mtp-5 are not separated: " in text
    entry = summarise({n: {"status": "ok"} for n in near}, timed(near), None)["runner_up"]
    assert (entry["arm"], entry["baseline"], entry["verdict"]) == ("tree", "mtp-5", "not separated")


def test_a_run_without_ar_has_a_headline_and_no_plain_decoding():
    assert "On this machine tree wins" in said({"mtp-5": 1.0, "tree": 0.5})
    text = said({"mtp-5": 0.5, "tree": 1.0})
    assert text.startswith("On this machine mtp-5 wins: mtp-5 reaches") and "plain" not in text


RUN = {"options": {"runs": 2}, "selected": [f"r{i}" for i in range(8)]}


def test_an_incomplete_arm_is_partial_and_not_ranked():
    rows = [
        row
        for row in timed({"ar": 1.0, "tree": 0.5, "server": 0.1})
        if row.arm != "server" or row.run == 1
    ]
    status = {name: {"status": "ok"} for name in ("ar", "tree", "server")}
    result = summarise(status, rows, None, RUN)
    server = result["arms"]["server"]
    assert (server["status"], server["reason"]) == ("partial", "8 of 16 requests completed")
    assert result["fastest"] == "tree" and result["arms"]["tree"]["status"] == "ok"
    text = headline(result)
    assert "tree wins" in text and text.endswith("Incomplete, so not ranked: server.")


def test_an_arm_gone_at_resume_is_not_ok():
    rows = timed({"ar": 1.0, "server": 0.5})
    status = {
        "ar": {"status": "ok"},
        "server": {"status": "unavailable", "reason": "no server reached at http://x"},
    }
    server = summarise(status, rows, None, RUN)["arms"]["server"]
    assert server["status"] == "partial"
    assert server["reason"] == "unavailable: no server reached at http://x"
    only = summarise({"server": status["server"]}, rows, None, RUN)
    assert only["fastest"] is None and only["runner_up"] is None
    assert "No arm completed all its requests" in headline(only)


def test_the_ratio_is_of_the_rates_beside_it_in_partial_runs_too():
    rows = [r for r in timed({"ar": 1.0, "tree": 0.5}, spread=0.4) if r.arm == "ar" or r.run == 1]
    rows = [r.model_copy(update={"decode_s": r.decode_s * r.run}) for r in rows]
    status = {"ar": {"status": "ok"}, "tree": {"status": "ok"}}
    (entry,) = summarise(status, rows, None, RUN)["comparisons"]
    for prefix in ("pooled_tok_s", "mean_request_tok_s"):
        assert entry[prefix] and entry[f"baseline_{prefix}"]
    assert entry["ratio"] == pytest.approx(entry["pooled_tok_s"] / entry["baseline_pooled_tok_s"])
    assert entry["mean_request_tok_s"] / entry["baseline_mean_request_tok_s"] < 2.5


def test_tables_say_why_an_arm_has_no_figures():
    out = Console(file=io.StringIO(), width=140)
    print_run(out, summary())
    text = out.file.getvalue()
    narrow = Console(file=io.StringIO(), width=80)
    print_run(narrow, summary())
    assert "…" not in narrow.file.getvalue()
    assert "no server reached at http://x" in text
    assert "Phases, ms per step" in text
    assert "6 conversations" in text and headline(summary()) in " ".join(text.split())

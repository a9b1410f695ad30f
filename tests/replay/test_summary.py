import io

from rich.console import Console

from replay.guards import check_equality
from replay.rows import Row
from replay.summary import summarise
from replay.tables import print_run, verdict

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
        for i in range(4)
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
    assert result["arms"]["late"]["reason"] == "8 of 8 failed: gone"


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


def test_the_verdict_names_the_winner_also_when_it_is_ar():
    assert "tree wins" in verdict(summary()) and "2.00 times ar" in verdict(summary())
    slow = verdict(summary(tree=2.0))
    assert "plain decoding wins" in slow and "tree, reaches 0.50 of it" in slow
    assert "no rate" in verdict(summarise({}, [], None))


def test_tables_say_why_an_arm_has_no_figures():
    out = Console(file=io.StringIO(), width=140)
    print_run(out, summary())
    text = out.file.getvalue()
    narrow = Console(file=io.StringIO(), width=80)
    print_run(narrow, summary())
    assert "…" not in narrow.file.getvalue()
    assert "no server reached at http://x" in text
    assert "Phases, ms per step" in text

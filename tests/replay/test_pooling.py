import pytest

from replay.pooling import pool
from replay.rows import Row


def row(run=1, n=11, decode=1.0, steps=5, **fields):
    base = {"arm": "a", "run": run, "request_id": f"r{n}", "completion_tokens": n}
    return Row(**{**base, "decode_s": decode, "steps": steps, **fields})


def test_the_protocols_formula():
    # (10 + 30) / (1 + 1), not the mean of 10 and 30 per request.
    pooled = pool([row(n=11, decode=1.5), row(n=31, decode=0.5, steps=10)])
    assert pooled.pooled_tok_s == 20
    assert pooled.mean_request_tok_s == pytest.approx((10 / 1.5 + 60) / 2)
    assert pooled.tokens_per_step == 40 / 15
    assert pooled.ms_per_step == pytest.approx(2000 / 15)
    assert (pooled.requests, pooled.completion_tokens) == (2, 42)


def test_the_run_range():
    pooled = pool([row(run=1, decode=1.0), row(run=2, decode=2.0), row(run=3, decode=0.5)])
    assert pooled.run_range_tok_s == (5, 20)


def test_failed_and_warm_up_rows_enter_nothing():
    good = [row()]
    noise = [
        row(error="gone", n=500, decode=9.0),
        row(run=0, warmup=True, n=900),
        row(run=0, warmup=True, error="gone"),
    ]
    clean, dirty = pool(good), pool(good + noise)
    assert dirty.failed_requests == 1
    assert dirty.pooled_tok_s == clean.pooled_tok_s
    assert dirty.requests == 1 and dirty.tokens_per_step == clean.tokens_per_step


def test_survival_and_phases():
    pooled = pool(
        [
            row(steps=4, accepted_by_depth=[4, 2], phases_ms={"draft": 8.0, "verify": 4.0}),
            row(steps=6, accepted_by_depth=[1], phases_ms={"draft": 2.0}),
        ]
    )
    assert pooled.survival_by_depth == (0.5, 0.2)
    assert pooled.phases_ms["draft"] == 10 and pooled.phases_ms_per_step["draft"] == 1
    assert list(pooled.phases_ms) == ["draft", "verify", "select", "publish", "other"]


def test_a_server_without_step_counts_has_no_figures_per_step():
    pooled = pool([row(steps=None)])
    assert pooled.pooled_tok_s == 10
    assert pooled.tokens_per_step is None and pooled.ms_per_step is None


@pytest.mark.parametrize("rows", [[], [row(n=1, decode=0.0, steps=0)]])
def test_nothing_measured_is_none(rows):
    pooled = pool(rows)
    assert pooled.pooled_tok_s is None and pooled.run_range_tok_s is None

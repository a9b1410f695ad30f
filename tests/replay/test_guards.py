import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.guards import Evidence, check_equality, divergence
from replay.guards.counters import rises
from replay.guards.equality import MARGINS
from replay.guards.judge import equality_check
from replay.guards.lengths import check_length_stops, swap_test
from replay.guards.loops import longest_loop, loops
from replay.guards.paired import Excess
from replay.rows import Row

PAIR = (("ar", 2), ("tree", 3))

ids = st.lists(st.integers(0, 3), max_size=6)


@given(ids, ids)
def test_divergence_is_the_length_of_the_common_prefix(left, right):
    position = divergence(left, right)
    if position is None:
        assert left == right
    else:
        assert left[:position] == right[:position]
        assert left[position : position + 1] != right[position : position + 1]


def row(arm, token_ids, run=1, request="r", **fields):
    return Row(arm=arm, run=run, request_id=request, token_ids=token_ids, **fields)


def test_arms_and_runs_are_compared_with_the_first():
    rows = [
        row("ar", [1, 2, 3]),
        row("ar", [1, 2, 3], run=2),
        row("tree", [1, 2, 4]),
        row("tree", [1, 2], run=2),
        row("tree", [9], error="gone", request="s"),
        row("server", [7]),
        row("ar", [5], run=0, warmup=True),
    ]
    found = check_equality(rows, ["ar", "tree"], lambda request, before: len(before) / 10)
    assert found.compared == {"ar": 1, "tree": 2}
    first, second = found.mismatches
    assert (first.position, first.expected, first.found, first.margin) == (2, 3, 4, 0.2)
    assert (second.position, second.expected, second.found, second.run) == (2, 3, None, 2)
    assert "leaves ar at token 2: id 3 became id 4, top-2 margin 0.2" in first.sentence()
    assert "the end" in second.sentence()
    assert found.of("ar")["token_ids_equal"] is True
    assert found.of("tree")["token_ids_equal"] is False
    assert found.of("server")["token_ids_equal"] is None


def test_a_request_the_first_arm_failed_is_compared_among_the_others():
    rows = [row("ar", None, error="gone"), row("b", [1]), row("c", [2])]
    found = check_equality(rows, ["ar", "b", "c"])
    assert [(m.reference, m.arm) for m in found.mismatches] == [("b", "c")]


def text(n, seed=0):
    return np.random.default_rng(seed).integers(0, 500, n).tolist()


@pytest.mark.parametrize(
    ("ids", "looping"),
    [
        (text(200), False),
        (text(80) + [7, 8, 9] * 40, True),  # ends in a loop: half of it is still new
        (text(130) + [7, 8, 9] * 20, False),  # a table at the end of an answer
        (text(60) * 2, False),  # said twice is no loop
        (text(50) * 4, True),
        ([t for i in range(40) for t in (1, 2, 3, 4, 5, 6, 7, text(40)[i] % 4)], True),  # varies
        ([5] * 23, False),  # too short to tell
        ([5] * 24, True),
        (None, False),
        ([], False),
    ],
)
def test_loops_are_told_from_text(ids, looping):
    assert loops(ids) is looping


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60))
def test_the_longest_loop_agrees_with_a_plain_search(tokens):
    best = 0
    for period in range(1, len(tokens) // 4 + 1):
        for start in range(len(tokens)):
            stop = start + period
            while stop < len(tokens) and tokens[stop] == tokens[stop - period]:
                stop += 1
            if stop <= len(tokens) and stop - start >= 4 * period:
                best = max(best, stop - start)
    assert longest_loop(tokens) == best


@pytest.mark.parametrize(("n", "exact"), [(4, 2 / 16), (10, 2 / 1024)])
def test_the_swap_test_is_exact_for_few_requests(n, exact):
    assert swap_test(np.full(n, 0.5)) == exact
    assert swap_test(np.array([0.5, -0.5] * (n // 2))) == 1


def test_the_swap_test_is_uniform_under_no_shift():
    random = np.random.default_rng(0)
    p = [swap_test(random.normal(0, 1, 20)) for _ in range(200)]
    assert 0.01 <= np.mean(np.array(p) <= 0.05) <= 0.1


def test_near_ties_only_warn_where_bits_are_not_equal():
    rows = [row("ar", [1, 2]), row("tree", [1, 3])]
    for margin, equal_bits, status in (
        (0.1, False, "warn"),
        (0.1, True, "fail"),
        (0.1, None, "fail"),
        (3.0, False, "fail"),
        (None, False, "warn"),
        (None, True, "fail"),
        (None, None, "fail"),
        (float("nan"), False, "fail"),
    ):
        found = check_equality(rows, ["ar", "tree"], lambda *_, m=margin: m)
        assert equality_check(found, "tree", equal_bits).status == status


def test_margins_beyond_the_first_ten_are_unknown_and_no_fault():
    rows = [row(arm, [1, tok], request=f"r{i}") for i in range(12) for arm, tok in PAIR]
    margins = iter([0.1] * MARGINS)
    found = check_equality(rows, ["ar", "tree"], lambda *_: next(margins))
    check = equality_check(found, "tree", False)
    assert check.status == "warn" and check.figures["unmeasured"] == 2
    assert equality_check(found, "tree", True).status == "fail"
    margins = iter([0.1] * (MARGINS - 1) + [3.0])
    check = equality_check(check_equality(rows, ["ar", "tree"], lambda *_: next(margins)),
                           "tree", False)  # fmt: skip
    assert check.status == "fail" and "top-2 margin 3" in check.reason


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 10, 43])
def test_honest_cap_stops_are_seldom_withheld(n):
    """Both arms end at the cap by a coin of their own, of any bias."""
    random, arms, ends = np.random.default_rng(n), ("server", "ar"), ("stop", "length")
    made = {
        (arm, i, end): row(arm, None, request=f"r{i}", completion_tokens=9, finish_reason=end)
        for arm in arms
        for i in range(n)
        for end in ends
    }
    for share in (0.3, 0.5, 0.8):
        failed = 0
        for capped in random.random((1000, 2, n)) < share:
            own, base = (
                [made[arm, i, ends[cap]] for i, cap in enumerate(caps)]
                for arm, caps in zip(arms, capped.astype(int), strict=True)
            )
            evidence = Evidence("server", own, "ar", base)
            failed += check_length_stops(evidence).status == "fail"
        assert failed < 20, (share, failed)
        assert n > 3 or not failed


def test_all_of_ours_and_none_of_theirs_counts_from_four_requests():
    for n, expected in ((1, False), (3, False), (4, True)):
        assert Excess(n, n, 0, n, 0).significant() is expected


def test_lifetime_counters_need_six_rising_rows():
    assert rises([1, 3, 5, 7, 9, 11]) and not rises([1, 3, 5, 7, 9])
    assert not rises([10, 11, 12, 13, 14, 15]), "natural growth is no sum"
    assert not rises([1, 3, 5, 7, 9, 9]) and not rises([None] * 6)

"""Batch scaling: options, equal answers, ratios that keep clear of the noise, where trees stop."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumotree.bench.batch import Group, Window
from lumotree.errors import LumoTreeError
from replay import metrics
from replay.scaling import Answers, make_row, pairs_of, rotated
from replay.scaling_options import ScalingOptions, parse_active
from replay.scaling_summary import AHEAD, BEHIND, EVEN, crossover, ratios_of, summarise, verdict

RATES = st.lists(st.floats(1, 1000), min_size=2, max_size=5)
WORDS = st.lists(st.sampled_from([AHEAD, BEHIND, EVEN]), min_size=1, max_size=6)


def options(**changed):
    given = {"active": "1,2", "prompt_tokens": 8, "tokens": 4, "arms": ("ar,lumotree",)}
    return ScalingOptions.of(**(given | changed))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"active": "1,two"}, "--active"),
        ({"active": "0"}, "--active"),
        ({"active": ""}, "--active"),
        ({"active": "4,-1"}, "--active"),
        ({"prompt_tokens": 0}, "--prompt-tokens"),
        ({"tokens": 1}, "--tokens"),
        ({"runs": 0}, "--runs"),
        ({"threads": 0}, "--threads"),
        ({"dtype": "int8"}, "--dtype"),
        ({"rows": "odd"}, "--rows"),
        ({"arms": ("ar vllm-mtp",)}, "--arms: 'vllm-mtp'"),
        ({"arms": ("lumotree:tree=auto",)}, "--arms: 'lumotree:tree=auto'"),
        ({"arms": ("lumotre",)}, "did you mean 'lumotree'"),
    ],
)
def test_a_bad_option_is_named(changed, named):
    with pytest.raises(LumoTreeError) as caught:
        options(**changed)
    assert named in str(caught.value)


def test_sizes_are_taken_once_and_in_order():
    assert parse_active("8,1, 2,8") == (1, 2, 8)


def test_arms_take_turns_and_trees_meet_every_other_kind():
    assert [rotated("abc", shift) for shift in (0, 1, 3)] == [
        ["a", "b", "c"], ["b", "c", "a"], ["a", "b", "c"]
    ]  # fmt: skip
    arms = [("ar", "ar"), ("mtp-5", "mtp-5"), ("lumotree:suffix=off", "lumotree")]
    assert pairs_of(arms) == [("lumotree:suffix=off", "ar"), ("lumotree:suffix=off", "mtp-5")]


def test_the_first_answer_that_differs_is_named():
    answers = Answers()
    answers.take("ar at 1 active (run 1)", "one", (5, 6, 7))
    answers.take("lumotree at 1 active (run 1)", "one", (5, 6, 7))
    answers.take("lumotree at 2 active (run 1)", "one", (5, 9, 7))
    answers.take("lumotree at 4 active (run 1)", "one", (5,))
    assert answers.as_dict() == {
        "answers": 4,
        "equal": 2,
        "first_difference": "request one: lumotree at 2 active (run 1) leaves "
        "ar at 1 active (run 1) at token 1",
    }


def test_groups_of_a_run_are_pooled():
    groups = [
        Group(Window(3, 18, 0.5, {"draft": 4.0, "verify": 40.0}), (0.1, 0.3), ()),
        Group(Window(1, 6, 0.3, {"draft": 0.0, "verify": 0.0}), (0.2, 0.9), ()),
    ]
    row = make_row("lumotree", 2, 1, 2, groups)
    assert row.keys() == metrics.tags(metrics.BATCH_ROW)
    assert (row["tok_s"], row["rounds"], row["tokens_per_step"]) == (30, 4, 3)
    assert row["ms_per_round"] == 200 and row["ttft_s"] == 0.25
    # Two rounds are left beside the first of each group.
    assert row["phases_ms_per_round"] == {"draft": 2, "verify": 20, "other": 178}
    assert make_row("ar", 2, 1, 2, groups[1:])["phases_ms_per_round"] is None


def rows_of(rates):
    """rates: by (active, arm), one for each run."""
    return [
        {"active": active, "arm": arm, "run": run, "tok_s": rate, "ms_per_round": 1.0,
         "tokens_per_step": 1.0, "ttft_s": 0.1, "phases_ms_per_round": None}
        for (active, arm), own in rates.items()
        for run, rate in enumerate(own, start=1)
    ]  # fmt: skip


def test_ratios_pair_runs_of_a_size():
    rows = rows_of({(1, "t"): [20, 33, 40], (1, "b"): [10, 11, 10], (2, "t"): [9, 9, 9]})
    found = summarise(rows, [("t", "b")])
    (entry,) = found["ratios"]
    assert entry.keys() == metrics.tags(metrics.BATCH_RATIO)
    assert (entry["active"], entry["ratio"], entry["run_range"]) == (1, 3, [2, 4])
    assert entry["aa_floor"] == 1 and entry["verdict"] == AHEAD
    assert [(c["active"], c["arm"], c["tok_s"]) for c in found["cells"]] == [
        (1, "t", 33), (1, "b", 10), (2, "t", 9)
    ]  # fmt: skip


def test_one_run_separates_nothing():
    assert verdict([9.0], 0.0) == EVEN
    (entry,) = ratios_of(rows_of({(1, "t"): [90], (1, "b"): [10]}), "t", "b")
    assert entry["aa_floor"] is None and entry["verdict"] == EVEN


@given(RATES, st.randoms(use_true_random=False))
def test_an_arm_is_never_separated_from_itself(rates, random):
    other = random.sample(rates, len(rates))
    rows = rows_of({(1, "t"): rates, (1, "b"): other})
    assert ratios_of(rows, "t", "b")[0]["verdict"] == EVEN


@given(
    st.lists(st.sampled_from([0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0]), min_size=3, max_size=3),
    st.sampled_from([0.0, 0.1, 0.7, 2.0]),
)
def test_ahead_and_behind_are_mirror_images(paired, floor):
    mirror = {AHEAD: BEHIND, BEHIND: AHEAD, EVEN: EVEN}
    assert verdict([1 / ratio for ratio in paired], floor) == mirror[verdict(paired, floor)]


def entries(words):
    return [{"active": 1 << i, "verdict": word} for i, word in enumerate(words)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([AHEAD] * 3, "t is ahead of b at 1, 2, 4 active requests: no crossover up to 4."),
        (
            [AHEAD, AHEAD, EVEN, BEHIND],
            "t is ahead of b at 1, 2; not separated at 4; behind at 8 active requests: "
            "the crossover lies between 2 and 8.",
        ),
        (
            [AHEAD, EVEN],
            "t is ahead of b at 1; not separated at 2 active requests: no crossover is shown up "
            "to 2, and 1 is the largest size at which it is ahead outside the noise.",
        ),
        ([EVEN] * 2, "t is not separated from b at 1, 2 active requests: no size is outside "
         "the noise."),
        (
            [EVEN, BEHIND],
            "t is not separated from b at 1; behind at 2 active requests: it is ahead at no size "
            "up to 2.",
        ),
        (
            [BEHIND, AHEAD],
            "t is behind b at 1; ahead at 2 active requests: it gets ahead between 1 and 2.",
        ),
        (
            [AHEAD, BEHIND, AHEAD],
            "t is ahead of b at 1; behind at 2; ahead at 4 active requests: the order changes "
            "more than once, so there is no single crossover.",
        ),
        ([], "t and b were not both measured at any size."),
    ],
)  # fmt: skip
def test_the_crossover_in_words(words, sentence):
    assert crossover("t", "b", entries(words)) == sentence


@settings(max_examples=200)
@given(WORDS)
def test_a_crossover_stands_between_sizes_that_are_outside_the_noise(words):
    found = entries(words)
    sentence = crossover("t", "b", found)
    told = {entry["active"]: entry["verdict"] for entry in found if entry["verdict"] != EVEN}
    turns = [(a, b) for a, b in zip(list(told), list(told)[1:], strict=False) if told[a] != told[b]]
    single = len(turns) == 1
    if "crossover lies between" in sentence or "gets ahead between" in sentence:
        assert single and sentence.endswith(f"between {turns[0][0]} and {turns[0][1]}.")
    else:
        assert not single
    if "no crossover up to" in sentence:
        assert not turns and told[found[-1]["active"]] == AHEAD
    if "no size is outside" in sentence:
        assert not told

"""Statistics on simulated data where the truth is known."""

import numpy as np
import pytest

from replay.rows import Row
from replay.statistics import T_975, Interval, Pairs, aa_floor, interval, pair, tally, verdict

SIMULATIONS = 1000


def simulated(random, effect, clusters, sizes, between, within):
    """Pairs with noise that conversations share and noise of each request."""
    count = random.integers(sizes[0], sizes[1] + 1, size=clusters)
    groups = np.repeat(np.arange(clusters), count)
    tokens = random.integers(40, 400, size=len(groups)).astype(float)
    base = 0.01 * tokens * np.exp(random.normal(0, 0.2, len(groups)))
    noise = random.normal(0, between, clusters)[groups] + random.normal(0, within, len(groups))
    names = tuple(f"r{i}" for i in range(len(groups)))
    return Pairs(names, groups, np.stack([tokens, base * np.exp(noise) / effect, tokens, base]))


@pytest.mark.parametrize(
    ("clusters", "sizes", "between", "within"),
    [
        (6, (5, 9), 0.1, 0.05),
        (6, (4, 4), 0.1, 0.1),
        (8, (5, 9), 0.1, 0.05),
        (8, (4, 4), 0.1, 0.1),
        (12, (4, 4), 0.1, 0.1),
        (12, (1, 1), 0.1, 0),
        (20, (2, 6), 0.03, 0.15),
    ],
)
def test_95_percent_intervals_cover(clusters, sizes, between, within):
    random = np.random.default_rng(1)
    # The pooled ratio of lognormal times has this limit, not `effect` itself.
    truth = 1.3 / np.exp((between**2 + within**2) / 2)
    simulations = SIMULATIONS // 2 if clusters >= 12 else 4 * SIMULATIONS  # t needs no draws
    hits = 0
    for _ in range(simulations):
        found = interval(simulated(random, 1.3, clusters, sizes, between, within), resamples=600)
        hits += found.low <= truth <= found.high
    assert found.method == ("t" if clusters < 12 else "bootstrap-t")
    assert 0.93 <= hits / simulations <= 0.97


@pytest.mark.parametrize(
    ("sizes", "between", "within"), [((2, 9), 0.1, 0.1), ((1, 1), 0.1, 0)], ids=["sizes", "tokens"]
)
def test_six_very_unequal_conversations_cost_little_coverage(sizes, between, within):
    """Two to nine requests each, or one of 40 to 400 tokens: at least 92.5 %, as the docs say."""
    random = np.random.default_rng(11)
    truth = 1.3 / np.exp((between**2 + within**2) / 2)
    hits = 0
    for _ in range(8000):
        found = interval(simulated(random, 1.3, 6, sizes, between, within))
        hits += found.low <= truth <= found.high
    assert 0.925 <= hits / 8000 <= 0.975


def test_few_conversations_have_no_exploding_end():
    """A studentised bootstrap of six gave ends such as 8.8 for a ratio of 2; t is symmetric."""
    random = np.random.default_rng(6)
    for _ in range(200):
        pairs = simulated(random, 2.0, 6, (2, 2), 0.4, 0.3)
        found = interval(pairs)
        assert found.high / pairs.ratio == pytest.approx(pairs.ratio / found.low)
        logs = np.log(found.high / pairs.ratio)
        assert 0 < logs < 1.5


def test_a_percentile_interval_over_requests_would_not_cover():
    """The reason for conversations: ignoring them is visibly wrong on the same data."""
    random = np.random.default_rng(2)
    hits = 0
    for _ in range(300):
        pairs = simulated(random, 1.0, 6, (6, 8), 0.1, 0.02)
        flat = Pairs(pairs.requests, np.arange(len(pairs.requests)), pairs.sums)
        found = interval(flat, resamples=400)
        hits += found.low <= np.exp(-(0.1**2 + 0.02**2) / 2) <= found.high
    assert hits / 300 < 0.8


def aa_rows(random, arm, runs=2, drifts=None, clusters=8):
    """One arm on conversations of 4 requests: the same work, noisy clocks, drifting runs."""
    made = []
    for run in range(1, runs + 1):
        drift = random.normal(0, 0.02) if drifts is None else drifts[run - 1]
        for c in range(clusters):
            shared = random.normal(0, 0.03)
            for t in range(4):
                noise = drift + shared + random.normal(0, 0.03)
                made.append(
                    Row(
                        arm=arm,
                        run=run,
                        request_id=f"{c}-{t}",
                        completion_tokens=101,
                        decode_s=float(np.exp(noise)),
                    )
                )
    return made


CONVERSATIONS = {f"{c}-{t}": f"c{c}" for c in range(20) for t in range(4)}


@pytest.mark.parametrize(
    ("runs", "common", "clusters"),
    [(2, True, 8), (3, True, 8), (3, False, 8), (2, True, 6), (2, True, 12), (2, True, 20)],
)
def test_an_arm_against_itself_is_not_separated(runs, common, clusters):
    """Interleaved arms share the drift of a run; the default three runs bear drift of their own."""
    random = np.random.default_rng(3)
    apart = 0
    for _ in range(SIMULATIONS // 4):
        drifts = random.normal(0, 0.02, runs) if common else None
        one, two = (aa_rows(random, name, runs, drifts, clusters) for name in "ab")
        pairs = pair(one, two, CONVERSATIONS)
        floor = max(aa_floor(one), aa_floor(two))
        name, _ = verdict(pairs.ratio, interval(pairs, resamples=300), floor)
        apart += name != "not separated"
    assert apart / (SIMULATIONS // 4) <= 0.07


def test_a_real_effect_is_separated():
    random = np.random.default_rng(4)
    found = 0
    for _ in range(50):
        one, two = aa_rows(random, "a"), aa_rows(random, "b")
        fast = [row.model_copy(update={"decode_s": row.decode_s / 1.3}) for row in one]
        pairs = pair(fast, two, CONVERSATIONS)
        floor = max(aa_floor(fast), aa_floor(two))
        found += verdict(pairs.ratio, interval(pairs, resamples=300), floor)[0] == "faster"
    assert found >= 47


def rows(arm, seconds, run=1, tokens=11):
    return [
        Row(arm=arm, run=run, request_id=f"r{i}", completion_tokens=tokens, decode_s=s)
        for i, s in enumerate(seconds)
    ]


def test_the_pooled_ratio_is_of_sums_over_shared_requests():
    ours = [*rows("a", [1.0, 3.0, 5.0])]
    base = [*rows("b", [2.0, 2.0]), Row(arm="b", run=1, request_id="r2", error="gone")]
    pairs = pair(ours, base, {})
    assert pairs.requests == ("r0", "r1") and pairs.ratio == pytest.approx(1.0)
    assert np.exp(pairs.log_ratios) == pytest.approx([2.0, 2 / 3])
    assert tally(pairs, None) == (1, 1, 0)
    assert tally(pairs, 0.6) == (1, 0, 1)


def test_runs_pair_with_runs_within_a_folder_and_with_requests_across():
    ours, base = rows("a", [1.0]), rows("b", [4.0], run=2)
    assert pair(ours, base, {}) is None
    assert pair(ours, base, {}, same_run=False).ratio == pytest.approx(4.0)


def test_the_aa_floor_is_the_widest_gap_between_runs():
    three = [*rows("a", [1.0, 1.0]), *rows("a", [1.1, 1.1], run=2), *rows("a", [1.0, 1.0], run=3)]
    assert aa_floor(three) == pytest.approx(0.1)
    assert aa_floor(rows("a", [1.0])) is None
    warm = [Row(arm="a", run=0, request_id="r0", warmup=True, completion_tokens=9, decode_s=9)]
    assert aa_floor([*rows("a", [1.0]), *warm]) is None


@pytest.mark.parametrize(
    ("ratio", "ci", "floor", "name", "why"),
    [
        (1.2, (1.1, 1.3), 0.05, "faster", "excludes 1"),
        (0.8, (0.7, 0.9), 0.05, "slower", "excludes 1"),
        (1.2, (0.9, 1.5), 0.05, "not separated", "includes 1"),
        (1.2, (1.1, 1.3), 0.25, "not separated", "A/A floor of 25.0 %"),
        (0.8, (0.7, 0.9), 0.26, "not separated", "A/A floor"),
        (1.2, (1.1, 1.3), None, "not separated", "floor is unknown"),
        (1.2, None, 0.05, "not separated", "no interval"),
    ],
)
def test_a_verdict_needs_interval_and_floor(ratio, ci, floor, name, why):
    found = verdict(ratio, ci and Interval(*ci, "t", "conversations", 9), floor)
    assert found[0] == name and why in found[1]


@pytest.mark.parametrize(("clusters", "says"), [(1, "only 1 conversation,"), (5, "only 5 conv")])
def test_no_verdict_from_fewer_than_six_conversations(clusters, says):
    found = verdict(2.0, Interval(1.9, 2.1, "t", "requests", clusters), 0.01)
    assert found[0] == "not separated" and says in found[1]
    assert verdict(2.0, Interval(1.9, 2.1, "t", "conversations", 6), 0.01)[0] == "faster"


def test_drift_comes_on_top_of_the_floor():
    ci = Interval(1.1, 1.3, "t", "conversations", 9)
    assert verdict(1.2, ci, 0.05, 0.1)[0] == "faster"
    name, why = verdict(1.2, ci, 0.1, 0.1)
    assert name == "not separated" and "drift of 10.0 % between the runs" in why


def test_few_conversations_are_described_over_requests_and_say_so():
    ours, base = rows("a", [1.0, 1.1, 1.2, 0.9]), rows("b", [2.0, 2.2, 2.1, 2.0])
    one = interval(pair(ours, base, dict.fromkeys(("r0", "r1", "r2", "r3"), "c")))
    assert (one.method, one.resampled, one.clusters) == ("t", "requests", 1)
    own = interval(pair(ours, base, {}))
    assert (own.resampled, own.clusters) == ("requests", 4)
    assert own == interval(pair(ours, base, {}))
    assert interval(pair(ours[:3], base[:3], {})) is None
    six = interval(pair(rows("a", [1.0, 1.1] * 3), rows("b", [2.0, 2.2] * 3), {}))
    assert (six.method, six.resampled, six.clusters) == ("t", "conversations", 6)


def test_t_quantiles_are_those_of_the_table():
    """Against the exact tail for odd and even degrees of freedom, by integration."""
    for df, quantile in enumerate(T_975, start=1):
        angle = np.linspace(0, np.arctan(quantile / np.sqrt(df)), 20001)
        density = np.cos(angle) ** (df - 1)
        half = np.cos(np.linspace(0, np.pi / 2, 20001)) ** (df - 1)
        share = np.trapezoid(density, angle) / np.trapezoid(half, dx=np.pi / 2 / 20000)
        assert share == pytest.approx(0.95, abs=2e-5)


def test_identical_times_give_an_interval_of_no_width():
    found = interval(pair(rows("a", [1.0] * 6), rows("b", [2.0] * 6), {}))
    assert found.low == pytest.approx(2.0) and found.high == pytest.approx(2.0)


def test_blocks_do_not_change_the_result(monkeypatch):
    pairs = simulated(np.random.default_rng(5), 1.2, 14, (2, 4), 0.1, 0.1)
    monkeypatch.setattr("replay.statistics.BLOCK", 40)
    small = interval(pairs, resamples=8000)
    monkeypatch.undo()
    whole = interval(pairs, resamples=8000)
    assert small.low == pytest.approx(whole.low, rel=0.02)
    assert small.high == pytest.approx(whole.high, rel=0.02)

"""Logits processing, position-keyed noise, sampling of rows, and the exactness of the walk."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lumotree import sampling
from lumotree.request import SamplingParams
from lumotree.sampling import (
    TokenHistory,
    accept_walk,
    gumbel_noise,
    path_counts,
    process_logits,
    sample_rows,
)

PLAIN = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, presence_penalty=0.0)
EVERYTHING = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    top_k=9,
    min_p=0.02,
    presence_penalty=0.7,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    seed=5,
)
CASES = {
    "protocol": SamplingParams(),
    "plain": PLAIN,
    "everything": EVERYTHING,
    "greedy": replace(EVERYTHING, temperature=0.0),
    "no-top-k": replace(EVERYTHING, top_k=0),
    "top-p": replace(PLAIN, top_p=0.8),
    "min-p": replace(PLAIN, min_p=0.1),
    "top-k-1": replace(PLAIN, top_k=1),
    "top-k-huge": replace(EVERYTHING, top_k=5000),
    "rewards": replace(EVERYTHING, presence_penalty=-1.0, repetition_penalty=0.8),
}
every_case = pytest.mark.parametrize("params", CASES.values(), ids=CASES.keys())


def scene(rows: int, vocab: int, seed: int = 0, depth: int = 5, step: float = 0.0):
    """Random logits (multiples of `step`, for ties), a history and ragged paths."""
    random_ = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, vocab, generator=random_, dtype=torch.float64)
    if step:
        logits = (logits / step).round() * step
    paths = torch.randint(0, vocab, (rows, depth), generator=random_)
    lengths = torch.randint(0, depth + 1, (rows, 1), generator=random_)
    paths = paths.masked_fill(torch.arange(depth) >= lengths, -1)
    prompt, generated = torch.randint(0, vocab, (2, 20), generator=random_).tolist()
    history = TokenHistory(vocab, prompt, "cpu")
    history.add(generated)
    return logits, history, paths, torch.arange(rows) + 40


def naive_process(logits: list[float], params: SamplingParams, counts, prompt_seen) -> list[float]:
    """The definition, one row, one token at a time."""
    x = list(logits)
    for t, count in enumerate(counts):
        if count or prompt_seen[t]:
            r = params.repetition_penalty
            x[t] = x[t] / r if x[t] > 0 else x[t] * r
        x[t] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if params.temperature == 0:
        return x
    x = [value / params.temperature for value in x]
    if params.top_k:
        kth = sorted(x, reverse=True)[: params.top_k][-1]
        x = [value if value >= kth else -math.inf for value in x]
    weights = [math.exp(value - max(x)) for value in x]
    reached, cut = 0.0, -math.inf
    for value, weight in sorted(zip(x, weights, strict=True), reverse=True):
        if reached >= params.top_p * sum(weights):
            break
        reached, cut = reached + weight, value
    x = [value if value >= cut else -math.inf for value in x]
    floor = params.min_p * max(weights)
    return [v if w >= floor else -math.inf for v, w in zip(x, weights, strict=True)]


# -- counts


def test_history_counts_generated_tokens_apart_from_the_prompt():
    history = TokenHistory(6, [1, 1, 2], "cpu")
    history.add([3])
    history.add([])
    history.add([3, 1, 3])
    assert history.generated.tolist() == [0, 1, 0, 3, 0, 0]
    assert history.generated.dtype == torch.int32
    assert history.prompt_seen.tolist() == [False, True, True, False, False, False]


def test_path_counts_are_the_rows_own():
    history = TokenHistory(5, [], "cpu")
    history.add([4, 0])
    paths = torch.tensor([[-1, -1, -1], [2, -1, -1], [2, 2, 0]])
    assert path_counts(history, paths).tolist() == [
        [1, 0, 0, 0, 1],
        [1, 0, 1, 0, 1],
        [2, 0, 2, 0, 1],
    ]
    assert history.generated.tolist() == [1, 0, 0, 0, 1]


def test_pitfall_9_penalties_follow_the_root_path_not_the_flattened_draft():
    """Rows 1 and 2 are siblings; row 3 is below 1. Flattened order would penalise 2's token."""
    logits = torch.tensor([[0.0, 1.0, 0.9, 0.0]]).repeat(4, 1)
    paths = torch.tensor([[-1, -1], [1, -1], [2, -1], [1, 2]])
    params = replace(PLAIN, temperature=0.0, presence_penalty=0.95)
    history = TokenHistory(4, [], "cpu")
    assert sample_rows(logits, params, history, paths, torch.arange(4)).tolist() == [1, 2, 1, 1]
    history.add([1])  # emitted earlier: now every row counts it
    assert sample_rows(logits, params, history, paths, torch.arange(4)).tolist() == [2, 2, 1, 1]


# -- processing


@every_case
@pytest.mark.parametrize("step", [0.0, 0.5], ids=["distinct", "ties"])
def test_processing_is_the_naive_definition(params, step):
    logits, history, paths, _ = scene(12, 63, seed=3, step=step)
    counts = path_counts(history, paths)
    got = process_logits(logits, params, counts, history.prompt_seen)
    for row in range(len(logits)):
        arguments = logits[row].tolist(), params, counts[row].tolist()
        expected = torch.tensor(naive_process(*arguments, history.prompt_seen.tolist()))
        torch.testing.assert_close(got[row], expected.double(), rtol=1e-6, atol=1e-6)


def test_inputs_are_left_alone_and_narrow_types_widened():
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        logits, history, paths, positions = scene(3, 50)
        logits = logits.to(dtype)
        kept = logits.clone(), paths.clone(), history.generated.clone()
        counts = path_counts(history, paths)
        assert process_logits(logits, EVERYTHING, counts, history.prompt_seen).dtype == wide
        for params in CASES.values():
            sample_rows(logits, params, history, paths, positions)
        assert all(map(torch.equal, (logits, paths, history.generated), kept))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@every_case
def test_every_row_is_independent_of_the_others_bit_for_bit(params, dtype):
    logits, history, paths, positions = scene(29, 500, seed=1)
    logits = logits.to(dtype)
    counts = path_counts(history, paths)
    whole = process_logits(logits, params, counts, history.prompt_seen)
    tokens = sample_rows(logits, params, history, paths, positions)
    for rows in ([7], [0, 28], list(reversed(range(29))), list(range(3, 20))):
        part = process_logits(logits[rows], params, counts[rows], history.prompt_seen)
        assert torch.equal(part, whole[rows])
        drawn = sample_rows(logits[rows], params, history, paths[rows], positions[rows])
        assert torch.equal(drawn, tokens[rows])


def test_pitfall_13_boundary_ties_and_min_p_as_in_single_row_decoding():
    """Ties with the k-th value stay together, whatever else is in the batch."""
    row = torch.tensor([5.0, 4.0, 4.0, 4.0, 4.0, 1.0, 1.0, 0.0])
    none = TokenHistory(8, [], "cpu")
    for params, kept in (
        (replace(PLAIN, top_k=2), [0, 1, 2, 3, 4]),
        (replace(PLAIN, top_k=6), [0, 1, 2, 3, 4, 5, 6]),
        (replace(PLAIN, top_p=0.5), [0, 1, 2, 3, 4]),
        (replace(PLAIN, min_p=math.exp(-1) - 1e-6), [0, 1, 2, 3, 4]),
        (replace(PLAIN, min_p=math.exp(-1) + 1e-6), [0]),
    ):
        for order in (list(range(8)), [4, 6, 0, 2, 7, 1, 5, 3]):
            batch = torch.stack([torch.arange(8.0), row[order], torch.zeros(8)])
            out = process_logits(
                batch, params, path_counts(none, torch.zeros(3, 0).long()), none.prompt_seen
            )
            alone = process_logits(row[order][None], params, none.generated[None], none.prompt_seen)
            assert sorted(order[t] for t in out[1].isfinite().nonzero().flatten().tolist()) == kept
            assert torch.equal(out[1], alone[0])


# -- noise


def chi_square_p(counts: torch.Tensor, expected: torch.Tensor) -> float:
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((counts.numel() - 1) / 2), statistic / 2))


def uniforms(seed: int, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    return gumbel_noise(seed, positions, vocab, torch.float64).neg().exp().neg().exp()


@pytest.mark.parametrize("seed", [0, 1, 2**31, -7, 2**64 + 3], ids=str)
def test_noise_is_gumbel_distributed(seed):
    """Kolmogorov-Smirnov over a million values; 1.95 is the 0.1 % point."""
    u = uniforms(seed, torch.arange(1000), 1000).flatten().sort().values
    n = u.numel()
    ranks = torch.arange(1, n + 1, dtype=torch.float64)
    distance = torch.maximum((ranks / n - u).max(), (u - (ranks - 1) / n).max())
    assert distance * math.sqrt(n) < 1.95
    assert gumbel_noise(seed, torch.arange(1000), 1000).isfinite().all()


NEIGHBOURS = {
    "positions": (lambda u, v: (u[:-1], u[1:])),
    "tokens": (lambda u, v: (u[:, :-1], u[:, 1:])),
    "diagonal": (lambda u, v: (u[:-1, 1:], u[1:, :-1])),
    "256-positions-apart": (lambda u, v: (u[:-256], u[256:])),
    "seeds": (lambda u, v: (u, v)),
    "seed-and-position": (lambda u, v: (u[1:], v[:-1])),
}


@pytest.mark.parametrize("pair", NEIGHBOURS.values(), ids=NEIGHBOURS.keys())
@pytest.mark.parametrize("seed", [0, 41, 10**12])
def test_neighbouring_values_are_independent(pair, seed):
    positions = torch.arange(800) + 3
    a, b = pair(uniforms(seed, positions, 800), uniforms(seed + 1, positions, 800))
    a, b = a.flatten(), b.flatten()
    correlation = torch.corrcoef(torch.stack([a, b]))[0, 1]
    assert abs(correlation) * math.sqrt(a.numel()) < 4.5
    cells = (a * 16).long() * 16 + (b * 16).long()
    counts = torch.bincount(cells, minlength=256).double()
    assert chi_square_p(counts, torch.full_like(counts, a.numel() / 256)) > 1e-4


def test_bits_deep_in_the_tail_are_uniform():
    """Only noise near the maximum decides a sample: its conditional law is tested apart."""
    u = torch.cat([uniforms(s, torch.arange(2000), 2000).flatten() for s in range(3)])
    tail = (1 - u[u > 1 - 2.0**-10]) * 2**10
    counts = torch.bincount((tail * 32).long().clamp(max=31), minlength=32).double()
    assert chi_square_p(counts, torch.full_like(counts, tail.numel() / 32)) > 1e-4
    assert abs(tail.numel() - u.numel() / 1024) < 4.5 * math.sqrt(u.numel() / 1024)


def test_extreme_hashes_stay_finite(monkeypatch):
    """u = 2^-53 and 1 - 2^-53 exactly, never 0 or 1."""
    ends = torch.tensor([[-(2**63), 2**63 - 1]])
    monkeypatch.setattr(sampling, "_mix64_", lambda x: ends.clone())
    low, high = gumbel_noise(0, torch.tensor([0]), 2, torch.float64)[0].tolist()
    assert math.isclose(low, -math.log(53 * math.log(2)), rel_tol=1e-14)
    assert math.isclose(high, 53 * math.log(2), rel_tol=1e-14)


def test_the_hash_is_stafford_mix_13():
    """Known answers: SplitMix64 seeded with 1234567 (Vigna's reference code)."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = [(1234567 + i * 0x9E3779B97F4A7C15) % 2**64 for i in (1, 2, 3)]
    assert [sampling._mix64_int(s) for s in states] == expected
    signed = torch.tensor([sampling._signed(s) for s in states])
    assert [v % 2**64 for v in sampling._mix64_(signed).tolist()] == expected


def test_noise_for_ids_is_the_dense_noise_gathered():
    positions, ids = torch.tensor([3, 900_000]), torch.randint(0, 5000, (2, 40))
    for dtype in (torch.float32, torch.float64):
        dense = gumbel_noise(9, positions, 5000, dtype)
        assert torch.equal(gumbel_noise(9, positions, ids, dtype), dense.gather(1, ids))


def test_pitfall_12_noise_belongs_to_the_request_and_not_to_a_generator():
    logits, history, paths, positions = scene(8, 300)
    draws = []
    for state in (0, 1):
        torch.manual_seed(state)
        draws.append(sample_rows(logits, EVERYTHING, history, paths, positions))
        assert torch.initial_seed() == state
    assert torch.equal(*draws)
    before = torch.get_rng_state()
    sample_rows(logits, EVERYTHING, history, paths, positions)
    assert torch.equal(before, torch.get_rng_state())
    many = [uniforms(seed, torch.tensor([7]), 4)[0, 0].item() for seed in range(200)]
    assert len(set(many)) == 200


# -- sampling rows


@every_case
@pytest.mark.parametrize("step", [0.0, 0.25, 2.0], ids=["distinct", "ties", "many-ties"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_candidates_give_what_the_dense_rows_give(params, step, dtype):
    for vocab in (500, 12):
        logits, history, paths, positions = scene(28, vocab, seed=2, step=step)
        logits = logits.to(dtype)
        rows = process_logits(logits, params, path_counts(history, paths), history.prompt_seen)
        if params.temperature > 0:
            rows = rows + gumbel_noise(params.seed, positions, vocab, rows.dtype)
        drawn = sample_rows(logits, params, history, paths, positions)
        assert torch.equal(drawn, rows.argmax(-1))


def test_fewer_finite_logits_than_top_k():
    logits, history, paths, positions = scene(4, 400)
    logits[:, 3:] = -math.inf
    drawn = sample_rows(logits, SamplingParams(), history, paths, positions)
    assert (drawn < 3).all()


def test_frequencies_are_the_processed_softmax():
    """G-test of 200,000 draws per case."""
    draws = 200_000
    logits, history, paths, _ = scene(1, 24, seed=8, step=0.25)
    for params in (SamplingParams(seed=3), PLAIN, EVERYTHING):
        row = process_logits(logits, params, path_counts(history, paths), history.prompt_seen)
        kept = row[0].isfinite()
        expected = row[0].softmax(-1)[kept] * draws
        many = logits.expand(draws, -1), params, history, paths.expand(draws, -1)
        counts = torch.bincount(sample_rows(*many, torch.arange(draws)), minlength=24)
        assert counts[~kept].sum() == 0
        rare = expected < 20
        observed = torch.cat([counts[kept][~rare], counts[kept][rare].sum()[None]]).double()
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
        observed, expected = observed[expected > 0], expected[expected > 0]
        g = 2 * torch.special.xlogy(observed, observed / expected).sum()
        freedom = torch.tensor((len(expected) - 1) / 2)
        assert torch.special.gammaincc(freedom, g.clamp(min=0) / 2) > 1e-4


@pytest.mark.parametrize("params", [CASES["greedy"], *CASES.values()][:4])
@pytest.mark.parametrize("top_k", [0, 4, 40])
def test_pitfall_11_ties_go_to_the_lowest_id(params, top_k, monkeypatch):
    """Without noise, equal logits are equal scores in greedy and in sampled mode."""
    monkeypatch.setattr(sampling, "gumbel_noise", lambda seed, at, ids, dtype: torch.zeros(1, 1))
    logits = torch.zeros(30, 300)
    winners = [random.Random(row).sample(range(300), 2 + row % 14) for row in range(30)]
    for row, ids in enumerate(winners):
        logits[row, ids] = 2.0
    history, paths = TokenHistory(300, [], "cpu"), torch.full((30, 1), -1)
    params = replace(params, top_k=top_k)
    drawn = sample_rows(logits, params, history, paths, torch.arange(30))
    assert drawn.tolist() == list(map(min, winners))


def test_equal_scores_go_to_the_lowest_id_in_any_candidate_order(monkeypatch):
    """Which of equal values top-k lists first differs between devices."""
    monkeypatch.setattr(sampling, "gumbel_noise", lambda seed, at, ids, dtype: torch.zeros(1, 1))
    values, ids = torch.tensor([[2.0, 2.0, 2.0, 1.0]]), torch.tensor([[31, 9, 50, 3]])
    assert sampling._perturbed_argmax(values, ids, 0, torch.tensor([0])).tolist() == [9]


def test_more_ties_at_the_boundary_than_candidates_are_fetched():
    """A flat row: all 300 tokens are tied with the fifth and must share the draws."""
    params = replace(PLAIN, top_k=5, top_p=0.9)
    logits, history = torch.zeros(400, 300), TokenHistory(300, [], "cpu")
    paths, positions = torch.zeros(400, 0).long(), torch.arange(400)
    drawn = sample_rows(logits, params, history, paths, positions)
    assert torch.equal(drawn, gumbel_noise(params.seed, positions, 300).argmax(-1))


def test_rows_of_nan_yield_valid_ids_and_leave_the_others_alone():
    logits, history, paths, positions = scene(6, 300)
    for params in CASES.values():
        clean = sample_rows(logits, params, history, paths, positions)
        for poison in (math.nan, math.inf, -math.inf):
            dirty = logits.clone()
            dirty[2] = poison
            dirty[4, 17] = math.nan
            drawn = sample_rows(dirty, params, history, paths, positions)
            assert ((drawn >= 0) & (drawn < 300)).all()
            untouched = [0, 1, 3, 5]
            assert torch.equal(drawn[untouched], clean[untouched])


# -- the walk


@st.composite
def trees(draw):
    parents = [-1] + [draw(st.integers(0, i)) for i in range(draw(st.integers(0, 10)))]
    tokens = [draw(st.integers(0, 3)) for _ in parents]
    active = [True] + [draw(st.booleans()) for _ in parents[1:]]
    sampled = [draw(st.integers(0, 3)) for _ in parents]
    return parents, tokens, active, sampled


def children_of(parents):
    return [[c for c, p in enumerate(parents) if p == row] for row in range(len(parents))]


@given(trees())
def test_the_walk_follows_the_samples_and_stops_where_nobody_carries_them(tree):
    parents, tokens, active, sampled = tree
    path, pending = accept_walk(children_of(parents), tokens, active, sampled)
    assert path[0] == 0
    for parent, row in itertools.pairwise(path):
        assert parents[row] == parent and active[row] and tokens[row] == sampled[parent]
    last = path[-1]
    assert pending == sampled[last]
    stuck = [c for c in children_of(parents)[last] if active[c] and tokens[c] == pending]
    assert not stuck


def test_pitfall_10_padding_rows_that_copy_the_spine_do_not_stop_the_walk():
    """Row 1 is padding with the spine's token and no children; rows 2, 3 are the spine."""
    children, tokens = [[1, 2], [], [3], []], [0, 7, 7, 8]
    walk = accept_walk(children, tokens, [True, False, True, True], [7, 5, 8, 9])
    assert walk == ([0, 2, 3], 9)


def test_a_root_alone_emits_its_own_sample():
    assert accept_walk([[]], [4], [True], [6]) == ([0], 6)


class TableModel:
    """Logits as a fixed random function of the whole prefix."""

    def __init__(self, vocab: int, seed: int):
        self.vocab, self.seed = vocab, seed

    def __call__(self, prefix: tuple[int, ...]) -> torch.Tensor:
        state = random.Random(f"{self.seed} {prefix}")
        return torch.tensor([state.gauss(0, 2) for _ in range(self.vocab)], dtype=torch.float64)


def random_tree(state: random.Random, rows: int, vocab: int, alive: float):
    """Parents, tokens without duplicates among active siblings, active flags closed upwards."""
    parents, tokens, active = [-1], [state.randrange(vocab)], [True]
    while len(parents) < rows:
        parent = state.randrange(len(parents))
        token = state.randrange(vocab)
        twins = [t for t, p, a in zip(tokens, parents, active, strict=True) if p == parent and a]
        parents.append(parent)
        tokens.append(token)
        active.append(active[parent] and token not in twins and state.random() < alive)
    return parents, tokens, active


def root_paths(parents, tokens) -> list[list[int]]:
    """Draft tokens from below the root down to each row."""
    paths = [[]]
    for row in range(1, len(parents)):
        paths.append([*paths[parents[row]], tokens[row]])
    return paths


def padded(paths) -> torch.Tensor:
    width = max(map(len, paths))
    return torch.tensor([p + [-1] * (width - len(p)) for p in paths]).view(len(paths), width)


@pytest.mark.parametrize("seed", range(12))
def test_the_walk_has_exactly_the_autoregressive_distribution(seed):
    """All joint outcomes of all rows, walked, against the chain rule one token at a time."""
    state, vocab, rows = random.Random(seed), 4, 5
    model = TableModel(vocab, seed)
    params = replace(EVERYTHING, temperature=1.6, top_k=3, top_p=0.93)
    parents, tokens, active = random_tree(state, rows, vocab, alive=0.9)
    prompt, emitted = (0, 2), (1, tokens[0])
    history = TokenHistory(vocab, prompt, "cpu")
    history.add(emitted)
    paths = root_paths(parents, tokens)
    logits = torch.stack([model(prompt + emitted + tuple(p)) for p in paths])
    counts = path_counts(history, padded(paths))
    law = process_logits(logits, params, counts, history.prompt_seen).softmax(-1).tolist()

    walked: dict[tuple[int, ...], float] = {}
    for outcome in itertools.product(range(vocab), repeat=rows):
        mass = math.prod(law[row][token] for row, token in enumerate(outcome))
        if mass:
            path, pending = accept_walk(children_of(parents), tokens, active, outcome)
            text = (*(tokens[row] for row in path[1:]), pending)
            walked[text] = walked.get(text, 0.0) + mass

    def autoregressive(text: tuple[int, ...]) -> float:
        probability = 1.0
        for place, token in enumerate(text):
            before = TokenHistory(vocab, prompt, "cpu")
            before.add(emitted + text[:place])
            row = model(prompt + emitted + text[:place])[None]
            row = process_logits(row, params, before.generated[None], before.prompt_seen)
            probability *= row.softmax(-1)[0, token].item()
        return probability

    assert math.isclose(sum(walked.values()), 1.0, abs_tol=1e-12)
    assert len(walked) > 1
    for text, mass in walked.items():
        assert abs(mass - autoregressive(text)) < 1e-12


@every_case
def test_any_tree_emits_the_tokens_of_one_at_a_time_decoding(params):
    """Noise is keyed by position: random trees with oracle-like drafts change nothing."""
    vocab, length = 12, 60
    model, prompt = TableModel(vocab, 77), [3, 1]

    def decode(tree_rows: int) -> list[int]:
        state = random.Random(tree_rows)
        history, text = TokenHistory(vocab, prompt, "cpu"), [5]
        history.add(text)
        while len(text) < length:
            parents, tokens, active = random_tree(state, tree_rows, vocab, alive=0.8)
            tokens[0] = text[-1]
            paths = root_paths(parents, tokens)
            logits = torch.stack([model((*prompt, *text, *p)) for p in paths])
            positions = torch.tensor([len(prompt) + len(text) + len(p) for p in paths])
            drawn = sample_rows(logits, params, history, padded(paths), positions).tolist()
            path, pending = accept_walk(children_of(parents), tokens, active, drawn)
            run = [*(tokens[row] for row in path[1:]), pending]
            history.add(run)
            text += run
        return text[:length]

    alone = decode(1)
    assert decode(9) == alone
    assert decode(32) == alone


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(-6, 6), min_size=3, max_size=9),
    st.floats(0.1, 3.0),
    st.integers(0, 9),
    st.floats(0.05, 1.0),
    st.floats(0.0, 1.0),
)
def test_processing_keeps_the_best_and_permutes_with_the_tokens(values, heat, top_k, top_p, min_p):
    params = replace(PLAIN, temperature=heat, top_k=top_k, top_p=top_p, min_p=min_p)
    order = list(reversed(range(len(values))))
    row = torch.tensor(values).float()
    counts, seen = torch.zeros(1, len(values)).int(), torch.zeros(len(values)).bool()
    out = process_logits(row[None], params, counts, seen)[0]
    assert out[row.argmax()].isfinite()
    assert torch.equal(process_logits(row[order][None], params, counts, seen)[0], out[order])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@every_case
def test_the_device_draws_the_same_tokens(params):
    logits, history, paths, positions = scene(28, 4096, seed=4)
    logits = logits.float()
    device = torch.device("cuda")
    there = TokenHistory(4096, [], device)
    there.generated, there.prompt_seen = (
        history.generated.to(device),
        history.prompt_seen.to(device),
    )
    here = sample_rows(logits, params, history, paths, positions)
    moved = logits.to(device), params, there, paths.to(device), positions.to(device)
    assert torch.equal(sample_rows(*moved).cpu(), here)
    noise = gumbel_noise(params.seed, positions, 4096)
    assert torch.equal(gumbel_noise(params.seed, positions.to(device), 4096).cpu(), noise)

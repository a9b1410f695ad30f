from hypothesis import given
from hypothesis import strategies as st

from replay.corpus import CorpusRequest
from replay.selection import evenly_spaced, largest_remainder, select

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def requests(conversations):
    return [CorpusRequest(f"r{i}", i + 1, [], None, {}, c) for i, c in enumerate(conversations)]


@given(sizes, st.data())
def test_shares_are_proportional(sizes, data):
    n = data.draw(st.integers(0, sum(sizes)))
    shares = largest_remainder(sizes, n)
    assert sum(shares) == n
    for share, size in zip(shares, sizes, strict=True):
        quota = n * size / sum(sizes)
        assert share <= size and quota - 1 < share < quota + 1


@given(st.integers(1, 500), st.data())
def test_positions_are_distinct_ordered_and_even(size, data):
    k = data.draw(st.integers(0, size))
    positions = evenly_spaced(size, k)
    assert len(positions) == k and positions == sorted(set(positions))
    assert all(0 <= p < size for p in positions)
    if k > 1:
        assert (positions[0], positions[-1]) == (0, size - 1)
        gaps = [b - a for a, b in zip(positions, positions[1:], strict=False)]
        assert max(gaps) - min(gaps) <= 1


@given(st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=1, max_size=60), st.data())
def test_a_selection_keeps_capture_order_and_repeats(conversations, data):
    corpus = requests(conversations)
    n = data.draw(st.integers(1, len(corpus) + 3))
    chosen = select(corpus, n)
    assert len(chosen) == min(n, len(corpus))
    assert [r.line for r in chosen] == sorted({r.line for r in chosen})
    assert chosen == select(corpus, n)


def test_no_limit_is_everything():
    corpus = requests(["a", "b"])
    assert select(corpus, None) == tuple(corpus)


def test_43_of_61_in_four_conversations():
    corpus = requests(["a"] * 20 + ["b"] * 17 + ["c"] * 13 + ["d"] * 11)
    chosen = select(corpus, 43)
    counts = [sum(r.conversation == c for r in chosen) for c in "abcd"]
    # Quotas 14.10, 11.98, 9.16, 7.75: the two left over go to b and d.
    assert counts == [14, 12, 9, 8]

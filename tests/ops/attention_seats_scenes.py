"""Scenes of test_attention.py with seats; run like attention_scenes.py.

Requests at once against each of them alone: every bit of its rows and of its seat, and of all
memory that is no request's.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402

from lumotree.ops.attention import TreeAttention  # noqa: E402
from lumotree.tree import TreeDescriptor, tree_from_name  # noqa: E402
from tests.ops.attention_scenes import Case, Sizes, few, main, trees  # noqa: E402

SEATS = 5
LAYERS = 2


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal in all bits, those of NaN too."""
    return torch.equal(*(x.contiguous().view(torch.uint8) for x in (one, other)))


@contextmanager
def unwritten_is_nan():
    """Memory that torch hands out is NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def places(live: int = 3):
    """Seats of as many requests, and of nobody somewhere among them."""
    seats = st.permutations(range(SEATS)).map(lambda x: x[:live])
    return st.tuples(seats, st.integers(0, live)).map(lambda x: [*x[0][: x[1]], -1, *x[0][x[1] :]])


def live(seats: list[int]) -> list[int]:
    return [seat for seat in seats if seat >= 0]


class Seated:
    """Steps of one tree at once: `cases` by seat, each the same step alone."""

    def __init__(self, cases: dict[int, Case], seats: list[int], programs: int, tma: bool) -> None:
        self.cases, self.seats = cases, seats
        case = next(iter(cases.values()))
        s, self.padded = case.sizes, case.attention.padded
        # Past every cache where nobody sits.
        self.length = torch.full((SEATS,), 2**24, dtype=torch.int32, device=case.device)
        # Seats need not be neighbours in memory.
        shape = (SEATS, LAYERS + 1, *case.keys.shape)
        self.keys, self.values = (case.normal(*shape)[:, :LAYERS] for _ in range(2))
        for seat, one in cases.items():
            one.norm = case.norm
            self.length[seat] = one.length
            self.keys[seat, 1], self.values[seat, 1] = one.keys, one.values
        nobody = torch.full_like(case.projected, torch.nan)
        rows = [cases[seat].projected if seat >= 0 else nobody for seat in seats]
        self.projected = torch.cat(rows)
        kind = (s.heads, s.kv_heads, s.head_dim, case.dtype, case.device)
        launch = replace(case.attention.launch, programs=programs, tma=tma)
        on_device = torch.tensor(seats, dtype=torch.int32, device=case.device)
        self.attention = TreeAttention(case.tree, self.padded, *kind, launch, on_device)
        self.tables = (case.norm, case.rope, case.partner)

    def run(self, chunks: int, first: int) -> tuple[Tensor, Tensor]:
        """q and the output of all requests."""
        projected, length = self.projected, self.length
        sides = self.keys[:, 1], self.values[:, 1]
        with unwritten_is_nan():
            q = self.attention.prepare(projected, *self.tables, length, *sides)
            return q, self.attention.attend(q, projected, *sides, length, chunks, first)

    def assert_alone(self, chunks: int, first: int) -> None:
        expected = self.keys.clone(), self.values.clone()
        found = self.run(chunks, first)
        for i, seat in enumerate(self.seats):
            q, out = (x[i * self.padded : (i + 1) * self.padded] for x in found)
            if seat < 0:
                assert q.isnan().all() and out.isnan().all()
                continue
            case = self.cases[seat]
            alone = case.prepare()
            assert same_bits(q, alone)
            assert same_bits(out, case.attend(alone, first))
            assert not out[len(case.tree) :].any()
            expected[0][seat, 1], expected[1][seat, 1] = case.keys, case.values
        for side, known in zip((self.keys, self.values), expected, strict=True):
            assert same_bits(side, known)


def check_step(device: str, dtype: torch.dtype, sizes: Sizes, examples: int) -> None:
    """Prefixes of all lengths side by side, with few programs and many, as tails and as walks."""
    block, chunk = sizes.launch.block, sizes.launch.chunk

    def one(tree: TreeDescriptor, lengths, seats, first: int, programs: int, tma: bool) -> None:
        kind = (sizes, dtype, device)
        cases = {s: Case(tree, n, *kind, s, 1) for s, n in zip(live(seats), lengths, strict=True)}
        for case in cases.values():
            if first:  # what stands before the first key must not count, whatever it is
                case.keys[:, 0], case.values[:, 0] = torch.nan, torch.nan
        Seated(cases, seats, programs, tma).assert_alone(sizes.chunks, first)

    tree, lengths = tree_from_name("-1,0,0"), (block - 2, chunk + block + 1, 2 * chunk)
    one(tree, lengths, [2, 4, -1, 0], 0, 1000, True)  # walks
    one(tree, lengths, [1, -1, 0, 3], 0, 24, False)  # tails
    # The draft head: its trees, and keys from position 1 on.
    one(tree_from_name("root"), (1, chunk + 3, 3 * chunk - 1), [4, -1, 0, 2], 1, 1, False)
    one(tree_from_name("-1,0,1"), (1, block - 1, 2 * chunk + 1), [-1, 3, 0, 1], 1, 1, False)

    border = st.integers(0, (sizes.chunks - 1) * chunk // block).map(lambda n: n * block)
    near = st.tuples(border, st.integers(-3, 1)).map(lambda x: max(1, sum(x)))
    programs = st.sampled_from((1, 24, 1000))

    @few(examples)
    @given(trees(), st.tuples(near, near, near), places(), st.integers(0, 1), programs,
           st.booleans())  # fmt: skip
    def check(tree, lengths, seats, first, programs, tma) -> None:
        one(tree, lengths, seats, first, programs, tma)

    check()


def check_move(device: str, dtype: torch.dtype, sizes: Sizes, examples: int) -> None:
    @few(examples)
    @given(trees(20), st.tuples(*[st.integers(0, 20)] * 3), places(), st.data())
    def check(tree, lengths, seats, data) -> None:
        kind = (sizes, dtype, device)
        cases = {s: Case(tree, n, *kind, s) for s, n in zip(live(seats), lengths, strict=True)}
        together = Seated(cases, seats, 1, False)
        sides = together.keys, together.values
        expected = [side.clone() for side in sides]
        # Paths and counts stand in one result of a request.
        steps = together.attention.steps
        result = torch.zeros(len(seats), steps + 3, dtype=torch.int32, device=device)
        count, path = result[:, 1], result[:, 2:]
        for i, seat in enumerate(seats):
            rows = data.draw(st.sampled_from(tree.root_paths))
            path[i, : len(rows)] = torch.tensor(rows)
            count[i] = len(rows)
            if seat >= 0:
                alone = [side[seat].clone() for side in expected]
                case = cases[seat]
                length = case.scalar(case.length)
                case.attention.move(*alone, path[i], count[i : i + 1], length)
                expected[0][seat], expected[1][seat] = alone
        together.attention.move(*sides, path, count, together.length)
        assert all(map(same_bits, sides, expected))

    check()


def check_refusals(device: str, dtype: torch.dtype, sizes: Sizes, examples: int) -> None:
    """Seats that kernels would misread, and attention by torch."""
    together = Seated({0: Case(tree_from_name("root"), 3, sizes, dtype, device)}, [0], 1, False)
    attention, projected, length = together.attention, together.projected, together.length
    keys, values = together.keys[:, 1], together.values[:, 1]
    unlike = (length, keys, values.contiguous())
    with pytest.raises(ValueError, match="alike"):
        attention.prepare(projected, *together.tables, *unlike)
    with pytest.raises(ValueError, match="one request"):
        attention.attend_stock(projected, projected, keys, values, length, 1)


CHECKS = {"step": (check_step, 1), "move": (check_move, 3), "refusals": (check_refusals, 1)}


if __name__ == "__main__":
    main(CHECKS, *sys.argv[1:], interpreted=(torch.float32,))

"""Scenes of test_attention.py, run as `python attention_scenes.py DEVICE NAME ...`.

A process of its own, because Triton reads whether to interpret when it is imported.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402

from lumotree.ops import reference as ops  # noqa: E402
from lumotree.ops.attention import TreeAttention  # noqa: E402
from lumotree.ops.attention_define import (  # noqa: E402
    attend_rows,
    move_rows,
    prepare_rows,
)
from lumotree.ops.attention_launch import Launch, choose  # noqa: E402
from lumotree.tree import TreeDescriptor, tree_from_name  # noqa: E402

# Small enough for the interpreter, and every border within reach of a small tree.
SMALL = Launch(
    chunk=32, block=16, tile=16, warps=1, stages=1, row_tile=16, row_warps=1, row_stages=1
)


def few(examples: int):
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def trees(draw, most: int = 8) -> TreeDescriptor:
    """Parents anywhere before a row, or the row before it: bushy trees and deep ones."""
    reach = draw(st.sampled_from((1, 2, most)))
    rows = draw(st.integers(1, most))
    parents = [max(0, i - draw(st.integers(1, reach))) for i in range(1, rows)]
    return TreeDescriptor("drawn", (-1, *parents), (True,) * rows)


@dataclass(frozen=True)
class Sizes:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int = 8
    chunks: int = 4
    launch: Launch = SMALL

    @property
    def width(self) -> int:
        return 2 * (self.heads + self.kv_heads) * self.head_dim


class Case:
    """One step: a tree on a prefix, its projections and its cache, NaN in all unused slots."""

    def __init__(
        self,
        tree: TreeDescriptor,
        length: int,
        sizes: Sizes,
        dtype: torch.dtype,
        device: str,
        seed: int = 0,
        padding: int = 0,
    ) -> None:
        self.tree, self.length, self.sizes, self.dtype = tree, length, sizes, dtype
        self.device = torch.device(device)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.attention = self.of(tree, len(tree) + padding)
        capacity = sizes.chunks * self.attention.launch.chunk
        self.keys, self.values = (
            torch.full((sizes.kv_heads, capacity, sizes.head_dim), torch.nan).to(self.device, dtype)
            for _ in range(2)
        )
        self.keys[:, :length] = self.normal(sizes.kv_heads, length, sizes.head_dim)
        self.values[:, :length] = self.normal(sizes.kv_heads, length, sizes.head_dim)
        self.projected = self.normal(len(tree) + padding, sizes.width)
        heads = sizes.heads + sizes.kv_heads
        weight = 1 + 0.3 * self.normal(heads, sizes.head_dim).float()
        weight[: sizes.heads] *= 2 * sizes.head_dim**-0.5
        self.norm = ops.Norm.of(weight, 1e-6)
        self.rope = ops.rope_table(
            capacity, sizes.head_dim, sizes.rotary_dim, 1e4, dtype, self.device
        )
        self.partner = ops.rope_partner(sizes.head_dim, sizes.rotary_dim, self.device)

    def of(self, tree: TreeDescriptor, padded: int) -> TreeAttention:
        s = self.sizes
        return TreeAttention(
            tree, padded, s.heads, s.kv_heads, s.head_dim, self.dtype, self.device, s.launch
        )

    def normal(self, *shape: int) -> Tensor:
        x = torch.randn(*shape, generator=self.generator, device=self.device)
        return x.to(self.dtype)

    def scalar(self, value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int32, device=self.device)

    def prepare(self) -> Tensor:
        """q of all rows; the tree's keys and values enter the cache."""
        tables = (self.norm, self.rope, self.partner)
        length = self.scalar(self.length)
        return self.attention.prepare(self.projected, *tables, length, self.keys, self.values)

    def attend(self, q: Tensor, first: int = 0, stock: bool = False) -> Tensor:
        attend = self.attention.attend_stock if stock else self.attention.attend
        length = self.scalar(self.length)
        return attend(q, self.projected, self.keys, self.values, length, self.sizes.chunks, first)

    def alone(self, row: int, q: Tensor, first: int = 0, padding: int = 0) -> Tensor:
        """The row as the root of a root-only step, its ancestors in line in the cache."""
        path = self.tree.root_paths[row]
        source = torch.tensor([self.tree.slots[r] for r in path], device=self.device) + self.length
        end = self.length + len(path)
        keys, values = (torch.full_like(x, torch.nan) for x in (self.keys, self.values))
        for into, side in ((keys, self.keys), (values, self.values)):
            into[:, : self.length] = side[:, : self.length]
            into[:, self.length : end] = side[:, source]
        root = self.of(tree_from_name("root"), 1 + padding)
        rows = [row] * (1 + padding)
        length = self.scalar(end - 1)
        out = root.attend(
            q[rows], self.projected[rows], keys, values, length, self.sizes.chunks, first
        )
        return out[0]


def assert_prepared(case: Case) -> None:
    """q, keys and values of the kernel against their definition; untouched slots stay."""
    keys, values = case.keys.clone(), case.values.clone()
    tables = (case.norm, case.rope, case.partner)
    expected = prepare_rows(case.attention, case.projected, *tables, case.length, keys, values)
    q = case.prepare()
    # A norm that differs in its last bit may round to the next bfloat16, and turn with it.
    exact = case.dtype == torch.float32
    near = dict(rtol=2e-6, atol=2e-6) if exact else dict(rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(q, expected, **near)
    torch.testing.assert_close(case.keys, keys, equal_nan=True, **near)
    torch.testing.assert_close(case.values, values, equal_nan=True, rtol=0, atol=0)


def assert_attended(case: Case, q: Tensor, out: Tensor, first: int = 0) -> None:
    """Rows that are not padding against float64."""
    expected = attend_rows(
        case.attention, q.double(), case.projected, case.keys, case.values, case.length, first
    )
    rows = len(case.tree)
    exact = case.dtype == torch.float32
    near = dict(rtol=1e-5, atol=1e-5) if exact else dict(rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(out[:rows].double(), expected[:rows].double(), **near)


def assert_rows_alone(case: Case, q: Tensor, out: Tensor, rows, first: int = 0) -> None:
    """Every row has the bits of a root-only step on the linear cache of its path."""
    for row in rows:
        alone = case.alone(row, q, first)
        torch.testing.assert_close(out[row], alone, rtol=1e-6, atol=1e-6)
        assert torch.equal(out[row], alone), (case.tree.name, case.length, row)


def check_prepare(device: str, dtype: torch.dtype, sizes: Sizes, examples: int) -> None:
    @few(examples)
    @given(trees(), st.integers(0, 90), st.integers(0, 2))
    def check(tree: TreeDescriptor, length: int, padding: int) -> None:
        case = Case(tree, length, sizes, dtype, device, padding=padding)
        value = (sizes.heads + sizes.kv_heads) * sizes.head_dim  # the first column of v
        case.projected[-1 - padding, value + 1] = torch.inf
        case.projected[0, value + 2] = torch.nan
        assert_prepared(case)

    check()


def check_attend(device: str, dtype: torch.dtype, sizes: Sizes, examples: int) -> None:
    """Prefixes that end within reach of a border of a block or a chunk, on either side."""
    blocks = (sizes.chunks - 1) * sizes.launch.chunk // sizes.launch.block
    border = st.integers(0, blocks).map(lambda n: n * sizes.launch.block)

    # Few programs share the chunks out, and only where there are many do rows walk their last one.
    programs = st.sampled_from((1, 12, 1000))

    def one(tree, length: int, first: int, programs: int, rows: set[int]) -> None:
        launch = replace(sizes.launch, programs=programs)
        case = Case(tree, length, replace(sizes, launch=launch), dtype, device, padding=first)
        q = case.prepare()
        if first:  # what stands before the first key must not count, whatever it is
            case.keys[:, 0], case.values[:, 0] = torch.nan, torch.nan
        out = case.attend(q, first)
        assert out.isfinite().all()
        assert_attended(case, q, out, first)
        assert_rows_alone(case, q, out, rows, first)

    @few(examples)
    @given(trees(), border, st.integers(-8, 1), st.integers(0, 1), programs, st.data())
    def check(tree, border, offset, first, programs, data) -> None:
        rows = {len(tree) - 1, data.draw(st.integers(0, len(tree) - 1))}
        one(tree, max(first, border + offset), first, programs, rows)

    check()
    # The first key in the block of the rows themselves.
    one(tree_from_name("-1,0,0,1"), 3, 1, 1000, {2})


def check_stock(device: str, dtype: torch.dtype, sizes: Sizes, examples: int) -> None:
    @few(examples)
    @given(trees(), st.integers(1, 90), st.integers(0, 1))
    def check(tree, length, first) -> None:
        case = Case(tree, length, sizes, dtype, device, padding=1)
        # Large where a mask that lets a slot through would show.
        case.keys.nan_to_num_(50.0), case.values.nan_to_num_(50.0)
        q = case.prepare()
        assert_attended(case, q, case.attend(q, first, stock=True), first)

    check()


def check_move(device: str, dtype: torch.dtype, sizes: Sizes, examples: int) -> None:
    @few(examples)
    @given(trees(40), st.integers(0, 20), st.data())
    def check(tree, length, data) -> None:
        case = Case(tree, length, sizes, dtype, device)
        keys, values = (case.normal(3, 2, length + len(tree) + 1, sizes.head_dim) for _ in range(2))
        path = data.draw(st.sampled_from(tree.root_paths))
        moved = keys.clone(), values.clone()
        move_rows(case.attention, *moved, list(path), length)
        padded = [*path, *[0] * (case.attention.steps + 1 - len(path))]
        rows = torch.tensor(padded, dtype=torch.int32, device=case.device)
        case.attention.move(keys, values, rows, case.scalar(len(path)), case.scalar(length))
        assert torch.equal(keys, moved[0]) and torch.equal(values, moved[1])

    check()


CHECKS = {
    "prepare": (check_prepare, 2),
    "attend": (check_attend, 3),
    "stock": (check_stock, 1),
    "move": (check_move, 3),
}
DTYPES = (torch.float32, torch.bfloat16)
# On the device: every size the models have, launches as chosen there, more examples; each tree is
# compiled for, seconds a kernel.
GROUPS = (Sizes(24, 4, 256, 64, 3), Sizes(16, 2, 128, 32, 3), Sizes(4, 1, 64, 64, 3))


def main(checks: dict, device: str, *names: str, interpreted=DTYPES) -> None:
    """Checks by name; the interpreter is slow, and may do with some dtypes of the two."""
    if device == "cpu":
        from tests.ops.attention_interpreter import install

        torch.set_num_threads(1)
        install()
        for name in names:
            check, examples = checks[name]
            for dtype in interpreted:
                check(device, dtype, Sizes(), examples)
        return
    for name in names:
        check, examples = checks[name]
        for sizes in GROUPS:
            for dtype in DTYPES:
                launch = choose(sizes.head_dim, dtype, torch.device(device))
                check(device, dtype, replace(sizes, launch=launch), 4 * examples)


if __name__ == "__main__":
    main(CHECKS, *sys.argv[1:])

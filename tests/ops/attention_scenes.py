"""Random steps of tree attention and what must hold of them; run by test_attention.py."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from lumotree.ops import reference as ops
from lumotree.ops.attention import (
    Launch,
    TreeAttention,
    attend_rows,
    move_rows,
    prepare_rows,
)
from lumotree.tree import TreeDescriptor, tree_from_name

# Small enough for the interpreter, and every border within reach of a small tree.
SMALL = Launch(chunk=32, block=16, tile=16, warps=1, stages=1, row_tile=16, row_warps=1, ahead=2)


@dataclass(frozen=True)
class Sizes:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int = 8
    chunks: int = 5
    launch: Launch | None = SMALL

    @property
    def width(self) -> int:
        return 2 * (self.heads + self.kv_heads) * self.head_dim


def random_tree(source: random.Random, rows: int) -> TreeDescriptor:
    """Parents drawn near the last row or anywhere before: deep trees and bushy ones."""
    reach = source.choice((1, 2, rows))
    parents = [-1, *(max(0, i - source.randint(1, reach)) for i in range(1, rows))]
    return tree_from_name(",".join(map(str, parents)))


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


def check_prepare(device: str, dtype: torch.dtype, examples: int, sizes: Sizes) -> None:
    source = random.Random(1)
    for seed in range(examples):
        tree = random_tree(source, source.randint(1, 9))
        case = Case(tree, source.randint(0, 90), sizes, dtype, device, seed, padding=2)
        value = (sizes.heads + sizes.kv_heads) * sizes.head_dim  # the first column of v
        case.projected[-3, value + 1] = torch.inf
        case.projected[0, value + 2] = torch.nan
        assert_prepared(case)


def check_attend(
    device: str, dtype: torch.dtype, examples: int, sizes: Sizes, most: int = 9
) -> None:
    """Random trees on prefixes at and around the borders of blocks and chunks."""
    launch = sizes.launch
    source = random.Random(2)
    for seed in range(examples):
        first = seed % 3 == 2
        tree = random_tree(source, source.randint(1, most))
        border = source.choice((launch.block, launch.chunk)) * source.randint(1, 4)
        border = min(border, (sizes.chunks - 1) * launch.chunk - most)
        length = max(int(first), border - source.randint(-1, most))
        case = Case(tree, length, sizes, dtype, device, seed, padding=seed % 2)
        q = case.prepare()
        if first:  # what stands before the first key must not count, whatever it is
            case.keys[:, 0], case.values[:, 0] = torch.nan, torch.nan
        out = case.attend(q, first)
        assert out.isfinite().all()
        assert_attended(case, q, out, first)
        rows = {0, len(tree) - 1, source.randrange(len(tree))}
        assert_rows_alone(case, q, out, rows, first)


def check_stock(device: str, dtype: torch.dtype, examples: int, sizes: Sizes) -> None:
    source = random.Random(3)
    for seed in range(examples):
        tree = random_tree(source, source.randint(1, 9))
        first = seed % 2
        case = Case(tree, source.randint(first, 90), sizes, dtype, device, seed, padding=1)
        # Large where a mask that lets a slot through would show.
        case.keys.nan_to_num_(50.0), case.values.nan_to_num_(50.0)
        q = case.prepare()
        assert_attended(case, q, case.attend(q, first, stock=True), first)


def check_move(device: str, dtype: torch.dtype, examples: int) -> None:
    source = random.Random(4)
    for seed in range(examples):
        tree = random_tree(source, source.randint(1, 40))
        case = Case(tree, source.randint(0, 20), Sizes(), dtype, device, seed)
        keys, values = (
            case.normal(3, 2, case.length + len(tree) + 1, case.sizes.head_dim) for _ in range(2)
        )
        path = tree.root_paths[source.randrange(len(tree))]
        moved = keys.clone(), values.clone()
        move_rows(case.attention, *moved, list(path), case.length)
        padded = [*path, *[0] * (case.attention.steps + 1 - len(path))]
        rows = torch.tensor(padded, dtype=torch.int32, device=case.device)
        case.attention.move(keys, values, rows, case.scalar(len(path)), case.scalar(case.length))
        assert torch.equal(keys, moved[0]) and torch.equal(values, moved[1])

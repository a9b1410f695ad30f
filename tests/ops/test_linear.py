"""Skinny-M products and norms against their definitions; in the interpreter, and on CUDA.

The interpreter rounds float32 to bfloat16 toward zero, so bfloat16 is compared to within one
unit in the last place of every rounding; exact cases use small integers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lumotree.ops import reference

pytest.importorskip("triton")

from lumotree.ops import linear as ops  # noqa: E402
from lumotree.ops.eight_bits import Scaled  # noqa: E402
from lumotree.ops.linear import Block  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="runs in a child")),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
TYPES = [torch.float32, torch.bfloat16]
# Rows, N, K, shares of K: one row; odd sizes; K that no block divides, nor 16 bytes (no
# descriptors then); more rows than 16; more than one program holds.
CASES = [(1, 64, 64, 1), (3, 100, 146, 2), (17, 72, 200, 3), (28, 130, 96, 1), (5, 66, 101, 1),
         (150, 70, 72, 2), (260, 64, 32, 1)]  # fmt: skip
BLOCK = Block(64, 64, stages=3)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fresh buffers hold NaN, so that an element nobody writes is seen."""
    empty = torch.empty

    def nan(*size, **options):
        made = empty(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", nan)
    monkeypatch.setattr(torch, "empty_like", lambda x: x.new_full(x.shape, float("nan")))


def draw(shape, dtype, device, seed, scale=1.0):
    source = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=source) * scale).to(device, dtype)


def integers(shape, dtype, device, seed):
    source = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=source).to(device, dtype)


def close(got, want, dtype, roundings=1):
    scale = want.double().abs().max().clamp_min(1)
    limit = roundings * TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=limit, atol=float(scale) * limit)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: "x".join(map(str, c)))
@pytest.mark.parametrize("hopper", [False, True], ids=["any", "hopper"])
def test_products_meet_their_definitions(device, dtype, case, hopper):
    if device == "cpu" and hopper:
        pytest.skip("Hopper's own kernel is not interpreted")
    rows, n, k, splits = case
    block = replace(BLOCK, splits=splits, hopper=hopper)
    x, weight = draw((rows, k), dtype, device, 0), draw((n, k), dtype, device, 1, k**-0.5)
    packed = ops.pack(weight)
    product = x.double() @ weight.double().t()
    close(ops.linear(x, packed, block=block), product, dtype)
    logits = ops.linear(x, packed, torch.float32, block)
    assert logits.dtype == torch.float32
    close(logits, product, torch.float32, 2)
    if splits == 1:
        want = reference.swiglu(product.to(dtype).clone())
        close(ops.linear_swiglu(x, packed, block), want, dtype, 4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: "x".join(map(str, c)))
def test_add_and_norm_meet_their_definitions(device, dtype, case):
    rows, n, k, splits = case
    block = replace(BLOCK, splits=splits)
    x, weight = draw((rows, k), dtype, device, 0), draw((n, k), dtype, device, 1, k**-0.5)
    residual = draw((rows, n), dtype, device, 2, 8)
    norm = reference.Norm.of(1 + draw((n,), torch.float32, device, 3, 0.1), 1e-6)
    total, normed = ops.linear_add_norm(residual, x, ops.pack(weight), norm, block)
    close(total, residual.double() + x.double() @ weight.double().t(), dtype)
    close(normed, reference.rms_norm(total, norm), dtype)
    assert torch.equal(ops.rms_norm(total, norm), normed)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: "x".join(map(str, c)))
def test_weights_in_8_bits_are_multiplied_as_what_they_stand_for(device, dtype, case):
    rows, n, k, splits = case
    block = replace(BLOCK, splits=splits)
    x, weight = draw((rows, k), dtype, device, 0), draw((n, k), dtype, device, 1, k**-0.5)
    narrow = Scaled.of(weight)
    stands_for = narrow.values.double() * narrow.scale.double()[:, None]
    product = x.double() @ stands_for.t()
    close(ops.linear(x, narrow, block=block), product, dtype)
    close(ops.linear(x, narrow), product, dtype)
    first = narrow.first(n - 7)
    close(ops.linear(x, first, torch.float32, block), product[:, : n - 7], torch.float32, 2)
    if splits == 1:
        want = reference.swiglu(product.to(dtype).clone())
        close(ops.linear_swiglu(x, narrow, block), want, dtype, 4)
    residual = draw((rows, n), dtype, device, 2, 8)
    norm = reference.Norm.of(torch.ones(n, device=device), 1e-6)
    total, _ = ops.linear_add_norm(residual, x, narrow, norm, block)
    close(total, residual.double() + product, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("splits", [1, 2])
def test_exact_sums_are_rounded_once(device, splits):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x, weight = integers((5, 160), dtype, device, 0), integers((72, 160), dtype, device, 1)
    residual = draw((5, 72), dtype, device, 2)
    norm = reference.Norm.of(torch.ones(72, device=device), 1e-6)
    block = replace(BLOCK, splits=splits)
    product = x.double() @ weight.double().t()
    assert torch.equal(ops.linear(x, weight, block=block), product.to(dtype))
    total, _ = ops.linear_add_norm(residual, x, weight, norm, block)
    assert torch.equal(total, (residual.float() + product.float()).to(dtype))


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("splits", [1, 2])
def test_ways_to_run_a_block_have_the_same_bits(device, splits):
    """Pointers, descriptors, Hopper's own kernel; one launch behind the other, each reading."""
    wide = draw((28, 328), torch.bfloat16, device, 0)
    weight = draw((256, 320), torch.bfloat16, device, 1)
    residual = draw((28, 256), torch.bfloat16, device, 2)
    norm = reference.Norm.of(torch.ones(256, device=device), 1e-6)

    def outputs(x, **kind):
        block = replace(BLOCK, splits=splits, **kind)
        found = [residual]
        for _ in range(20):
            found = [*ops.linear_add_norm(found[0], x, weight, norm, block)]
        return found + ([ops.linear_swiglu(x, weight, block)] if splits == 1 else [])

    unaligned = wide[:, 1:321]
    want = outputs(unaligned)
    for kind in ({}, {"hopper": True}, {"hopper": True, "early": True, "stages": 5}):
        for got, expected in zip(outputs(unaligned.contiguous(), **kind), want, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("many", [False, True], ids=["a program's rows", "more"])
@pytest.mark.parametrize("kind", [{}, {"splits": 3}], ids=str)
def test_a_rows_bits_depend_on_nothing_else(device, kind, many):
    """Neither on the row count, nor its index, nor NaN in its neighbours.

    In the interpreter BLAS multiplies, whose bits do depend on the padded row count: there only
    counts of one padding are compared.
    """
    dtype = torch.bfloat16
    if device == "cpu":
        most, fewer = (150, (70, 130)) if many else (16, (1, 11))
    else:
        most, fewer = (432 if many else 128), (1, 2, 16, 17, 28, 33, 64, 65)
    block = replace(BLOCK, hopper=True, **kind)
    x, weight = draw((most, 96), dtype, device, 0), draw((80, 96), dtype, device, 1)
    residual = draw((most, 80), dtype, device, 2)
    norm = reference.Norm.of(torch.ones(80, device=device), 1e-6)

    def outputs(x, residual):
        found = [ops.linear(x, weight, block=block)]
        found += ops.linear_add_norm(residual, x, weight, norm, block)
        return found + ([ops.linear_swiglu(x, weight, block)] if block.splits == 1 else [])

    full = outputs(x, residual)
    for rows in fewer:
        shifted = slice(most - rows, most)
        for part in (slice(0, rows), shifted):
            some = outputs(x[part].contiguous(), residual[part].contiguous())
            for got, whole in zip(some, full, strict=True):
                assert torch.equal(got, whole[part])
    x[1:] = float("nan")
    for got, whole in zip(outputs(x, residual), full, strict=True):
        assert torch.equal(got[:1], whole[:1])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_may_be_a_slice_of_wider_ones(device):
    wide = draw((4, 144), torch.float32, device, 0)
    weight = draw((64, 64), torch.float32, device, 1)
    for first in (0, 1, 80):  # the second is not 16-byte aligned
        x = wide[:, first : first + 64]
        got = ops.linear(x, weight, block=BLOCK)
        assert torch.equal(got, ops.linear(x.contiguous(), weight, block=BLOCK))


@pytest.mark.parametrize("device", DEVICES)
def test_shapes_that_do_not_fit_are_named(device):
    x, weight = torch.zeros(2, 32, device=device), torch.zeros(48, 40, device=device)
    with pytest.raises(ValueError, match="32.*40"):
        ops.linear(x, weight)
    with pytest.raises(ValueError, match="513 rows"):
        ops.linear(torch.zeros(ops.MAX_STEP_ROWS + 1, 32, device=device), weight)
    with pytest.raises(ValueError, match="float32.*bfloat16"):
        ops.linear(x, torch.zeros(48, 32, device=device, dtype=torch.bfloat16))


LIMITS = [ops.Limits(132, 227 * 1024), ops.Limits(128, 99 * 1024), ops.Limits(48, 99 * 1024)]
SHAPES = [*ops.TABLE, (248320, 2048), (6144, 2048), (2048, 512), (64, 64), (100, 24)]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=["float32", "bfloat16"])
def test_chosen_blocks_fit_the_device(limits, dtype):
    for n, k in SHAPES:
        for halves in (1, 2):
            block = ops.choose(n, k, halves, dtype, limits)
            tiles = block.stages * block.k * (halves * block.n + 32) * dtype.itemsize
            assert block.stages >= 2 and tiles < limits.shared
            assert block.n % 64 == 0 and block.n // 16 >= block.warps
            assert block.splits == 1 or k // block.splits >= 8 * block.k


@pytest.mark.skipif(INTERPRETED, reason="the child itself")
def test_in_the_interpreter():
    """All of the above on CPU tensors, in a child whose Triton interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", __file__],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout

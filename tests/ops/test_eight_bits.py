"""Weights in 8 bits: how far they are from the weights."""

from __future__ import annotations

import pytest
import torch

from lumotree.ops import eight_bits
from lumotree.ops.eight_bits import Scaled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_are_within_half_a_unit_of_their_row(monkeypatch, dtype):
    monkeypatch.setattr(eight_bits, "BLOCK", 4)  # several blocks, the last one short
    weight = torch.randn(10, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3] *= 1e-6
    weight[4] *= 1e6
    weight[5] = 0
    before = weight.clone()
    narrow = Scaled.of(weight)
    assert torch.equal(weight, before)
    wide = narrow.wide(torch.float32)
    # Three bits behind the leading one; below 2^-6 of 448 times the scale, steps of equal size.
    bound = (weight.float().abs() / 16).clamp_min(narrow.scale[:, None] * 2.0**-10)
    assert ((wide - weight.float()).abs() <= bound * 1.01).all()
    assert torch.equal(wide[5], torch.zeros(33))
    assert torch.equal(narrow.first(4).wide(torch.float32), wide[:4])

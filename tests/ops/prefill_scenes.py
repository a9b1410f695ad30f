"""Scenes of test_prefill.py, run as `python prefill_scenes.py DEVICE NAME ...`.

A process of its own, because Triton reads whether to interpret when it is imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from lumotree.ops import prefill as ops  # noqa: E402
from lumotree.ops import reference  # noqa: E402
from lumotree.ops.prefill import AttentionLaunch, DeltaLaunch  # noqa: E402

DEVICE = torch.device("cpu")
# Relative error in the norm: of float32, and of operands rounded to the model dtype.
NEAR = {torch.float32: 5e-5, torch.bfloat16: 6e-3}
SMALL = DeltaLaunch(block=16, stages=1, group=2)
BLOCKS = AttentionLaunch(rows=32, keys=16, warps=1, stages=1)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE)


def near(found: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    far = ((found.double() - want.double()).norm() / want.double().norm()).item()
    assert far <= bound, far


def delta_inputs(n: int, dtype: torch.dtype, alike: bool = False):
    """query, key, value, g, beta, state; alike: keys close to each other, written in full."""
    torch.manual_seed(n)
    heads, key_heads, width = 4, 2, 32
    query = F.normalize(normal(n, key_heads, width), dim=-1) * width**-0.5
    key = F.normalize(normal(n, key_heads, width) + 3 * alike * normal(1, key_heads, width), dim=-1)
    rate = torch.tensor([0.01, 0.1, 0.5, 3.0], device=DEVICE)
    g = -torch.rand(n, heads).to(DEVICE) * rate
    beta = torch.sigmoid(2 * normal(n, heads) + 3 * alike)
    state = 0.3 * normal(heads, width, width)
    return query, key, normal(n, heads, width).to(dtype), g, beta, state


def exact_delta(query, key, value, g, beta, state):
    heads = value.shape[1]
    query, key = (x.repeat_interleave(heads // x.shape[1], 1) for x in (query, key))
    by_head = [x.double().transpose(0, 1) for x in (query, key, value, g, beta)]
    state = state.double()
    return reference.delta_chunk(*by_head, state).transpose(0, 1), state


def delta():
    # A device's tf32x3 products keep about 21 bits; the inverse for keys so alike loses some.
    for dtype, bound in {torch.float32: 2e-4, torch.bfloat16: 2e-3}.items():
        for n, alike in ((1, False), (63, True), (130, True)):
            inputs = delta_inputs(n, dtype, alike)
            want, end = exact_delta(*inputs)
            state, out = inputs[-1].clone(), torch.full(want.shape, float("nan"), device=DEVICE)
            ops.delta_chunk(*inputs[:-1], state, out, SMALL)
            near(out, want, bound)
            near(state, end, bound)


def delta_alone():
    """Bits depend neither on later tokens nor on where a run is cut, at whole chunks."""
    *inputs, state = delta_inputs(100, torch.bfloat16)
    end = state.clone()
    whole = ops.delta_chunk(*inputs, end, launch=SMALL)
    shorter = ops.delta_chunk(*(x[:75] for x in inputs), state.clone(), launch=SMALL)
    assert torch.equal(shorter, whole[:75])
    halves = [
        ops.delta_chunk(*(x[part] for x in inputs), state, launch=SMALL)
        for part in (slice(0, 64), slice(64, None))
    ]
    assert torch.equal(torch.cat(halves), whole)
    assert torch.equal(state, end)


def attention_inputs(n: int, start: int, dtype: torch.dtype):
    torch.manual_seed(n)
    heads, kv_heads, d, slots = 4, 2, 32, 160
    q = (normal(n, heads, d) * d**-0.25).to(dtype)
    keys, values = normal(2, kv_heads, slots, d).to(dtype)
    keys[:, start + n :] = values[:, start + n :] = float("nan")
    return q, keys, values


def attention():
    for dtype, bound in NEAR.items():
        for n, start, first in ((1, 0, 1), (1, 37, 1), (40, 0, 1), (40, 61, 0)):
            q, keys, values = attention_inputs(n, start, dtype)
            seen = [x[:, : start + n].float() for x in (keys, values)]
            want = reference.prefill_attention(q.float(), *seen, start, first)
            if n > 1:
                found = ops.prefill_attention(q, keys, values, start, first, launch=BLOCKS)
                near(found, want, bound)
            row = normal(n, 3 * q[0].numel()).to(dtype)
            gate = row[:, -q[0].numel() :]
            found = ops.prefill_attention(q, keys, values, start, first, gate, BLOCKS)
            near(found, want * torch.sigmoid(gate.float()).view_as(want), 2 * bound)


def attention_operands():
    heads, kv_heads, d, rotary, n, start = 4, 2, 32, 8, 5, 11
    for dtype, bound in NEAR.items():
        projected = normal(n, 2 * (heads + kv_heads) * d).to(dtype)
        norm = reference.Norm.of(normal(heads + kv_heads, d), 1e-6)
        rope = reference.rope_table(40, d, rotary, 1e4, dtype, DEVICE)
        partner = reference.rope_partner(d, rotary, DEVICE)
        cache = torch.full((2, kv_heads, 30, d), float("nan"), device=DEVICE, dtype=dtype)
        q = ops.prepare_attention(projected, norm, rope, partner, start, *cache)
        qk, v, _ = projected.view(n, -1, d).split((heads + kv_heads, kv_heads, heads), 1)
        angles = reference.rope_angles(rope[start : start + n])
        turned = reference.rope(reference.rms_norm(qk, norm), angles, partner)
        near(q, turned[:, :heads], bound)
        near(cache[0, :, start : start + n], turned[:, heads:].transpose(0, 1), bound)
        assert torch.equal(cache[1, :, start : start + n], v.transpose(0, 1))
        assert cache[:, :, :start].isnan().all() and cache[:, :, start + n :].isnan().all()


def attention_alone():
    """A row's bits do not depend on the run it stands in."""
    q, keys, values = attention_inputs(60, 0, torch.bfloat16)
    whole = ops.prefill_attention(q, keys, values, 0, launch=BLOCKS)
    for start, stop in ((0, 59), (17, 50)):
        part = ops.prefill_attention(q[start:stop], keys, values, start, launch=BLOCKS)
        assert torch.equal(part, whole[start:stop])


def swiglu():
    for dtype, bound in {torch.float32: 1e-6, torch.bfloat16: 3e-3}.items():
        gate_up = normal(5, 2 * 1100).to(dtype)
        near(ops.swiglu(gate_up), reference.swiglu(gate_up), bound)


if __name__ == "__main__":
    torch.set_num_threads(1)
    DEVICE = torch.device(sys.argv[1])
    if DEVICE.type == "cpu":
        from attention_interpreter import install

        install()
    for name in sys.argv[2:]:
        globals()[name]()

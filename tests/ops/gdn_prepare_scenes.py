"""Scenes of test_gdn_prepare.py, run as `python gdn_prepare_scenes.py DEVICE NAME ...`.

A process of its own, because Triton reads whether to interpret when it is imported.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

from lumotree.model.rows import TreeIndex  # noqa: E402
from lumotree.ops import gdn_prepare as ops  # noqa: E402
from lumotree.ops.gdn import Operands  # noqa: E402
from lumotree.ops.reference import DeltaGates, Norm, gated_rms_norm  # noqa: E402
from lumotree.tree import tree_from_name  # noqa: E402

EPS = 1e-6
TREE = "-1,0,0,1,3"
# What the device's own exp, rsqrt and order of sums may change, before a bfloat16 rounding.
NEAR = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
NAMES = ("query", "key", "value", "decay", "beta", "overlap")
DEVICE = torch.device("cpu")


class Layer:
    """Random weights and inputs of one GDN layer; values wide enough to reach every branch."""

    def __init__(self, dtype, key_heads=2, heads=3, dk=32, dv=16, width=4, rows=5):
        torch.manual_seed(rows)
        self.key_heads, self.heads, self.dk, self.dv, self.width = key_heads, heads, dk, dv, width
        self.dtype, self.scale = dtype, dk**-0.5
        self.channels = 2 * key_heads * dk + heads * dv
        columns = self.channels + heads * dv + 2 * heads
        self.projected = 3 * torch.randn(rows, columns, device=DEVICE)
        self.projected[:, -2 * heads :] *= 8
        self.projected = self.projected.to(dtype)
        self.conv = torch.randn(width - 1, self.channels, device=DEVICE).to(dtype)
        self.weight = torch.randn(width, self.channels, device=DEVICE)
        self.gates = DeltaGates(torch.randn(heads, device=DEVICE), torch.randn(heads).to(DEVICE))

    def fixed(self):
        return self.weight, self.gates, EPS, self.scale

    def buffers(self, rows: int, heads_first: bool = False) -> Operands:
        def empty(heads, *width, dtype=torch.float32):
            shape = (heads, rows, *width) if heads_first else (rows, heads, *width)
            x = torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
            return x.transpose(0, 1) if heads_first else x

        return Operands(
            empty(self.key_heads, self.dk),
            empty(self.key_heads, self.dk),
            empty(self.heads, self.dv, dtype=self.dtype),
            empty(self.heads),
            empty(self.heads),
            empty(self.key_heads),
        )

    def define(self, gather: torch.Tensor, like: Operands):
        n = len(gather)
        inputs = torch.cat((self.conv, self.projected[:, : self.channels]))
        b_a = self.projected[:n, -2 * self.heads :]
        return ops.define(inputs[gather.long()], b_a, *self.fixed(), like)

    def prepare(self, gather: torch.Tensor):
        into = self.buffers(len(gather))
        record = torch.full_like(self.projected[: len(gather), : self.channels], float("nan"))
        ops.prepare(self.projected, self.conv, gather, *self.fixed(), into, record)
        return into, record


def gather_of(name: str, width: int) -> torch.Tensor:
    paths = tree_from_name(name).root_paths
    table = [TreeIndex.history(path, width) for path in paths]
    return torch.tensor(table, dtype=torch.int32, device=DEVICE)


def close(found: Operands, wanted: Operands, near: float) -> None:
    for name in NAMES:
        a, b = getattr(found, name), getattr(wanted, name)
        assert a.dtype == b.dtype and a.shape == b.shape, name
        torch.testing.assert_close(a, b, atol=near, rtol=near, msg=lambda m, n=name: f"{n}: {m}")


def rows():
    for dtype, width, rows in ((torch.float32, 4, 5), (torch.bfloat16, 2, 7)):
        layer = Layer(dtype, width=width, rows=rows)
        gather = gather_of(TREE, width)
        found, record = layer.prepare(gather)
        close(found, layer.define(gather, found)[0], NEAR[dtype])
        assert torch.equal(record, layer.projected[: len(gather), : layer.channels])


def rows_alone():
    """A row has the same bits in a tree and in a chain that is its own path."""
    layer, alone = Layer(torch.bfloat16), Layer(torch.bfloat16)
    path = tree_from_name(TREE).root_paths[4]
    alone.projected[: len(path)] = layer.projected[list(path)]
    found, _ = layer.prepare(gather_of(TREE, 4))
    chain, _ = alone.prepare(gather_of(f"chain-{len(path) - 1}", 4))
    for name in NAMES:
        row = getattr(found, name)[list(path)]
        assert torch.equal(row, getattr(chain, name)), name


def run():
    for dtype, tokens in itertools.product(NEAR, (2, 19)):
        near = NEAR[dtype]
        layer = Layer(dtype, rows=tokens + 1)
        gather = torch.arange(tokens)[:, None] + torch.arange(4)
        found = layer.buffers(tokens, heads_first=True)
        ops.prepare_run(layer.projected, layer.conv, *layer.fixed(), found)
        wanted, log_decay = layer.define(gather.to(DEVICE), found)
        torch.testing.assert_close(found.decay, log_decay, atol=near, rtol=near)
        close(Operands(**{**vars(found), "decay": wanted.decay}), wanted, near)
        inputs = torch.cat((layer.conv, layer.projected[:tokens, : layer.channels]))
        ops.advance_conv(layer.conv, layer.projected, tokens)
        assert torch.equal(layer.conv, inputs[-3:])


def finish():
    for dtype, (count, padded) in itertools.product(NEAR, ((5, 8), (130, 131))):
        near = NEAR[dtype]
        layer = Layer(dtype, rows=padded)
        read = torch.randn(count, layer.heads, layer.dv, device=DEVICE)
        norm = Norm.of(torch.randn(layer.dv, device=DEVICE), EPS)
        out = torch.full((padded, layer.heads * layer.dv), float("nan"), device=DEVICE)
        out = ops.finish(read, layer.projected, norm, out.to(dtype))
        z = layer.projected[:count, layer.channels : -2 * layer.heads].reshape(read.shape)
        wanted = gated_rms_norm(read, z, norm).flatten(1)
        torch.testing.assert_close(out[:count], wanted, atol=near, rtol=near)
        assert not out[count:].any()


def histories():
    state = random.Random(3)
    for (width, channels), count in itertools.product(((4, 700), (2, 64), (6, 30)), (0, 1, 2, 7)):
        conv = torch.randn(2, width - 1, channels, device=DEVICE)
        records = torch.randn(2, 9, channels, device=DEVICE)
        path = torch.tensor(sorted(state.sample(range(9), 8)), dtype=torch.int32)
        inputs = torch.cat((conv, records[:, path[:count].long()]), 1)
        counts = torch.tensor([count], dtype=torch.int32, device=DEVICE)
        ops.publish_conv(conv, records, path.to(DEVICE), counts)
        assert torch.equal(conv, inputs[:, inputs.shape[1] - width + 1 :])


def seats():
    """Every request of a launch has the bits that it has alone, and nothing else is written."""
    requests, where = 3, (3, -1, 0)
    # On a device more rows in all than one request may have before its tiles grow, and its bits.
    padded = 44 if DEVICE.type == "cuda" else 7
    layer = Layer(torch.bfloat16, rows=requests * padded)
    gather = gather_of(TREE, layer.width)
    count = len(gather)
    seats = torch.tensor(where, dtype=torch.int32, device=DEVICE)
    # One layer more than is published: a seat's stride is not its size.
    pool = torch.randn(5, 3, *layer.conv.shape, device=DEVICE).to(layer.dtype)
    before = pool.clone()
    records = layer.projected.new_full((2, requests * count, layer.channels), float("nan"))
    into = layer.buffers(requests * count)
    fixed = (gather, *layer.fixed())
    ops.prepare(layer.projected, pool[:, 1], *fixed, into, records[1], seats=seats, padded=padded)
    read = torch.randn(requests * count, layer.heads, layer.dv, device=DEVICE)
    norm = Norm.of(torch.randn(layer.dv, device=DEVICE), EPS)
    out = layer.projected.new_full((requests * padded, layer.heads * layer.dv), float("nan"))
    ops.finish(read, layer.projected, norm, out, seats=seats)
    assert torch.equal(pool, before)
    found = (*vars(into).values(), records[1], out)
    records[0].normal_()
    result = torch.tensor(((4, 0, 1, 3, 4), (1, 0, 0, 0, 0), (2, 0, 2, 0, 0)), dtype=torch.int32)
    result = result.to(DEVICE)
    ops.publish_conv(pool[:, :2], records, result[:, 1:], result[:, 0], seats)
    for i, seat in enumerate(where):
        rows, wide = slice(i * count, (i + 1) * count), slice(i * padded, (i + 1) * padded)
        if seat < 0:
            for x in found:
                assert x[wide if x is out else rows].isnan().all()
            continue
        alone = layer.buffers(count)
        record, own = (torch.full_like(x, float("nan")) for x in (records[1][rows], out[wide]))
        projected, conv = layer.projected[wide], before[seat]
        ops.prepare(projected, conv[1], *fixed, alone, record)
        ops.finish(read[rows], projected, norm, own)
        wanted = (*vars(alone).values(), record, own)
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a[wide if a is out else rows], b)
        assert not own[count:].any()
        path, number = result[i, 1:].clone(), result[i, :1].clone()
        ops.publish_conv(conv[:2], records[:, rows].contiguous(), path, number)
    # Published alone in place: now all of the pool is alike, seats of nobody among them.
    assert torch.equal(pool, before)


if __name__ == "__main__":
    torch.set_num_threads(1)
    DEVICE = torch.device(sys.argv[1])
    for name in sys.argv[2:]:
        globals()[name]()

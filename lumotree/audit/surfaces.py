"""The surfaces of a continuation, and how far two runs are apart on each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lumotree.state import HybridState, KVCache

# Distances below these count as nothing where bits may differ: relative L2, and nats.
STATE_FLOOR = 0.02
KL_FLOOR = 0.15
FLOORS = {
    "GDN state": STATE_FLOOR,
    "conv history": STATE_FLOOR,
    "new KV": STATE_FLOOR,
    "old KV": STATE_FLOOR,
    "MTP KV": STATE_FLOOR,
    "MTP hidden": STATE_FLOOR,
    "next-token KL": KL_FLOOR,
}


@dataclass
class Boundary:
    """A run at the end of a cycle: `start` tokens before the cycle, `stop` after it.

    recurrent [layers, heads, dk, dv], conv [layers, width - 1, channels]; logits float32
    [rows, vocab] of the cycle's accepted rows, the last being the boundary's; mtp_hidden
    [rows, hidden], those of the cycle without a draft-head slot, None without a draft head.
    kv and mtp_kv are caches that hold at least `stop` tokens, and may be the live ones.
    """

    start: int
    stop: int
    recurrent: Tensor
    conv: Tensor
    logits: Tensor
    kv: KVCache
    mtp_kv: KVCache | None
    mtp_hidden: Tensor | None

    @classmethod
    def of(
        cls, state: HybridState, start: int, logits: Tensor, mtp_hidden: Tensor | None = None
    ) -> Boundary:
        """A copy of what the next cycle overwrites; key-value rows are not copied."""
        hidden = state.mtp_hidden if mtp_hidden is None else mtp_hidden
        return cls(
            start,
            state.length,
            state.recurrent.clone(),
            state.conv.clone(),
            logits.clone(),
            state.kv,
            state.mtp_kv,
            None if state.mtp_kv is None else hidden.clone(),
        )

    @property
    def greedy(self) -> list[int]:
        return self.logits.argmax(-1).tolist()


@dataclass(frozen=True)
class Distance:
    """value: relative L2 of the worst layer, or nats. equal: no bit differs."""

    value: float
    equal: bool


def distances(ours: Boundary, theirs: Boundary) -> dict[str, Distance]:
    """By surface. Rows that only one of the two kept (a run of many tokens) are left out.

    A run that stands at another length is infinitely far away.
    """
    if (ours.start, ours.stop) != (theirs.start, theirs.stop):
        return {"length": Distance(float("inf"), False)}
    new, old = slice(ours.start, ours.stop), slice(0, ours.start)
    found = {
        "GDN state": _layers([(ours.recurrent, theirs.recurrent)]),
        "conv history": _layers([(ours.conv, theirs.conv)]),
        "new KV": _layers(_sides(ours.kv, theirs.kv, new)),
        "old KV": _layers(_sides(ours.kv, theirs.kv, old)),
    }
    if ours.mtp_kv is not None and theirs.mtp_kv is not None:
        # The draft head has no slot 0; the last token's is written when the next is drafted.
        filled = slice(1, ours.start + 1)
        found["MTP KV"] = _layers(_sides(ours.mtp_kv, theirs.mtp_kv, filled))
        rows = min(len(ours.mtp_hidden), len(theirs.mtp_hidden)) or 1
        found["MTP hidden"] = _layers([(ours.mtp_hidden[-rows:], theirs.mtp_hidden[-rows:])])
    rows = min(len(ours.logits), len(theirs.logits))
    a, b = ours.logits[-rows:], theirs.logits[-rows:].to(ours.logits.device)
    found["next-token KL"] = Distance(_kl(b, a), torch.equal(a, b))
    return found


def _sides(ours: KVCache, theirs: KVCache, part: slice) -> list[tuple[Tensor, Tensor]]:
    return [
        (ours.keys[:, :, part], theirs.keys[:, :, part]),
        (ours.values[:, :, part], theirs.values[:, :, part]),
    ]


def _layers(pairs: list[tuple[Tensor, Tensor]]) -> Distance:
    """|a - b| / |b| of the worst layer (dim 0); NaN is infinitely far."""
    value, equal = 0.0, True
    for a, b in pairs:
        b = b.to(a.device)
        if torch.equal(a, b):
            continue
        equal = False
        a, b = a.flatten(1).double(), b.flatten(1).double()
        far = (a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-300)
        value = max(value, far.nan_to_num(float("inf")).max().item())
    return Distance(value, equal)


def _kl(reference: Tensor, other: Tensor) -> float:
    """KL(reference || other) in nats, of the worst row."""
    p, q = (x.double().log_softmax(-1) for x in (reference, other))
    rows = (p.exp() * (p - q)).sum(-1)
    return rows.nan_to_num(float("inf")).max().clamp_min(0.0).item()

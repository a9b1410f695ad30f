"""Log probabilities of emitted tokens, from the target's own logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprob:
    """An emitted token's log probability, and the `top` most likely tokens at its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """logits [n, V] as the model gave them, before penalties, temperature and filters; tokens
    are the n ids emitted there. Ties among the `top` go to the lowest id.
    """
    values = torch.log_softmax(logits.double(), -1)
    own = values.gather(1, torch.tensor(tokens, device=values.device)[:, None])[:, 0].tolist()
    # A stable sort: topk may order ties as it likes.
    best = values.sort(dim=-1, descending=True, stable=True)
    ids, best = best.indices[:, :top].tolist(), best.values[:, :top].tolist()
    return [
        TokenLogprob(token, logprob, tuple(zip(*pairs, strict=True)))
        for token, logprob, *pairs in zip(tokens, own, ids, best, strict=True)
    ]

"""Drafting with the MTP head: refill from true hiddens, then recurse along the spine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lumotree.model.hybrid import HybridModel
from lumotree.model.rows import TreeRows, prefill_rows
from lumotree.model.runner import RowRunner
from lumotree.ops import reference as ops
from lumotree.state import HybridState

# A lead of the best logit over the second, in nats: the odds are then at least 4 to 1 on it.
SURE_MARGIN = 1.4


def refill(
    model: HybridModel, state: HybridState, tokens: Sequence[int], runner: RowRunner
) -> Tensor:
    """Writes the draft head's keys and values of every token that lacks them, the last included.

    tokens: all tokens of the request, the pending one last. Slots that earlier passes filled
    from the head's own output are overwritten from the target's true hidden rows. Returns the
    head's hidden row at the pending token, [1, hidden].
    """
    hidden = state.mtp_hidden
    count = hidden.shape[0]
    first_slot = len(tokens) - count
    index = runner.index(f"chain-{count - 1}" if count > 1 else "root")
    rows = TreeRows(index, state.mtp_kv, first_slot, model.rope, first=1)
    ids = runner.token_ids(tokens[first_slot:], index.padded)
    out = model.draft_forward(ids, ops.pad_rows(hidden, index.padded), rows)
    state.mtp_hidden = hidden[:0]
    return out[count - 1 : count]


def sure(best: Sequence[float]) -> bool:
    """Whether further passes pay, given the logits of a pass's best tokens in falling order."""
    return best[0] - best[1] >= SURE_MARGIN


def draft(
    model: HybridModel,
    state: HybridState,
    tokens: Sequence[int],
    passes: int,
    runner: RowRunner,
    vocab: int | None = None,
    first_passes: int = 0,
) -> list[tuple[int, list[int]]]:
    """(argmax, ordered best three) of each of `passes` depths below the pending token.

    vocab: candidates are chosen among the first so many ids, all by default. first_passes: after
    so many passes the others run only if the best logit then leads by SURE_MARGIN.
    Depth k reads the keys of depth 1 at every earlier position and those of its own chain.
    """
    found: list[tuple[int, list[int]]] = []
    index = runner.index("root")
    hidden = refill(model, state, tokens, runner)
    for depth in range(1, passes + 1):
        logits = model.logits(ops.pad_rows(hidden, index.padded), vocab)[:1]
        best, ordered = ops.top_candidates(logits)
        found.append((best[0], ordered[0]))
        if depth == first_passes and not sure(logits[0, ordered[0]].tolist()):
            break
        if depth < passes:
            slot = len(tokens) - 1 + depth
            rows = TreeRows(index, state.mtp_kv, slot, model.rope, first=1)
            ids = runner.token_ids([best[0]], index.padded)
            hidden = model.draft_forward(ids, ops.pad_rows(hidden, index.padded), rows)[:1]
    return found


def fill_prompt(
    model: HybridModel, state: HybridState, ids: Tensor, hidden: Tensor, start: int
) -> None:
    """Draft-head keys and values of the prompt tokens `ids` at start, start + 1, ...

    hidden: the target's rows of the same positions; slot p pairs token p with the row of p - 1,
    so the last row waits for its successor.
    """
    before = state.mtp_hidden if start else torch.zeros_like(hidden[:1])
    rows = prefill_rows(model, state.mtp_kv, start, ids.numel(), first=1)
    model.draft_forward(ids, torch.cat((before, hidden[:-1])), rows)
    state.mtp_hidden = hidden[-1:].clone()

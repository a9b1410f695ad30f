"""Drafting with the MTP head: refill from true hiddens, then recurse along the spine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lumotree.model.drafter import Drafter
from lumotree.model.hybrid import HybridModel
from lumotree.model.rows import TreeRows, joined, prefill_rows
from lumotree.model.runner import RowRunner
from lumotree.ops import reference as ops
from lumotree.state import HybridState

# A lead of the best logit over the second, in nats: the odds are then at least 4 to 1 on it.
SURE_MARGIN = 1.4


# A request under way: its state, and all its tokens, the pending one last.
Request = tuple[HybridState, Sequence[int]]


def refill(model: Drafter, state: HybridState, tokens: Sequence[int], runner: RowRunner) -> Tensor:
    """Writes the draft head's keys and values of every token that lacks them, the last included.

    tokens: all tokens of the request, the pending one last. Slots that earlier passes filled
    from the head's own output are overwritten from the target's true hidden rows. Returns the
    head's hidden row at the pending token, [1, hidden].
    """
    return _refill_all(model, [(state, tokens)], runner)


def _refill_all(model: Drafter, requests: Sequence[Request], runner: RowRunner) -> Tensor:
    """`refill` of several requests in one forward, [requests, hidden]."""
    parts, ids, hiddens, last = [], [], [], []
    start = 0
    for state, tokens in requests:
        hidden = state.mtp_hidden
        count = hidden.shape[0]
        first_slot = len(tokens) - count
        index = runner.index(f"chain-{count - 1}" if count > 1 else "root")
        parts.append(TreeRows(index, state.mtp_kv, first_slot, model.rope, first=1))
        ids.append(runner.token_ids(tokens[first_slot:], index.padded))
        hiddens.append(ops.pad_rows(hidden, index.padded))
        last.append(start + count - 1)
        start += index.padded
        state.mtp_hidden = hidden[:0]
    out = model.draft_forward(_together(ids), _together(hiddens), joined(parts))
    return out[last] if len(last) > 1 else out[last[0] : last[0] + 1]


def _together(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def sure(best: Sequence[float]) -> bool:
    """Whether further passes pay, given the logits of a pass's best tokens in falling order."""
    return best[0] - best[1] >= SURE_MARGIN


def draft(
    model: Drafter,
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
    hidden = refill(model, state, tokens, runner)
    return _recurse(model, hidden, [(state, tokens)], passes, runner, vocab, first_passes)[0]


def draft_all(
    model: Drafter,
    requests: Sequence[Request],
    passes: int,
    runner: RowRunner,
    vocab: int | None = None,
    first_passes: int = 0,
) -> list[list[tuple[int, list[int]]]]:
    """`draft` of several requests, their rows in one forward a pass."""
    hidden = _refill_all(model, requests, runner)
    return _recurse(model, hidden, requests, passes, runner, vocab, first_passes)


def _recurse(
    model: Drafter,
    hidden: Tensor,
    requests: Sequence[Request],
    passes: int,
    runner: RowRunner,
    vocab: int | None,
    first_passes: int,
) -> list[list[tuple[int, list[int]]]]:
    """The passes from `refill`'s rows [requests, hidden] on."""
    index = runner.index("root")
    found: list[list[tuple[int, list[int]]]] = [[] for _ in requests]
    going = list(range(len(requests)))

    def spread(rows: Tensor) -> Tensor:
        """Every request at the row count of a root-only step."""
        parts = [rows] if len(rows) == 1 else rows.split(1)
        return _together([ops.pad_rows(row, index.padded) for row in parts])

    for depth in range(1, passes + 1):
        logits = model.logits(spread(hidden), vocab)[:: index.padded]
        best, ordered = ops.top_candidates(logits)
        for place, request in enumerate(going):
            found[request].append((best[place], ordered[place]))
        if depth == first_passes:
            kept = [i for i in range(len(going)) if sure(logits[i, ordered[i]].tolist())]
            if not kept:
                break
            if len(kept) < len(going):
                going = [going[i] for i in kept]
                best, hidden = [best[i] for i in kept], hidden[kept]
        if depth < passes:
            parts, ids = [], []
            for request, token in zip(going, best, strict=True):
                state, tokens = requests[request]
                slot = len(tokens) - 1 + depth
                parts.append(TreeRows(index, state.mtp_kv, slot, model.rope, first=1))
                ids.append(runner.token_ids([token], index.padded))
            out = model.draft_forward(_together(ids), spread(hidden), joined(parts))
            hidden = out[:: index.padded]
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

"""Faults of what rows are given: tokens, positions, drafts, and the draft head's hidden rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from lumotree import decoder
from lumotree.audit.faults.base import Fault, Mutation, replaced, replaced_captured
from lumotree.draft import mtp
from lumotree.draft.plan import Proposal
from lumotree.model import hybrid
from lumotree.model.rows import TreeRows
from lumotree.state import HybridState, KVCache


def stale_root(mutation: Mutation) -> list[AbstractContextManager]:
    last: list[int] = []

    def make(verify):
        def wrapped(self, state, proposal: Proposal):
            token = proposal.tokens[0]
            if last and last[0] != token:
                mutation.count += 1
                proposal = replace(proposal, tokens=[last[0], *proposal.tokens[1:]])
            last[:] = [token]
            return verify(self, state, proposal)

        return wrapped

    return _verifying(make)


def _verifying(make) -> list[AbstractContextManager]:
    """Patches of `verify` of plain and of captured steps."""
    captured = replaced_captured("CapturedDecoder", "verify", make)
    return [replaced(decoder.Decoder, "verify", make), *captured]


def position_off_by_one(mutation: Mutation) -> list[AbstractContextManager]:
    """Plain steps look their rotations up when rows are made; captured ones read the table."""

    def rows(init):
        def wrapped(self, index, cache, prefix, rope, *rest, **named):
            mutation.count += 1
            return init(self, index, cache, prefix, rope[1:], *rest, **named)

        return wrapped

    def captured_verify(verify):
        def wrapped(self, state, proposal):
            mutation.count += 1
            # The rows keep the table that the model had at their capture.
            table = self.tree_step.rows.rope
            right = table.clone()
            table.copy_(right.roll(-1, 0))
            verified = verify(self, state, proposal)
            table.copy_(right)  # on the device's own time, after the step
            return verified

        return wrapped

    captured = replaced_captured("CapturedDecoder", "verify", captured_verify)
    return [replaced(TreeRows, "__init__", rows), *captured]


def no_refill(mutation: Mutation) -> list[AbstractContextManager]:
    """The slots of accepted tokens keep what drafting left in them."""

    def make(refill):
        def wrapped(model, state: HybridState, tokens, runner):
            cache, missing = state.mtp_kv, state.mtp_hidden.shape[0] - 1
            slots = slice(len(tokens) - 1 - missing, len(tokens) - 1)
            with unchanged(cache, slots):
                return refill(model, state, tokens, runner)

        return wrapped

    def captured_propose(propose):
        def wrapped(self, run, state: HybridState):
            if not self.forced:
                return propose(self, run, state)
            # The last slot is the pending token's, which drafting never fills.
            cache, slots = state.mtp_kv, slice(state.length + 1 - self.forced, state.length)
            with unchanged(cache, slots):
                return propose(self, run, state)

        return wrapped

    @contextmanager
    def unchanged(cache: KVCache, slots: slice) -> Iterator[None]:
        sides = (cache.keys, cache.values)
        kept = [side[:, :, slots].clone() for side in sides]
        yield
        for side, saved in zip(sides, kept, strict=True):
            mutation.count += not torch.equal(side[:, :, slots], saved)
            side[:, :, slots] = saved

    captured = replaced_captured("CapturedDecoder", "propose", captured_propose)
    return [replaced(mtp, "refill", make), *captured]


def pre_norm_hidden(mutation: Mutation) -> list[AbstractContextManager]:
    """Publication keeps the rows that went into the final norm, not those that came out of it."""
    before_norm: list[Tensor] = []

    def stream(original):
        def wrapped(self, token_ids, rows):
            residual, normed = original(self, token_ids, rows)
            before_norm[:] = [residual]
            return residual, normed

        return wrapped

    def publish(original):
        def wrapped(rows: TreeRows, path, hidden: Tensor) -> None:
            if not before_norm or mutation.inside:
                return original(rows, path, hidden)
            mutation.count += 1
            original(rows, path, before_norm[0])

        return wrapped

    def captured_verify(verify):
        def wrapped(self, state, proposal: Proposal):
            verified = verify(self, state, proposal)
            # The graph keeps no such rows: the same step once more, which only reads states, for
            # `stream` above to note them.
            self.model.stream(self.tree_step.upload.tokens, self.tree_step.rows)
            return verified

        return wrapped

    def captured_publish(original):
        def wrapped(rows, path, hidden: Tensor) -> None:
            original(rows, path, hidden)
            if not before_norm or not rows.decoder.uses_mtp:
                return
            mutation.count += 1
            kept = rows.decoder.drafted.inputs.hidden[0, : len(path)]
            kept.copy_(before_norm[0][path])
            rows.state.mtp_hidden = kept.clone()

        return wrapped

    return [
        replaced(hybrid.HybridModel, "stream", stream),
        replaced(TreeRows, "publish", publish),
        *replaced_captured("CapturedDecoder", "verify", captured_verify),
        *replaced_captured("_Rows", "publish", captured_publish),
    ]


def duplicate_sibling(mutation: Mutation) -> list[AbstractContextManager]:
    """A second child carries the first child's token, as padding by copies does."""

    def make(fill):
        def wrapped(plan, *rest):
            proposal = fill(plan, *rest)
            for rows in plan.tree.children:
                active = [row for row in rows if proposal.active[row]]
                if len(active) > 1:
                    mutation.count += 1
                    proposal.tokens[active[1]] = proposal.tokens[active[0]]
            return proposal

        return wrapped

    return [replaced(decoder, "fill", make), *replaced_captured(None, "fill", make)]


def no_reset(mutation: Mutation) -> list[AbstractContextManager]:
    def make(reset):
        def wrapped(state: HybridState) -> None:
            # A new slot has nothing to keep; one that was used keeps its recurrent part.
            if not hasattr(state, "length"):
                return reset(state)
            kept = state.recurrent.clone(), state.conv.clone()
            used = state.length > 0
            reset(state)
            if used:
                mutation.count += 1
                state.recurrent.copy_(kept[0])
                state.conv.copy_(kept[1])

        return wrapped

    return [replaced(HybridState, "reset", make)]


FAULTS = (
    Fault(
        "stale root input",
        "new KV",
        "continuation",
        "The root row is computed from the pending token of the step before.",
        stale_root,
    ),
    Fault(
        "off-by-one position",
        "new KV",
        "continuation",
        "Rows are rotated as if they stood one position further on.",
        position_off_by_one,
    ),
    Fault(
        "MTP rows not refilled",
        "MTP KV",
        "continuation",
        "Slots of accepted tokens keep the keys and values of drafting.",
        no_refill,
    ),
    Fault(
        "pre-norm hidden to the drafter",
        "MTP hidden",
        "continuation",
        "The draft head is fed rows from before the final norm.",
        pre_norm_hidden,
    ),
    Fault(
        "duplicate sibling",
        "drafts",
        "sampler",
        "Two children of a row carry the same token.",
        duplicate_sibling,
    ),
    Fault(
        "slot reuse without reset",
        "GDN state, conv history",
        "soak",
        "A slot starts its next request from the recurrent state of the last one.",
        no_reset,
    ),
)

"""What a continuation is compared with: the same tokens, one at a time or in another way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lumotree.audit.fresh import load_engine
from lumotree.audit.prompts import Prefix
from lumotree.audit.schedule import Cycle
from lumotree.audit.surfaces import Boundary
from lumotree.decoder import Decoder, DecoderConfig, Run, prefill
from lumotree.draft import mtp
from lumotree.draft.plan import Proposal
from lumotree.engine import Engine
from lumotree.request import SamplingParams
from lumotree.state import HybridState, KVCache

# Tokens past the prefix that a slot has room for, and of control V.
ROOM = 256
OTHER_ROOM = 2500


def open_slot(
    decoder: Decoder, prefix: Prefix, pending: int, room: int = ROOM
) -> tuple[Run, HybridState]:
    """The prefix in the decoder's slot, with `pending` as its pending token."""
    params = SamplingParams(temperature=0.0, presence_penalty=0.0, max_tokens=room, ignore_eos=True)
    run, state = decoder.begin(prefix.tokens, params)
    decoder.repend(run, pending)
    return run, state


def audited_decoder(engine: Engine, tree: str = "hydra27", passes: int = 5) -> Decoder:
    """The decoder under audit: drafting from text is left out, since drafts are forced."""
    return engine.decoder(DecoderConfig(tree, passes if engine.has_mtp else 0, suffix=False))


def sequential_decoder(engine: Engine) -> Decoder:
    """Decodes token by token, root rows alone. A draft head is refilled, so the state has room for
    it; captured steps have a graph of their own, of a root and, to refill that head, one draft."""
    if engine.model.kernels:
        drafts = engine.has_mtp
        return engine.decoder(DecoderConfig("chain-1" if drafts else "root", int(drafts), False))
    return audited_decoder(engine)


def refill(decoder: Decoder, run: Run, state: HybridState) -> None:
    """Keys and values of the draft head for every token of the run, the pending one last."""
    if decoder.model.kernels:
        decoder.propose(run, state)
    elif state.mtp_kv is not None:
        mtp.refill(decoder.model, state, run.tokens, decoder.runner)


def sequential(
    decoder: Decoder, prefix: Prefix, cycles: Sequence[Cycle], room: int = ROOM
) -> list[Boundary]:
    """One token a step, the draft head refilled before each; a boundary per cycle."""
    run, state = open_slot(decoder, prefix, cycles[0].tokens[0], room)
    run.tokens.pop()
    found = []
    for cycle in cycles:
        start, logits, hidden = state.length, [], []
        for token in cycle.tokens:
            run.tokens.append(token)
            refill(decoder, run, state)
            verified = decoder.verify(state, Proposal.root_only(decoder.tree, token))
            logits.append(verified.logits[:1].clone())
            verified.rows.publish([0], verified.hidden)
            hidden.append(state.mtp_hidden[-1:].clone())
        found.append(Boundary.of(state, start, torch.cat(logits), torch.cat(hidden)))
    return _with_own_caches(found, state)


def packed(decoder: Decoder, prefix: Prefix, cycles: Sequence[Cycle]) -> list[Boundary]:
    """Each cycle's tokens as a run of prompt tokens: the chunked kernels instead of the native
    update, other row counts, another order of every sum."""
    text = list(prefix.tokens)
    state = decoder.reserve(len(text) + ROOM)
    state.reset()  # no slot is opened: a captured decoder hands the draft head's rows on at once
    prefill(decoder.model, state, text)
    found = []
    for cycle in cycles:
        start = state.length
        text += cycle.tokens
        hidden = prefill(decoder.model, state, text)
        found.append(Boundary.of(state, start, decoder.model.logits(hidden)))
    return _with_own_caches(found, state)


def _with_own_caches(found: list[Boundary], state: HybridState) -> list[Boundary]:
    """The slot will be used again: all boundaries share one copy of its keys and values."""
    kv = state.kv.clone_prefix(state.length)
    mtp_kv = None if state.mtp_kv is None else state.mtp_kv.clone_prefix(state.length)
    for boundary in found:
        boundary.kv, boundary.mtp_kv = kv, mtp_kv
    return found


@torch.inference_mode()
def sequential_job(job: dict[str, Any]) -> int:
    """Control B, in a process of its own: saves the boundaries of every (prefix, schedule)."""
    engine = load_engine(job)
    decoder = sequential_decoder(engine)
    runs = []
    for prefix, cycles in job["runs"]:
        named = Prefix(prefix["name"], tuple(prefix["tokens"]), tuple(prefix["script"]))
        forced = [
            Cycle("", Proposal.root_only(decoder.tree, tokens[0]), (0,), tuple(tokens), 0)
            for tokens in cycles
        ]
        runs.append(_plain(sequential(decoder, named, forced)))
    torch.save(runs, job["out"])
    return len(runs)


def _plain(run: Sequence[Boundary]) -> list[dict[str, Any]]:
    """Boundaries as tensors and numbers on the host; the caches they share are copied once."""
    caches = {
        name: cache and [cache.keys.cpu(), cache.values.cpu()]
        for name in ("kv", "mtp_kv")
        for cache in (getattr(run[0], name),)
    }
    return [
        {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in vars(boundary).items()}
        | caches
        for boundary in run
    ]


def load_runs(path: str) -> list[list[Boundary]]:
    """What `sequential_job` saved."""
    runs = torch.load(path, weights_only=True)
    for run in runs:
        for fields in run:
            for name in ("kv", "mtp_kv"):
                fields[name] = fields[name] and KVCache(*fields[name])
    return [[Boundary(**fields) for fields in run] for run in runs]

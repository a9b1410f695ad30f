"""Single steps over a model, as the decode loop takes them, and what tests compare of a state."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from lumotree.decoder import Decoder, DecoderConfig, Run
from lumotree.draft import mtp
from lumotree.draft.plan import Proposal
from lumotree.engine import Engine
from lumotree.model.hybrid import PREFILL_CHUNK, HybridModel
from lumotree.model.rows import PrefillRows, TreeRows
from lumotree.model.runner import RowRunner
from lumotree.request import Generation, SamplingParams
from lumotree.state import HybridState, Snapshot
from lumotree.tree import TreeDescriptor, tree_from_name

ROOT = tree_from_name("root")
SPARE = 136


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest absolute difference over the largest absolute value."""
    return ((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max()).item()


@torch.inference_mode()
def poison(state: HybridState) -> None:
    """NaN into every buffer of a state slot."""
    caches = [cache for cache in (state.kv, state.mtp_kv) if cache is not None]
    for buffer in (
        state.recurrent,
        state.conv,
        *(side for cache in caches for side in (cache.keys, cache.values)),
    ):
        buffer.fill_(float("nan"))


@torch.no_grad()
def prefill(
    model: HybridModel,
    tokens: Sequence[int],
    room: int = SPARE,
    chunk: int = PREFILL_CHUNK,
    draft_head: bool = True,
) -> tuple[HybridState, Tensor]:
    """The state after `tokens`, in a slot that held NaN, and the logits of every position."""
    with_mtp = draft_head and model.mtp is not None
    capacity = len(tokens) + room
    state = model.new_state(capacity, with_mtp)
    poison(state)
    state.reset()
    ids = torch.tensor(tokens)
    logits = []
    for start in range(0, len(tokens), chunk):
        piece = ids[start : start + chunk]
        rows = PrefillRows(state.kv, start, piece.numel(), model.rope, state)
        hidden = model.forward(piece, rows)
        if with_mtp:
            mtp.fill_prompt(model, state, piece, hidden, start)
        state.length += piece.numel()
        logits.append(model.logits(hidden))
    return state, torch.cat(logits)


@dataclass
class Step:
    """One verification: logits and hidden rows of the tree, and the rows that can be published."""

    rows: TreeRows
    hidden: Tensor
    logits: Tensor

    def publish(self, path: Sequence[int]) -> None:
        self.rows.publish(list(path), self.hidden)


@torch.no_grad()
def verify(
    model: HybridModel,
    runner: RowRunner,
    state: HybridState,
    tree: TreeDescriptor,
    tokens: Sequence[int],
) -> Step:
    index = runner.index(tree)
    rows = TreeRows(index, state.kv, state.length, model.rope, state)
    hidden = model.forward(runner.token_ids(tokens, index.padded), rows)
    return Step(rows, hidden, model.logits(hidden)[: len(tree)])


@torch.no_grad()
def decode(
    model: HybridModel, runner: RowRunner, state: HybridState, tokens: Sequence[int]
) -> Tensor:
    """Feeds `tokens` one at a time; the logits after each, [n, vocab]."""
    found = []
    for token in tokens:
        step = verify(model, runner, state, ROOT, [token])
        step.publish([0])
        found.append(step.logits[0])
    return torch.stack(found)


@dataclass
class Node:
    """A tree row as decoding its path token by token finds it."""

    logits: Tensor
    after: Snapshot


@torch.no_grad()
def decode_every_path(
    model: HybridModel,
    runner: RowRunner,
    start: Snapshot,
    state: HybridState,
    tree: TreeDescriptor,
    tokens: Sequence[int],
) -> list[Node]:
    """Every row by root-only steps from its parent's state, the draft head refilled each time."""
    nodes: list[Node] = []
    for row, parent in enumerate(tree.parents):
        before = start if parent < 0 else nodes[parent].after
        state.restore(before)
        text = (*before.token_ids, tokens[row])
        if state.mtp_kv is not None:
            mtp.refill(model, state, text, runner)
        step = verify(model, runner, state, ROOT, [tokens[row]])
        step.publish([0])
        nodes.append(Node(step.logits[0], state.snapshot(text)))
    return nodes


def surfaces(snapshot: Snapshot) -> dict[str, Tensor]:
    """Everything that must agree after publication, by name."""
    found = {
        "recurrent": snapshot.recurrent,
        "conv": snapshot.conv,
        "keys": snapshot.kv.keys,
        "values": snapshot.kv.values,
        "mtp hidden": snapshot.mtp_hidden,
    }
    if snapshot.mtp_kv is not None:
        # Slot 0 of the draft head pairs the first token with no hidden row; nobody reads it.
        found["mtp keys"] = snapshot.mtp_kv.keys[:, :, 1:]
        found["mtp values"] = snapshot.mtp_kv.values[:, :, 1:]
    return found


def assert_same_bits(ours: Snapshot, theirs: Snapshot, skip: Sequence[str] = ()) -> None:
    wanted = surfaces(theirs)
    for name, tensor in surfaces(ours).items():
        if name not in skip:
            assert torch.equal(tensor, wanted[name]), f"{name} differs"


def random_tokens(seed: int, count: int, vocab: int) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=count)


def tree_of(parents: Sequence[int]) -> TreeDescriptor:
    return tree_from_name(",".join(map(str, parents)))


@st.composite
def parent_lists(draw: st.DrawFn, max_rows: int = 32) -> list[int]:
    """Random trees: `reach` bounds how far back a parent lies, so small means deep."""
    rows = draw(st.integers(1, max_rows))
    reach = draw(st.sampled_from([1, 2, 4, max_rows]))
    seed = draw(st.integers(0, 2**16))
    choose = random.Random(seed)
    return [-1, *(choose.randrange(max(0, row - reach), row) for row in range(1, rows))]


class Scripted(Decoder):
    """A decoder whose drafts come from a known continuation instead of a drafter.

    Each row continues its parent's text by the script's token with probability `right`, else by
    another token; siblings never share one. `trees` take turns; `empty` is the share of steps
    with no draft at all. The MTP head, where the decoder has one, runs as usual.
    """

    def __init__(
        self,
        engine: Engine,
        config: DecoderConfig,
        script: Sequence[int],
        right: float = 1.0,
        trees: Sequence[TreeDescriptor] = (),
        empty: float = 0.0,
    ) -> None:
        super().__init__(engine.model, engine.tokenizer, config, engine.runner)
        self.script, self.right, self.empty = list(script), right, empty
        self.trees = list(trees) or [self.tree]

    def propose(self, run: Run, state: HybridState) -> Proposal:
        super().propose(run, state)
        emitted = len(run.tokens) - run.prompt_tokens
        choose = random.Random(len(run.tokens))
        tree = self.trees[choose.randrange(len(self.trees))]
        proposal = Proposal.root_only(tree, run.tokens[-1])
        if choose.random() < self.empty:
            return proposal
        follows = [True] + [False] * (len(tree) - 1)
        for row in range(1, len(tree)):
            parent, place = tree.parents[row], emitted + tree.depth[row] - 1
            if not tree.default_active[row] or not proposal.active[parent]:
                continue
            taken = {proposal.tokens[r] for r in tree.children[parent] if proposal.active[r]}
            wanted = self.script[place] if place < len(self.script) else None
            if follows[parent] and wanted not in taken | {None} and choose.random() < self.right:
                proposal.put(row, wanted, "spine")
                follows[row] = True
            else:
                other = choose.randrange(self.model.config.vocab_size)
                if other not in taken | {wanted}:
                    proposal.put(row, other, "spine")
        return proposal


@torch.inference_mode()
def generate_with_state(
    decoder: Decoder,
    prompt: Sequence[int],
    params: SamplingParams,
    conversation: str | None = None,
) -> tuple[Generation, Snapshot, list[int]]:
    """generate(), the state at its end, and the text that state holds."""
    run, state = decoder.begin(prompt, params, conversation)
    while run.finish_reason is None:
        decoder.step(run, state)
    return decoder.finish(run), state.snapshot(tuple(run.tokens[: state.length])), run.tokens


def plain(max_tokens: int, **changes) -> SamplingParams:
    """Greedy without penalties, to the full length."""
    fields = {"temperature": 0.0, "presence_penalty": 0.0, "ignore_eos": True} | changes
    return SamplingParams(max_tokens=max_tokens, **fields)


AR = DecoderConfig("root", 0, False)

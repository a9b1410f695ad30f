"""The decode loop: propose, verify, select, publish. One loop for every arm.

Autoregressive decoding proposes the root-only tree, an MTP chain a path, LumoTree hydra27.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lumotree.draft import mtp
from lumotree.draft.plan import DraftPlan, Proposal, draft_plan, fill
from lumotree.draft.suffix import SuffixAutomaton
from lumotree.errors import CheckpointError, LumoTreeError, RequestError
from lumotree.logprobs import TokenLogprob, token_logprobs
from lumotree.model.hybrid import HybridModel
from lumotree.model.rows import TreeRows, joined, prefill_rows
from lumotree.model.runner import MAX_INDICES, RowRunner
from lumotree.ops import reference as ops
from lumotree.ops.gdn import Geometry
from lumotree.prefix import PrefixStore, worth_saving
from lumotree.request import PHASES, FinishReason, Generation, SamplingParams, TokenCallback
from lumotree.sampling import TokenHistory, accept_walk, sample_rows
from lumotree.state import HybridState
from lumotree.text import ChatTokenizer, StreamDecoder
from lumotree.tree import TreeDescriptor, tree_from_name
from lumotree.verifiers import verifier_class
from lumotree.verifiers.base import Verifier

_SLOT_STEP = 1024
# On an H200 products of 32 rows cost 3 % more than of one row, of 64 rows 18 %, of 128 rows 59 %.
ROUND_ROWS = 32
EXACT_SCAN = "path-scan"
# Each keeps buffers for the tree it serves, and which rows are active differs from step to step.
MAX_VERIFIERS = 16


@dataclass(frozen=True)
class DecoderConfig:
    """tree: a preset or parent list; passes: MTP passes per step; suffix: copy from own text.

    first_passes: after so many passes the rest run only where the last one was sure of its best
    token (see draft.mtp.SURE_MARGIN); 0: all run. verify: the GDN verifier. draft_vocab: MTP
    candidates are the best of the first so many ids (0: of all). draft_weights: drafts read the
    model's own weights, or copies in 8 bits (fp8) that cost half the time. attention, selection and
    operands choose between a kernel and the torch operations in its place, where there are
    kernels. round_rows: there, several requests at once verify fewer rows each, down to the MTP
    chain, so that a round has so many together (0: whole trees): tokens are the same either way.
    """

    tree: str = "hydra27"
    passes: int = 5
    suffix: bool = True
    first_passes: int = 0
    verify: str = EXACT_SCAN
    draft_vocab: int = 0
    draft_weights: str = "model"
    attention: str = "grouped"
    selection: str = "fused"
    operands: str = "prepared"
    round_rows: int = ROUND_ROWS


@dataclass
class Verified:
    """The target's answer to a proposal: for its active rows, or for rows some of which are not
    `active`, as a captured step must."""

    tree: TreeDescriptor
    kept: tuple[int, ...]  # row of the proposal behind each row of `tree`
    tokens: list[int]
    rows: TreeRows
    hidden: Tensor
    logits: Tensor
    active: Sequence[bool]


@dataclass
class Run:
    """One request under way. tokens: prompt and emitted tokens, the pending token last.

    fresh: what the last step emitted, and `fresh_logprobs` of it where `logprobs` asks for so
    many alternatives. drafted: draft tokens verified so far.
    """

    params: SamplingParams
    tokens: list[int]
    prompt_tokens: int
    limit: int
    history: TokenHistory
    text: StreamDecoder
    suffix: SuffixAutomaton | None
    on_tokens: TokenCallback | None
    started: float
    scope: str | None = None
    save_at: tuple[int, ...] = ()  # prompt positions whose state the prefix store gets
    logprobs: int | None = None
    reused: int = 0
    completion_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    finish_reason: FinishReason | None = None
    fresh: tuple[tuple[int, ...], str] = ((), "")
    fresh_logprobs: tuple[TokenLogprob, ...] = ()
    pieces: list[str] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    accepted_by_row: list[int] = field(default_factory=list)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    phases_ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    first_token_at: float = 0.0
    last_token_at: float = 0.0


def prefill(model: HybridModel, state: HybridState, tokens: Sequence[int]) -> Tensor:
    """Materialises `tokens` past `state.length`; returns the last one's hidden row [1, hidden].

    Runs start at multiples of `model.prefill_chunk` wherever the state stands on one. Fills the
    draft head's keys and values too when the state has room for them.
    """
    ids = torch.tensor(tokens, device=model.device)
    hidden = None
    for start in range(state.length, len(tokens), model.prefill_chunk):
        piece = ids[start : start + model.prefill_chunk]
        rows = prefill_rows(model, state.kv, start, piece.numel(), state)
        hidden = model.forward(piece, rows)
        if state.mtp_kv is not None:
            mtp.fill_prompt(model, state, piece, hidden, start)
        state.length += piece.numel()
    return hidden[-1:]


class Decoder:
    """Decodes one request at a time over shared weights, in a state slot of its own."""

    def __init__(
        self,
        model: HybridModel,
        tokenizer: ChatTokenizer,
        config: DecoderConfig,
        runner: RowRunner,
    ) -> None:
        self.tree = tree_from_name(config.tree)
        self.plan: DraftPlan = draft_plan(self.tree, config.passes)
        self.uses_mtp = bool(self.plan.mtp)
        if self.uses_mtp and model.mtp is None:
            raise CheckpointError(
                "the checkpoint has no mtp.* tensors, which MTP drafts need",
                "draft with passes=0, or decode without drafts (tree=root)",
            )
        self.model, self.tokenizer, self.config, self.runner = model, tokenizer, config, runner
        self.drafter = model.drafter(config.draft_weights) if self.uses_mtp else model
        self.snapshots = PrefixStore()
        self._state: HybridState | None = None
        self._path_tensors: dict[TreeDescriptor, tuple[Tensor, Tensor]] = {}
        self._verifiers: dict[TreeDescriptor, Verifier] = {}
        verifier_class(config.verify)
        if not model.kernels:
            self._refuse_kernel_options(config)

    @staticmethod
    def _refuse_kernel_options(config: DecoderConfig) -> None:
        for name in ("attention", "selection", "operands"):
            if getattr(config, name) != getattr(DecoderConfig, name):
                raise LumoTreeError(
                    f"{name}={getattr(config, name)} takes a kernel away, and this device has none",
                    "leave it out, or run on a CUDA device with triton installed",
                )

    @property
    def max_context(self) -> int:
        return self.model.config.max_position_embeddings

    def reset(self) -> None:
        """Forgets saved prefixes."""
        self.snapshots.clear()

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        conversation: str | None = None,
        on_tokens: TokenCallback | None = None,
    ) -> Generation:
        """Decodes one request to its end.

        `conversation` is the scope of the prefix store: prompts under the same name share what
        they begin with. Raises RequestError for a prompt that is empty, too long for the context,
        or holds ids outside the vocabulary.
        """
        run, state = self.begin(prompt_ids, params, conversation, on_tokens)
        while run.finish_reason is None:
            self.step(run, state)
        return self.finish(run)

    def step(self, run: Run, state: HybridState) -> None:
        """One round: draft, verify, select, publish."""
        with self._phase(run, "draft"):
            proposal = self.propose(run, state)
        with self._phase(run, "verify"):
            verified = self.verify(state, proposal)
        self.settle(run, proposal, verified)

    def repend(self, run: Run, token: int) -> None:
        """Puts a token of an audit's choice in place of the pending one."""
        run.tokens[-1] = token

    def settle(self, run: Run, proposal: Proposal, verified: Verified) -> None:
        """The rest of a round: select, publish, hand out."""
        with self._phase(run, "select"):
            path, pending = self.select(run, verified)
            self.take(run, proposal, verified, path, pending)
        if run.finish_reason is None:
            with self._phase(run, "publish"):
                self.publish(run, verified, path)
        self.hand_out(run)

    def take(
        self, run: Run, proposal: Proposal, verified: Verified, path: list[int], pending: int
    ) -> None:
        """Emits what a walk accepted, and counts it."""
        taken = self._emit(run, [*(verified.tokens[row] for row in path[1:]), pending])
        run.steps += 1
        run.drafted += sum(proposal.active) - 1
        self._note_logprobs(run, verified.logits, path)
        # Drafts past the end of the request were accepted by nobody.
        self._count(run, proposal, [verified.kept[row] for row in path[: taken + 1]])

    def begin(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        conversation: str | None = None,
        on_tokens: TokenCallback | None = None,
    ) -> tuple[Run, HybridState]:
        """Prefills the prompt and emits the first token."""
        run, state = self.open(prompt_ids, params, conversation, on_tokens)
        while not self.advance_prompt(run, state):
            pass
        return run, state

    def open(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        conversation: str | None = None,
        on_tokens: TokenCallback | None = None,
        logprobs: int | None = None,
    ) -> tuple[Run, HybridState]:
        """A request made ready: checked, with a state slot that holds the prefix that is known.

        `advance_prompt` is to be called until it says that the prompt is through.
        """
        started = time.perf_counter()
        tokens = list(prompt_ids)
        self._check_prompt(tokens)
        limit = min(params.max_tokens, self.max_context - len(tokens))
        state = self.reserve(len(tokens) + limit)
        chunk, ends = self.model.prefill_chunk, self.tokenizer.eos_ids
        run = Run(
            params=params,
            tokens=tokens,
            prompt_tokens=len(tokens),
            limit=limit,
            history=TokenHistory(self.model.config.vocab_size, tokens, self.model.device),
            text=StreamDecoder(self.tokenizer, params.stop),
            suffix=SuffixAutomaton(tokens) if self.config.suffix else None,
            on_tokens=on_tokens,
            started=started,
            scope=conversation,
            save_at=() if conversation is None else worth_saving(tokens, ends, chunk),
            logprobs=logprobs,
        )
        run.reused = self.snapshots.restore(conversation, tokens, state, chunk)
        return run, state

    def advance_prompt(self, run: Run, state: HybridState) -> bool:
        """Materialises the prompt up to the next chunk's end; with the last one, emits the first
        token and returns True.
        """
        prompt, chunk = run.tokens, self.model.prefill_chunk
        stop = min((state.length // chunk + 1) * chunk, len(prompt))
        hidden = prefill(self.model, state, prompt[:stop])
        if stop in run.save_at:
            self.snapshots.save(run.scope, prompt[:stop], state, chunk)
        if stop < len(prompt):
            return False
        self._enter(run, state, hidden)
        return True

    def _enter(self, run: Run, state: HybridState, hidden: Tensor) -> None:
        """Emits the first token, from the prompt's last hidden row [1, hidden size]."""
        root = self.runner.index("root")
        logits = self.model.logits(ops.pad_rows(hidden, root.padded))[:1]
        place = len(run.tokens) - 1
        self._emit(run, self.sample(run, logits, tree_from_name("root"), [0], place))
        self._note_logprobs(run, logits, [0])
        run.history.add(run.fresh[0])
        self.hand_out(run)

    def propose(self, run: Run, state: HybridState) -> Proposal:
        """Draft tokens for the rows that have a source; an arm without drafts gets the root."""
        candidates = []
        if self.uses_mtp:
            candidates = mtp.draft(self.drafter, state, run.tokens, *self._drafting)
        return fill(self.plan, run.tokens[-1], candidates, run.suffix)

    def propose_all(self, active: Sequence[tuple[Run, HybridState]]) -> list[Proposal]:
        """`propose` of several requests, their rows side by side in one forward a pass."""
        candidates: list = [[]] * len(active)
        if self.uses_mtp:
            requests = [(state, run.tokens) for run, state in active]
            candidates = mtp.draft_all(self.drafter, requests, *self._drafting)
        return [
            fill(self.plan, run.tokens[-1], found, run.suffix)
            for (run, _), found in zip(active, candidates, strict=True)
        ]

    @property
    def _drafting(self) -> tuple[int, RowRunner, int | None, int]:
        config = self.config
        return len(self.plan.mtp), self.runner, config.draft_vocab or None, config.first_passes

    def verify(self, state: HybridState, proposal: Proposal) -> Verified:
        """One target forward over the proposal's active rows; the state is only read."""
        return self.verify_all([(state, proposal)])[0]

    def verify_all(self, asked: Sequence[tuple[HybridState, Proposal]]) -> list[Verified]:
        """`verify` of several requests, their rows side by side in one forward."""
        model, parts, ids, shapes = self.model, [], [], []
        for state, proposal in asked:
            tree, kept = proposal.tree.restrict(tuple(proposal.active))
            tokens = [proposal.tokens[row] for row in kept]
            index = self.runner.index(tree)
            verifier = None if self.config.verify == EXACT_SCAN else self._verifier(tree)
            parts.append(
                TreeRows(index, state.kv, state.length, model.rope, state, verifier=verifier)
            )
            ids.append(self.runner.token_ids(tokens, index.padded))
            shapes.append((tree, kept, tokens))
        every = ids[0] if len(ids) == 1 else torch.cat(ids)
        hidden = model.forward(every, joined(parts))
        sizes = [part.index.padded for part in parts]
        hiddens, logits = hidden.split(sizes), model.logits(hidden).split(sizes)
        return [
            Verified(tree, kept, tokens, rows, own, scores[: len(tree)], [True] * len(tree))
            for (tree, kept, tokens), rows, own, scores in zip(
                shapes, parts, hiddens, logits, strict=True
            )
        ]

    def _verifier(self, tree: TreeDescriptor) -> Verifier:
        if tree not in self._verifiers:
            if len(self._verifiers) >= MAX_VERIFIERS:
                self._verifiers.clear()
            model, kind = self.model, verifier_class(self.config.verify)
            geometry = Geometry.of(model.config)
            self._verifiers[tree] = kind(tree, geometry, model.device, torch.float32)
        return self._verifiers[tree]

    def select(self, run: Run, verified: Verified) -> tuple[list[int], int]:
        """The walk: accepted rows from the root, and the next pending token."""
        tree = verified.tree
        sampled = self.sample(run, verified.logits, tree, verified.tokens, verified.rows.prefix)
        return accept_walk(tree.children, verified.tokens, verified.active, sampled)

    def publish(self, run: Run, verified: Verified, path: list[int]) -> None:
        """Advances the state along `path`; what was emitted joins the history of penalties."""
        verified.rows.publish(path, verified.hidden)
        run.history.add(run.fresh[0])

    def sample(
        self, run: Run, logits: Tensor, tree: TreeDescriptor, tokens: list[int], root_position: int
    ) -> list[int]:
        """The token every row would emit, each with its own root path as penalty history."""
        if tree not in self._path_tensors:
            if len(self._path_tensors) >= MAX_INDICES:
                self._path_tensors.clear()
            deepest = max(tree.depth)
            device = self.model.device
            self._path_tensors[tree] = (
                torch.tensor(tree.drafts_above, dtype=torch.long, device=device).view(
                    len(tree), deepest
                ),
                torch.tensor(tree.depth, device=device),
            )
        below, depth = self._path_tensors[tree]
        ids = torch.tensor([*tokens, -1], device=self.model.device)  # row -1 reads the -1
        positions = depth + (root_position + 1)
        return sample_rows(logits, run.params, run.history, ids[below], positions).tolist()

    def _emit(self, run: Run, tokens: Sequence[int]) -> int:
        """Takes tokens one by one up to the first that ends the request; returns how many."""
        shown: list[int] = []
        text = ""
        taken = 0
        for token in tokens:
            run.tokens.append(token)
            taken += 1
            if token in self.tokenizer.eos_ids and not run.params.ignore_eos:
                run.finish_reason = "stop"
                break
            shown.append(token)
            text += run.text.push(token)
            if run.text.stopped:
                run.finish_reason = "stop"
                break
            if run.completion_tokens + taken == run.limit:
                run.finish_reason = "length"
                break
        run.completion_tokens += taken
        run.output += shown
        if run.suffix is not None:
            run.suffix.extend(shown)
        run.fresh = (tuple(shown), text)
        run.pieces.append(text)
        run.last_token_at = time.perf_counter()
        run.first_token_at = run.first_token_at or run.last_token_at
        return taken

    @staticmethod
    def _note_logprobs(run: Run, logits: Tensor, path: list[int]) -> None:
        """Of the tokens just emitted, which were sampled at the rows of `path`."""
        if run.logprobs is not None:
            ids = run.fresh[0]
            rows = logits[path[: len(ids)]]
            run.fresh_logprobs = tuple(token_logprobs(rows, ids, run.logprobs))

    @staticmethod
    def hand_out(run: Run) -> None:
        """Calls the request's callback with what the last step emitted."""
        ids, text = run.fresh
        if run.on_tokens is not None and (ids or text):
            run.on_tokens(ids, text)

    @staticmethod
    def _count(run: Run, proposal: Proposal, path: list[int]) -> None:
        """Notes the proposal's rows whose tokens were emitted, root first."""
        depth = len(path) - 1
        run.accepted_by_depth += [0] * (depth - len(run.accepted_by_depth))
        run.accepted_by_row += [0] * (len(proposal.tree) - len(run.accepted_by_row))
        for row in path:
            run.accepted_by_row[row] += 1
        for i, row in enumerate(path[1:]):
            run.accepted_by_depth[i] += 1
            source = proposal.source[row]
            run.accepted_by_source[source] = run.accepted_by_source.get(source, 0) + 1

    def finish(self, run: Run) -> Generation:
        """The result of a run that has ended; the last of its text is in `run.fresh` then."""
        run.fresh, run.fresh_logprobs = ((), run.text.finish()), ()
        run.pieces.append(run.fresh[1])
        self.hand_out(run)
        decode_ms = (run.last_token_at - run.first_token_at) * 1e3
        timed = sum(run.phases_ms.values())
        run.phases_ms["other"] = max(0.0, decode_ms - timed)
        return Generation(
            token_ids=run.output,
            text="".join(run.pieces),
            finish_reason=run.finish_reason,
            prompt_tokens=run.prompt_tokens,
            completion_tokens=run.completion_tokens,
            prefix_reused_tokens=run.reused,
            ttft_s=run.first_token_at - run.started,
            e2e_s=run.last_token_at - run.started,
            steps=run.steps,
            accepted_by_depth=run.accepted_by_depth,
            accepted_by_row=run.accepted_by_row,
            accepted_by_source=run.accepted_by_source,
            phases_ms=dict(run.phases_ms),
        )

    def _check_prompt(self, tokens: list[int]) -> None:
        if not tokens:
            raise RequestError("the prompt is empty")
        if len(tokens) >= self.max_context:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; the model's context is {self.max_context}",
                "shorten the prompt: at least one position must be left to generate",
            )
        vocab = self.model.config.vocab_size
        wrong = next((token for token in tokens if not 0 <= token < vocab), None)
        if wrong is not None:
            raise RequestError(f"token id {wrong} is outside the vocabulary of {vocab}")

    def reserve(self, tokens: int) -> HybridState:
        """The state slot, grown when a request needs more; a tree may reach past the last token.

        Raises RequestError when the device cannot hold it.
        """
        needed = tokens + len(self.tree)
        self.model.reserve(needed)
        if self._state is None or self._state.capacity < needed:
            capacity = -(-needed // _SLOT_STEP) * _SLOT_STEP
            model = self.model
            self._state = None  # the old slot makes room for the new one
            try:
                self._state = model.new_state(capacity, self.uses_mtp)
            except (torch.OutOfMemoryError, MemoryError) as error:
                raise RequestError(
                    f"{model.device} has no memory for the state of {capacity} tokens",
                    "lower max_tokens or shorten the prompt",
                ) from error
        return self._state

    @contextmanager
    def _phase(self, run: Run, name: str) -> Iterator[None]:
        with timed([run], name, self.model.device):
            yield


@contextmanager
def timed(runs: Sequence[Run], name: str, device: torch.device) -> Iterator[None]:
    """Adds the wall-clock milliseconds of a stage to each run; the device is drained at its end."""
    started = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    spent = (time.perf_counter() - started) * 1e3
    for run in runs:
        run.phases_ms[name] += spent

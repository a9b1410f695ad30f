"""Selection on the device: draft candidates, sampling of a tree's rows, the acceptance walk.

Definitions: reference.top_candidates, sampling.sample_rows, sampling.accept_walk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lumotree.ops import select_kernels as kernels
from lumotree.ops.gdn import Path
from lumotree.ops.walk_kernels import take_kernel, walk_kernel
from lumotree.request import SamplingParams
from lumotree.sampling import seed_start
from lumotree.tree import MAX_ROWS, TreeDescriptor

# The largest top_k that is sampled on the device.
MAX_TOP_K = 64
# Room for groups and candidates of a row; ties beyond it are the host's business.
CHOSEN, FOUND = 128, 256
# Parts of a row's vocabulary at most: enough programs for one row, and 2048 groups. A part has
# at least some tiles, of COLUMNS ids each.
PARTS, MIN_TILES = 64, 4
# Unions of groups at most, from which a row's bound is found: all are compared with all.
UNIONS = 256
# Logits of a program of `top_candidates`.
BEST_BLOCK = 2048
# Warps of the programs; they change no bit. BATCH: logits that a drawing program reads at once.
SCAN_WARPS, DRAW_WARPS, BATCH = 4, 8, 4096
TAKE_BLOCK = 1024


def _padded(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _options(early: bool, warps: int) -> dict:
    return {"PDL": early, "num_warps": warps, **({"launch_pdl": True} if early else {})}


class TopCandidates:
    """Argmax and ordered best three of rows of logits [rows, vocab], ids below `live` only.

    Where values differ the order is torch.topk's; equal values come lowest id first, so the
    argmax is the first of the three. NaN is above everything, as in torch.
    """

    def __init__(
        self, rows: int, vocab: int, live: int, device: torch.device, early: bool = False
    ) -> None:
        """early: a launch may begin before the kernel in front of it ends."""
        if live < 3:
            raise ValueError(f"the best three of {live} tokens do not exist")
        self.vocab, self.live = vocab, live
        self.parts = -(-vocab // BEST_BLOCK)
        self.part = torch.empty(rows, self.parts, 3, dtype=torch.int64, device=device)
        self.found = torch.empty(rows, 4, dtype=torch.int32, device=device)
        self.options = _options(early, 4)

    def __call__(self, logits: Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [n, vocab], n at most rows -> argmax int32 [n], best three int32 [n, 3].

        Both are views of `into`, int32 [n, 4], or of a buffer that the next call overwrites.
        """
        n = logits.shape[0]
        into = self.found[:n] if into is None else into
        block = min(BEST_BLOCK, _padded(self.vocab))
        kernels.best_kernel[(self.parts, n)](
            logits, self.part, self.vocab, self.live, logits.stride(0), BLOCK=block, **self.options
        )
        entries = 3 * self.parts
        kernels.merge_kernel[(n,)](
            self.part, into, entries, into.stride(0), BLOCK=_padded(entries), **self.options
        )
        return into[:, 0], into[:, 1:]


class SamplingBlock:
    """Sampling parameters on the device, int64 [seats, 12], as the kernels read them.

    What sampling.py derives from a parameter is derived here, once, by the same arithmetic.
    """

    def __init__(self, device: torch.device, seats: int = 1) -> None:
        words = kernels.WORDS.value
        self.words = torch.zeros(seats, words, dtype=torch.int64, device=device)

    @staticmethod
    def supports(params: SamplingParams) -> bool:
        """Whether the device can sample: greedy, or top_k from 1 to MAX_TOP_K."""
        return params.greedy or 1 <= params.top_k <= MAX_TOP_K

    def set(self, params: SamplingParams, seat: int = 0) -> None:
        """Takes the parameters of a request. Unsupported ones flag every row they sample."""
        supported = self.supports(params)
        greedy = params.greedy
        words = torch.zeros(kernels.WORDS.value, dtype=torch.int64)
        words[kernels.GREEDY.value] = greedy
        words[kernels.TOP_K.value] = 1 if greedy or not supported else params.top_k
        words[kernels.SUPPORTED.value] = supported
        words[kernels.START.value] = seed_start(params.seed)
        words[kernels.PENALISED.value] = (
            params.presence_penalty != 0
            or params.frequency_penalty != 0
            or params.repetition_penalty != 1
        )
        fractions = words.view(torch.float64)
        fractions[kernels.SCALE.value] = 1.0 if greedy else 1.0 / params.temperature
        # Off, it must keep tokens whose mass rounds to nothing too.
        fractions[kernels.TOP_P.value] = params.top_p if params.top_p < 1 else math.inf
        fractions[kernels.LOG_MIN_P.value] = math.log(params.min_p) if params.min_p else -math.inf
        fractions[kernels.PRESENCE.value] = params.presence_penalty
        fractions[kernels.FREQUENCY.value] = params.frequency_penalty
        fractions[kernels.SHRINK.value] = 1.0 / params.repetition_penalty
        fractions[kernels.GROW.value] = params.repetition_penalty
        self.words[seat].copy_(words)


@dataclass(frozen=True)
class Outcome:
    """What a step selected, on the host. flag: a row on the path must be sampled by the host, and
    then nothing was accepted or counted."""

    path: tuple[int, ...]
    pending: int
    flag: bool
    sampled: tuple[int, ...]


class Selector:
    """Sampling and walk of one tree. `result` int32 holds all the host wants, for one copy.

    result: count, pending, flag, 0, path rows [height + 2], padding, sampled tokens [rows].
    `path` reads the accepted rows and their count there. Scratch belongs to one stream.

    With `seats`, int32 [requests], one launch serves that many requests, and nobody where a seat
    is below 0. Buffers of a request's own (parameters, counts, prompt_seen, length, what `take`
    fills) then have a leading dimension of seats, all others one of requests; logits, hidden,
    tokens and active hold `padded` rows a request.
    """

    def __init__(
        self,
        tree: TreeDescriptor,
        vocab: int,
        live: int,
        device: torch.device,
        early: bool = False,
        seats: Tensor | None = None,
        padded: int = 0,
    ) -> None:
        """early: a launch may begin before the kernel in front of it ends."""
        self.tree, self.vocab, self.live = tree, vocab, live
        self.early, self.seats, self.padded = early, seats, padded
        self.requests = 1 if seats is None else seats.numel()
        rows, self.depth = len(tree), max(tree.depth)
        tiles = -(-vocab // kernels.COLUMNS.value)
        self.tiles = max(MIN_TILES, _padded(-(-tiles // PARTS)))
        self.parts = -(-tiles // self.tiles)
        groups = self.parts * kernels.COLUMNS.value
        self.together = max(1, _padded(groups) // UNIONS)

        def table(values, dtype=torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        def empty(*shape: int, dtype=torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.paths = table(tree.drafts_above if self.depth else [[-1]])
        self.depths, self.parents = table(tree.depth), table(tree.parents)
        above = torch.zeros(rows, rows, dtype=torch.uint8)
        for row, path in enumerate(tree.root_paths):
            above[row, list(path)] = 1
        self.ancestors = above.to(device)
        every = self.requests * rows
        self.groups = empty(every, groups)
        self.unions = empty(every, groups // self.together)
        self.chosen = torch.zeros(every, CHOSEN, dtype=torch.int32, device=device)
        self.values = empty(every, FOUND, dtype=torch.float32)
        self.ids = empty(every, FOUND)
        self.fallback = empty(every)
        self.first = 4 + -(-(self.depth + 2) // 4) * 4
        words = self.first + rows
        self.results = torch.zeros(self.requests, words, dtype=torch.int32, device=device)
        self.result = self.results[0] if seats is None else self.results
        self.path = Path(
            self.result[..., 4 : 4 + self.depth + 2],
            self.result[:1] if seats is None else self.result[:, 0],
        )
        self.sampled = self.result[..., self.first :]

    def sample(
        self,
        logits: Tensor,
        block: SamplingBlock,
        counts: Tensor,
        prompt_seen: Tensor,
        tokens: Tensor,
        length: Tensor,
    ) -> Tensor:
        """The token each row would emit, int32 [rows], or [requests, rows] with seats:
        sampling.sample_rows bit for bit.

        logits [rows or more, vocab] in any float type; counts int32 [vocab] and prompt_seen bool
        [vocab] as in TokenHistory; tokens int32 [rows], drafts; length integer [1], materialised
        tokens: row i samples for position length + 1 + depth. Rows that the device cannot sample
        (top_k 0 or above MAX_TOP_K, too many ties at the boundary, values that are not finite
        at the top) hold a valid id and are marked in `fallback`.
        """
        rows = len(self.tree)
        shape = dict(TILES=self.tiles, TOGETHER=self.together, enable_fp_fusion=False)
        seen = prompt_seen.view(torch.uint8)
        common = (block.words, counts, seen, self.paths, tokens)
        size = (self.vocab, self.live, logits.stride(0), self.parts, self.depth)
        kernels.scan_kernel[(self.parts, rows, self.requests)](
            logits,
            self.groups,
            self.unions,
            *common,
            self.seats,
            self.padded,
            *size,
            **shape,
            PATHS=MAX_ROWS,
            **_options(self.early, SCAN_WARPS),
        )
        kernels.draw_kernel[(rows, self.requests)](
            logits,
            self.groups,
            self.unions,
            *common,
            self.depths,
            length,
            self.chosen,
            self.values,
            self.ids,
            self.sampled,
            self.fallback,
            self.seats,
            self.padded,
            self.results.stride(0),
            *size,
            **shape,
            GROUPS=_padded(self.groups.shape[1]),
            UNIONS=_padded(self.unions.shape[1]),
            CHOSEN=CHOSEN,
            FOUND=FOUND,
            BATCH=min(CHOSEN, max(1, BATCH // self.tiles)),
            BLOCK=32,
            **_options(self.early, DRAW_WARPS),
        )
        return self.sampled

    def walk(self, tokens: Tensor, active: Tensor, counts: Tensor) -> None:
        """sampling.accept_walk over `sampled`; fills `result` and counts what is emitted.

        tokens int32 [rows], active uint8 [rows]; counts int32 [vocab] takes the path's drafts
        and the pending token.
        """
        rows = len(self.tree)
        walk_kernel[(self.requests,)](
            self.parents,
            self.depths,
            self.ancestors,
            tokens,
            active,
            self.sampled,
            self.fallback,
            counts,
            self.result,
            self.seats,
            self.padded,
            self.results.stride(0),
            self.vocab,
            rows,
            self.depth + 2,
            ROWS=_padded(rows),
            LENGTH=_padded(self.depth + 2),
            **_options(self.early, 4 if rows <= 64 else 16),
        )

    def take(
        self, hidden: Tensor, tokens: Tensor, hidden_to: Tensor, tokens_to: Tensor, count: Tensor
    ) -> None:
        """What the draft head refills from: hidden rows of the path and the tokens after them.

        hidden [rows or more, width], tokens int32 [rows] -> hidden_to [height + 1 or more, width],
        tokens_to int32 [height + 1 or more] (the pending token after the last row), count
        int32 [1]. Entries past the count are those of row 0. All contiguous.
        """
        width = hidden.shape[1]
        take_kernel[(-(-width // TAKE_BLOCK), self.depth + 1, self.requests)](
            self.result,
            hidden,
            tokens,
            hidden_to,
            tokens_to,
            count,
            self.seats,
            self.padded,
            self.results.stride(0),
            tokens_to.shape[-1],
            width,
            BLOCK=TAKE_BLOCK,
            **_options(self.early, 4),
        )

    def set(self, path: Sequence[int], pending: int, request: int = 0) -> None:
        """Puts a path of the host's choice in place of what was selected."""
        words = torch.zeros(self.results.shape[1], dtype=torch.int32)
        words[0], words[1] = len(path), pending
        words[4 : 4 + len(path)] = torch.tensor(path, dtype=torch.int32)
        self.results[request].copy_(words)

    def outcome(self, result: Tensor | None = None) -> Outcome:
        """A request's result on the host; waits for the device unless given a copy of it."""
        values = (self.results[0] if result is None else result).tolist()
        count, pending, flag = values[:3]
        path = tuple(values[4 : 4 + count])
        return Outcome(path, pending, bool(flag), tuple(values[self.first :]))

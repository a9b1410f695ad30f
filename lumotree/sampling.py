"""From target logits to tokens: penalties, filters, position-keyed noise, the acceptance walk.

Every filter is a threshold on logit values, so a boundary tie is kept or dropped as a whole and
no result depends on a sort order. Sums of probabilities are sums of integers, which no
reduction order can change, so a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lumotree.request import SamplingParams

# Candidates fetched beyond top_k, so that ties with the k-th value are seen without a dense pass.
_TIE_SLACK = 8
# Probabilities relative to the most likely token are rounded to multiples of 2^-34. As integers
# in float64 their sums are exact, whatever the order, up to 2^19 tokens.
_PROBABILITY_UNIT = 2.0**34

_MASK64 = 2**64 - 1


class TokenHistory:
    """Which tokens a request has seen: what the penalties need, kept up to date in O(new tokens).

    generated: int32 [V], how often each token was generated, the pending token included.
    prompt_seen: bool [V], whether the prompt holds it.
    """

    def __init__(self, vocab_size: int, prompt_ids: Sequence[int], device: torch.device | str):
        self.generated = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self.prompt_seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        if prompt_ids:
            self.prompt_seen[torch.tensor(prompt_ids, device=device)] = True

    @classmethod
    def over(cls, generated: Tensor, prompt_seen: Tensor) -> TokenHistory:
        """A history kept in buffers that are there, as they are."""
        history = cls.__new__(cls)
        history.generated, history.prompt_seen = generated, prompt_seen
        return history

    def copy_(self, other: TokenHistory) -> None:
        self.generated.copy_(other.generated)
        self.prompt_seen.copy_(other.prompt_seen)

    def add(self, token_ids: Sequence[int]) -> None:
        """Counts newly emitted tokens."""
        if token_ids:
            ids = torch.tensor(token_ids, dtype=torch.int64, device=self.generated.device)
            ones = torch.ones(len(token_ids), dtype=torch.int32, device=ids.device)
            self.generated.scatter_add_(0, ids, ones)


def path_counts(history: TokenHistory, paths: Tensor) -> Tensor:
    """Generated-token counts as each row sees them: int32 [n, V].

    paths: int64 [n, D], the draft tokens on row i's own root path below the root, row i's token
    last, padded with -1. Tokens of other branches never count. The root is the pending token,
    which the history already holds.
    """
    counts = history.generated.repeat(len(paths), 1)
    return counts.scatter_add_(1, paths.clamp(min=0), (paths >= 0).int())


def process_logits(
    logits: Tensor, params: SamplingParams, counts: Tensor, prompt_seen: Tensor
) -> Tensor:
    """Penalties, temperature, top-k, top-p, min-p in this order; dropped tokens become -inf.

    logits [n, V] in float64, float32 or a narrower type, kept as they are; the result is [n, V]
    in float64 or else float32. counts: int32 [n, V]; prompt_seen: bool [V].
    At temperature 0 only the penalties apply (without any, the result may be `logits` itself),
    and the caller takes the argmax.
    """
    penalised = _penalise(_widen(logits), counts, prompt_seen, params)
    if params.greedy:
        return penalised
    scaled = penalised * (1.0 / params.temperature)
    return scaled.masked_fill_(scaled < _dense_cut(scaled, params), -math.inf)


def sample_rows(
    logits: Tensor,
    params: SamplingParams,
    history: TokenHistory,
    paths: Tensor,
    positions: Tensor,
) -> Tensor:
    """The token each row would emit: int64 [n]. Ties go to the lowest id.

    logits [n, V] as in `process_logits`, paths int64 [n, D] as in `path_counts`; positions
    int64 [n] are the absolute positions of the tokens being sampled (the row's own plus one).
    Gumbel-max over the processed row: a draw depends on seed, position and row, on nothing else.
    """
    penalised = _penalise_rows(_widen(logits), params, history, paths)
    if params.greedy:
        return penalised.argmax(-1)
    scaled = penalised * (1.0 / params.temperature)
    vocab = scaled.shape[1]
    if params.top_k:
        k = min(params.top_k, vocab)
        values, ids = scaled.topk(min(k + _TIE_SLACK, vocab))
        kth = values[:, k - 1 : k]
        ties_may_be_missing = bool((values[:, -1:] == kth).any())
        if not ties_may_be_missing:
            values.masked_fill_(values < _cut(values, params, kth), -math.inf)
            return _perturbed_argmax(values, ids, params.seed, positions)
    scaled.masked_fill_(scaled < _dense_cut(scaled, params), -math.inf)
    ids = torch.arange(vocab, device=scaled.device).expand_as(scaled)
    return _perturbed_argmax(scaled, ids, params.seed, positions)


def gumbel_noise(
    seed: int, positions: Tensor, tokens: int | Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Standard Gumbel noise that is a pure function of (seed, position, token id).

    positions: int64 [n]. tokens: the vocabulary size, giving [n, V], or ids int64 [n, k],
    giving [n, k]. No generator state exists, so order, batch and device do not matter.

    The seed is hashed to a 64-bit start; position and token id advance it by two odd constants
    (SplitMix64 along the token ids: Steele, Lea, Flood 2014), and every point of that lattice
    goes through the SplitMix64 finaliser (Stafford's mix 13), a bijection. The top
    52 bits give u = (bits + 1/2) / 2^52, exact and strictly inside (0, 1). The integers agree
    everywhere. -log(-log u) is taken in float64, where log is within one unit in the last
    place on CPU and CUDA alike, and rounded to float32, which hides that unit: about one value
    in 10^9 may differ (none did in 10^9 compared); float64 noise may, in its last bits.
    """
    if isinstance(tokens, int):
        tokens = torch.arange(tokens, device=positions.device)[None]
    keys = (positions * _POSITION_STEP).add_(seed_start(seed))
    bits = _mix64_(tokens * _signed(_TOKEN_STEP) + keys[:, None])
    # The arithmetic shift gives [-2^51, 2^51); every step up to the logarithm is exact.
    u = (bits >> 12).double().add_(2.0**51 + 0.5).mul_(2.0**-52)
    return u.log_().neg_().log_().neg_().to(dtype)


def seed_start(seed: int) -> int:
    """The hashed seed, an int64: where the noise of `gumbel_noise` starts."""
    return _signed(_mix64_int(seed * _TOKEN_STEP))


def accept_walk(
    children: Sequence[Sequence[int]],
    tokens: Sequence[int],
    active: Sequence[bool],
    sampled: Sequence[int],
) -> tuple[list[int], int]:
    """Follows the target's own samples down the tree from row 0.

    children[i]: rows below row i; tokens[i], active[i]: row i's draft token and whether a
    drafter filled it; sampled[i]: the target's sample at row i. Inactive rows carry no token.
    Returns the accepted rows, starting with 0, and the next pending token: the first sample
    that no active child carries. Exact when candidates do not depend on the noise.
    """
    row, path = 0, [0]
    while True:
        token = sampled[row]
        for child in children[row]:
            if active[child] and tokens[child] == token:
                row = child
                path.append(row)
                break
        else:
            return path, token


def _widen(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _penalise(x: Tensor, counts: Tensor, prompt_seen: Tensor, params: SamplingParams) -> Tensor:
    """Elementwise; counts and prompt_seen broadcast to the shape of x, which is kept."""
    if params.repetition_penalty != 1:
        seen = prompt_seen | (counts > 0)
        penalty = params.repetition_penalty
        # Factors of a tensor's own precision: two Python numbers make a float32 tensor.
        lowered = torch.where(x > 0, x * (1.0 / penalty), x * penalty)
        x = torch.where(seen, lowered, x)
    # Products are rounded before they are subtracted: a fused multiply-add would make the
    # bits depend on which vector lane an element falls into.
    if params.frequency_penalty != 0:
        x = x - counts.to(x.dtype).mul_(params.frequency_penalty)
    if params.presence_penalty != 0:
        x = x - (counts > 0).to(x.dtype).mul_(params.presence_penalty)
    return x


def _penalise_rows(
    x: Tensor, params: SamplingParams, history: TokenHistory, paths: Tensor
) -> Tensor:
    """`_penalise` with `path_counts`, without building [n, V] counts: the rows share the
    history, and only the tokens on a row's own path are done again with that row's counts."""
    additive = params.presence_penalty != 0 or params.frequency_penalty != 0
    if not additive and params.repetition_penalty == 1:
        return x
    shared = _penalise(x, history.generated, history.prompt_seen, params)
    if paths.shape[1] == 0:
        return shared
    # Padding stands for token 0, whose own count is right below, so that writing it is harmless.
    safe = paths.clamp(min=0)
    counts = (paths.unsqueeze(2) == safe.unsqueeze(1)).sum(1, dtype=torch.int32)
    counts.add_(history.generated.take(safe))
    own = _penalise(x.gather(1, safe), counts, history.prompt_seen.take(safe), params)
    return shared.scatter_(1, safe, own)


def _dense_cut(scaled: Tensor, params: SamplingParams) -> Tensor:
    """The smallest value that survives all filters in each row of [n, V] logits: [n, 1]."""
    if params.top_k:
        k = min(params.top_k, scaled.shape[1])
        values = scaled.topk(k).values
        kth = values[:, -1:]
        surplus = (scaled >= kth).sum(-1, keepdim=True) - k
        return _cut(values, params, kth, surplus)
    if params.top_p < 1:
        values = scaled.sort(dim=-1, descending=True).values
    else:
        values = scaled.amax(-1, keepdim=True)
    return _cut(values, params, torch.full_like(values[:, :1], -math.inf))


def _cut(
    values: Tensor, params: SamplingParams, floor: Tensor, surplus: Tensor | None = None
) -> Tensor:
    """The smallest value that top-p and min-p keep, [n, 1], given the cut so far, floor [n, 1].

    values: [n, m], descending, may reach below the floor. surplus: int64 [n, 1], how many more
    tokens, absent from `values`, share its last value.
    """
    cut, top = floor, values[:, :1]
    if params.top_p < 1:
        mass = (values - top).double().exp_().mul_(_PROBABILITY_UNIT).round_()
        mass.masked_fill_(values < floor, 0)
        total = mass.sum(-1, keepdim=True)
        if surplus is not None:
            total = total + surplus * mass[:, -1:]
        more_likely = mass.cumsum(-1).sub_(mass)
        dropped = more_likely >= total * params.top_p
        # Below the floor, `more_likely` is the total: what the floor dropped stays dropped.
        cut = values.masked_fill(dropped, math.inf).amin(-1, keepdim=True)
    if params.min_p > 0:
        cut = torch.maximum(cut, top + math.log(params.min_p))
    return cut


def _perturbed_argmax(values: Tensor, ids: Tensor, seed: int, positions: Tensor) -> Tensor:
    """argmax over values + noise, [n, k], as token ids; the lowest id among equal scores."""
    scores = values + gumbel_noise(seed, positions, ids, values.dtype)
    best = scores.amax(-1, keepdim=True)
    # "Not below the best" also holds in a row of NaN, which must still yield a valid id.
    return ids.masked_fill(scores < best, torch.iinfo(torch.int64).max).amin(-1)


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch's wrapping arithmetic uses."""
    value &= _MASK64
    return value - 2**64 if value >> 63 else value


_TOKEN_STEP = 0x9E3779B97F4A7C15
_POSITION_STEP = _signed(0xD1B54A32D192ED03)
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _mix64_int(value: int) -> int:
    """Stafford's mix 13 on one Python integer."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK64
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK64
    return value ^ (value >> 31)


def _mix64_(x: Tensor) -> Tensor:
    """The same on int64, in place. Shifts are arithmetic, so the sign copies are masked off."""
    x.bitwise_xor_((x >> 30).bitwise_and_(2**34 - 1)).mul_(_signed(_MIX_1))
    x.bitwise_xor_((x >> 27).bitwise_and_(2**37 - 1)).mul_(_signed(_MIX_2))
    return x.bitwise_xor_((x >> 31).bitwise_and_(2**33 - 1))

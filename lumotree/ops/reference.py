"""Plain torch definition of every operation, float32 and bfloat16, CPU and CUDA.

Rows are independent, as far as the start-up probe finds it so on this machine: the bits of a
row's result depend neither on its neighbours nor on the row count. Where that needs care (which
matrix product, which summation order), a comment says how. Recurrences and attention run in
float32 whatever the model dtype.
Arithmetic: Qwen3.5 as published (RMSNorm with 1 + w, gated attention, gated delta rule of
Yang et al. 2024, arXiv 2412.06464).
"""

from __future__ import annotations

from functools import lru_cache, reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lumotree.ops.eight_bits import Scaled
from lumotree.tree import MAX_ROWS

# Prefix keys are summed in blocks of this many absolute positions. One BLAS call sums a block
# as a single chain from its first key to its last, so zero weights between keys change no bit.
# The last block and a tree's own keys (at most 128) share a chain, which MKL holds to 384 terms
# with AVX-512 and to 192 without.
_WIDE_VECTORS = torch.backends.cpu.get_cpu_capability() == "AVX512"
KEY_BLOCK = 256 if _WIDE_VECTORS else 64
# Score products with fewer queries go to other BLAS kernels: pad to this many.
MIN_QUERIES = 1 if _WIDE_VECTORS else 16
# Products with fewer keys go to other BLAS kernels, which sum in another order: pad to this many.
MIN_KEYS = 16
# Intra-chunk length of the chunked delta rule, as in its reference implementations.
DELTA_CHUNK = 64

# Cosine and sine of each row's position, [n, 1, head_dim] each.
RopeAngles = tuple[Tensor, Tensor]


def pack(weight: Tensor) -> Tensor:
    """[out, in] weight -> the [in, out] right-hand side of `linear`.

    On CPU a contiguous copy: BLAS then uses one summation order for every row count above one.
    On CUDA a view: cuBLAS wants the reduction dimension contiguous.
    """
    return weight.t() if weight.is_cuda else weight.t().contiguous()


def first(packed: Tensor, outputs: int) -> Tensor:
    """The first outputs of a packed weight alone, sharing its memory."""
    return packed[:, :outputs]


def narrow_weight(packed: Tensor) -> Tensor:
    """A packed weight as its 8-bit form would have it, in the dtype it had; see eight_bits."""
    return pack(Scaled.of(packed.t()).wide(packed.dtype))


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """[n, d] -> [rows, d], padding rows zero: row counts at which products have equal bits."""
    n, width = x.shape
    return x if n == rows else torch.cat((x, _zeros(rows - n, width, x.dtype, x.device)))


@lru_cache(maxsize=256)
def _zeros(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(rows, width, dtype=dtype, device=device)


def wide(x: Tensor) -> Tensor:
    """x in float32. A cast that changes nothing still costs a dispatch, so it is left out."""
    return x if x.dtype == torch.float32 else x.float()


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def linear(x: Tensor, packed: Tensor) -> Tensor:
    """[n, in] @ [in, out] in the model dtype."""
    return torch.mm(x, packed)


def linear_add(residual: Tensor, x: Tensor, packed: Tensor) -> Tensor:
    """residual + x @ packed; one rounding to the model dtype, of the sum."""
    return torch.addmm(residual, x, packed)


class Norm(NamedTuple):
    """An RMSNorm over d dims: scale float32 [..., d], sqrt(d) times the weight; eps [1], d eps.

    x / sqrt(mean x^2 + eps) * w = sqrt(d) w x / sqrt(sum x^2 + d eps).
    """

    scale: Tensor
    eps: Tensor

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> Norm:
        d = weight.shape[-1]
        return cls(weight.float() * d**0.5, weight.new_full((1,), d * eps, dtype=torch.float32))


def inverse_norm(x: Tensor, eps: Tensor) -> Tensor:
    """1 / sqrt(sum x^2 + eps) over the last dim, kept; x float32, eps float32 [1]."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(eps, norm, norm).rsqrt_()


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """RMSNorm in float32 over the last dim, result in x's dtype."""
    x32 = wide(x)
    return narrow((x32 * inverse_norm(x32, norm.eps)).mul_(norm.scale), x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, norm: Norm) -> Tensor:
    """GDN output norm per value head: normalise, times weight, times silu(gate) in float32.

    x float32 [n, heads, dv], gate [n, heads, dv] in the model dtype, which the result takes.
    """
    normed = (x * inverse_norm(x, norm.eps)).mul_(norm.scale)
    return narrow(normed.mul_(F.silu(wide(gate))), gate.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """[n, 2 f] -> silu(first half) * second half, [n, f]."""
    width = gate_up.shape[1] // 2
    return F.silu(gate_up[:, :width]).mul_(gate_up[:, width:])


def linear_swiglu(x: Tensor, packed: Tensor) -> Tensor:
    """`swiglu` of x [n, in] @ packed [in, 2 f]: [n, f]."""
    return swiglu(linear(x, packed))


def linear_add_norm(
    residual: Tensor, x: Tensor, packed: Tensor, norm: Norm
) -> tuple[Tensor, Tensor]:
    """The residual stream plus x @ packed, [n, out], and its RMSNorm."""
    total = linear_add(residual, x, packed)
    return total, rms_norm(total, norm)


def rope_table(
    positions: int,
    head_dim: int,
    rotary_dim: int,
    theta: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """[positions, 2, head_dim]: what each dim of a head is multiplied by in `rope`.

    Row 0 is the cosine of position * theta^(-2 i / rotary_dim), 1 past the rotary dims; row 1
    the sine, negative in the first half, 0 past the rotary dims. Computed in float32, rounded
    to the model dtype, as the published model does.
    """
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float, device=device) / rotary_dim
    inverse = 1.0 / (theta**exponent)
    angle = torch.arange(positions, dtype=torch.float, device=device)[:, None] * inverse
    cos, sin = angle.cos(), angle.sin()
    rest = angle.new_zeros(positions, head_dim - rotary_dim)
    rows = (torch.cat((cos, cos, rest + 1), 1), torch.cat((-sin, sin, rest), 1))
    return torch.stack(rows, 1).to(dtype)


def rope_partner(head_dim: int, rotary_dim: int, device: torch.device) -> Tensor:
    """int64 [head_dim]: the dim each rotary dim is mixed with (halves swapped, NeoX)."""
    half = rotary_dim // 2
    dims = torch.arange(head_dim, device=device)
    return torch.cat((dims[half:rotary_dim], dims[:half], dims[rotary_dim:]))


def rope_angles(rows: Tensor) -> RopeAngles:
    """Rows of `rope_table`, [n, 2, head_dim], as `rope` wants them."""
    return tuple(rows[:, :, None].unbind(1))


def rope(x: Tensor, angles: RopeAngles, partner: Tensor) -> Tensor:
    """Rotates the first dims of each head: x [n, heads, d]."""
    cos, sin = angles
    return torch.addcmul(x * cos, x.index_select(-1, partner), sin)


def conv_taps(taps: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution of gathered inputs, then SiLU.

    taps [n, width, channels], oldest first; weight float32 [width, channels]. The few taps of
    a channel are added in order, oldest first, in float32, whatever the row count.
    """
    return F.silu(narrow((wide(taps) * weight).sum(1), taps.dtype))


class DeltaGates:
    """Log decay g = -exp(A_log) softplus(a + dt_bias) and rate beta = sigmoid(b) of a GDN layer.

    Spelled with exp and log1p: on CPU, softplus and sigmoid give other bits in the last few
    elements of a tensor, which would make them depend on the row count. Constants are tensors
    because a Python scalar costs more than the sum it goes into.
    """

    def __init__(self, a_log: Tensor, dt_bias: Tensor) -> None:
        self.heads = a_log.numel()
        self.a_neg = -a_log.float().exp()
        self.bias = torch.cat((torch.zeros_like(self.a_neg), dt_bias.float()))
        self.sign = torch.cat((-torch.ones_like(self.a_neg), torch.ones_like(self.a_neg)))
        self.one = self.a_neg.new_ones(1)
        # Beyond this softplus(x) is x in float32, and exp(x) soon overflows.
        self.linear_from = self.a_neg.new_full((1,), 20.0)

    def __call__(self, b_a: Tensor) -> tuple[Tensor, Tensor]:
        """[n, 2 heads], b then a -> (g, beta), float32 [n, heads] each.

        beta is rounded to the model dtype first, as the published model does.
        """
        signed = torch.addcmul(self.bias, wide(b_a), self.sign)
        grown = signed.exp()
        beta = (grown[:, : self.heads] + self.one).reciprocal_()
        step = signed[:, self.heads :]
        soft = torch.where(step > self.linear_from, step, grown[:, self.heads :].log1p())
        return soft.mul_(self.a_neg), wide(narrow(beta, b_a.dtype))


def delta_hold(state: Tensor, query_key: Tensor, decay: Tensor) -> Tensor:
    """What the decayed state holds for one token: decay S^T [q, k], [B, 2, dv].

    state [B, dk, dv], query_key [B, 2, dk], decay [B, 1, 1]. Query and key share one product
    of two rows: with one row BLAS sums differently.
    """
    return torch.bmm(query_key, state).mul_(decay)


def delta_read(held: Tensor, overlap: Tensor, written: Tensor) -> Tensor:
    """o = decay S^T q + (q . k) d, [B, dv], which is (decay S + k d^T)^T q; overlap is q . k."""
    return torch.addcmul(held[:, 0], overlap, written)


def delta_value(held: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """d = beta (v - decay S^T k), [B, dv]: what the token writes; beta [B, 1]."""
    return (v - held[:, 1]).mul_(beta)


def delta_write(
    state: Tensor, query_key: Tensor, written: Tensor, decay: Tensor, out: Tensor
) -> Tensor:
    """out = decay S + k d^T, [B, dk, dv]; `out` may be `state`."""
    torch.mul(state, decay, out=out)
    return out.addcmul_(query_key[:, 1, :, None], written[:, None, :])


def delta_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Gated delta rule over a run of tokens, in chunks; `state` is advanced in place.

    q, k [heads, T, dk], v [heads, T, dv], g (log decay) and beta [heads, T], state
    [heads, dk, dv], all float32; returns [heads, T, dv]. The chunk form (a unit lower
    triangular system per chunk) is that of arXiv 2412.06464.
    """
    heads, length, dk = k.shape
    pad = -length % DELTA_CHUNK
    if pad:  # rows of beta 0 and decay 1 leave the state alone
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
        g, beta = F.pad(g, (0, pad)), F.pad(beta, (0, pad))
    shape = (heads, -1, DELTA_CHUNK)
    q, k, v = (x.reshape(*shape, x.shape[-1]) for x in (q, k, v))
    fall = g.reshape(shape).cumsum(-1)
    rate = beta.reshape(shape)[..., None]
    between = (fall[..., :, None] - fall[..., None, :]).tril().exp().tril()
    system = (k * rate) @ k.transpose(-1, -2) * between
    local = q @ k.transpose(-1, -2) * between
    sides = torch.cat((v * rate, k * rate * fall.exp()[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    own, read = solved.split((v.shape[-1], dk), dim=-1)
    q_in = q * fall.exp()[..., None]
    k_out = (k * (fall[..., -1:] - fall).exp()[..., None]).transpose(-1, -2)
    keep = fall[..., -1].exp()[..., None, None]
    out = torch.empty_like(own)
    for i in range(own.shape[1]):
        fresh = own[:, i] - read[:, i] @ state
        out[:, i] = q_in[:, i] @ state + local[:, i] @ fresh
        state.mul_(keep[:, i]).add_(k_out[:, i] @ fresh)
    return out.reshape(heads, -1, v.shape[-1])[:, :length]


def tree_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    prefix: int,
    hidden: Tensor | None,
    later: Tensor | None,
    first: int = 0,
) -> Tensor:
    """Attention of tree rows over the prefix and their own root paths.

    q [n, heads, d] already scaled; keys, values float32 [kv_heads, prefix + slots, d], tree
    keys in slot order after the prefix; hidden bool [n * group, slots]: keys a query must not
    see, None when all see all; later bool [blocks, slots]: keys whose position lies in each key
    block after the one that holds position `prefix`, None when none does; keys before `first`
    are seen by nobody. Returns [n, heads, d] float32.

    A key's weight is summed within the block of its absolute position, ancestors before
    descendants, blocks in order. So a row's sum is the one that decoding its path token by
    token gives, bit for bit; keys of other branches enter as exact zeros.
    """
    n, heads, d = q.shape
    kv_heads, length, _ = keys.shape
    m = n * heads // kv_heads
    if kv_heads > 1:
        q = q.reshape(n, kv_heads, -1, d).transpose(0, 1)
    queries = q.reshape(kv_heads, m, d).transpose(1, 2)
    some = F.pad(keys, (0, 0, 0, MIN_KEYS - length)) if length < MIN_KEYS else keys
    if m < MIN_QUERIES:
        queries = F.pad(queries, (0, MIN_QUERIES - m))
    scores = torch.bmm(some, queries)[:, :length, :m].transpose(1, 2).contiguous()
    if hidden is not None:
        scores[..., prefix:].masked_fill_(hidden, float("-inf"))
    if first:
        scores[..., :first].fill_(float("-inf"))
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    start = prefix // KEY_BLOCK * KEY_BLOCK
    tail, tail_values = weights[..., start:], values[:, start:]
    parts = []
    if start:
        blocks = weights[..., :start].view(kv_heads, m, -1, KEY_BLOCK).transpose(1, 2)
        block_values = values[:, :start].view(kv_heads, -1, KEY_BLOCK, d)
        # One product per head: a batched one would first copy the whole cache to make it regular.
        heads_parts = [_weighted(w, v) for w, v in zip(blocks, block_values, strict=True)]
        sums, masses = (torch.stack(side, dim=1) for side in zip(*heads_parts, strict=True))
        parts += zip(sums, masses, strict=True)
    tails = [tail]
    if later is not None:
        here = F.pad(later, (prefix - start, 0))
        tails = [tail * mask for mask in (~here.any(0), *here)]
    parts += [_weighted(part, tail_values) for part in tails]
    total, mass = (reduce(torch.add, side) for side in zip(*parts, strict=True))
    out = total / mass
    if kv_heads > 1:
        out = out.view(kv_heads, n, -1, d).transpose(0, 1)
    return out.reshape(n, heads, d)


def _weighted(weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(weights @ values, sum of weights), both summed by the same kind of chain.

    weights [b, m, keys], values [b, keys, d]; returns [b, m, d] and [b, m, 1].
    """
    missing = MIN_KEYS - weights.shape[-1]
    if missing > 0:
        weights, values = F.pad(weights, (0, missing)), F.pad(values, (0, 0, 0, missing))
    b, _, keys = weights.shape
    ones = _ones(values.device)[:keys].expand(b, keys, 8)
    return torch.bmm(weights, values), torch.bmm(weights, ones)[..., :1]


@lru_cache(maxsize=8)
def _ones(device: torch.device) -> Tensor:
    """float32 [keys, 8]: as many keys as one product of `_weighted` can have."""
    return torch.ones(KEY_BLOCK + MAX_ROWS, 8, device=device)


def prefill_attention(
    q: Tensor, keys: Tensor, values: Tensor, start: int, first: int = 0
) -> Tensor:
    """Causal attention of positions start .. start + n - 1 over keys 0 .. start + n - 1.

    q [n, heads, d] already scaled, keys and values float32 [kv_heads, start + n, d];
    keys before `first` are not seen (except by rows that see nothing else).
    """
    n = q.shape[0]
    column = torch.arange(start + n, device=q.device)
    row = column[start:, None]
    seen = (column <= row) & ((column >= first) | (row < first))
    group = q.shape[1] // keys.shape[0]
    keys, values = (x.repeat_interleave(group, 0)[None] for x in (keys, values))
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys, values, attn_mask=seen, scale=1.0
    )
    return out[0].transpose(0, 1)


def top_candidates(logits: Tensor, k: int = 3) -> tuple[list[int], list[list[int]]]:
    """Per row of [n, V]: the argmax (lowest id wins ties) and the k best ids in top-k order."""
    return logits.argmax(-1).tolist(), logits.topk(k, dim=-1).indices.tolist()

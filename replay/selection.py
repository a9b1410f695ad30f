"""The protocol's choice of n requests out of N: proportional, evenly spaced, deterministic."""

from __future__ import annotations

from collections.abc import Sequence

from replay.corpus import CorpusRequest


def select(requests: Sequence[CorpusRequest], n: int | None) -> tuple[CorpusRequest, ...]:
    """`n` requests in capture order; all of them when `n` is None or no fewer than there are.

    Each conversation gets a share in proportion to its requests (requests without one count
    as one conversation), and gives requests evenly spaced over its own capture order.
    """
    if n is None or n >= len(requests):
        return tuple(requests)
    members: dict[str | None, list[int]] = {}
    for index, request in enumerate(requests):
        members.setdefault(request.conversation, []).append(index)
    shares = largest_remainder([len(group) for group in members.values()], n)
    chosen = [
        group[offset]
        for group, share in zip(members.values(), shares, strict=True)
        for offset in evenly_spaced(len(group), share)
    ]
    return tuple(requests[index] for index in sorted(chosen))


def largest_remainder(sizes: Sequence[int], n: int) -> list[int]:
    """Shares of `n` in proportion to `sizes`; what is left goes to the largest remainders.

    Equal remainders go to the earlier group. Needs 0 <= n <= sum(sizes); then no share is
    larger than its size, and the shares sum to `n`.
    """
    total = sum(sizes)
    shares = [n * size // total for size in sizes]
    order = sorted(range(len(sizes)), key=lambda i: (-(n * sizes[i] % total), i))
    for i in order[: n - sum(shares)]:
        shares[i] += 1
    return shares


def evenly_spaced(size: int, k: int) -> list[int]:
    """`k` distinct positions of 0..size-1 from first to last; a single one is the middle."""
    if k <= 1:
        return [(size - 1) // 2][:k]
    gaps = k - 1
    return [(j * (size - 1) + gaps // 2) // gaps for j in range(k)]

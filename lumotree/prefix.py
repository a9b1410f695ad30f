"""Prefix store: states at the ends of prompts and turns, found again by token ids.

A trie whose edges are whole prefill chunks of token ids. A node keeps the attention keys and
values of its chunk (and the draft head's); a node where a prompt was saved also keeps the
surfaces that exist at one position only: recurrent state, convolution history, pending hidden
rows. Prompts that share a beginning share its nodes.

Positions are multiples of the prefill chunk, so that what is computed after a restored prefix
has the bits of a prompt computed afresh. Hits are exact: the token ids themselves are the keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lumotree.state import HybridState, KVCache

DEFAULT_BUDGET_BYTES = 1 << 30


@dataclass(frozen=True)
class Point:
    """The surfaces of one position: what no other position's can be made from."""

    recurrent: Tensor
    conv: Tensor
    mtp_hidden: Tensor

    @classmethod
    def of(cls, state: HybridState) -> Point:
        return cls(state.recurrent.clone(), state.conv.clone(), state.mtp_hidden.clone())

    @property
    def nbytes(self) -> int:
        return sum(map(_nbytes, (self.recurrent, self.conv, self.mtp_hidden)))


@dataclass(eq=False)
class Node:
    """One chunk of a prefix. `caches` hold its keys and values of all layers; the root has none."""

    parent: Node | None
    tokens: tuple[int, ...]
    caches: tuple[KVCache, ...] = ()
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    point: Point | None = None

    @property
    def cache_bytes(self) -> int:
        return sum(_nbytes(side) for cache in self.caches for side in (cache.keys, cache.values))


@dataclass
class PrefixCounts:
    """What the store has done since it was made."""

    queries: int = 0
    hits: int = 0
    saved: int = 0
    evicted: int = 0


class PrefixStore:
    """Saved prefixes by scope (a conversation, or everything a server sees), within a budget.

    The least recently used point goes first, and with it the chunks that no other point needs.
    """

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self.budget = budget_bytes
        self._roots: dict[str, Node] = {}
        # Nodes with a point, least recently used first, and the scope they belong to.
        self._points: OrderedDict[Node, str] = OrderedDict()
        self.nbytes = 0
        self.counts = PrefixCounts()

    def __len__(self) -> int:
        """Number of saved positions."""
        return len(self._points)

    def clear(self) -> None:
        """Forgets everything but the counts."""
        self._roots.clear()
        self._points.clear()
        self.nbytes = 0

    def restore(
        self, scope: str | None, prompt_ids: Sequence[int], state: HybridState, chunk: int
    ) -> int:
        """Sets `state` to the longest saved proper prefix of the prompt; returns its length.

        0, with a state that was reset, when there is none, or without a scope.
        """
        state.reset()
        if scope is None:
            return 0
        self.counts.queries += 1
        path = self._path(scope, prompt_ids[:-1], chunk)
        while path and path[-1].point is None:
            path.pop()
        if not path:
            return 0
        if len(path[0].caches) != len(_caches(state)):
            raise ValueError("saved prefix and state differ in having a draft head")
        for index, node in enumerate(path):
            start, stop = index * chunk, (index + 1) * chunk
            for cache, saved in zip(_caches(state), node.caches, strict=True):
                cache.keys[:, :, start:stop] = saved.keys
                cache.values[:, :, start:stop] = saved.values
        point = path[-1].point
        state.recurrent.copy_(point.recurrent)
        state.conv.copy_(point.conv)
        state.mtp_hidden = point.mtp_hidden.clone()
        state.length = len(path) * chunk
        self._points.move_to_end(path[-1])
        self.counts.hits += 1
        return state.length

    def save(self, scope: str, token_ids: Sequence[int], state: HybridState, chunk: int) -> bool:
        """Keeps `state`, which has materialised exactly `token_ids`; False when it does not fit.

        Raises ValueError for a state of another length or one between chunks.
        """
        if len(token_ids) != state.length or state.length % chunk or not state.length:
            raise ValueError(f"a state of {state.length} tokens cannot be kept at a chunk's end")
        if self.budget == 0:
            return False
        node = root = self._roots.get(scope) or Node(None, ())
        made: list[Node] = []
        # Everything is copied before anything is counted: memory may end at any copy.
        for start in range(0, state.length, chunk):
            tokens = tuple(token_ids[start : start + chunk])
            known = node.children.get(tokens)
            if known is None:
                caches = tuple(_copy(cache, start, start + chunk) for cache in _caches(state))
                known = Node(node, tokens, caches)
                made.append(known)
            node = known
        point = Point.of(state) if node.point is None else None
        self._roots[scope] = root
        for new in made:
            new.parent.children[new.tokens] = new
            self.nbytes += new.cache_bytes
        if point is not None:
            node.point = point
            self.nbytes += point.nbytes
            self.counts.saved += 1
        self._points[node] = scope
        self._points.move_to_end(node)
        while self.nbytes > self.budget:
            self._evict()
        return node in self._points

    def _path(self, scope: str, token_ids: Sequence[int], chunk: int) -> list[Node]:
        """The nodes of the longest known prefix, whole chunks only."""
        node, path = self._roots.get(scope), []
        for start in range(0, len(token_ids) - chunk + 1, chunk):
            node = node and node.children.get(tuple(token_ids[start : start + chunk]))
            if node is None:
                break
            path.append(node)
        return path

    def _evict(self) -> None:
        """Drops the least recently used point and every chunk that only it needed."""
        node, scope = self._points.popitem(last=False)
        self.nbytes -= node.point.nbytes
        node.point = None
        self.counts.evicted += 1
        while node.parent is not None and node.point is None and not node.children:
            self.nbytes -= node.cache_bytes
            del node.parent.children[node.tokens]
            node = node.parent
        if node.parent is None and not node.children:
            del self._roots[scope]


def turn_ends(token_ids: Sequence[int], ends: frozenset[int]) -> Iterator[int]:
    """Positions after each end-of-turn token of a prompt, in order."""
    return (place + 1 for place, token in enumerate(token_ids) if token in ends)


def worth_saving(token_ids: Sequence[int], ends: frozenset[int], chunk: int) -> tuple[int, ...]:
    """Where to save the state of a prompt: whole chunks before the end of its first turn (the
    instructions that conversations share), of its last whole turn, and of the prompt itself.
    """
    turns = list(turn_ends(token_ids, ends))
    places = [*turns[:1], *turns[-1:], len(token_ids) - 1]
    whole = {place // chunk * chunk for place in places if chunk <= place < len(token_ids)}
    return tuple(sorted(whole))


def _caches(state: HybridState) -> tuple[KVCache, ...]:
    return (state.kv,) if state.mtp_kv is None else (state.kv, state.mtp_kv)


def _copy(cache: KVCache, start: int, stop: int) -> KVCache:
    return KVCache(cache.keys[:, :, start:stop].clone(), cache.values[:, :, start:stop].clone())


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

"""Drafts from the request's own text: an online suffix automaton over its tokens.

Agents copy: file contents, tool output and their own edits come back word for word. The
longest suffix of the text that occurred before says where to copy from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

DRAFT_PER_MATCHED_TOKEN = 4


class SuffixMatch(NamedTuple):
    """length: matched tokens, 0 for none. tokens: the text after the match's first end.

    Where that text reaches the end of history + extra it goes on into itself, as a repeating
    text does.
    """

    length: int
    tokens: list[int]


class SuffixAutomaton:
    """All substrings of a growing token sequence (Blumer et al. 1985).

    One state stands for substrings that end at the same set of positions. Per state: the
    length of its longest member, the link to the state of the longest proper suffix that has
    more ends, the first end (an index into the history), and the transitions by token.
    Building costs amortised constant time per token; memory is linear in the history.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._history: list[int] = []
        self._length = [0]
        self._link = [-1]
        self._first_end = [-1]
        self._next: list[dict[int, int]] = [{}]
        self._last = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._history)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the history."""
        length, link, first_end, follow = self._length, self._link, self._first_end, self._next
        last = self._last
        end = len(self._history)
        tokens = list(tokens)
        for token in tokens:
            new = len(length)
            length.append(end + 1)
            first_end.append(end)
            follow.append({})
            state = last
            while state >= 0 and token not in follow[state]:
                follow[state][token] = new
                state = link[state]
            if state < 0:
                link.append(0)
            else:
                target = follow[state][token]
                if length[state] + 1 == length[target]:
                    link.append(target)
                else:
                    # The suffixes up to length[state] + 1 gain an end that the longer members
                    # of `target` lack: they split off into a state of their own.
                    split = new + 1
                    link.append(split)
                    length.append(length[state] + 1)
                    link.append(link[target])
                    first_end.append(first_end[target])
                    follow.append(follow[target].copy())
                    link[target] = split
                    while state >= 0 and follow[state].get(token) == target:
                        follow[state][token] = split
                        state = link[state]
            last = new
            end += 1
        self._history += tokens
        self._last = last

    def lookup(self, extra: Sequence[int], limit: int) -> SuffixMatch:
        """The longest suffix of history + extra that ended before the history's end, and the
        `limit` tokens after its first end. Changes nothing.

        The cost is one step per extra token and per suffix link followed: microseconds, except
        in a long run of one repeated token, where the links form a chain of that length.
        """
        length, link, follow = self._length, self._link, self._next
        # The history as a whole has only one end, so the search starts at its suffix link.
        state = max(link[self._last], 0)
        matched = length[state]
        for token in extra:
            if token not in follow[0]:
                state = matched = 0
                continue
            while token not in follow[state]:
                state = link[state]
                matched = length[state]
            state = follow[state][token]
            matched += 1
        # A match whose only end is the end of the history has nothing after it; a shorter one has.
        if self._first_end[state] == len(self._history) - 1:
            state = max(link[state], 0)
            matched = length[state]
        if matched == 0:
            return SuffixMatch(0, [])
        start = self._first_end[state] + 1
        copied = self._history[start : start + max(limit, 0)]
        # A text that repeats itself runs past the history's end: the copy goes on in what it
        # would have to follow, `extra` and then the copy itself.
        for at in range(
            start + len(copied) - len(self._history), start + limit - len(self._history)
        ):
            copied.append(extra[at] if at < len(extra) else copied[at - len(extra)])
        return SuffixMatch(matched, copied)


def budget(match_length: int, capacity: int, minimum: int = 2) -> int:
    """How many tokens a match may draft: four per matched token, at most `capacity`, and none
    below `minimum` matched tokens, where a match is mostly chance."""
    if match_length < minimum:
        return 0
    return min(capacity, DRAFT_PER_MATCHED_TOKEN * match_length)

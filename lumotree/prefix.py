"""Prefix snapshots between the turns of a conversation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from lumotree.state import Snapshot

DEFAULT_BUDGET_BYTES = 1 << 30


class PrefixStore:
    """The last snapshot of each conversation, least recently used out first.

    A snapshot is used only when its token ids are a proper prefix of the prompt, so a
    conversation that was edited is computed afresh.
    """

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self._budget = budget_bytes
        self._kept: OrderedDict[str, Snapshot] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return sum(snapshot.nbytes for snapshot in self._kept.values())

    def find(self, conversation: str | None, prompt_ids: Sequence[int]) -> Snapshot | None:
        snapshot = self._kept.get(conversation) if conversation is not None else None
        if snapshot is None or snapshot.length >= len(prompt_ids):
            return None
        if snapshot.token_ids != tuple(prompt_ids[: snapshot.length]):
            return None
        self._kept.move_to_end(conversation)
        return snapshot

    def put(self, conversation: str, snapshot: Snapshot) -> None:
        """Keeps `snapshot` in place of the conversation's last; one over the budget is not kept."""
        self._kept.pop(conversation, None)
        if snapshot.nbytes > self._budget:
            return
        self._kept[conversation] = snapshot
        while self.nbytes > self._budget:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        self._kept.clear()

"""One registry of faults: each can be planted in any audit, and in tests, by `apply()`."""

from __future__ import annotations

from lumotree.audit.faults import publication, rows, selection
from lumotree.audit.faults.base import AUDITS, Fault, Mutation
from lumotree.errors import LumoTreeError

__all__ = ["AUDITS", "FAULTS", "Fault", "Mutation", "fault"]

FAULTS: dict[str, Fault] = {
    f.name: f for f in (*publication.FAULTS, *rows.FAULTS, *selection.FAULTS)
}


def fault(name: str) -> Fault:
    """Raises LumoTreeError naming the faults there are."""
    if name not in FAULTS:
        raise LumoTreeError(f"unknown fault {name!r}", f"one of: {', '.join(FAULTS)}")
    return FAULTS[name]

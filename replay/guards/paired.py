"""Does a yes-or-no property of outputs occur more often in an arm than in its baseline?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from replay.guards.check import Evidence, sign_test
from replay.rows import Row

# Both must hold: unlikely by chance, and large enough to matter.
P_VALUE = 0.05
SHARE = 0.1
# With fewer requests, all of ours and none of theirs is what coins do, too.
MIN_REQUESTS = 4


@dataclass(frozen=True)
class Excess:
    """Requests in which a property holds: in all, in the arm, in the baseline, in one alone."""

    requests: int
    ours: int
    base: int
    only_ours: int
    only_base: int

    def significant(self, p_value: float = P_VALUE) -> bool:
        """More often than chance and by a tenth of the requests.

        Or in every output and in none of the baseline's, from MIN_REQUESTS on.
        """
        if self.requests >= MIN_REQUESTS and self.ours == self.requests and self.base == 0:
            return True
        large = self.only_ours - self.only_base >= SHARE * self.requests
        return large and self.only_ours > 0 and sign_test(self.only_ours, self.only_base) <= p_value

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def excess(evidence: Evidence, holds: Callable[[Row], bool]) -> Excess:
    """Count by request; with several runs the property holds when it does in most of them."""
    pairs = [(_most(ours, holds), _most(base, holds)) for ours, base in evidence.by_request()]
    return Excess(
        requests=len(pairs),
        ours=sum(ours for ours, _ in pairs),
        base=sum(base for _, base in pairs),
        only_ours=sum(ours and not base for ours, base in pairs),
        only_base=sum(base and not ours for ours, base in pairs),
    )


def _most(rows: list[Row], holds: Callable[[Row], bool]) -> bool:
    return 2 * sum(map(holds, rows)) > len(rows)

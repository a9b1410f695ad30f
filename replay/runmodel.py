"""The cost model and the predicted best tree of a run folder, from its rows alone.

Rows do not say how many drafts a step carried, so an arm counts with every row its drafters may
fill: an upper bound where suffix drafts are rare. `lumotree breakeven` and tree=auto measure it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lumotree.errors import LumoTreeError
from lumotree.tree import tree_from_name
from replay.costmodel import Observation, fit
from replay.prediction import Reach, candidates, drafters

SHOWN = 5


def run_model(
    arms: Mapping[str, Mapping[str, Any]], table: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any] | None:
    """`cost_model` of a summary; None with fewer than three designs or ones of a kind.

    `arms` is run.json's status by arm, `table` the summary's. Withheld arms teach nothing.
    """
    observations, measured = [], []
    for name, status in arms.items():
        entry = table[name]
        if entry["status"] == "withheld" or not entry["ms_per_step"]:
            continue
        reach = _design(status.get("description", {}), entry)
        if reach is None:
            continue
        rows = sum(reach.active)
        observations.append(Observation(name, reach.passes, rows, entry["ms_per_step"]))
        if len(entry["reach_by_row"]) == len(reach.active):
            measured.append(reach)
    cost = fit(observations)
    if cost is None:
        return None
    return cost.as_dict() | {
        "rows": "nominal",
        "predicted": [candidate.as_dict() for candidate in candidates(measured, cost)[:SHOWN]],
    }


def _design(description: Mapping[str, Any], entry: Mapping[str, Any]) -> Reach | None:
    try:
        tree = tree_from_name(description["tree"])
        passes, suffix = int(description["passes"]), bool(description["suffix"])
    except (KeyError, TypeError, ValueError, LumoTreeError):
        return None
    fed = drafters(tree, passes)
    sources = ("spine", "runner-up", *(("suffix", "rescue") if suffix else ()))
    active = [1.0] + [
        1.0 if fed.get(row, ("",))[0] in sources else 0.0 for row in range(1, len(tree))
    ]
    return Reach(tree.name, passes, suffix, 0, tuple(entry["reach_by_row"]), tuple(active))

"""The break-even map: what trees of each size gain, what they cost, and what publishing eats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lumotree.errors import CorpusError
from replay.plots.style import (
    BLUE,
    GREEN,
    GRID,
    INK,
    ORANGE,
    PURPLE,
    SOFT,
    VERMILLION,
    new_figure,
)

if TYPE_CHECKING:
    from replay.report.view import RunView

TITLE = "Break-even map: rate and publishing over tree size"
TEXT = (
    "Above, the rate of trees of each size, as measured (filled) and as it would be if publishing "
    "cost nothing (hollow, joined by a bar); the line is decoding without a tree. Below, what a "
    "step saves before publishing (filled) and what publishing costs (hollow): where the hollow "
    "mark is above the filled one, publishing eats the whole advantage."
)
NAME = "breakeven.json"
# Colour and marker of each series, in the order in which they turn up.
SERIES = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "D"), (VERMILLION, "^"), (PURPLE, "v"), (SOFT, "P"))


def draw(view: RunView) -> Any | None:
    path = view.path / NAME
    return draw_map(load_map(path)) if path.is_file() else None


def load_map(path: Path) -> dict[str, Any]:
    """The JSON of `lumotree breakeven`. Raises CorpusError when it is something else."""
    try:
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and isinstance(found["map"], list) and found["map"]:
            return found
    except (OSError, ValueError, KeyError):
        pass
    raise CorpusError(f"{path} is no break-even map", "write one: lumotree breakeven --out FILE")


def draw_map(found: dict[str, Any]) -> Any:
    figure, axes = new_figure(TITLE, _caption(found), 6.4)
    axes.remove()
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for axis in (upper, lower):
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(SOFT)
        axis.tick_params(colors=INK, labelsize=9, length=3)
        axis.grid(color=GRID)
        axis.set_axisbelow(True)
    for (label, rows), (colour, marker) in zip(_series(found["map"]), SERIES, strict=False):
        sizes = [row["rows"] for row in rows]
        style = {"marker": marker, "color": colour, "ms": 6}
        rates, free = ([row[key] for row in rows] for key in ("tok_s", "tok_s_free_publish"))
        upper.vlines(sizes, rates, free, color=colour, linewidth=1)
        upper.plot(sizes, free, linestyle="none", mfc="white", **style)
        upper.plot(sizes, rates, linewidth=1.4, label=label, mec="white", **style)
        lower.plot(sizes, [row["advantage_ms"] for row in rows], lw=1.4, mec="white", **style)
        publish = [row["publish_ms"] for row in rows]
        lower.plot(sizes, publish, linestyle=":", lw=1, mfc="white", **style)
    root = next((row for row in found["map"] if row["kind"] == "root"), None)
    if root is not None and root["tok_s"]:
        upper.axhline(root["tok_s"], color=INK, linewidth=1.1, label="without a tree")
    lower.axhline(0, color=INK, linewidth=1.1)
    upper.set_ylabel("tokens per second", fontsize=9)
    upper.set_ylim(bottom=0)
    lower.set_ylabel("ms per step", fontsize=9)
    lower.set_xlabel("rows of the tree, the pending token included", fontsize=9)
    beside = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5), "frameon": False, "fontsize": 9}
    upper.legend(**beside)
    grey = {"color": SOFT, "marker": "o", "ms": 6}
    lower.plot([], [], mec="white", label="saved before\npublishing", **grey)
    lower.plot([], [], linestyle=":", mfc="white", label="publishing", **grey)
    lower.legend(**beside)
    return figure


def _series(rows: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Trees of one kind and origin, by size; those without a rate have no place in the map."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] == "root" or row.get("tok_s") is None:
            continue
        label = "chains"
        if row["kind"] != "chain":
            origin, _, passes = row["name"].split(" ")[0].partition("/")
            label = f"parts of {origin},\n{passes} passes" if passes else f"parts of {origin}"
        groups.setdefault(label, []).append(row)
    for label, group in groups.items():
        yield label, sorted(group, key=lambda row: row["rows"])


def _caption(found: dict[str, Any]) -> str:
    machine, model = found.get("machine") or {}, found.get("model") or {}
    gpu = machine.get("gpu")
    where = gpu.get("name") if isinstance(gpu, dict) else gpu or machine.get("cpu", "")
    where = str(where).replace("(R)", "").replace("(TM)", "")
    corpus = (found.get("corpus") or {}).get("name") or "corpus"
    prefix = found.get("prefix_tokens")
    label = f" ({model['label']})" if model.get("label") else ""
    said = [corpus, f"model {Path(str(model.get('name', '?'))).name}{label}", where]
    return " · ".join([*said, f"behind {prefix:,} tokens" if prefix else ""]).strip(" ·")

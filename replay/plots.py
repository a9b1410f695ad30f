"""Pictures of a run, from its saved files only; readable in black and white."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lumotree.errors import CorpusError
from lumotree.request import PHASES
from replay.runfolder import RunFolder

HATCHES = ("///", "...", "xxx", "\\\\\\", "")
GREYS = ("0.35", "0.85", "0.6", "0.95", "0.75")


def draw_run(run: Path, out: Path) -> list[Path]:
    """Write rates.png and, when phases were measured, phases.png into `out`; return the paths.

    Raises CorpusError when `run` is no finished run folder or holds no rate.
    """
    folder = RunFolder.open(run)
    summary = folder.summary()
    rated = {n: a for n, a in summary["arms"].items() if a["pooled_tok_s"] is not None}
    if not rated:
        raise CorpusError(f"{run} holds no measured arm, so there is nothing to draw")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CorpusError(f"{out} cannot be created: {error.strerror}") from None
    paths = [_rates(rated, _caption(folder.run), out / "rates.png")]
    phased = {n: a for n, a in rated.items() if a["phases_ms_per_step"]}
    if phased:
        paths.append(_phases(phased, _caption(folder.run), out / "phases.png"))
    return paths


def _rates(arms: dict[str, Any], caption: str, path: Path) -> Path:
    figure, axes = _figure(len(arms))
    rates = [arm["pooled_tok_s"] for arm in arms.values()]
    spread = [
        arm["run_range_tok_s"] or (rate, rate)
        for arm, rate in zip(arms.values(), rates, strict=True)
    ]
    # The pooled rate lies between the runs' rates but for rounding; error bars need that exactly.
    down = [max(0.0, rate - low) for rate, (low, _) in zip(rates, spread, strict=True)]
    up = [max(0.0, high - rate) for rate, (_, high) in zip(rates, spread, strict=True)]
    axes.barh(list(arms), rates, color="0.8", edgecolor="black", height=0.6)
    axes.errorbar(rates, list(arms), xerr=[down, up], fmt="none", ecolor="black", capsize=4)
    for row, (rate, rise) in enumerate(zip(rates, up, strict=True)):
        axes.annotate(
            f"{rate:.1f}", (rate + rise, row), (6, 0), "data", "offset points", va="center"
        )
    axes.set_xlim(0, 1.15 * max(rate + rise for rate, rise in zip(rates, up, strict=True)))
    axes.set_xlabel("pooled decode rate, tokens per second (whiskers: lowest and highest run)")
    return _save(figure, axes, caption, path)


def _phases(arms: dict[str, Any], caption: str, path: Path) -> Path:
    figure, axes = _figure(len(arms) + 1)
    left = [0.0] * len(arms)
    for phase, hatch, grey in zip(PHASES, HATCHES, GREYS, strict=True):
        widths = [arm["phases_ms_per_step"].get(phase, 0.0) for arm in arms.values()]
        axes.barh(
            list(arms),
            widths,
            left=left,
            height=0.6,
            label=phase,
            color=grey,
            hatch=hatch,
            edgecolor="black",
        )
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, (arm, end) in enumerate(zip(arms.values(), left, strict=True)):
        steps = arm["tokens_per_step"]
        note = f"{end:.2f} ms" if steps is None else f"{end:.2f} ms, {steps:.2f} tokens"
        _label(axes, note, end, row)
    axes.set_xlim(0, 1.35 * max(left))
    axes.set_xlabel("milliseconds per step")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.0), ncols=len(PHASES), frameon=False)
    axes.set_ylim(len(arms) - 0.4, -1.1)  # room for the legend above the first bar
    return _save(figure, axes, caption, path)


def _figure(bars: int) -> tuple[Any, Any]:
    # The object interface: no global pyplot state, no display needed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.4 + 0.5 * bars), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _label(axes: Any, text: str, x: float, row: int) -> None:
    axes.annotate(text, (x, row), (6, 0), "data", "offset points", va="center")


def _save(figure: Any, axes: Any, caption: str, path: Path) -> Path:
    axes.set_title(caption, fontsize=9, loc="left")
    figure.savefig(path)
    return path


def _caption(run: dict[str, Any]) -> str:
    """Which model, on which machine: a rate without it says nothing."""
    model = run.get("model", {})
    machine = run.get("machine", {})
    device = str(model.get("device", "cpu"))
    where = f"{machine.get('cpu', 'CPU')}, {machine.get('cores', '?')} cores"
    if not device.startswith("cpu"):
        where = str(model.get("device_name", device))
    name = model.get("name", model.get("model", run.get("options", {}).get("model", "")))
    return f"{Path(run.get('corpus_path', '')).name}, model {name} on {where}"

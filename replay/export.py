"""A run as Markdown for people, and as CSV or Parquet tables for other tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lumotree.errors import CorpusError, LumoTreeError
from replay.report.cells import Table
from replay.report.sections import tables
from replay.report.view import RunView, stream_rows
from replay.report.words import headline, warnings, why

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("md", "csv", "parquet")


def export_run(run: Path, kind: str, out: Path | None = None) -> list[Path]:
    """Write a run into `out` (by default its own folder); return the paths.

    md writes report.md; csv and parquet write requests, arms and comparisons. Reads saved files
    only. Raises LumoTreeError for an unknown format or a missing package, CorpusError for files.
    """
    if kind not in FORMATS:
        raise LumoTreeError(f"--format is '{kind}'", f"valid formats: {', '.join(FORMATS)}")
    view = RunView.load(run)
    out = out or run
    if kind == "parquet":
        _need_pyarrow()
    try:
        out.mkdir(parents=True, exist_ok=True)
        if kind == "md":
            path = out / "report.md"
            path.write_text(markdown(view), encoding="utf-8")
            return [path]
        paths = []
        for name, frame in frames(view).items():
            path = out / f"{name}.{kind}"
            if kind == "csv":
                _as_text(frame).to_csv(path, index=False)
            else:
                frame.to_parquet(path, index=False)
            paths.append(path)
        return paths
    except OSError as error:
        raise CorpusError(f"{out} cannot be written: {error.strerror}") from None


def markdown(view: RunView) -> str:
    """The report's sentences and tables as Markdown."""
    parts = [f"# LumoTree replay of {view.corpus}", f"Model {view.model}, {view.machine}."]
    parts += [f"**{headline(view.summary)}** {why(view) or ''}".strip()]
    cautions = warnings(view)
    if cautions:
        parts.append("\n".join(f"- {text}" for text in cautions))
    for table in tables(view).values():
        parts += [f"## {table.title}", markdown_table(table)]
        if table.note:
            parts.append(table.note)
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """One table; units stand behind their headings."""
    heads = [f"{name}, {unit}" if unit else name for name, unit in table.columns]
    lines = [heads, ["---:" if right else "---" for right in table.numeric]]
    for index, row in enumerate(table.rows):
        cells = [f"**{cell.text}**" if "best" in cell.kind else cell.text for cell in row]
        if index in table.asides:
            cells[-1] += f": {table.asides[index]}"
        lines.append(cells)
    return "\n".join("| " + " | ".join(map(_escape, line)) + " |" for line in lines)


def frames(view: RunView) -> dict[str, pd.DataFrame]:
    """Data frames: one row per request row, per arm and per comparison.

    Nested figures become columns such as `phases_ms.verify`; lists stay lists. Warm-up and
    failed rows are among the requests, as they are in the run folder.
    """
    import pandas as pd

    rows = stream_rows(view.path / "requests.jsonl")
    arms = (
        {"arm": arm.name} | {k: v for k, v in arm.entry.items() if k != "guards"}
        for arm in view.arms.values()
    )
    dropped = {"token_ids", "details"}
    return {
        "requests": pd.DataFrame(_flat(row.model_dump(exclude=dropped)) for row in rows),
        "arms": pd.DataFrame(_flat(entry) for entry in arms),
        "comparisons": pd.DataFrame(_flat(entry) for entry in view.comparisons),
    }


def _flat(value: dict[str, Any]) -> dict[str, Any]:
    return dict(_leaves(value, ""))


def _leaves(value: dict[str, Any], lead: str) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _leaves(inner, f"{lead}{key}.")
        else:
            yield f"{lead}{key}", list(inner) if isinstance(inner, tuple) else inner


def _as_text(frame: pd.DataFrame) -> pd.DataFrame:
    """Lists as JSON: CSV has no lists."""
    return frame.map(lambda value: json.dumps(value) if isinstance(value, list) else value)


def _need_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise LumoTreeError(
            "Parquet needs the package pyarrow", "pip install 'lumotree[parquet]', or use csv"
        ) from None


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

"""The page of a study: what it says, what it must not hold, and that it needs nothing else."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from replay.agent.store import StudyFolder
from replay.agent.summary import summarise
from replay.agent.table import tables
from replay.cli import app
from replay.report.study import headline, render, warnings

TASKS = ("t-one", "t-two")


def counted(task: str, tokens: int, requests: int) -> dict[str, Any]:
    """Counters of a task that decoded at 20 tok/s."""
    difference = {"requests": requests, "generation_tokens": tokens, "ttft_s": 1.0}
    difference["decode_s"] = (tokens - requests) / 20.0
    return {"difference": difference, "faults": []}


def row(arm: str, task: str, outcome: str, **more: Any) -> dict[str, Any]:
    reason = None if outcome == "R" else f"why {task} is {outcome}"
    known = {"arm": arm, "task": task, "outcome": outcome, "reason": reason, "error": None}
    known |= {"exit_status": "Submitted", "requests": 4, "completion_tokens": 1204}
    known |= {"model_s": 90.0, "tools_s": 30.0, "agent_s": 120.0, "grading_s": 60.0}
    return known | {"counters": counted(task, 1204, 4), **more}


@pytest.fixture
def run() -> dict[str, Any]:
    budget = {"seconds": 9000.0, "steps": 0, "max_tokens": 24000, "command_s": 120.0}
    options = {"arms": "lumotree ar", "budget": budget, "seed": 0, "agent_cmd": None}
    options |= {"output_cap": 10_000, "server_options": ["--model", "/home/someone/models/q"]}
    return {
        "schema_version": 1,
        "kind": "agent-study",
        "options": options,
        "tasks": dict.fromkeys(TASKS, "hash"),
        "sets": dict.fromkeys(TASKS, "tiny"),
        "sandbox": "bubblewrap",
        "contained": True,
        "machine": {"cpu": "Made-up CPU", "cores": 2},
        "versions": {"python": "3.11.7"},
        "commit": "abc",
        "start": "2026-01-02T03:04:05+00:00",
        "arms": {
            "lumotree": {"decodes": True},
            "ar": {"decodes": True},
            "openai": {"unavailable": "no server reached"},
        },
    }


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    found = [row("lumotree", "t-one", "R"), row("lumotree", "t-two", "F")]
    return [*found, row("ar", "t-one", "E"), row("ar", "t-two", "X", error="the server went away")]


class Grid(HTMLParser):
    """Rows of the tables by the heading's id above them, and all that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.fetched: list[str] = []
        self._name, self._cell = "", False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.fetched += [known[name] for name in ("src", "href", "data") if known.get(name)]
        if tag == "h2":
            self._name = known.get("id", "")
        elif tag == "tr":
            self.tables.setdefault(self._name, []).append([])
        elif tag in ("td", "th"):
            self.tables[self._name][-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.tables[self._name][-1][-1] += data


def read(page: str) -> Grid:
    grid = Grid()
    grid.feed(page)
    return grid


def test_the_table_is_the_papers_with_its_figures_beside(run, rows) -> None:
    shown = read(render(run, summarise(run, rows))).tables["main"]
    assert shown[0] == ["arm", "resolved", "requests", "ratetok/s", "timeminutes", "output tokens"]
    assert shown[1] == ["lumotree", "1 of 2", "8", "20.00", "4.0", "2,408"]
    assert shown[2] == ["lumotree (paper)", "5 of 10", "248", "26.12", "190.8", "258,889"]
    # A spoiled attempt is in no figure but in the count of tasks.
    assert shown[3] == ["ar", "0 of 2", "4", "20.00", "2.0", "1,204"]
    assert shown[4] == ["openai", "0 of 2", "–", "–", "–", "–"]


def test_outcomes_minutes_tokens_and_requests(run, rows) -> None:
    page = render(run, summarise(run, rows))
    shown = read(page).tables
    assert shown["outcomes"][1:] == [["t-one", "R", "E", "–"], ["t-two", "F", "X", "–"]]
    assert shown["reasons"][1] == ["t-one", "ar", "why t-one is E", "Submitted"]
    assert shown["minutes"][1] == ["lumotree", "3.00", "1.00", "2.00"]
    assert shown["tokens"][1:] == [["t-one", "1,204", "1,204"], ["t-two", "1,204", "1,204"]]
    assert shown["requests"][1] == ["t-one", "4", "4", "–"]
    assert 'style="--share:0.5000"' in page, "three of six minutes were the model's"
    text = html.unescape(re.sub(r"<[^>]+>", " ", page))
    for letter in "RFEX":
        assert f"{letter}: " in text, "every letter of the grid is explained"


def test_it_says_what_one_attempt_can_show_and_what_is_not_counted(run, rows) -> None:
    rows[0]["counters"]["faults"] = ["the counters fell"]
    summary = summarise(run, rows)
    assert headline(summary) == "Tasks resolved: lumotree 1 of 2, ar 0 of 2."
    said = warnings(run, summary)
    assert said[0] == "lumotree: t-one: the counters fell"
    assert "openai: unavailable: no server reached" in said
    assert "ar: 1 of 2 tasks have no attempt that counts." in said
    # Of two tasks each: equal in 6 of 16 ways.
    assert "differ by 1 or more resolved tasks in 62% of studies" in summary["caution"]
    page = html.unescape(render(run, summary))
    assert "It does not show which arm solves more" in page
    for sentence in (headline(summary), *said):
        assert sentence in page
    for name in run["arms"]:
        run["arms"][name] = {"unavailable": "gone"}
    assert headline(summarise(run, [])) == "No arm could be reached, so no task was attempted."


def test_without_a_model_there_is_no_table_of_tokens(run, rows) -> None:
    run["arms"]["lumotree"]["decodes"] = run["arms"]["ar"]["decodes"] = False
    assert "tokens" not in tables(summarise(run, rows))


def test_the_page_needs_nothing_else_and_escapes_what_it_is_given(run, rows) -> None:
    nasty = '<img src="http://x/" onerror=alert(1)>'
    rows[1]["reason"] = nasty
    run["arms"]["openai"]["unavailable"] = nasty
    page = render(run, summarise(run, rows))
    assert nasty not in page and html.escape(nasty)[:7] in page
    grid = read(page)
    for reference in grid.fetched:
        assert reference == "data:," or f'id="{reference[1:]}"' in page, reference
    assert "default-src 'none'" in page and "someone" not in page and "--model q" in page


def test_the_command_writes_it_again_and_only_of_a_finished_study(run, rows, tmp_path) -> None:
    folder = StudyFolder.create(tmp_path / "run", run)
    done = CliRunner().invoke(app, ["report", str(folder.path)])
    assert done.exit_code == 2 and "agent-study --resume" in done.stderr
    folder.write("summary.json", json.dumps(summarise(run, rows)))
    done = CliRunner().invoke(app, ["report", str(folder.path)])
    assert done.exit_code == 0, done.stderr
    assert Path(done.stdout.strip()).read_text() == render(run, summarise(run, rows))

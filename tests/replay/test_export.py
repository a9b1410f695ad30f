"""Exports: the tables in Markdown, the rows in CSV and Parquet."""

import builtins
import json

import pytest
from typer.testing import CliRunner

from replay.cli import app
from replay.export import export_run, frames, markdown
from replay.report.view import RunView
from tests.replay.synthetic import synthetic_rows, write_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", synthetic_rows(requests=8))


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_markdown_has_the_sentence_and_the_tables(run):
    done = call("export", run)
    assert done.exit_code == 0 and done.stdout.strip() == str(run / "report.md")
    text = (run / "report.md").read_text()
    assert "**On this machine lumotree wins:" in text
    lines = text.splitlines()
    head = lines.index("## Pooled decode rate") + 2
    assert lines[head].startswith("| arm | rate, tok/s |")
    widths = {line.count("|") for line in lines[head : head + 5]}
    assert len(widths) == 1, "every row has the columns of its head"


def test_a_bar_in_a_name_does_not_break_the_table(tmp_path):
    rows = synthetic_rows()
    path = write_run(tmp_path / "run", rows)
    summary = json.loads((path / "summary.json").read_text())
    summary["arms"]["ar"]["status"], summary["arms"]["ar"]["reason"] = "partial", "a|b\nc"
    (path / "summary.json").write_text(json.dumps(summary))
    assert "a\\|b c" in markdown(RunView.load(path))


def test_csv_holds_every_row_and_comes_back(run, tmp_path):
    import pandas as pd

    done = call("export", run, "--format", "csv", "--out", tmp_path / "csv", "--json")
    paths = json.loads(done.stdout)["files"]
    assert [path.rsplit("/", 1)[1] for path in paths] == [
        "requests.csv", "arms.csv", "comparisons.csv",
    ]  # fmt: skip
    requests = pd.read_csv(paths[0])
    assert len(requests) == 8 * 2 * 3 and "phases_ms.verify" in requests
    assert json.loads(requests["accepted_by_depth"].iloc[-1])
    arms = pd.read_csv(paths[1]).set_index("arm")
    summary = json.loads((run / "summary.json").read_text())
    rate = summary["arms"]["lumotree"]["pooled_tok_s"]
    assert arms.loc["lumotree", "pooled_tok_s"] == pytest.approx(rate)
    comparisons = pd.read_csv(paths[2])
    assert list(comparisons["verdict"]) == [c["verdict"] for c in summary["comparisons"]]


def test_parquet_keeps_lists(run, tmp_path):
    pytest.importorskip("pyarrow")
    import pandas as pd

    paths = export_run(run, "parquet", tmp_path / "pq")
    requests = pd.read_parquet(paths[0])
    assert len(requests) == 48 and len(requests["accepted_by_row"].iloc[2]) == 32


def test_parquet_without_pyarrow_says_what_to_install(run, monkeypatch):
    real = builtins.__import__

    def missing(name, *rest, **more):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    done = call("export", run, "--format", "parquet")
    assert done.exit_code == 2
    assert "Parquet needs the package pyarrow (pip install 'lumotree[parquet]'" in done.stderr


def test_an_unknown_format_lists_the_valid_ones(run):
    done = call("export", run, "--format", "xls")
    assert done.exit_code == 2 and "valid formats: md, csv, parquet" in done.stderr


def test_a_withheld_rate_is_null_in_the_tables(run):
    summary = json.loads((run / "summary.json").read_text())
    summary["arms"]["mtp-5"] |= {"status": "withheld", "reason": "loops", "pooled_tok_s": None}
    (run / "summary.json").write_text(json.dumps(summary))
    view = RunView.load(run)
    arms = frames(view)["arms"].set_index("arm")
    assert arms.loc["mtp-5"].isna()["pooled_tok_s"] and arms.loc["mtp-5", "status"] == "withheld"
    assert "withheld: loops" in markdown(view)

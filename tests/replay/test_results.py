"""Tables of the paper's shape: filled from stored rows, and checked against them."""

import importlib.util
import json
from pathlib import Path

import pytest

from replay.results import stored_runs
from tests.replay.synthetic import synthetic_rows, write_run

ROOT = Path(__file__).parents[2]
PAGE = """# Page

<!-- results:a-run -->
<!-- /results -->
Text between.
<!-- results:replay a-run -->
stale
<!-- /results -->
<!-- results:steps -->
<!-- /results -->
<!-- results:phases -->
<!-- /results -->
"""


def script():
    spec = importlib.util.spec_from_file_location(
        "build_results", ROOT / "scripts" / "build_results.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(root, *words):
    return script().main(["--root", str(root), *words])


@pytest.fixture
def root(tmp_path):
    write_run(tmp_path / "results" / "a-run", synthetic_rows())
    (tmp_path / "results" / "embedded").mkdir()
    (tmp_path / "results" / "embedded" / "run.json").write_text("{}")
    (tmp_path / "README.md").write_text(PAGE)
    return tmp_path


def test_the_repository_matches_its_stored_rows(capsys):
    assert build(ROOT, "--check") == 0, capsys.readouterr().err


def test_a_page_is_filled_and_then_matches(root, capsys):
    assert build(root, "--check") == 1 and "stale" in capsys.readouterr().err
    assert build(root) == 0 and build(root, "--check") == 0
    text = (root / "README.md").read_text()
    assert "stale" not in text and "Text between." in text
    assert "On this machine lumotree wins" in text and "Made-up CPU, 2 cores" in text
    first, row, *_ = [line for line in text.splitlines() if line.startswith("| lumotree |")]
    rate = json.loads((root / "results/a-run/summary.json").read_text())["arms"]["lumotree"]
    assert f"| **{rate['pooled_tok_s']:.2f}** |" in first
    assert f"| {rate['pooled_tok_s']:.2f} |" in row
    assert "| 28.13 | 27.40–28.78 | 2.67 |" in row, "the paper's figures stand beside"
    assert "DGX Spark (GB10) with Qwen3.8-27B" in text
    assert build(root) == 0 and (root / "README.md").read_text() == text


def test_a_changed_row_is_noticed(root, capsys):
    build(root)
    path = root / "results" / "a-run" / "requests.jsonl"
    lines = path.read_text().splitlines()
    row = json.loads(lines[-1])
    row["decode_s"] *= 0.5
    path.write_text("\n".join([*lines[:-1], json.dumps(row)]) + "\n")
    assert build(root, "--check") == 1
    said = capsys.readouterr().err
    assert "summary.json: arms lumotree pooled_tok_s is" in said and "README.md" in said


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s["comparisons"][0].update(ci_high=9.0), "comparisons 0 ci_high is 9.0, rows"),
        (lambda s: s["comparisons"][1].update(verdict="slower"), "comparisons 1 verdict is slower"),
        (lambda s: s["comparisons"].pop(), "comparisons is"),
        (lambda s: s["arms"]["ar"].update(status="partial"), "arms ar status is partial"),
        (lambda s: s["runner_up"].update(ratio=3.0), "runner_up ratio is 3.0"),
        (lambda s: s.update(fastest="ar"), "fastest is ar"),
        (lambda s: s["arms"].pop("mtp-5"), "arms mtp-5 is missing"),
    ],
)
def test_a_changed_summary_is_noticed_and_made_anew(root, capsys, change, says):
    build(root)
    path = root / "results" / "a-run" / "summary.json"
    before = path.read_text()
    summary = json.loads(before)
    change(summary)
    path.write_text(json.dumps(summary))
    assert build(root, "--check") == 1 and says in capsys.readouterr().err
    assert build(root) == 0 and build(root, "--check") == 0
    assert json.loads(path.read_text())["comparisons"] == json.loads(before)["comparisons"]


def test_rounding_is_no_difference(root):
    build(root)
    path = root / "results" / "a-run" / "summary.json"
    summary = json.loads(path.read_text())
    summary["comparisons"][0]["ratio"] *= 1 + 1e-13
    path.write_text(json.dumps(summary))
    assert build(root, "--check") == 0


def test_a_changed_figure_in_a_page_is_noticed(root, capsys):
    build(root)
    page = root / "README.md"
    page.write_text(page.read_text().replace("| 28.13 |", "| 18.13 |"))
    assert build(root, "--check") == 1 and "18.13" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!-- results:replay nowhere -->\nx\n<!-- /results -->", "'nowhere' is quoted but not"),
        ("<!-- results:speed -->\n9\n<!-- /results -->", "tables and runs: replay, steps"),
        ("<!-- results:replay -->\n", "malformed or not closed"),
    ],
)
def test_a_wrong_block_is_named(root, capsys, text, says):
    (root / "README.md").write_text(text)
    assert build(root) == 2
    assert says in capsys.readouterr().err


def test_the_disjoint_corpus_stands_beside_the_papers(root):
    write_run(root / "results" / "b-run", synthetic_rows(), corpus_path="corpora/disjoint.jsonl")
    (root / "README.md").write_text("<!-- results:replay b-run -->\n<!-- /results -->\n")
    build(root)
    assert "| 30.76 | 30.38–31.14 |" in (root / "README.md").read_text()
    assert [run.name for run in stored_runs(root / "results")] == ["a-run", "b-run"]


def test_an_empty_block_may_wait_for_its_run(root):
    text = "<!-- results:later -->\n<!-- /results -->\n"
    (root / "README.md").write_text(text)
    assert build(root, "--check") == 0 and build(root) == 0
    assert (root / "README.md").read_text() == text


def test_no_run_is_said(tmp_path):
    (tmp_path / "README.md").write_text("<!-- results:replay -->\n<!-- /results -->\n")
    (tmp_path / "results").mkdir()
    assert build(tmp_path) == 0
    assert "No run is stored yet." in (tmp_path / "README.md").read_text()

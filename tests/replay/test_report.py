"""The report: self-contained, honest about withheld rates, and made from saved files alone."""

import html
import io
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from replay.cli import app
from replay.export import markdown
from replay.report.page import render, write_report
from replay.report.template import breakable
from replay.report.view import RunView
from replay.report.words import headline, warnings, why
from replay.results import Stored, overview
from replay.summary import summarise
from replay.tables import print_run
from tests.replay.synthetic import ARMS, synthetic_rows, write_run

FIRST_VERSION = Path(__file__).parents[1] / "fixtures" / "run-v1"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class References(HTMLParser):
    """Everything in a page that a browser would fetch."""

    LOADS = {"src", "href", "srcset", "poster", "data", "action", "background", "formaction"}

    def __init__(self):
        super().__init__()
        self.found, self.tags = [], set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.found += [value for name, value in attrs if name in self.LOADS and value]


def text_of(page):
    return html.unescape(re.sub(r"<[^>]+>", " ", page.replace("<wbr>", "")))


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", synthetic_rows())


@pytest.fixture
def withheld(tmp_path):
    """mtp-5 is fastest and loops; its rate must not be seen anywhere."""
    path = write_run(tmp_path / "withheld", synthetic_rows())
    summary = json.loads((path / "summary.json").read_text())
    entry = summary["arms"]["mtp-5"]
    figures = ("pooled_tok_s", "run_range_tok_s", "mean_request_tok_s")
    entry["withheld"] = dict.fromkeys(figures) | {"pooled_tok_s": 777.77}
    entry |= dict.fromkeys(figures)
    reason = "9 of 10 outputs loop"
    entry["status"], entry["reason"] = "withheld", reason
    entry["guards"]["checks"] = [{"name": "repetition", "status": "fail", "reason": reason}]
    for other in summary["comparisons"]:
        if other["arm"] == "mtp-5":
            other |= {"ratio": None, "ci_low": None, "ci_high": None, "verdict": "withheld"}
    (path / "summary.json").write_text(json.dumps(summary))
    return path


@pytest.mark.pictures
def test_the_page_references_nothing_outside_itself(run):
    page = write_report(run).read_text()
    parser = References()
    parser.feed(page)
    assert parser.found, "pictures are embedded"
    for reference in parser.found:
        assert reference.startswith(("data:", "#")), reference[:80]
    assert not parser.tags & {"iframe", "object", "embed", "base"}
    style = "".join(re.findall(r"<style>(.*?)</style>", page, re.S))
    assert "@import" not in style and "url(" not in style and "@font-face" not in style
    assert "default-src 'none'" in page
    script = "".join(re.findall(r"<script>(.*?)</script>", page, re.S))
    assert not re.search(r"fetch|XMLHttp|import\(|https?:", script)
    for anchor in (r for r in parser.found if r.startswith("#")):
        assert f'id="{anchor[1:]}"' in page


def test_the_report_says_who_won_and_why(run):
    view = RunView.load(run)
    assert headline(view.summary).startswith("On this machine lumotree wins:")
    assert "A step of lumotree emits" in why(view) and "times the rate" in why(view)
    text = text_of(render(view, {}))
    assert headline(view.summary) in text
    assert "t, 8 conversations" in text, "an interval says how it came about"
    assert "Paired comparisons" in text and "Made-up CPU, 2 cores" in text


def test_every_output_has_the_same_sentence(run):
    """Terminal, page, Markdown export and README block say who won in one voice."""
    view = RunView.load(run)
    said = headline(view.summary)
    out = Console(file=io.StringIO(), width=100)
    print_run(out, view.summary)
    assert said in " ".join(out.file.getvalue().split())
    assert said in text_of(render(view, {})) and said in markdown(view)
    assert overview(Stored("run", run)).startswith(said)


def test_the_label_of_a_rehearsal_stands_beside_every_figure(tmp_path):
    label = "acceptance of the embedded model, cost of the 27B shape"
    model = {"name": "rehearsal:27b", "label": label, "device": "cpu"}
    view = RunView.load(write_run(tmp_path / "run", synthetic_rows(), model=model))
    assert label in headline(view.summary) and label in view.caption
    out = Console(file=io.StringIO(), width=100)
    print_run(out, view.summary)
    assert out.file.getvalue().count(label) == 2, "above the table and in the sentence"
    assert label in text_of(render(view, {})) and label in markdown(view)
    assert label in overview(Stored("run", view.path))


def test_why_is_silent_about_incomplete_arms(run):
    summary = json.loads((run / "summary.json").read_text())
    summary["arms"]["ar"] |= {"status": "partial", "reason": "3 of 16 requests completed"}
    (run / "summary.json").write_text(json.dumps(summary))
    view = RunView.load(run)
    assert why(view) is None
    assert headline(view.summary).endswith("Incomplete, so not ranked: ar.")
    summary["arms"]["lumotree"] |= {"status": "partial", "reason": "gone"}
    (run / "summary.json").write_text(json.dumps(summary))
    assert RunView.load(run).winner.name == "mtp-5"


def test_plain_decoding_may_win(tmp_path):
    rows = synthetic_rows()
    for row in rows:
        if row.arm != "ar":
            row.decode_s *= 10
    view = RunView.load(write_run(tmp_path / "run", rows))
    assert headline(view.summary).startswith("On this machine plain decoding wins: ar reaches")


def test_a_withheld_rate_is_nowhere_in_the_page(withheld):
    view = RunView.load(withheld)
    page = text_of(render(view, {}))
    assert "777.77" not in render(view, {}) and "777.8" not in page
    assert "The speed of mtp-5 is withheld: 9 of 10 outputs loop." in page
    assert view.winner.name == "lumotree"
    assert any("The speed of mtp-5 is withheld" in text for text in warnings(view))


def test_only_withheld_arms_give_no_winner(withheld):
    summary = json.loads((withheld / "summary.json").read_text())
    summary["arms"] = {"mtp-5": summary["arms"]["mtp-5"]}
    summary["comparisons"] = []
    (withheld / "summary.json").write_text(json.dumps(summary))
    view = RunView.load(withheld)
    assert "a guard withholds every arm" in headline(view.summary)
    assert render(view, {})


def test_a_folder_of_the_first_version_renders():
    view = RunView.load(FIRST_VERSION)
    text = text_of(render(view, {}))
    assert "On this machine lumotree is ahead of ar: 132.1 tokens per second, 2.26 times" in text
    assert "lumotree and mtp-5 were not compared" in text
    assert "token ids" in text and "equal bits hold" in text


def test_missing_keys_are_empty_places(tmp_path, run):
    summary = json.loads((run / "summary.json").read_text())
    for entry in summary["arms"].values():
        for key in list(entry):
            if key not in ("pooled_tok_s", "status"):
                del entry[key]
    del summary["comparisons"]
    (run / "summary.json").write_text(json.dumps(summary))
    about = {"schema_version": 1, "arms": {}}
    (run / "run.json").write_text(json.dumps(about))
    text = text_of(render(RunView.load(run), {}))
    assert "lumotree has the highest rate" in text and "It was not compared with ar." in text


def test_what_comes_from_a_run_is_escaped(tmp_path):
    rows = synthetic_rows()
    nasty = '<img src=x onerror="alert(1)">'
    for row in rows:
        row.request_id = nasty + row.request_id
    page = render(RunView.load(write_run(tmp_path / "run", rows, corpus_path=nasty)), {})
    assert "<img src=x" not in page and html.escape(nasty)[:7] in page


def test_folders_of_the_machine_stay_out(tmp_path):
    where = {"corpus_path": "/home/someone/secret/c.jsonl"}
    where["command"] = ["lumotree", "replay", "/home/someone/secret/c.jsonl"]
    where["model"] = {"name": "/home/someone/models/q", "device": "cpu"}
    view = RunView.load(write_run(tmp_path / "run", synthetic_rows(), **where))
    assert "someone" not in render(view, {})


def test_prompt_lengths_that_differ_between_arms_are_shown(tmp_path):
    rows = synthetic_rows()
    for row in rows:
        row.prompt_tokens += 33 * (row.arm == "mtp-5")
    page = text_of(render(RunView.load(write_run(tmp_path / "run", rows)), {}))
    assert "1,000 – 1,033" in page


def test_the_command_writes_the_report_again(run):
    (run / "requests.jsonl").chmod(0o400)
    done = CliRunner().invoke(app, ["report", str(run)])
    assert done.exit_code == 0 and done.stdout.strip() == str(run / "report.html")
    assert CliRunner().invoke(app, ["report", str(run / "nowhere")]).exit_code == 2


def test_a_run_without_a_finished_request_still_has_a_report(tmp_path):
    rows = synthetic_rows()
    for row in rows:
        row.error = "the server went away"
    path = write_run(tmp_path / "run", rows)
    text = text_of(write_report(path).read_text())
    assert "No arm completed a request" in text and "the server went away" in text


@pytest.mark.pictures
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_chromium_opens_the_page_without_a_word(run, tmp_path):
    page = write_report(run)
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
    flags += " --disable-background-networking --disable-component-update --enable-logging=stderr"
    words = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}"]
    # A click on a heading, then the page as the browser has it.
    click = "document.querySelectorAll('table.sortable th button')[4].click()"
    source = page.read_text().replace("</body>", f"<script>{click}</script></body>")
    (tmp_path / "sorted.html").write_text(source)
    done = subprocess.run(
        [*words, "--dump-dom", (tmp_path / "sorted.html").as_uri()],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    assert 'aria-sort="ascending"' in done.stdout
    table = done.stdout[done.stdout.index('class="sortable"') :]
    cells = re.findall(r"<tr>(.*?)</tr>", table[table.index("<tbody>") : table.index("</tbody>")])
    rates = [float(re.findall(r'data-key="([^"]+)"', row)[2]) for row in cells]
    assert len(rates) == 8 and rates == sorted(rates)


@pytest.mark.pictures
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_ten_thousand_rows_render_in_time_and_memory(tmp_path):
    rows = synthetic_rows(requests=1112, runs=3, tokens=400)
    few = [row for row in rows if row.request_id < "conversation-002"]
    arms = {a: {"status": "ok", "description": {"kind": "in-process", **ARMS[a]}} for a in ARMS}
    path = write_run(tmp_path / "run", rows, summarise(arms, few, None, {}))
    assert len(rows) > 10_000
    del rows, few
    code = (
        "import sys, time\nfrom pathlib import Path\nstart = time.process_time()\n"
        "from replay.report.page import write_report\nwrite_report(Path(sys.argv[1]))\n"
        # Not ru_maxrss, which a process inherits from the one that started it.
        "status = Path('/proc/self/status').read_text()\n"
        "peak = int(status.split('VmHWM:')[1].split()[0]) / 1024\n"
        "print(time.process_time() - start, peak)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seconds, mib = map(float, done.stdout.split())
    assert seconds < 20 and mib < 1024, (seconds, mib)


def test_formulas_and_the_cost_model_are_in_the_page(run):
    summary = json.loads((run / "summary.json").read_text())
    page = text_of(render(RunView.load(run), {}))
    assert "sum(completion_tokens - 1) / sum(decode_s)" in page
    cost = summary["cost_model"]
    if cost and cost["predicted"]:
        assert "Trees predicted to be best here" in page and cost["predicted"][0]["tree"] in page


def test_long_arm_specs_may_break_after_their_signs_only(run):
    assert breakable("lumotree:tree=-1,0") == "lumotree:<wbr>tree=<wbr>-1,<wbr>0"
    assert "<b>" not in breakable("<b>:")

"""`lumotree audit` in process: output, files, exit codes, sentences."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from lumotree.audit import component as component_module
from lumotree.audit import soak as soak_module
from lumotree.audit.component import ComponentPlan
from lumotree.audit.faults import base, fault
from lumotree.audit.fresh import fits_beside
from lumotree.audit.soak import SoakBeside, SoakPlan
from lumotree.errors import LumoTreeError
from lumotree.ops.gdn import GEOMETRIES
from replay import audit as auditing
from replay import auditfile
from replay.audit import AuditOptions
from replay.audittables import fault_rows, figure, verdict, walk_power
from replay.cli import app
from replay.report.audit import audit_tables
from replay.report.page import extra_tables
from replay.report.view import RunView

KEYS = {
    "schema_version", "command", "started_at", "ended_at", "machine", "versions", "git_commit",
    "model", "options", "rule", "audits", "faults", "undetected", "walk_power", "false_alarms",
    "passed",
}  # fmt: skip


def call(*arguments):
    return CliRunner().invoke(app, ["audit", *(str(argument) for argument in arguments)])


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "c.jsonl"
    rows = [
        {
            "custom_id": f"r{i}",
            "body": {"messages": [{"role": "user", "content": f"{i} how are you? " * 40}]},
        }
        for i in range(3)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def soak(speaking, corpus, tmp_path, monkeypatch):
    """Options of a soak that is over in a second."""
    monkeypatch.setattr(SoakPlan, "quick", classmethod(lambda cls: cls(24, 4, 24, False)))
    out = tmp_path / "out"
    options = ("--model", speaking, "--device", "cpu", "--corpus", corpus, "--out", out, "--quick")
    return out, ("soak", *options)


def test_help_loads_nothing_heavy():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom replay.cli import app\n"
        "for name in 'component continuation sampler soak all faults'.split():\n"
        "    done = CliRunner().invoke(app, ['audit', name, '--help'])\n"
        "    assert done.exit_code == 0 and 'Example' in done.output, (name, done.output)\n"
        "assert not {'torch', 'scipy', 'numpy', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_component_prints_a_table_and_leaves_its_files(tmp_path, monkeypatch):
    quick = ComponentPlan(tree="-1,0,0,1", sets=(1, 1), processes=1)
    monkeypatch.setattr(ComponentPlan, "quick", classmethod(lambda cls, device: quick))
    out = tmp_path / "out"
    done = call("component", "--geometry", "tiny", "--quick", "--device", "cpu", "--out", out)
    assert done.exit_code == 0, done.output
    assert "lumotree" in done.stdout and "All audits passed." in done.stdout
    found = auditfile.load_audit(out / "audit.json")
    assert set(found) == KEYS and found["passed"] and found["model"] is None
    (entry,) = found["audits"]
    assert entry["audit"] == "component" and entry["failures"] == []
    assert {"same bits in fresh processes", "planted control seen"} < {
        line["name"] for line in entry["lines"]
    }
    frozen = json.loads((out / "constants.json").read_text())
    assert list(frozen) == ["component, seed 0"]
    page = (out / "audit.html").read_text()
    assert "<h2>Audits</h2>" in page and "planted control seen" in page


def test_an_audit_that_passes_prints_json(soak):
    out, arguments = soak
    done = call(*arguments, "--json", "--quiet", "--seeds", 2)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found == auditfile.load_audit(out / "audit.json")
    assert found["false_alarms"] == {"soak": {"runs": 2, "failed": 0}}
    assert found["rule"] == "equality" and [e["seed"] for e in found["audits"]] == [0, 1]
    assert "False alarms" in (out / "audit.html").read_text()


def test_a_failed_audit_is_exit_code_1(soak):
    out, arguments = soak
    with fault("unconditional accept").apply():
        done = call(*arguments)
    assert done.exit_code == 1 and "Failed: soak (seed 0)." in done.stdout
    found = auditfile.load_audit(out / "audit.json")
    assert not found["passed"] and found["audits"][0]["failures"][0]["reason"]


@pytest.fixture
def small(corpus, speaking, tmp_path, monkeypatch):
    """Options of a whole audit of small sizes whose soak runs beside the rest."""
    component = ComponentPlan(GEOMETRIES["tiny"], "-1,0,0,1", (1, 1), processes=1)
    monkeypatch.setattr(ComponentPlan, "quick", classmethod(lambda cls, device: component))
    monkeypatch.setattr(SoakPlan, "quick", classmethod(lambda cls: cls(24, 4, 24)))
    # Two audits are enough: the soak, and one that it runs beside.
    monkeypatch.setattr(base, "AUDITS", ("component", "soak"))
    out = tmp_path / "out"
    options = ("--model", speaking, "--device", "cpu", "--corpus", corpus, "--out", out)
    return out, ("all", *options, "--quick", "--no-faults", "--threads", "1")


def soak_entry(out):
    found = auditfile.load_audit(out / "audit.json")
    assert [entry["audit"] for entry in found["audits"]] == ["component", "soak"]
    return found["audits"][1]


def test_a_soak_beside_finds_what_a_soak_in_the_process_finds(small, monkeypatch):
    out, arguments = small
    done = call(*arguments)
    assert done.exit_code == 0, done.output
    beside = soak_entry(out)
    monkeypatch.setattr(
        SoakPlan, "quick", classmethod(lambda cls: cls(24, 4, 24, side_by_side=False))
    )
    again = call(*arguments)
    assert again.exit_code == 0, again.output
    here = soak_entry(out)
    assert sorted(beside["lines"], key=str) == sorted(here["lines"], key=str)
    assert beside["passed"] and beside["seconds"] > 0 and beside["cpu_seconds"] > 0
    told = [text.splitlines()[1].split(" checks in ")[0] for text in (done.stderr, again.stderr)]
    assert told[0] == told[1] == "soak, seed 0: 6/6"


def test_a_soak_beside_that_crashes_fails_the_audit(small, monkeypatch):
    out, arguments = small
    monkeypatch.setattr(soak_module, "same_engine", lambda engine: {"model": "nowhere"})
    done = call(*arguments)
    assert done.exit_code == 1 and "Failed: soak (seed 0)." in done.stdout
    failures = soak_entry(out)["failures"]
    assert [failure["check"] for failure in failures] == ["long continuation", "requests"]
    assert all("nowhere" in failure["reason"] for failure in failures)
    assert "nowhere" in done.stdout


def test_an_interrupted_audit_ends_its_soak(small, monkeypatch):
    made = []

    class Watched(SoakBeside):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(soak_module, "SoakBeside", Watched)
    monkeypatch.setattr(component_module, "audit_component", interrupted)
    assert call(*small[1]).exit_code == 130
    (beside,) = made
    running = [p for part in beside._parts.values() for p in part._running]
    assert len(running) == 2 and all(p.poll() is not None for p in running)


def test_a_process_of_its_own_ends_with_the_one_that_asked_for_it():
    """Also where that one is killed and can end nothing."""
    code = """
import sys, time
from lumotree.audit.fresh import FreshProcesses
fresh = FreshProcesses("noise", {"seeds": list(range(10**5))}, 1)
print(fresh._running[0].pid, flush=True)
time.sleep(600)
"""
    asker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(asker.stdout.readline())
    time.sleep(1)
    assert _is_there(pid)
    asker.kill()
    asker.communicate()
    deadline = time.monotonic() + 60
    while _is_there(pid):
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.1)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        # An orphan that nobody waits for has ended all the same.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_an_audit_that_breaks_keeps_what_was_found_before_it(small, monkeypatch):
    out, arguments = small
    monkeypatch.setattr(auditing.AuditOptions, "soak_beside", property(lambda self: False))

    def broken(*given):
        raise LumoTreeError("the soak broke")
        yield

    monkeypatch.setattr(auditing.soak, "audit_soak", broken)
    done = call(*arguments)
    assert done.exit_code == 2 and "the soak broke" in done.stderr
    found = auditfile.load_audit(out / "audit.json")
    assert [entry["audit"] for entry in found["audits"]] == ["component"]
    assert found["audits"][0]["passed"] and not found["passed"]
    assert "the soak broke" in found["ended_early"]
    assert verdict(found).startswith("Ended early") and str(out) in done.stderr


def test_a_second_copy_of_the_weights_is_asked_for_where_it_fits(monkeypatch):
    engine = SimpleNamespace(model=SimpleNamespace(device=torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50)
    for free, fits in ((49, False), (51, True)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 100))
        assert fits_beside(engine) is fits
    assert fits_beside(SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu"))))


def test_control_b_is_left_out_and_said_so(monkeypatch):
    monkeypatch.setattr(auditing, "fits_beside", lambda engine: False)
    monkeypatch.setattr(auditing.continuation, "audit_continuation", lambda *given: iter(()))
    said = []
    options = auditing.AuditOptions(("continuation",), quick=True)
    plan, _ = auditing._audit(
        "continuation", options, None, (), torch.device("cuda"), 0, None, said.append
    )
    assert plan.other_process is False and "control B is left out" in said[0]


def test_the_soak_runs_beside_others_on_a_processor():
    assert AuditOptions(device="cpu").soak_beside
    assert not AuditOptions(device="cuda").soak_beside
    assert not AuditOptions(device="cpu", quick=True).soak_beside
    assert not AuditOptions(("soak",), device="cpu").soak_beside
    assert AuditOptions(("soak",), device="cpu", faults=True).soak_beside


def test_planted_faults_are_in_the_files(soak):
    out, arguments = soak
    done = call(*arguments, "--faults")
    assert done.exit_code == 0, done.output
    (entry,) = auditfile.load_audit(out / "audit.json")["faults"]
    assert entry["fault"] == "slot reuse without reset" and entry["at_once"]
    assert "All 1 planted faults were seen" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("component", "--geometry", "huge"), "27b"),
        (("component", "--seed", "-1"), "--seed is -1"),
        (("component", "--device", "tpu"), "cpu, cuda or auto"),
        (("sampler", "--seeds", "0"), "--seeds is 0"),
        (("soak", "--corpus", "nowhere.jsonl"), "nowhere.jsonl"),
        (("continuation", "--rows", "odd"), "natural, matched"),
        (("continuation", "--dtype", "int8"), "bfloat16"),
    ],
)
def test_wrong_use_is_a_sentence(arguments, said, speaking, corpus):
    if arguments[0] != "component" and "--corpus" not in arguments:
        arguments = (*arguments, "--corpus", corpus, "--model", speaking)
    done = call(*arguments)
    assert done.exit_code == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_a_file_of_another_version_is_refused(tmp_path):
    (tmp_path / "audit.json").write_text('{"schema_version": 99}')
    with pytest.raises(Exception, match="schema version 99"):
        auditfile.load_audit(tmp_path / "audit.json")


def entry(audit, acted, detected):
    return {
        "fault": "no replay", "audit": audit, "place": "", "seed": 0, "acted": acted,
        "detected": detected, "named": "continuation", "check": "", "reason": "",
        "at_once": detected is not None and acted == detected,
    }  # fmt: skip


def test_the_fault_table_tells_seen_unseen_late_and_not_reached():
    faults = [
        entry("component", None, None),
        entry("continuation", 1, 1),
        entry("continuation", 2, 4),
        entry("soak", 0, None),
    ]
    (row,) = fault_rows(faults, ["component", "continuation", "sampler", "soak"])
    assert row == ("no replay", "continuation", ["-", "2/2, cycle 2, 1 late", "", "0/1"])


def test_a_verdict_names_what_failed():
    found = {
        "audits": [{"audit": "soak", "seed": 0, "passed": True, "lines": [], "failures": []}],
        "faults": [entry("continuation", 1, None)],
        "undetected": ["fault 'no replay' was not seen"],
        "rule": "equality",
        "options": {"seeds": 1},
        "false_alarms": {},
        "walk_power": [
            {"fault": "shifted rows", "seed": 0, "steps": 6, "seen": 5, "walks": 50_000}
        ],
    }
    assert verdict(found) == "Failed: 1 times a planted fault went undetected."
    assert [table.name for table in audit_tables(found)] == ["faults", "power"]
    assert "walks alone see it in 5 of 6" in walk_power(found)[0]
    assert figure(None) == "not finite" and figure(3.0) == "3" and figure(0.5) == "5.00e-01"


def test_an_audit_beside_a_replay_is_a_section_of_its_report(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(Path(__file__).parents[1] / "fixtures" / "run-v1", run)
    assert extra_tables(RunView.load(run)) == []
    found = {
        "schema_version": auditfile.SCHEMA_VERSION,
        "audits": [],
        "faults": [entry("continuation", 1, 1)],
        "undetected": [],
        "rule": "equality",
        "options": {"seeds": 1},
        "false_alarms": {},
        "walk_power": [],
    }
    auditfile.save_audit(run, found)
    (table,) = extra_tables(RunView.load(run))
    assert table.title == "Planted faults" and table.rows[0][2].text == "1/1, cycle 2"


def test_faults_without_the_model_s_audits_need_the_model():
    assert not AuditOptions(("component",)).needs_model
    assert AuditOptions(("component", "soak")).needs_model

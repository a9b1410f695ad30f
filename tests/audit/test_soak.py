import math
import signal
from dataclasses import replace

import pytest

from lumotree.audit import soak
from lumotree.audit.check import Check, lines
from lumotree.audit.faults import fault
from lumotree.audit.soak import SoakBeside, SoakPlan, audit_soak

SMALL = SoakPlan(tokens=36, requests=4, stretch=18, side_by_side=False)


def test_a_soak_without_faults_passes(engine, prompts):
    found = list(audit_soak(engine, SMALL, prompts, 0))
    assert all(check.passed for check in found), [c.sentence for c in found if not c.passed]
    counts = {line.name: line.total for line in lines(found)}
    assert counts == {"requests": 4, "long continuation": 2, "state at the end": 1}


def test_a_broken_walk_fails_the_long_continuation(engine, prompts):
    plan = SoakPlan(tokens=36, requests=0, stretch=18, side_by_side=False)
    found = list(audit_soak(engine, plan, prompts, 0, fault("unconditional accept").apply))
    assert not found[-1].passed


def compared(found):
    """The stretches that the long continuation was compared over."""
    return [c.place.split(" of ")[0] for c in found if c.name == "long continuation"]


def test_a_tolerated_divergence_does_not_end_the_comparison(engine, prompts, monkeypatch):
    """Another decoder's tokens go wrong again and again; each time it goes on after the right."""
    monkeypatch.setattr(engine, "row_multiple", None)
    monkeypatch.setattr(soak, "CLOSE", math.inf)
    plan = SoakPlan(tokens=36, requests=0, stretch=18, side_by_side=False)
    found = list(audit_soak(engine, plan, prompts, 0, fault("unconditional accept").apply))
    assert sum(check.figures.get("divergences", 0) for check in found) > 1
    at = 0
    for stretch in compared(found):
        first, last = (int(word) for word in stretch.split() if word.isdigit())
        assert first == at + 1 and last >= first
        at = last
    assert at == 36 and found[-1].name == "state at the end"
    assert found[-1].passed, found[-1].reason


def test_without_equal_bits_nothing_that_is_right_fails(engine, prompts, monkeypatch):
    monkeypatch.setattr(engine, "row_multiple", None)
    plan = SoakPlan(tokens=36, requests=0, stretch=18, side_by_side=False)
    found = list(audit_soak(engine, plan, prompts, 0))
    assert compared(found) == ["tokens 1 to 18", "tokens 19 to 36"]
    assert found[-1].passed and found[-1].figures["GDN state"] == 0


def test_without_equal_bits_a_state_that_is_far_off_fails(engine, prompts, monkeypatch):
    monkeypatch.setattr(engine, "row_multiple", None)
    monkeypatch.setattr(soak, "_tokens_check", lambda name, place, *_: Check(name, place, True))
    plan = SoakPlan(tokens=36, requests=0, stretch=18, side_by_side=False)
    found = list(audit_soak(engine, plan, prompts, 0, fault("no replay").apply))
    assert not found[-1].passed and "GDN state" in found[-1].reason


def test_plain_decoding_is_the_reference_and_has_no_fault(engine, prompts):
    """A fault in a slot's reset cannot hide in a reference that has it too."""
    found = list(audit_soak(engine, SMALL, prompts, 0, fault("slot reuse without reset").apply))
    assert [check.passed for check in found[:3]] == [True] * 3
    assert not found[3].passed


@pytest.fixture
def beside(engine, prompts):
    """Makes soaks in processes of their own, and ends what is left of them."""
    made = []

    def make(*, engine=engine, prompts=prompts):
        made.append(SoakBeside(engine, SMALL, prompts, 0))
        return made[-1]

    yield make
    for running in made:
        running.close()


def test_a_soak_beside_makes_the_same_checks(engine, prompts, beside):
    here = list(audit_soak(engine, SMALL, prompts, 0))
    soak = beside()
    assert list(soak.checks()) == here[SMALL.requests :] + here[: SMALL.requests]
    assert 0 < soak.seconds and 0 < soak.cpu_seconds


def test_a_soak_beside_that_fails_is_failed_checks_with_its_message(beside):
    longer, requests = beside(prompts=[]).checks()
    assert not longer.passed and "ZeroDivisionError" in longer.reason
    assert not requests.passed and "IndexError" in requests.reason
    assert (longer.name, requests.name) == ("long continuation", "requests")


def test_a_soak_beside_that_is_killed_is_a_failed_check(beside):
    soak = beside()
    (process,) = soak._parts["long continuation"]._running
    process.send_signal(signal.SIGSEGV)
    first, *others = soak.checks()
    assert not first.passed and f"exit code -{signal.SIGSEGV.value}" in first.reason
    assert [check.passed for check in others] == [True] * SMALL.requests


def test_a_soak_beside_ends_when_it_is_closed(beside):
    soak = beside()
    running = [process for part in soak._parts.values() for process in part._running]
    soak.close()
    assert len(running) == 2 and all(process.poll() is not None for process in running)


def test_requests_run_beside_the_continuation(engine, prompts):
    found = list(audit_soak(engine, replace(SMALL, side_by_side=True), prompts, 0))
    here = list(audit_soak(engine, SMALL, prompts, 0))
    assert found == here[SMALL.requests :] + here[: SMALL.requests]


def test_a_fault_is_not_planted_where_it_cannot_reach(engine, prompts):
    with pytest.raises(ValueError, match="process of its own"):
        list(audit_soak(engine, SoakPlan(), prompts, 0, fault("no replay").apply))

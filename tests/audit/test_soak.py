from dataclasses import asdict

import pytest

from lumotree.audit.check import lines
from lumotree.audit.faults import fault
from lumotree.audit.fresh import same_engine
from lumotree.audit.soak import SoakPlan, audit_soak, requests_job

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


def test_plain_decoding_is_the_reference_and_has_no_fault(engine, prompts):
    """A fault in a slot's reset cannot hide in a reference that has it too."""
    found = list(audit_soak(engine, SMALL, prompts, 0, fault("slot reuse without reset").apply))
    assert [check.passed for check in found[:3]] == [True] * 3
    assert not found[3].passed


def test_requests_beside_the_continuation_are_the_same_requests(engine, prompts):
    """What a process of its own is asked for gives the checks that this process makes."""
    job = {
        "engine": same_engine(engine),
        "plan": asdict(SMALL),
        "prompts": [[prompt.name, list(prompt.tokens)] for prompt in prompts],
        "seed": 0,
    }
    here = [asdict(check) for check in audit_soak(engine, SMALL, prompts, 0)][: SMALL.requests]
    assert requests_job(job) == here


def test_a_fault_is_not_planted_where_it_cannot_reach(engine, prompts):
    with pytest.raises(ValueError, match="process of its own"):
        list(audit_soak(engine, SoakPlan(), prompts, 0, fault("no replay").apply))

import math
from dataclasses import replace

import pytest
import torch

from lumotree.audit import continuation, reference
from lumotree.audit.check import Check, lines
from lumotree.audit.constants import Constants
from lumotree.audit.continuation import ContinuationPlan, audit_continuation, forced_runs
from lumotree.audit.faults import fault
from lumotree.audit.prompts import Prompt, prefixes
from lumotree.audit.schedule import KINDS, SCHEDULES, forced_cycles
from lumotree.audit.surfaces import FLOORS, Distance, distances
from lumotree.errors import LumoTreeError
from lumotree.tree import tree_from_name

HYDRA = tree_from_name("hydra27")
SMALL = ContinuationPlan((20, 250), 1, ("a", "b"), other_process=False)


def test_a_run_without_faults_passes(engine, prompts):
    found = list(audit_continuation(engine, SMALL, prompts, 0, Constants()))
    table = {line.name: line for line in lines(found)}
    assert all(check.passed for check in found), [c.sentence for c in found if not c.passed]
    assert table["cycles"].passed == table["greedy tokens"].passed == 2 * 2 * 7
    assert table["cycles"].figures["GDN state"] == 0
    # The packed kernels sum in another order: the envelope is measured, and it is not zero.
    assert table["control P: packed kernels"].figures["GDN state"] > 0


def test_the_envelope_is_frozen_on_calibration_prefixes(engine, prompts, tmp_path):
    list(audit_continuation(engine, SMALL, prompts, 0, Constants(tmp_path)))
    frozen = Constants(tmp_path).values["continuation, seed 0"]
    assert frozen["measured_on"] == ["prefix p0[:20], schedule a", "prefix p0[:20], schedule b"]
    assert frozen["values"]["envelope"]["GDN state"] == 0.02
    other = replace(SMALL, lengths=(30, 250))
    with pytest.raises(LumoTreeError, match="frozen"):
        list(audit_continuation(engine, other, prompts, 0, Constants(tmp_path)))


def test_without_equal_bits_the_rule_is_twice_the_envelope(engine, prompts):
    decoder = reference.audited_decoder(engine)
    (run,) = forced_runs(decoder, replace(SMALL, lengths=(20,), schedules=("a",)), prompts, 0)
    with torch.inference_mode():
        wanted = reference.sequential(decoder, run.prefix, run.cycles)
    steps = list(continuation.follow(decoder, run.prefix, run.cycles, wanted, fault("no replay")))
    limits = {name: 0.04 for name in steps[0].distances}
    (cycle, greedy) = continuation.step_checks(run, steps[0], limits, continuation.FLOORS)
    assert not cycle.passed and "GDN state is outside the envelope" in cycle.reason
    assert greedy.passed
    wide = dict.fromkeys(limits, 1e9)
    assert all(c.passed for c in continuation.step_checks(run, steps[0], wide, {}))
    nowhere = replace(steps[0], distances={"GDN state": Distance(math.inf, False)})
    (cycle, _) = continuation.step_checks(run, nowhere, {"GDN state": math.inf}, {})
    assert not cycle.passed


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("control", "BVP")
def test_a_control_without_a_finite_distance_fails_and_widens_nothing(
    engine, prompts, control, exact
):
    decoder = reference.audited_decoder(engine)
    (run,) = forced_runs(decoder, replace(SMALL, lengths=(20,), schedules=("a",)), prompts, 0)
    with torch.inference_mode():
        wanted = reference.sequential(decoder, run.prefix, run.cycles)[:1]
        found = reference.sequential(decoder, run.prefix, run.cycles)[:1]
        found[0].recurrent[0, 0, 0, 0] = math.nan
    envelope = dict(FLOORS)
    (check,) = continuation._control(control, run, found, wanted, envelope, exact)
    assert not check.passed and "GDN state" in check.reason
    assert envelope == FLOORS


def test_all_kinds_of_cycles_are_forced_and_the_last_has_no_draft():
    assert {kind for kinds in SCHEDULES.values() for kind in kinds} == set(KINDS)
    assert all(len(kinds) == 7 and kinds[-1] == "root" for kinds in SCHEDULES.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tree", ["hydra27", "chain-3", "root", "-1,0,0,1,1,2"])
def test_forced_cycles_are_steps_that_a_decoder_could_take(schedule, tree):
    tree = tree_from_name(tree)
    script = list(range(1000, 1000 + 7 * len(tree) + 1))
    for seed in range(5):
        cycles = forced_cycles(SCHEDULES[schedule], tree, script, 500, seed)
        text = [token for cycle in cycles for token in cycle.tokens]
        assert text == script[: len(text)]
        for cycle, following in zip(cycles, [*cycles[1:], None], strict=True):
            p, path = cycle.proposal, cycle.path
            assert tree.root_paths[path[-1]] == path and all(p.active[row] for row in path)
            assert [p.tokens[row] for row in path] == list(cycle.tokens)
            assert following is None or following.tokens[0] == cycle.pending
            below = {p.tokens[r] for r in tree.children[path[-1]] if p.active[r]}
            assert cycle.pending not in below
            for children in tree.children:
                tokens = [p.tokens[row] for row in children if p.active[row]]
                assert len(set(tokens)) == len(tokens)
            assert tree.restrict(tuple(p.active))


def test_a_short_script_is_an_error():
    with pytest.raises(ValueError, match="too short"):
        forced_cycles(("principal",), HYDRA, [1, 2, 3], 100, 0)


def test_runs_of_different_length_are_infinitely_apart(engine, prompts):
    decoder = reference.audited_decoder(engine)
    (run,) = forced_runs(decoder, replace(SMALL, lengths=(20,), schedules=("a",)), prompts, 0)
    with torch.inference_mode():
        first, second, *_ = reference.sequential(decoder, run.prefix, run.cycles)
        again, *_ = reference.sequential(decoder, run.prefix, run.cycles)
        apart = distances(first, second)
        assert apart["length"].value == math.inf and not apart["length"].equal
        assert all(d.equal and d.value == 0 for d in distances(first, again).values())
        first.recurrent[0, 0, 0, 0] = float("nan")
        assert distances(first, again)["GDN state"].value == math.inf


def test_another_process_repeats_the_bits(engine, prompts):
    plan = replace(SMALL, lengths=(20,), schedules=("b",), other_process=True)
    found = lines(audit_continuation(engine, plan, prompts, 0, Constants()))
    (other,) = [line for line in found if line.name.startswith("control B")]
    assert other.passed == other.total == 7 and other.figures["GDN state"] == 0


def test_prefixes_come_from_different_prompts_and_go_on():
    long = [Prompt(f"p{i}", tuple(range(500))) for i in range(3)]
    found = prefixes(long, (60, 300, 1021), 1)
    assert [p.name for p in found] == ["p1[:60]", "p2[:300]", "p0[:404]"]
    assert found[0].script[0] == 60 and len(found[0].script) == 96
    with pytest.raises(LumoTreeError, match="no prompt"):
        prefixes([Prompt("short", (1, 2, 3))], (60,), 0)


def test_figures_that_are_no_numbers_are_not_lost():
    (line,) = lines([Check("a", "b", True, figures={"x": v}) for v in (1.0, math.nan, 2.0)])
    assert line.as_dict()["figures"] == {"x": None} and line.passed == 3

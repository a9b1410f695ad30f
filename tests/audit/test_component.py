from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lumotree.audit import component
from lumotree.audit.check import lines
from lumotree.audit.component import (
    ComponentPlan,
    Measured,
    audit_component,
    compare,
    equal_rows,
    paired_rule,
)
from lumotree.audit.constants import Constants
from lumotree.errors import LumoTreeError
from lumotree.ops.gdn import GEOMETRIES
from lumotree.verifiers import NAMES, verifier_class

CPU = torch.device("cpu")
TINY = ComponentPlan(GEOMETRIES["tiny"], "-1,0,0,1,1,2", (1, 1), processes=0)


def audit(plan=TINY, constants=None):
    return list(audit_component(plan, CPU, 0, constants or Constants()))


def test_every_verifier_passes_and_every_control_is_seen():
    found = audit()
    assert all(check.passed for check in found), [c.sentence for c in found if not c.passed]
    table = {line.name: line for line in lines(found)}
    assert table["planted control seen"].total == len(component.CONTROLS) == 4
    assert table["poisoned off-path branches"].total == 2 * len(NAMES)
    assert table["lumotree"].figures["states not equal"] == 0
    assert table["Weaver"].figures["states not equal"] > 0


def test_sets_have_seeds_of_their_own():
    plan = ComponentPlan()
    seeds = [seed for run in range(3) for _, seed in plan.seeds(run)]
    assert len(set(seeds)) == len(seeds) == 12
    assert [place.split()[0] for place, _ in plan.seeds(0)] == ["calibration"] * 2 + [
        "held-out"
    ] * 2
    assert plan.geometry.heads == 48 and plan.geometry.dk == 128


def test_a_verifier_that_is_a_bit_off_fails(monkeypatch):
    kind = verifier_class("path-scan")
    honest = kind.verify

    def careless(self, layer, recurrent, operands):
        out = honest(self, layer, recurrent, operands)
        out[3, 0, 0] += 1e-7
        return out

    monkeypatch.setattr(kind, "verify", careless)
    found = audit(replace(TINY, verifiers=("path-scan",), controls=False))
    assert not any(check.passed for check in found)
    assert "outputs differ from native ones" in found[0].reason


def test_an_inexact_verifier_must_keep_to_what_it_was_calibrated_on(monkeypatch):
    kind = verifier_class("weaver-fp32")
    honest, calls = kind.verify, []

    def drifting(self, layer, recurrent, operands):
        calls.append(layer)
        # Within its fixed tolerance; the held-out set comes second.
        return honest(self, layer, recurrent, operands) + (5e-6 if len(calls) > 2 else 0)

    monkeypatch.setattr(kind, "verify", drifting)
    plan = replace(TINY, verifiers=("weaver-fp32",), controls=False)
    first, second = audit(plan)
    assert first.passed and not second.passed and "output error" in second.reason


@pytest.mark.parametrize(("error", "passed"), [(1.9e-6, True), (3.1e-6, False)])
def test_what_native_decoding_is_off_by_is_no_verifiers_fault(error, passed):
    """Calibration sets can be lucky: their error, doubled, is not the only limit."""
    exact = torch.zeros(2, 1, 4, dtype=torch.float64)
    native = torch.full((2, 1, 4), 3e-6)
    ours = torch.full((2, 1, 4), error)
    layer = [(exact, exact)], [(native, native)]
    case = SimpleNamespace(audited=1, exact=layer[0], native=layer[1], tree=[0, 1])
    verifier = SimpleNamespace(exact=False, tolerance=(1e-3, 1e-3), title="inexact")
    measured = Measured([ours], ours[:, None])
    check, errors = compare(case, verifier, measured, "held-out set", (5e-7, 5e-7))
    assert check.passed is passed and errors == pytest.approx((error, error))


def test_a_publication_that_reads_a_rejected_branch_fails(monkeypatch):
    kind = verifier_class("native-path")
    honest = kind.publish

    def leaking(self, recurrent, path):
        honest(self, recurrent, path)
        recurrent += 0 * self.states[:, -1]

    monkeypatch.setattr(kind, "publish", leaking)
    found = audit(replace(TINY, verifiers=("native-path",)))
    failed = {check.name for check in found if not check.passed}
    assert failed == {"poisoned off-path branches"}


def test_the_paired_rule():
    exact = torch.ones(1, 1, 4, dtype=torch.float64)
    native = (exact + 1e-3).float()
    assert paired_rule(native, native, exact).all()
    assert paired_rule((exact + 1.09e-3).float(), native, exact).all()
    assert not paired_rule((exact + 1.2e-3).float(), native, exact).any()
    one = native.clone()
    one[..., 0] = 1 + 1.2e-3  # the largest error breaks the rule, the RMS does not
    assert paired_rule(one, native, exact).flatten().tolist() == [True, False]
    assert not paired_rule(native * float("nan"), native, exact).any()


@pytest.mark.parametrize("rows", (1, 2))
def test_how_many_rows_are_compared_at_once_changes_nothing(rows, monkeypatch):
    whole = audit()
    state = TINY.geometry.heads * TINY.geometry.dk * TINY.geometry.dv
    monkeypatch.setattr(component, "PART", rows * state)
    assert audit() == whole


def test_equality_is_of_bits():
    a = torch.zeros(2, 3)
    b = a.clone()
    b[1, 0] = -0.0
    assert equal_rows(a, b).tolist() == [True, False]


def test_constants_are_written_once(tmp_path):
    first = Constants(tmp_path, 3)
    assert first.freeze("component", ["set a"], {"weaver": [1.0, 2.0]}) == {"weaver": [1.0, 2.0]}
    Constants(tmp_path, 3).freeze("component", ["set a"], {"weaver": [1.0, 2.0]})
    Constants(tmp_path, 4).freeze("component", ["set b"], {"weaver": [9.0, 2.0]})
    for on, value in ((["held-out"], 1.0), (["set a"], 9.0)):
        with pytest.raises(LumoTreeError, match="--out"):
            Constants(tmp_path, 3).freeze("component", on, {"weaver": [value, 2.0]})


def test_a_damaged_constants_file_is_a_sentence(tmp_path):
    (tmp_path / "constants.json").write_text("{")
    with pytest.raises(LumoTreeError, match="cannot be read"):
        Constants(tmp_path)

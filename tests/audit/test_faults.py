"""Every fault is seen by the audit it names, in the step in which it acts, and leaves no trace."""

from types import SimpleNamespace

import pytest
import torch

from lumotree import decoder, sampling
from lumotree.audit.detect import Detection, Sensitivity, undetected
from lumotree.audit.faults import AUDITS, FAULTS, base, fault, selection
from lumotree.audit.faults.base import replaced
from lumotree.audit.sampler import SamplerPlan
from lumotree.draft import mtp
from lumotree.engine import Engine
from lumotree.errors import LumoTreeError
from lumotree.model.hybrid import HybridModel
from lumotree.model.rows import TreeRows
from lumotree.state import HybridState
from lumotree.verifiers.path_scan import PathScan
from tests.tiny import Geometry, save_tiny

SEAMS = {
    (decoder, "sample_rows"),
    (decoder, "accept_walk"),
    (decoder, "fill"),
    (decoder.Decoder, "verify"),
    (mtp, "refill"),
    (sampling, "_perturbed_argmax"),
    (HybridModel, "stream"),
    (TreeRows, "__init__"),
    (TreeRows, "publish"),
    (HybridState, "reset"),
    (PathScan, "publish"),
}


@pytest.fixture(scope="module")
def sensitivity(engine, prompts):
    return Sensitivity(engine, prompts, seed=1)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen_at_once_by_the_audit_it_names(sensitivity, name):
    planted = fault(name)
    found = list(sensitivity.detections(planted, (planted.audit,)))
    assert len(found) == (2 if planted.audit == "continuation" else 1)
    assert undetected(found) == []
    assert all(detection.at_once for detection in found)
    if planted.audit == "continuation":
        surface = planted.surface.split(",")[0]
        assert all(surface in detection.reason for detection in found)


def test_every_fault_names_an_audit_and_there_are_twenty():
    assert len(FAULTS) == 20
    assert {f.audit for f in FAULTS.values()} <= set(AUDITS)
    assert all(f.text.endswith(".") and f.surface for f in FAULTS.values())


def test_the_component_audit_sees_its_controls(sensitivity):
    for name in ("no replay", "sibling state", "swapped rings", "stale graph buffer"):
        (found,) = sensitivity.detections(fault(name), ("component",))
        assert found.at_once and "states differ" in found.reason, name


def test_what_walks_alone_see_is_counted(sensitivity):
    found = sensitivity.walk_power(SamplerPlan(2, 1, 24, 3000))
    assert [entry.fault for entry in found] == [f.name for f in selection.FAULTS]
    assert all(0 <= entry.seen <= entry.steps == 2 for entry in found)
    assert any(entry.seen for entry in found)


def test_an_audit_that_does_not_run_the_broken_code_says_so(sensitivity):
    (found,) = sensitivity.detections(fault("temperature twice"), ("component",))
    assert (found.acted, found.detected) == (None, None)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_leaves_nothing_behind(name):
    before = {seam: vars(seam[0])[seam[1]] for seam in SEAMS}
    with pytest.raises(RuntimeError), fault(name).apply():
        changed = [seam for seam in SEAMS if vars(seam[0])[seam[1]] is not before[seam]]
        assert changed
        raise RuntimeError
    assert all(vars(owner)[attribute] is before[owner, attribute] for owner, attribute in SEAMS)


def test_a_seam_that_moved_is_an_error():
    with pytest.raises(AttributeError, match="no gone of its own"):
        with replaced(mtp, "gone", lambda original: original):
            pass


def test_faults_of_a_draft_head_need_one(tmp_path, prompts):
    save_tiny(tmp_path, Geometry(), mtp=False)
    headless = Sensitivity(Engine.load(str(tmp_path), device="cpu"), prompts, 0)
    for name in ("MTP rows not refilled", "pre-norm hidden to the drafter", "duplicate sibling"):
        assert list(headless.detections(fault(name))) == []


def test_an_unknown_fault_names_those_there_are():
    with pytest.raises(LumoTreeError, match="no replay"):
        fault("no such fault")


def test_what_went_undetected_is_said():
    said = undetected(
        [
            Detection("no replay", "continuation", "prefix a", 3, 2, None),
            Detection("no replay", "continuation", "prefix a", 3, None, None),
            Detection("no replay", "continuation", "prefix a", 3, 1, 4, "cycles", "x"),
            Detection("no replay", "sampler", "", 3, 2, None),
            Detection("no replay", "continuation", "prefix a", 3, 2, 2, "cycles", "x"),
        ]
    )
    assert len(said) == 3
    assert "acted in step 3 and was not seen" in said[0] and "never acted" in said[1]
    assert "seen in step 5" in said[2]


def test_planted_faults_do_not_touch_weights(engine):
    before = engine.model.embedding.clone()
    with fault("off-by-one position").apply():
        pass
    assert torch.equal(engine.model.embedding, before)


def test_captured_rows_are_rotated_by_the_table_that_they_keep(monkeypatch):
    class CapturedDecoder:
        """Captured before the model made a longer table."""

        def __init__(self):
            self.model = SimpleNamespace(rope=torch.arange(8.0))
            self.tree_step = SimpleNamespace(rows=SimpleNamespace(rope=torch.arange(4.0)))

        def verify(self, state, proposal):
            return self.tree_step.rows.rope.tolist()

    module = SimpleNamespace(CapturedDecoder=CapturedDecoder)
    monkeypatch.setattr(base, "captured_module", lambda name: module)
    captured = CapturedDecoder()
    with fault("off-by-one position").apply() as mutation:
        assert captured.verify(None, None) == [1, 2, 3, 0]
    assert captured.verify(None, None) == [0, 1, 2, 3] and mutation.count == 1

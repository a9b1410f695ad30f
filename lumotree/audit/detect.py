"""Which audit sees which fault, and how soon: the sensitivity of the audits, measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lumotree.audit import component, continuation, reference, sampler, soak
from lumotree.audit.check import Check
from lumotree.audit.continuation import ContinuationPlan, ForcedRun
from lumotree.audit.faults import AUDITS, FAULTS, Fault, Mutation, selection
from lumotree.audit.prompts import Prompt
from lumotree.audit.surfaces import Boundary
from lumotree.engine import Engine

# Two prefixes, one of which crosses a key block on the way.
LENGTHS = (60, 250)
# A fault is planted before one of the first cycles, by seed: enough are left for it to act in.
PLANTED_AT = 3


@dataclass(frozen=True)
class Detection:
    """One fault in one audit. Steps are cycles, captured steps, or requests, from 0.

    acted: the first step in which the fault changed anything, None when the audit does not run
    the code it breaks. detected: the first step with a failed check, None when all passed.
    """

    fault: str
    audit: str
    place: str
    seed: int
    acted: int | None
    detected: int | None
    check: str = ""
    reason: str = ""

    @property
    def at_once(self) -> bool:
        """Seen in the step in which it first acted."""
        return self.detected is not None and self.detected == self.acted

    def as_dict(self) -> dict[str, Any]:
        named = FAULTS[self.fault].audit
        return asdict(self) | {"named": named, "at_once": self.at_once}


@dataclass(frozen=True)
class WalkPower:
    """In how many captured steps the walks alone, without the exact checks, saw a fault."""

    fault: str
    seed: int
    steps: int
    seen: int
    walks: int


class Sensitivity:
    """Plants faults in audits of small size. References are made once per seed, without faults."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        seed: int,
        envelope: dict[str, float] | None = None,
    ) -> None:
        """envelope: the frozen one of the continuation audit, for machines without equal bits."""
        self.engine, self.prompts, self.seed = engine, prompts, seed
        exact = engine.row_multiple is not None
        self.limits = None
        if not exact:
            envelope = envelope or continuation.FLOORS
            self.limits = {n: continuation.ALLOWANCE * v for n, v in envelope.items()}
        self._runs: list[tuple[ForcedRun, list[Boundary]]] | None = None
        self._case = self._decoder = None

    def detections(self, fault: Fault, audits: Sequence[str] = AUDITS) -> Iterator[Detection]:
        """One per audit, and per prefix in the continuation audit; none where it cannot act:
        faults of the draft head need one."""
        drafts = fault.surface == "drafts" or fault.surface.startswith("MTP")
        if drafts and not self.engine.has_mtp:
            return
        for audit in audits:
            yield from getattr(self, f"_{audit}")(fault)

    @torch.inference_mode()
    def walk_power(self, plan: sampler.SamplerPlan) -> list[WalkPower]:
        """What the G-test sees of the faults of selection, on steps captured without a fault."""
        steps = sampler.capture(self.engine, plan, self.prompts, self.seed)
        rows = [step.targets() for step in steps]
        found = []
        for fault in selection.FAULTS:
            with fault.apply():
                checks = [
                    sampler.walk_check(step, targets, number, plan, self.seed)
                    for number, (step, targets) in enumerate(zip(steps, rows, strict=True))
                ]
            seen = sum(not check.passed for check in checks)
            found.append(WalkPower(fault.name, self.seed, len(steps), seen, plan.walks))
        return found

    def _component(self, fault: Fault) -> Iterator[Detection]:
        plan = component.ComponentPlan.quick(self.engine.model.device)
        if self._case is None:
            seed = plan.seeds(self.seed)[-1][1]
            self._case = plan.case(seed, self.engine.model.device)
        verifier = self._case.make(component.LUMOTREE)
        with fault.apply() as mutation:
            found = component.measure(self._case, verifier)
        check, _ = component.compare(self._case, verifier, found, "held-out set", None)
        acted = 0 if mutation.count else None
        yield self._found(fault, "component", "held-out set", acted, 0, check)

    @torch.inference_mode()
    def _continuation(self, fault: Fault) -> Iterator[Detection]:
        if self._runs is None:
            self._decoder = reference.audited_decoder(self.engine)
            plain = reference.sequential_decoder(self.engine)
            schedule = "abc"[self.seed % 3]
            plan = ContinuationPlan(LENGTHS, 1, (schedule,), other_process=False)
            runs = continuation.forced_runs(self._decoder, plan, self.prompts, self.seed)
            self._runs = [(r, reference.sequential(plain, r.prefix, r.cycles)) for r in runs]
        for run, wanted in self._runs:
            acted = failed = None
            steps = continuation.follow(
                self._decoder, run.prefix, run.cycles, wanted, fault, self.seed % PLANTED_AT
            )
            for step in steps:
                if acted is None and step.mutations:
                    acted = step.cycle
                checks = continuation.step_checks(run, step, self.limits, continuation.FLOORS)
                failed = next((check for check in checks if not check.passed), None)
                if failed is not None:
                    break
            yield self._found(
                fault, "continuation", run.place, acted, failed and failed.step, failed
            )

    def _sampler(self, fault: Fault) -> Iterator[Detection]:
        planted = _Planted(fault)
        plan = sampler.SamplerPlan.probe()
        checks = sampler.audit_sampler(self.engine, plan, self.prompts, self.seed, planted)
        yield self._watched(fault, "sampler", checks, planted)

    def _soak(self, fault: Fault) -> Iterator[Detection]:
        planted = _Planted(fault)
        plan = soak.SoakPlan.probe()
        checks = soak.audit_soak(self.engine, plan, self.prompts, self.seed, planted)
        yield self._watched(fault, "soak", checks, planted)

    def _watched(
        self, fault: Fault, audit: str, checks: Iterator[Check], planted: _Planted
    ) -> Detection:
        acted = failed = None
        before = None
        for check in checks:
            # Before the first check steps were captured; what a fault did then shows in their
            # drafts, which are that check. A few changed walks among thousands are nothing a test
            # must see: where walks pass, they do not count.
            first = before is None
            counts = not check.passed if first or check.name == "walks" else True
            if acted is None and counts and planted.count > (before or 0):
                acted = check.step
            before = planted.count
            if not check.passed:
                failed = check
                break
        checks.close()  # takes the fault out
        return self._found(fault, audit, "", acted, failed and failed.step, failed)

    def _found(
        self,
        fault: Fault,
        audit: str,
        place: str,
        acted: int | None,
        step: int | None,
        failed: Check | None,
    ) -> Detection:
        if failed is None or failed.passed:
            return Detection(fault.name, audit, place, self.seed, acted, None)
        return Detection(
            fault.name, audit, place, self.seed, acted, step, failed.name, failed.reason
        )


class _Planted:
    """A fault as the context that an audit enters, perhaps many times; counts what it did."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.mutations: list[Mutation] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.fault.apply() as mutation:
            self.mutations.append(mutation)
            yield

    @property
    def count(self) -> int:
        return sum(mutation.count for mutation in self.mutations)


def undetected(found: Sequence[Detection]) -> list[str]:
    """A sentence per fault that the audit it names did not see in the step it acted in."""
    sentences = []
    for detection in found:
        fault = FAULTS[detection.fault]
        if detection.audit != fault.audit or detection.at_once:
            continue
        where = f" on {detection.place}" if detection.place else ""
        if detection.acted is None:
            what = "never acted"
        elif detection.detected is None:
            what = f"acted in step {detection.acted + 1} and was not seen"
        else:
            what = f"acted in step {detection.acted + 1}, seen in step {detection.detected + 1}"
        sentences.append(
            f"fault '{fault.name}', seed {detection.seed}{where}, {fault.audit} audit: {what}"
        )
    return sentences

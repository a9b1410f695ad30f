"""Continuation audit: trees verified and published cycle after cycle, against one token at a time.

Paths are forced, so that every kind of publication occurs. After each cycle every surface is
compared with the sequential run of the same tokens. Where the start-up probe found equal bits the
rule is equality; elsewhere a distance may be twice the envelope, that is, the largest distance
that honest variations of the sequential run show on calibration prefixes. The envelope is
measured and reported either way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from lumotree.audit import reference
from lumotree.audit.check import Check
from lumotree.audit.constants import Constants
from lumotree.audit.faults import Fault
from lumotree.audit.fresh import FreshProcesses, same_engine
from lumotree.audit.prompts import Prefix, Prompt, prefixes
from lumotree.audit.reference import audited_decoder, open_slot, sequential_decoder
from lumotree.audit.schedule import SCHEDULES, Cycle, forced_cycles
from lumotree.audit.surfaces import FLOORS, Boundary, Distance, distances
from lumotree.decoder import Decoder
from lumotree.draft.plan import Proposal
from lumotree.engine import Engine

# Times the envelope that a candidate may be away from the sequential run.
ALLOWANCE = 2.0
# Prefixes end inside, just before, on and just after key blocks of 256 positions.
LENGTHS = (60, 507, 256, 300, 765, 1021)
CALIBRATION = 2


@dataclass(frozen=True)
class ContinuationPlan:
    """lengths: one per prefix, the first `calibration` of which the envelope is measured on."""

    lengths: tuple[int, ...] = LENGTHS
    calibration: int = CALIBRATION
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    other_process: bool = True

    @classmethod
    def quick(cls) -> ContinuationPlan:
        return cls((60, 507), 1, ("a", "b"))


@dataclass(frozen=True)
class Step:
    """One cycle of a candidate. mutations: how often a planted fault had acted by its end."""

    cycle: int
    distances: dict[str, Distance]
    greedy: bool
    mutations: int = 0

    def broken(self, limits: dict[str, float] | None) -> list[str]:
        """Surfaces that break the rule: equality, or `limits` by surface where there are any."""
        if limits is None:
            found = [name for name, d in self.distances.items() if not d.equal]
        else:
            found = [
                name
                for name, d in self.distances.items()
                if not (isfinite(d.value) and d.value <= limits.get(name, 0.0))
            ]
        return found


@torch.inference_mode()
def follow(
    decoder: Decoder,
    prefix: Prefix,
    cycles: Sequence[Cycle],
    wanted: Sequence[Boundary],
    fault: Fault | None = None,
    planted_at: int = 0,
) -> Iterator[Step]:
    """Runs the forced cycles through the decoder's own stages, a Step after each.

    A fault is planted before cycle `planted_at` and taken out at the end.
    """
    with ExitStack() as stack:
        mutation = None
        run, state = open_slot(decoder, prefix, cycles[0].tokens[0])
        for number, (cycle, reference_at) in enumerate(zip(cycles, wanted, strict=True)):
            if fault is not None and number == planted_at:
                mutation = stack.enter_context(fault.apply())
            start = state.length
            decoder.propose(run, state)  # the draft head refills its slots; its drafts are unused
            verified = decoder.verify(state, _copy(cycle.proposal))
            place = {row: i for i, row in enumerate(verified.kept)}
            path = [place[row] for row in cycle.path]
            logits = verified.logits[path].clone()
            run.tokens += [*cycle.tokens[1:], cycle.pending]
            verified.rows.publish(path, verified.hidden)
            here = Boundary.of(state, start, logits)
            yield Step(
                number,
                distances(here, reference_at),
                here.greedy == reference_at.greedy,
                mutation.count if mutation is not None else 0,
            )


def _copy(proposal: Proposal) -> Proposal:
    return Proposal(
        proposal.tree, list(proposal.tokens), list(proposal.active), list(proposal.source)
    )


@torch.inference_mode()
def audit_continuation(
    engine: Engine,
    plan: ContinuationPlan,
    prompts: Sequence[Prompt],
    seed: int,
    constants: Constants,
) -> Iterator[Check]:
    """One check per cycle and one per greedy row of a cycle; the envelope is frozen first."""
    decoder, plain = audited_decoder(engine), sequential_decoder(engine)
    runs = forced_runs(decoder, plan, prompts, seed)
    exact = engine.row_multiple is not None
    calibration = [run for run in runs if run.number < plan.calibration]
    with TemporaryDirectory() as folder:
        fresh = _second_process(engine, calibration, folder) if plan.other_process else None
        try:
            wanted = {id(r): reference.sequential(plain, r.prefix, r.cycles) for r in calibration}
            others = {"V": [], "P": []}
            for run in calibration:
                v = reference.sequential(plain, run.prefix, run.cycles, reference.OTHER_ROOM)
                others["V"].append(v)
                others["P"].append(reference.packed(plain, run.prefix, run.cycles))
            if fresh is not None:
                fresh.answers()
                others["B"] = reference.load_runs(f"{folder}/runs.pt")
        finally:
            if fresh is not None:
                fresh.close()
    envelope = dict(FLOORS)
    for control, found in others.items():
        for run, boundaries in zip(calibration, found, strict=True):
            yield from _control(control, run, boundaries, wanted[id(run)], envelope, exact)
    frozen = constants.freeze(
        "continuation", [run.place for run in calibration], {"envelope": envelope}
    )
    envelope = frozen["envelope"]
    limits = None if exact else {name: ALLOWANCE * value for name, value in envelope.items()}
    for run in runs:
        boundaries = wanted.pop(id(run), None)
        if boundaries is None:
            boundaries = reference.sequential(plain, run.prefix, run.cycles)
        for step in follow(decoder, run.prefix, run.cycles, boundaries):
            yield from step_checks(run, step, limits, envelope)


@dataclass(frozen=True)
class ForcedRun:
    """A prefix under a schedule; `number` is the prefix's."""

    number: int
    prefix: Prefix
    schedule: str
    cycles: list[Cycle]

    @property
    def place(self) -> str:
        return f"prefix {self.prefix.name}, schedule {self.schedule}"


def forced_runs(
    decoder: Decoder, plan: ContinuationPlan, prompts: Sequence[Prompt], seed: int
) -> list[ForcedRun]:
    """Every prefix under every schedule."""
    vocab = decoder.model.config.vocab_size
    return [
        ForcedRun(
            number,
            prefix,
            name,
            forced_cycles(
                SCHEDULES[name], decoder.tree, prefix.script, vocab, 1000 * seed + 10 * number + j
            ),
        )
        for number, prefix in enumerate(prefixes(prompts, plan.lengths, seed))
        for j, name in enumerate(plan.schedules)
    ]


def _second_process(engine: Engine, runs: list[ForcedRun], folder: str) -> FreshProcesses:
    job = {
        "engine": same_engine(engine),
        "out": str(Path(folder) / "runs.pt"),
        "runs": [
            (
                {"name": r.prefix.name, "tokens": r.prefix.tokens, "script": r.prefix.script},
                [cycle.tokens for cycle in r.cycles],
            )
            for r in runs
        ],
    }
    return FreshProcesses("sequential", job, 1)


CONTROLS = {
    "B": "sequential in another process",
    "V": "sequential with another cache capacity",
    "P": "packed kernels",
}


def _control(
    control: str,
    run: ForcedRun,
    found: Sequence[Boundary],
    wanted: Sequence[Boundary],
    envelope: dict[str, float],
    exact: bool,
) -> Iterator[Check]:
    """Widens the envelope; other processes and capacities must have equal bits if any do.

    A distance that is not finite is a failure of the control and widens nothing.
    """
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        apart = distances(ours, theirs)
        for name, distance in apart.items():
            if isfinite(distance.value):
                envelope[name] = max(envelope.get(name, 0.0), distance.value)
        equal_bits = exact and control != "P"
        wrong = [n for n, d in apart.items() if not isfinite(d.value) or equal_bits and not d.equal]
        yield Check(
            f"control {control}: {CONTROLS[control]}",
            f"{run.place}, cycle {number + 1}",
            not wrong,
            f"{', '.join(wrong)} differ" if wrong else "",
            {name: d.value for name, d in apart.items()},
        )


def step_checks(
    run: ForcedRun, step: Step, limits: dict[str, float] | None, envelope: dict[str, float]
) -> Iterator[Check]:
    """The two checks of a cycle."""
    broken = step.broken(limits)
    kind = run.cycles[step.cycle].kind
    place = f"{run.place}, cycle {step.cycle + 1} ({kind})"
    figures = {name: d.value for name, d in step.distances.items()}
    ratios = [d.value / envelope[n] for n, d in step.distances.items() if envelope.get(n)]
    figures["envelope ratio"] = max(ratios, default=0.0)
    rule = "differs" if limits is None else "is outside the envelope"
    yield Check(
        "cycles",
        place,
        not broken,
        f"{', '.join(broken)} {rule}" if broken else "",
        figures,
        step.cycle,
    )
    # Where bits differ, so may the larger of two logits that are nearly equal: it is counted.
    passed = step.greedy or limits is not None
    yield Check(
        "greedy tokens",
        place,
        passed,
        "" if passed else "another token has the highest logit",
        {"cycles with another greedy token": float(not step.greedy)},
        step.cycle,
    )

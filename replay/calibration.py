"""Measure acceptance and cost on this machine and corpus, and choose the tree for `tree=auto`.

A few requests are decoded with a handful of designs; every step's rows, phases and accepted
path are recorded. Acceptance comes from the widest trees, cost from all steps; `prediction`
turns both into a choice. Sampling noise differs from the replay's; the prompts differ too where
the corpus has requests that the replay leaves out. The choice names the requests it was made on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from arms.choice import TreeChoice
from lumotree.decoder import Decoder, DecoderConfig, Run
from lumotree.errors import LumoTreeError
from lumotree.prefix import PrefixStore
from replay.costmodel import CostModel, Observation, fit
from replay.machine import describe_machine
from replay.prediction import Candidate, Reach, candidates
from replay.selection import evenly_spaced

if TYPE_CHECKING:
    from lumotree.engine import Engine
    from lumotree.state import HybridState
    from replay.runner import Item

REQUESTS = 4
TOKENS = 64
# A step that takes this many times its design's median was disturbed.
DISTURBED = 2.0
# Another stream of sampling noise than the run's: greedy runs are calibrated on their own text.
SEED_SHIFT = 0x5EED
# What is decoded with: together they measure every depth, width and number of passes that a
# candidate may have, and spread passes and rows for the cost model.
DESIGNS = (
    DecoderConfig("root", 0, False),
    DecoderConfig("chain-11", 11, False),
    DecoderConfig("hydra27", 0, True),
    DecoderConfig("hydra27", 1, True),
    DecoderConfig("hydra27", 3, True),
    DecoderConfig("hydra27", 5, True),
    DecoderConfig("hydra27", 7, True),
)


@dataclass(frozen=True)
class StepRecord:
    """One step: rows of the descriptor that were drafted and accepted, milliseconds by phase."""

    active: tuple[int, ...]
    path: tuple[int, ...]
    phases_ms: dict[str, float]

    @property
    def ms(self) -> float:
        return sum(self.phases_ms.values())


class RecordingDecoder(Decoder):
    """The decoder as it is, with a note of every step."""

    def __init__(self, engine: Engine, config: DecoderConfig) -> None:
        if engine.model.kernels:
            raise LumoTreeError(
                "calibration times torch operations, and this device runs captured kernels",
                "name a tree, or use --device cpu",
            )
        super().__init__(engine.model, engine.tokenizer, config, engine.runner)
        self.records: list[StepRecord] = []
        self._last: tuple[tuple[int, ...], tuple[int, ...]] = ((0,), (0,))

    def step(self, run: Run, state: HybridState) -> None:
        before = dict(run.phases_ms)
        super().step(run, state)
        spent = {phase: ms - before[phase] for phase, ms in run.phases_ms.items()}
        # The last step of a request has no publish phase: its cost would be one of a kind.
        if run.finish_reason is None:
            self.records.append(StepRecord(*self._last, spent))

    def select(self, run, verified):
        path, pending = super().select(run, verified)
        self._last = (verified.kept, tuple(verified.kept[row] for row in path))
        return path, pending


@dataclass(frozen=True)
class Calibration:
    """What was measured and what follows from it."""

    measured: tuple[Reach, ...]
    observations: tuple[Observation, ...]
    cost: CostModel
    ranked: tuple[Candidate, ...]
    choice: TreeChoice

    def as_dict(self, shown: int = 10) -> dict[str, Any]:
        """JSON form with the first `shown` candidates."""
        return {
            "choice": self.choice.as_dict(),
            "cost_model": self.cost.as_dict(),
            "observations": [vars(o) for o in self.observations],
            "acceptance": [reach.as_dict() for reach in self.measured],
            "candidates": [candidate.as_dict() for candidate in self.ranked[:shown]],
        }


def calibrate(
    engine: Engine,
    items: Sequence[Item],
    *,
    requests: int = REQUESTS,
    tokens: int = TOKENS,
    designs: Sequence[DecoderConfig] = DESIGNS,
    corpus_sha256: str | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """Decode `requests` of `items`, evenly spaced, up to `tokens` tokens with each design.

    `corpus_sha256` is of the corpus of `items`. Raises LumoTreeError when the outputs are too
    short to measure anything, or the designs too few to know the error of a prediction.
    """
    chosen = [items[i] for i in evenly_spaced(len(items), min(requests, len(items)))]
    records = record(engine, chosen, tokens, designs, note)
    observations = tuple(observe(config, steps) for config, steps in records if steps)
    cost = fit(observations)
    if cost is None:
        raise LumoTreeError(
            "calibration: too few steps to measure acceptance and cost",
            "give it longer outputs or more requests",
        )
    measured = tuple(reach_of(config, steps) for config, steps in records if steps)
    ranked = candidates(measured, cost)
    if not ranked:
        raise LumoTreeError("calibration: too few designs to predict another tree")
    about, machine = engine.description(), describe_machine()
    best = ranked[0]
    choice = TreeChoice(
        tree=best.tree,
        passes=best.passes,
        suffix=best.suffix,
        predicted_tok_s=best.tok_s,
        predicted_tokens_per_step=best.tokens_per_step,
        predicted_ms_per_step=best.ms_per_step,
        weights_sha256=about["weights_sha256"],
        device=about["device"],
        cpu=machine["cpu"],
        cores=machine["cores"],
        corpus_sha256=corpus_sha256,
        calibrated_on=tuple(item.request.request_id for item in chosen),
    )
    return Calibration(measured, observations, cost, tuple(ranked), choice)


def record(
    engine: Engine,
    chosen: Sequence[Item],
    tokens: int,
    designs: Sequence[DecoderConfig],
    note: Callable[[str], None],
) -> list[tuple[DecoderConfig, list[StepRecord]]]:
    """The steps of each design; designs alternate by request, so that drift falls on all alike."""
    usable = [c for c in designs if c.passes == 0 or engine.has_mtp]
    decoders = [RecordingDecoder(engine, config) for config in usable]
    # One prefill per prompt and kind of state instead of one per design.
    stores = {True: PrefixStore(), False: PrefixStore()}
    for decoder in decoders:
        decoder.snapshots = stores[decoder.uses_mtp]
    for number, item in enumerate(chosen, start=1):
        note(f"calibrating tree=auto, request {number} of {len(chosen)}")
        params = replace(
            item.params,
            seed=item.params.seed ^ SEED_SHIFT,
            max_tokens=min(tokens, item.params.max_tokens),
        )
        for decoder in decoders:
            decoder.generate(
                list(item.request.prompt_ids), params, conversation=item.request.request_id
            )
    return [(d.config, d.records) for d in decoders]


def observe(config: DecoderConfig, steps: Sequence[StepRecord]) -> Observation:
    """Mean cost of a design's steps, without those the machine was busy with something else.

    Row counts vary from step to step, by less than a factor of two in cost.
    """
    limit = DISTURBED * median(step.ms for step in steps)
    kept = [step for step in steps if step.ms <= limit]
    return Observation(
        design=f"{config.tree}/{config.passes}{'+suffix' if config.suffix else ''}",
        passes=config.passes,
        rows=sum(len(step.active) for step in kept) / len(kept),
        ms=sum(step.ms for step in kept) / len(kept),
    )


def reach_of(config: DecoderConfig, steps: Sequence[StepRecord]) -> Reach:
    """How often each row of a design was drafted and accepted."""
    from lumotree.tree import tree_from_name

    rows = range(len(tree_from_name(config.tree)))
    return Reach(
        tree=config.tree,
        passes=config.passes,
        suffix=config.suffix,
        steps=len(steps),
        reach=tuple(sum(row in step.path for step in steps) / len(steps) for row in rows),
        active=tuple(sum(row in step.active for step in steps) / len(steps) for row in rows),
    )

"""Where does publishing eat the tree's advantage? Cost measured over tree sizes and depths.

Every tree is verified and published on one prefix of the corpus with random drafts in all its
rows, so that cost depends on shape alone; tokens per step come from acceptance recorded on the
corpus (`calibration`). Gain and cost then stand in one row.

JSON of `lumotree breakeven`, lists in the order of measurement:

    schema_version        1
    corpus, requests, prefix_tokens, repeats, machine, model, versions
    root_ms_per_token     milliseconds of a step without drafts: what a token costs without a tree
    cost_model            fixed_ms, per_pass_ms, per_row_ms, rmse_ms, loo_rmse_ms, loo_relative,
                          designs: fitted to the `map` rows (forced drafts, every row active)
    recorded_cost_model   the same, fitted to the steps of the calibration (real drafts)
    acceptance            per calibrated design: tree, passes, suffix, steps, reach[], active[]
    candidates            the best predicted trees: tree, passes, suffix, rows, tokens_per_step,
                          ms_per_step, tok_s
    choice                what lumotree:tree=auto,plan=FILE decodes with; calibrated_on are the
                          requests it was chosen on, cpu and cores the machine
    map                   one row per tree:
      kind                root, chain, pruned (a part of the measured tree), wide (cost only)
      name, tree, passes, suffix, rows (root included), depth
      mean_rows                           rows that real drafts fill per step; null for wide.
                                          Below `rows`, tok_s is a lower bound
      draft_ms, verify_ms, select_ms      medians over ROUNDS rounds, each of which times all
                                          trees in turn; every timed step stands beside one of
                                          the root alone and is scaled by that one's slowness
      publish_root_ms, publish_deep_ms    publishing 1 row, and the longest path
      publish_ms                          at the expected path length, between the two
      ms_per_step                         draft + verify + select + publish_ms
      tokens_per_step                     from recorded acceptance; null where none covers it
      tok_s, tok_s_free_publish           with publishing as measured, and if it cost nothing
      advantage_ms                        tokens_per_step * root_ms_per_token, less draft,
                                          verify and select: what a step saves before publishing
      publish_share_of_advantage          publish_ms / advantage_ms; 1 and more: eaten. null
                                          for the root and where there is no advantage to eat
      over_best_chain                     tok_s over that of the fastest chain of the map
      over_best_chain_free_publish        the same if publishing cost nothing anywhere
      publish_share_of_step               publish_ms / ms_per_step
      round_spread                        slowest round over fastest after scaling: what is left
                                          of the machine's moods
      break_even_tokens_per_step          ms_per_step / root_ms_per_token
    conclusion            one sentence per finding
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from lumotree.decoder import Decoder, DecoderConfig
from lumotree.draft.plan import Proposal
from lumotree.errors import RequestError
from lumotree.prefix import PrefixStore
from lumotree.tree import TreeDescriptor, tree_from_name
from replay.calibration import Calibration
from replay.costmodel import CostModel, Observation, fit
from replay.prediction import Reach, parts, prune

if TYPE_CHECKING:
    from lumotree.engine import Engine
    from replay.runner import Item

SCHEMA_VERSION = 1
CHAINS = range(1, 12)
PRUNED_PASSES = (0, 3, 5, 7)
PRUNED_SIZES = (4, 8, 12, 16, 20, 28)
# Children at every depth, and depths: shapes no drafter here can fill, so they have cost only.
WIDE = ((4, 1), (8, 1), (16, 1), (31, 1), (2, 4), (4, 4), (4, 7))
REPEATS = 15
# Trees take turns, so that a slow minute of the machine is no slow tree.
ROUNDS = 5
# Samples of a step of the root alone, beside each timed step.
REFERENCE = "reference"


@dataclass(frozen=True)
class Shape:
    """A tree to measure. tokens_per_step is None where no recorded acceptance covers it."""

    kind: str
    name: str
    tree: str
    passes: int
    suffix: bool
    tokens_per_step: float | None
    mean_rows: float | None = None


@dataclass(frozen=True)
class Cost:
    """Milliseconds by stage; `round_spread` is the slowest round over the fastest."""

    draft_ms: float
    verify_ms: float
    select_ms: float
    publish_root_ms: float
    publish_deep_ms: float
    round_spread: float = 1.0

    @classmethod
    def of(cls, rounds: Sequence[dict[str, list[float]]], reference: float) -> Cost:
        """From the samples of each round, by stage. `reference` is the usual ms of a root step.

        A round in which the root took twice as long was a slow one, not a slow tree's.
        """
        scaled = []
        for one in rounds:
            medians = {name: median(ms) for name, ms in one.items()}
            slowness = medians.pop(REFERENCE) / reference
            scaled.append({name: ms / slowness for name, ms in medians.items()})
        totals = [sum(one.values()) for one in scaled]
        middle = {name: median(one[name] for one in scaled) for name in scaled[0]}
        return cls(**middle, round_spread=max(totals) / min(totals))


def shapes(measured: Sequence[Reach]) -> list[Shape]:
    """The root, chains of 1 to 11, the best parts of the deployed tree, and wide trees.

    Chains and parts carry the tokens per step that recorded acceptance gives them.
    """
    found = [Shape("root", "root", "root", 0, False, 1.0, 1.0)]
    by_design = {(reach.tree, reach.passes): reach for reach in measured}
    longest = max(
        (r for r in measured if r.tree.startswith("chain-")), key=lambda r: r.passes, default=None
    )
    for depth in CHAINS:
        tokens = None
        if longest is not None and depth <= longest.passes:
            tokens = sum(longest.reach[: depth + 1])
        name = f"chain-{depth}"
        found.append(Shape("chain", name, name, depth, False, tokens, depth + 1.0))
    for passes in PRUNED_PASSES:
        reach = by_design.get(("hydra27", passes))
        if reach is not None:
            found += _pruned(reach)
    for width, depth in WIDE:
        name = f"wide-{width}x{depth}"
        found.append(Shape("wide", name, _comb(width, depth), min(depth, 5), False, None))
    return found


def _pruned(reach: Reach) -> list[Shape]:
    found = []
    tree = tree_from_name(reach.tree)
    for rows in parts(reach):
        if len(rows) not in PRUNED_SIZES:
            continue
        part, passes, suffix = prune(tree, rows, reach.passes)
        if part is not None:
            tokens, filled = (sum(by[row] for row in rows) for by in (reach.reach, reach.active))
            name = f"{reach.tree}/{reach.passes} best {len(rows)}"
            found.append(Shape("pruned", name, part, passes, suffix, tokens, filled))
    return found


def _comb(width: int, depth: int) -> str:
    """`width` children at every depth, the first of which carries the next depth."""
    parents, head = [-1], 0
    for _ in range(depth):
        parents += [head] * width
        head = len(parents) - width
    return ",".join(map(str, parents))


class CostBench:
    """Times the stages of a step on one prefix, with random drafts in every row."""

    def __init__(self, engine: Engine, item: Item, seed: int = 0) -> None:
        self.engine, self.item = engine, item
        self._random_ids = torch.Generator().manual_seed(seed)
        self._stores = {True: PrefixStore(), False: PrefixStore()}

    @property
    def prefix_tokens(self) -> int:
        return len(self.item.request.prompt_ids)

    def measure(self, shape: Shape, repeats: int) -> dict[str, list[float]]:
        """Milliseconds by stage over `repeats` steps; one step more is thrown away first.

        The draft follows a publication of the longest path: its refill is part of drafting.
        Raises RequestError when the prompt's answer ends at once.
        """
        decoder = self.engine.decoder(DecoderConfig(shape.tree, shape.passes, False))
        decoder.snapshots = self._stores[decoder.uses_mtp]
        spent: dict[str, list[float]] = {}
        with torch.inference_mode():
            run, state = decoder.begin(
                self.item.request.prompt_ids, self.item.params, conversation="bench"
            )
            if run.finish_reason is not None:
                raise RequestError("the prompt ends after one token: there is no step to measure")
            tokens = list(run.tokens)
            start = state.snapshot(tuple(tokens[:-1]))
            deepest = list(decoder.tree.root_paths[decoder.tree.spine[-1]])
            for repeat in range(repeats + 1):
                clock = _Clock(decoder)
                state.restore(start)
                run.tokens = list(tokens)
                clock.restart()
                alone = decoder.verify(state, Proposal.root_only(decoder.tree, tokens[-1]))
                decoder.select(run, alone)
                alone.rows.publish([0], alone.hidden)
                clock.take(REFERENCE)
                for name, path in (("publish_root_ms", [0]), ("publish_deep_ms", deepest)):
                    state.restore(start)
                    run.tokens = list(tokens)
                    proposal = self._drafts(decoder.tree, tokens[-1])
                    clock.restart()
                    verified = decoder.verify(state, proposal)
                    clock.take("verify_ms")
                    decoder.select(run, verified)
                    clock.take("select_ms")
                    # Inactive rows are compacted away; the path is in compact rows.
                    place = {row: i for i, row in enumerate(verified.kept)}
                    verified.rows.publish([place[row] for row in path], verified.hidden)
                    clock.take(name)
                below = [proposal.tokens[row] for row in path[1:]]
                run.tokens = [*tokens, *below, tokens[-1]]
                clock.restart()
                decoder.propose(run, state)
                clock.take("draft_ms")
                if repeat:
                    for name, ms in clock.spent.items():
                        spent.setdefault(name, []).extend(ms)
        return spent

    def _drafts(self, tree: TreeDescriptor, pending: int) -> Proposal:
        vocab = self.engine.model.config.vocab_size
        ids = torch.randint(vocab, (len(tree),), generator=self._random_ids).tolist()
        proposal = Proposal.root_only(tree, pending)
        for row in range(1, len(tree)):
            if tree.default_active[row]:
                proposal.put(row, ids[row], "spine")
        return proposal


class _Clock:
    """Wall-clock milliseconds between stages, the device drained at each."""

    def __init__(self, decoder: Decoder) -> None:
        self._device = decoder.model.device
        self.spent: dict[str, list[float]] = {}
        self._at = 0.0

    def restart(self) -> None:
        self._at = self._now()

    def take(self, name: str) -> None:
        now = self._now()
        self.spent.setdefault(name, []).append(1e3 * (now - self._at))
        self._at = now

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def measure_map(
    bench: CostBench,
    calibration: Calibration,
    *,
    repeats: int = REPEATS,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The rows of the map, the cost model fitted to them, and what they show."""
    wanted = [s for s in shapes(calibration.measured) if s.passes == 0 or bench.engine.has_mtp]
    spent: list[list[dict[str, list[float]]]] = [[] for _ in wanted]
    rounds = min(ROUNDS, repeats)
    for turn in range(rounds):
        share = repeats // rounds + (turn < repeats % rounds)
        for number, shape in enumerate(wanted):
            note(f"round {turn + 1} of {rounds}: {shape.name}, {number + 1} of {len(wanted)}")
            spent[number].append(bench.measure(shape, share))
    reference = median(ms for found in spent for one in found for ms in one[REFERENCE])
    costs = [Cost.of(found, reference) for found in spent]
    root = costs[0]
    per_token = root.draft_ms + root.verify_ms + root.select_ms + root.publish_root_ms
    rows = [map_row(shape, cost, per_token) for shape, cost in zip(wanted, costs, strict=True)]
    add_best_chain(rows)
    return {
        "root_ms_per_token": per_token,
        "cost_model": _fitted(rows),
        "map": rows,
        "conclusion": conclude(rows),
    }


def map_row(shape: Shape, cost: Cost, per_token: float) -> dict[str, Any]:
    """One row of the map; keys in the module's docstring."""
    tree = tree_from_name(shape.tree)
    depth, tokens = max(tree.depth), shape.tokens_per_step
    before = cost.draft_ms + cost.verify_ms + cost.select_ms
    # A publication walks the accepted path, pending row included: tokens_per_step rows.
    reached = 0.0 if tokens is None or depth == 0 else (tokens - 1) / depth
    publish = cost.publish_root_ms + reached * (cost.publish_deep_ms - cost.publish_root_ms)
    total = before + publish
    row = vars(shape) | {
        "rows": sum(tree.default_active),
        "depth": depth,
        **vars(cost),
        "publish_ms": publish,
        "ms_per_step": total,
        "publish_share_of_step": publish / total,
        "break_even_tokens_per_step": total / per_token,
        **dict.fromkeys(
            ("tok_s", "tok_s_free_publish", "advantage_ms", "publish_share_of_advantage")
        ),
    }
    if tokens is not None:
        advantage = tokens * per_token - before
        row |= {
            "tok_s": 1e3 * tokens / total,
            "tok_s_free_publish": 1e3 * tokens / before,
            "advantage_ms": advantage,
            "publish_share_of_advantage": publish / advantage
            if advantage > 0 and shape.kind != "root"
            else None,
        }
    return row


def add_best_chain(rows: list[dict[str, Any]]) -> None:
    """Adds each row's rate over the fastest chain's, with publishing as measured and for free."""
    for key, name in (
        ("tok_s", "over_best_chain"),
        ("tok_s_free_publish", "over_best_chain_free_publish"),
    ):
        chains = [row[key] for row in rows if row["kind"] == "chain" and row[key] is not None]
        best = max(chains, default=None)
        for row in rows:
            row[name] = None if best is None or row[key] is None else row[key] / best


def conclude(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the map shows, in sentences; also when trees lose."""
    known = [row for row in rows if row["tok_s"] is not None]
    best = max(known, key=lambda row: row["tok_s"])
    free = max(known, key=lambda row: row["tok_s_free_publish"])
    root = known[0]
    found = [
        f"Fastest here: {best['name']}, {best['tok_s']:.1f} tok/s, "
        f"{best['tok_s'] / root['tok_s']:.2f} times the root alone.",
        f"If publishing cost nothing: {free['name']}, {free['tok_s_free_publish']:.1f} tok/s.",
    ]
    others = known[1:]
    eaten = [
        row["name"] for row in others
        if row["publish_share_of_advantage"] is not None and row["publish_share_of_advantage"] >= 1
    ]  # fmt: skip
    none = [row["name"] for row in others if row["publish_share_of_advantage"] is None]
    if eaten:
        found.append(f"Publishing eats the whole advantage of: {', '.join(eaten)}.")
    if none:
        found.append(f"No advantage before publishing: {', '.join(none)}.")
    shares = [row for row in others if row["publish_share_of_advantage"] is not None]
    lost = [
        row["name"] for row in others
        if row["kind"] == "pruned" and (row["over_best_chain_free_publish"] or 0) > 1
        and row["over_best_chain"] <= 1
    ]  # fmt: skip
    if lost:
        found.append(f"Faster than every chain but for publishing: {', '.join(lost)}.")
    if shares and not eaten:
        worst = max(shares, key=lambda row: row["publish_share_of_advantage"])
        found.append(
            f"Publishing eats no tree's advantage whole; most of {worst['name']}'s: "
            f"{100 * worst['publish_share_of_advantage']:.0f} %."
        )
    return found


def _fitted(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    model: CostModel | None = fit(
        [Observation(r["name"], r["passes"], r["rows"], r["ms_per_step"]) for r in rows]
    )
    return None if model is None else model.as_dict()

"""Component audit: every GDN tree verifier against the native chain and float64, bit by bit.

Operand sets with stated seeds, two for calibration and two held out. A verifier that claims
native bits must have them in every output and in the state published at every frontier; the
others must stay within twice the error of their calibration sets, or within native decoding's
own. Runs in fresh processes must repeat the bits. Controls show that the comparison sees what it
must, and that rejected branches reach nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from lumotree.audit.check import Check
from lumotree.audit.constants import Constants
from lumotree.audit.faults import fault
from lumotree.audit.fresh import FreshProcesses
from lumotree.bench.gdn import Case, active_tree
from lumotree.ops.gdn import GEOMETRIES, Geometry, Path
from lumotree.verifiers import NAMES
from lumotree.verifiers.base import Verifier

LUMOTREE = "path-scan"
# Faults of the registry that this audit must see, by the name of the control.
CONTROLS = {
    "sibling substitution": "sibling state",
    "swapped operand rings": "swapped rings",
    "stale publication metadata": "stale graph buffer",
    "zero replay": "no replay",
}
# Times the calibration sets' error that held-out sets may show.
ALLOWANCE = 2.0
# Seeds of neighbouring sets: layers take consecutive ones.
SEED_STRIDE = 1000
REPEATS = 2
# Elements that a processor compares at once: what is larger than its caches is slow, and new
# memory for it slower still.
PART = 2**20
# Words of a checksum that are weighted at once, and what joins one part to the next.
WORDS = 2**18
MULTIPLIER = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class ComponentPlan:
    """What is audited. sets: how many for calibration, how many held out."""

    geometry: Geometry = GEOMETRIES["27b"]
    tree: str = "hydra27"
    sets: tuple[int, int] = (2, 2)
    verifiers: tuple[str, ...] = NAMES
    processes: int = 2
    controls: bool = True

    @classmethod
    def standard(cls, device: torch.device) -> ComponentPlan:
        """27B; two of its 48 layers where there is only a processor."""
        geometry = GEOMETRIES["27b"]
        return cls(geometry if device.type == "cuda" else replace(geometry, layers=2))

    @classmethod
    def quick(cls, device: torch.device) -> ComponentPlan:
        """Three of the 48 heads."""
        geometry = replace(GEOMETRIES["27b"], layers=2, heads=3, key_heads=1)
        return cls(geometry, sets=(1, 1), processes=1)

    def seeds(self, seed: int) -> list[tuple[str, int]]:
        """(place, seed) of each set, calibration first."""
        roles = ["calibration"] * self.sets[0] + ["held-out"] * self.sets[1]
        first = SEED_STRIDE * (1 + len(roles) * seed)
        return [
            (f"{role} set, seed {first + SEED_STRIDE * i}", first + SEED_STRIDE * i)
            for i, role in enumerate(roles)
        ]

    def case(self, seed: int, device: torch.device, audited: int | None = None) -> Case:
        return Case(self.geometry, active_tree(self.tree), device, seed, audited)


def audit_component(
    plan: ComponentPlan, device: torch.device, seed: int, constants: Constants
) -> Iterator[Check]:
    """Checks as they are made. Constants are frozen after the calibration sets."""
    seeds = plan.seeds(seed)
    fresh = None
    if plan.processes:
        job = {"plan": asdict(plan), "device": str(device), "seeds": [s for _, s in seeds]}
        fresh = FreshProcesses("component", job, plan.processes)
    try:
        calibration: dict[str, list[float]] = {}
        digests = []
        limits = None
        for number, (place, set_seed) in enumerate(seeds):
            case = plan.case(set_seed, device)
            if number == plan.sets[0]:
                on = [where for where, _ in seeds[: plan.sets[0]]]
                limits = constants.freeze("component", on, calibration)
            digests.append({})
            for name in plan.verifiers:
                verifier = case.make(name)
                found = measure(case, verifier)
                digests[-1][name] = found.digest()
                check, errors = compare(case, verifier, found, place, limits and limits[name])
                yield check
                if limits is None:
                    worst = calibration.setdefault(name, [0.0, 0.0])
                    worst[:] = map(max, worst, errors)
                if plan.controls:
                    yield poison(case, name, found, place)
        if plan.controls:
            yield from _controls(case, place)
        if fresh is not None:
            yield from _repeats(fresh.answers(), [place for place, _ in seeds], digests)
    finally:
        if fresh is not None:
            fresh.close()


@dataclass
class Measured:
    """outputs: [rows, heads, dv] per layer. states: [rows, layers, heads, dk, dv], of frontiers."""

    outputs: list[Tensor]
    states: Tensor

    def digest(self) -> str:
        """A 64-bit checksum of every bit, in which each word has a weight of its own."""
        total = 0
        weights = torch.arange(1, 2 * WORDS, 2, device=self.states.device)
        for tensor in (*self.outputs, self.states):
            for part in tensor.contiguous().view(torch.int32).flatten().split(WORDS):
                weighted = int((part * weights[: len(part)]).sum())
                total = (total * MULTIPLIER + weighted) % 2**64
        return f"{total:016x}"


def measure(case: Case, verifier: Verifier, poisoned: bool = False) -> Measured:
    """One verification and one publication per row, each from the pre-tree state.

    poisoned: NaN is planted in everything the verifier kept of rows off the published path.
    """
    operands = [verifier.place(i, o) for i, o in enumerate(case.operands)]
    states = case.states.clone()
    if case.device.type == "cuda":
        torch.cuda.synchronize()  # a kernel that starts early needs a state that is settled
    outputs = [verifier.verify(i, states, o).clone() for i, o in enumerate(operands)]
    kept = {name: buffer.clone() for name, buffer in verifier.buffers.items() if poisoned}
    published = states.new_empty(len(case.paths), *states.shape)
    for path, after in zip(case.paths, published, strict=True):
        states.copy_(case.states)
        if poisoned:
            _poison(verifier, kept, path)
        verifier.publish(states, path)
        verifier.flush(states)
        after.copy_(states)
    return Measured(outputs, published)


def _poison(verifier: Verifier, kept: dict[str, Tensor], path: Path) -> None:
    """Buffers as they were kept, but for NaN in the rows that are not on the path."""
    on = sorted(set(path.rows[: int(path.count)].tolist()))
    for name, buffer in verifier.buffers.items():
        # Buffers by row are [layers, rows, ...]; others belong to no row.
        if buffer.dim() > 2 and buffer.shape[:2] == (verifier.geometry.layers, verifier.rows):
            buffer.fill_(float("nan"))
            buffer[:, on] = kept[name][:, on]
        else:
            buffer.copy_(kept[name])


def compare(
    case: Case, verifier: Verifier, found: Measured, place: str, limits: Sequence[float] | None
) -> tuple[Check, tuple[float, float]]:
    """One check of outputs and states; and their largest errors against float64.

    limits: the calibration sets' errors, None while those are being measured.
    """
    outputs_equal = states_equal = pairs = held = 0
    errors, natives = [0.0, 0.0], [0.0, 0.0]  # the largest of outputs, and of states
    first_wrong = None
    for layer in range(case.audited):
        exact_out, exact_states = case.exact[layer]
        native_out, native_states = case.native[layer]
        out, states = found.outputs[layer], found.states[:, layer]
        same = equal_rows(out, native_out)
        outputs_equal += int(same.sum())
        same = equal_rows(states, native_states)
        states_equal += int(same.sum())
        if first_wrong is None and not bool(same.all()):
            first_wrong = int((~same).nonzero()[0])
        for kind, compared in enumerate(
            ((out, native_out, exact_out), (states, native_states, exact_states))
        ):
            ok, error, theirs = _against_float64(*compared)
            held, pairs = held + int(ok.sum()), pairs + ok.numel()
            errors[kind] = max(errors[kind], error)
            natives[kind] = max(natives[kind], theirs)
    cells = case.audited * len(case.tree)
    reasons = []
    if verifier.exact:
        if outputs_equal != cells:
            reasons.append(f"{cells - outputs_equal} of {cells} outputs differ from native ones")
        if states_equal != cells:
            reasons.append(
                f"{cells - states_equal} of {cells} states differ from native ones, "
                f"the first at row {first_wrong}"
            )
        if held != pairs:
            reasons.append(f"the paired rule fails for {pairs - held} of {pairs} heads")
    for what, error, native, limit, frozen in zip(
        ("output", "state"),
        errors,
        natives,
        verifier.tolerance,
        limits or (None, None),
        strict=True,
    ):
        if frozen is not None and not verifier.exact:
            # What native decoding itself is off by on this set is no fault of any verifier.
            limit = min(limit, max(ALLOWANCE * frozen, native))
        if not error <= limit:
            reasons.append(f"{what} error {error:.2e} exceeds {limit:.2e}")
    figures = {
        "outputs not equal": cells - outputs_equal,
        "states not equal": cells - states_equal,
        "paired rule broken": pairs - held,
        "output error": errors[0],
        "state error": errors[1],
    }
    totals = f"{cells} outputs, {cells} states, {pairs} pairs"
    check = Check(
        verifier.title,
        f"{place}, {totals}",
        not reasons,
        "; ".join(reasons),
        figures,
        first_wrong,
    )
    return check, tuple(errors)


def _against_float64(value: Tensor, native: Tensor, exact: Tensor) -> tuple[Tensor, float, float]:
    """The paired rule, the largest error (infinite where a value is not a number), and native's."""
    held, worst, natives = [], 0.0, 0.0
    for part in _parts(value, native, exact):
        ours, theirs = (_errors(x, part[2]) for x in part[:2])
        held.append(_paired(ours, theirs, part[2]))
        error = ours[1].max().item()
        worst = max(worst, error if error == error else float("inf"))
        natives = max(natives, theirs[1].max().item())
    return torch.cat(held, 1), worst, natives


def paired_rule(value: Tensor, native: Tensor, exact: Tensor) -> Tensor:
    """bool [2, rows, heads]: E <= 1.10 E_native + 2^-24 M64 + 2^-149, for RMS and largest error.

    Errors are against float64 `exact`, M64 is its largest value in the head (arXiv 2609.23900).
    Arguments [rows, heads, ...].
    """
    return _against_float64(value, native, exact)[0]


def _paired(ours: Tensor, theirs: Tensor, exact: Tensor) -> Tensor:
    floor = exact.abs().flatten(2).amax(-1) * 2.0**-24 + 2.0**-149
    return ours <= 1.10 * theirs + floor


def _errors(value: Tensor, exact: Tensor) -> Tensor:
    """float64 [2, rows, heads]: RMS and largest error of each head."""
    apart = (value - exact).flatten(2)
    rms = torch.linalg.vector_norm(apart, dim=-1) / apart.shape[-1] ** 0.5
    return torch.stack([rms, apart.abs_().amax(-1)])


def equal_rows(a: Tensor, b: Tensor) -> Tensor:
    """bool [rows]: float32 rows equal in every bit."""
    return torch.cat(
        [
            (x.contiguous().view(torch.int32) == y.contiguous().view(torch.int32)).flatten(1).all(1)
            for x, y in _parts(a, b)
        ]
    )


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each tensor, as many together as a processor compares at once."""
    rows = tensors[0].shape[0]
    if tensors[0].device.type == "cpu":
        rows = max(1, PART // tensors[0][0].numel())
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def poison(case: Case, name: str, clean: Measured, place: str) -> Check:
    """NaN in every rejected branch must not change a bit of what is published."""
    planted = measure(case, case.make(name), poisoned=True)
    same = equal_rows(planted.states.flatten(0, 1), clean.states.flatten(0, 1))
    wrong = int((~same).sum())
    reason = f"{wrong} of {same.numel()} published states read a rejected branch" if wrong else ""
    return Check("poisoned off-path branches", f"{place}, {name}", not wrong, reason)


def _controls(case: Case, place: str) -> Iterator[Check]:
    for control, name in CONTROLS.items():
        verifier = case.make(LUMOTREE)
        with fault(name).apply() as mutation:
            found = measure(case, verifier)
        check, _ = compare(case, verifier, found, place, None)
        seen = mutation.count > 0 and not check.passed
        reason = "" if seen else f"the planted fault '{name}' was not seen"
        yield Check("planted control seen", f"{place}, {control}", seen, reason)


def _repeats(processes: list, places: list[str], ours: list[dict[str, str]]) -> Iterator[Check]:
    """`processes`: of each process, of each set, REPEATS times: the digest of each verifier."""
    for number, (place, digests) in enumerate(zip(places, ours, strict=True)):
        for name, digest in digests.items():
            others = [run[name] for process in processes for run in process[number]]
            same = bool(others) and all(other == digest for other in others)
            reason = "" if same else "runs of the same operands gave other bits"
            yield Check("same bits in fresh processes", f"{place}, {name}", same, reason)


def digests_job(job: dict) -> list[list[dict[str, str]]]:
    """What a fresh process computes: for each set, REPEATS times, the digest of each verifier."""
    fields = {key: tuple(v) if isinstance(v, list) else v for key, v in job["plan"].items()}
    plan = ComponentPlan(**fields | {"geometry": Geometry(**fields["geometry"])})
    found = []
    for seed in job["seeds"]:
        case = plan.case(seed, torch.device(job["device"]), audited=0)
        runs = range(REPEATS)
        found.append(
            [
                {name: measure(case, case.make(name)).digest() for name in plan.verifiers}
                for _ in runs
            ]
        )
    return found

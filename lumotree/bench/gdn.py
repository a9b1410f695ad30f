"""The mechanism benchmark: verify, publish, memory and error of each GDN tree verifier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from lumotree.bench.inputs import float64_rows, native_rows, random_operands, random_states
from lumotree.bench.timing import Protocol, Spread, time_stages
from lumotree.captured.graph import capture
from lumotree.ops.gdn import Geometry, Path
from lumotree.ops.table import has_kernels
from lumotree.tree import TreeDescriptor, tree_from_name
from lumotree.verifiers import NAMES, verifier_class
from lumotree.verifiers.base import Verifier

SCHEMA_VERSION = 1


@dataclass
class Gate:
    """Correctness of one row. A cell is one layer and row; equal means every bit of it."""

    output_error: float
    state_error: float
    bf16_outputs_equal: int
    states_equal: int
    cells: int
    reasons: list[str] = field(default_factory=list)

    @property
    def green(self) -> bool:
        return not self.reasons


@dataclass
class Row:
    """One verifier. Timings are None when its gate is red, or where they cannot be had."""

    name: str
    title: str
    policy: str
    buffers_mib: float
    gate: Gate
    graph_ms: dict[str, Spread] | None = None
    eager_ms: dict[str, Spread] | None = None

    def as_dict(self) -> dict[str, Any]:
        def times(spreads: dict[str, Spread] | None) -> dict | None:
            return spreads and {name: spread.as_dict() for name, spread in spreads.items()}

        return {
            "name": self.name,
            "title": self.title,
            "policy": self.policy,
            "buffers_mib": round(self.buffers_mib, 3),
            "gate": {**asdict(self.gate), "green": self.gate.green},
            "graph_ms": times(self.graph_ms),
            "eager_ms": times(self.eager_ms),
        }


class Case:
    """Inputs of a run and their answers: float64, and the native chain of this device.

    Answers are kept for the first `audited` layers; 27B takes 260 MiB of them a layer.
    """

    def __init__(
        self,
        geometry: Geometry,
        tree: TreeDescriptor,
        device: torch.device,
        seed: int = 0,
        audited: int | None = None,
        launch=None,
    ) -> None:
        self.geometry, self.tree, self.device, self.launch = geometry, tree, device, launch
        rows = len(tree)
        self.states = random_states(geometry, device, seed)
        self.operands = [
            random_operands(geometry, rows, device, seed + 1 + layer)
            for layer in range(geometry.layers)
        ]
        self.audited = min(geometry.layers, _affordable(geometry, rows, device))
        if audited is not None:
            self.audited = min(self.audited, audited)
        self.paths = [Path.of(tree, path, device) for path in tree.root_paths]
        layers = range(self.audited)
        self.exact = [float64_rows(tree, self.states[i], self.operands[i]) for i in layers]
        self.renew_native(launch)

    def renew_native(self, launch) -> None:
        """The native chain under another launch: its bits are what exact rows must equal."""
        self.launch = launch
        self.native = [
            native_rows(self.tree, self.geometry, self.states[i], self.operands[i], launch)
            for i in range(self.audited)
        ]

    def make(self, name: str, launch=None) -> Verifier:
        kind = verifier_class(name)
        kwargs = {"launch": launch or self.launch} if kind.exact else {}
        return kind(self.tree, self.geometry, self.device, **kwargs)


def _affordable(geometry: Geometry, rows: int, device: torch.device) -> int:
    """Layers whose answers (12 bytes an element and row) take at most a quarter of the memory."""
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0] // 4
    else:
        room = 2**30
    return max(1, room // (3 * geometry.state_bytes * rows))


def check(case: Case, verifier: Verifier) -> Gate:
    """Every row's output, and the state published at every frontier, against both answers."""
    operands = [verifier.place(i, o) for i, o in enumerate(case.operands)]
    states = case.states.clone()
    if case.device.type == "cuda":
        torch.cuda.synchronize()  # an early start needs a state that is settled
    gate = Gate(0.0, 0.0, 0, 0, case.audited * len(case.tree))
    outs = [verifier.verify(i, states, o) for i, o in enumerate(operands)]
    if not verifier.pending and not torch.equal(states, case.states):
        gate.reasons.append("verification changed the persistent state")
    for out, (exact, _), (native, _) in zip(outs, case.exact, case.native, strict=False):
        gate.output_error = _worst(gate.output_error, _error(out, exact))
        gate.bf16_outputs_equal += _equal_cells(out.bfloat16(), native.bfloat16())
    for row, path in enumerate(case.paths):
        states.copy_(case.states)
        verifier.publish(states, path)
        verifier.flush(states)
        for i in range(case.audited):
            error = _error(states[i], case.exact[i][1][row])
            gate.state_error = _worst(gate.state_error, error)
            gate.states_equal += _equal_cells(states[i : i + 1], case.native[i][1][row][None])
    limits = zip(("output", "state"), verifier.tolerance, strict=True)
    for what, limit in limits:
        error = getattr(gate, f"{what}_error")
        if not error <= limit:
            gate.reasons.append(f"{what} error {error:.2e} exceeds {limit:.0e}")
    if verifier.exact:
        for what in ("bf16_outputs_equal", "states_equal"):
            if getattr(gate, what) != gate.cells:
                gate.reasons.append(f"{what.replace('_', ' ')} in {getattr(gate, what)} cells")
    return gate


def _worst(a: float, b: float) -> float:
    """The larger error, NaN above all: `max` would drop one that comes second."""
    return a if b <= a or a != a else b


def _error(value: Tensor, exact: Tensor) -> float:
    """Largest absolute error; NaN anywhere is NaN, which no limit admits."""
    return (value.double() - exact).abs().max().item()


def _equal_cells(a: Tensor, b: Tensor) -> int:
    """Rows (dim 0) that are equal in every bit."""
    bits = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return int((a.view(bits) == b.view(bits)).flatten(1).all(1).sum())


def time_row(
    case: Case, verifier: Verifier, protocol: Protocol, eager: Protocol | None
) -> tuple[dict[str, Spread] | None, dict[str, Spread] | None]:
    """Graph and eager timings of verify, publish, total, and flush where there is one."""
    operands = [verifier.place(i, o) for i, o in enumerate(case.operands)]
    states = case.states.clone()
    path = Path.empty(case.tree, case.device)
    path.copy_(case.paths[-1])
    outs: list[Tensor] = []  # kept: the decoder would use them

    def verify() -> None:
        outs[:] = [verifier.verify(i, states, o) for i, o in enumerate(operands)]

    stages: dict[str, Callable[[], object]] = {
        "verify": verify,
        "publish": lambda: verifier.publish(states, path),
    }
    if verifier.pending:
        stages["flush"] = lambda: verifier.flush(states)

    def before(i: int) -> None:
        path.copy_(case.paths[i % len(case.paths)])

    eager_ms = eager and time_stages(stages, before, case.device, eager)
    if case.device.type != "cuda":
        return None, eager_ms
    graphs = {name: capture(stage) for name, stage in stages.items()}
    replays = {name: graph.replay for name, graph in graphs.items()}
    return time_stages(replays, before, case.device, protocol), eager_ms


def run_row(case: Case, name: str, protocol: Protocol, eager: Protocol | None) -> Row:
    verifier = case.make(name)
    gate = check(case, verifier)
    row = Row(name, verifier.title, verifier.policy, verifier.buffers_mib, gate)
    if gate.green:
        row.graph_ms, row.eager_ms = time_row(case, verifier, protocol, eager)
    return row


def run(
    case: Case,
    names: Iterable[str] = NAMES,
    protocol: Protocol | None = None,
    eager: Protocol | None = None,
) -> Iterator[Row]:
    """Rows as they end. `eager` defaults to the protocol of the graphs."""
    protocol = protocol or Protocol()
    for name in names:
        yield run_row(case, name, protocol, eager or protocol)


def active_tree(name: str) -> TreeDescriptor:
    """A preset without its inactive rows: what one step with every drafter busy verifies."""
    tree = tree_from_name(name)
    return tree.restrict(tree.default_active)[0]


def describe(case: Case) -> dict[str, Any]:
    """What the timings depend on, for the result file."""
    launch = None
    if has_kernels(case.device):
        from lumotree.ops.gdn_triton import choose

        launch = asdict(case.launch or choose(case.geometry, case.device))
    return {
        "schema_version": SCHEMA_VERSION,
        "geometry": asdict(case.geometry),
        "tree": case.tree.name,
        "active_rows": len(case.tree),
        "device": torch.cuda.get_device_name(case.device)
        if case.device.type == "cuda"
        else case.device.type,
        "audited_layers": case.audited,
        "launch": launch,
    }

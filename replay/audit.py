"""Audits as a library call: runs them, keeps audit.json and constants.json."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lumotree.audit import component, continuation, sampler, soak
from lumotree.audit.check import Check, lines
from lumotree.audit.constants import Constants
from lumotree.audit.detect import Detection, Sensitivity, WalkPower, undetected
from lumotree.audit.faults import AUDITS, FAULTS
from lumotree.audit.fresh import fits_beside
from lumotree.audit.prompts import Prompt
from lumotree.errors import LumoTreeError, RequestError
from lumotree.ops.gdn import GEOMETRIES
from replay.auditfile import SCHEMA_VERSION, save_audit
from replay.corpus import load_corpus
from replay.machine import describe_machine, describe_versions, git_commit
from replay.selection import select

if TYPE_CHECKING:
    from lumotree.engine import Engine

# Prompts taken from the corpus: evenly over its conversations.
PROMPTS = 12
FAILURES_KEPT = 50
# Walks per step where walks alone look for a fault.
POWER_WALKS = 50_000

Say = Callable[[str], None]


@dataclass(frozen=True)
class AuditOptions:
    """What is audited, on what, how thoroughly. seeds: how many, from `seed` on.

    No audits and `faults`: faults alone are planted, each where it must be seen.
    """

    audits: tuple[str, ...] = AUDITS
    model: str = "embedded"
    dtype: str = "auto"
    device: str = "auto"
    rows: str = "natural"
    threads: int | None = None
    corpus: str = "corpora/first.jsonl"
    geometry: str | None = None
    seed: int = 0
    seeds: int = 1
    quick: bool = False
    faults: bool = False

    def __post_init__(self) -> None:
        """Raises LumoTreeError naming the option."""
        for name, least in (("seed", 0), ("seeds", 1), ("threads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise LumoTreeError(f"--{name} is {value}; it takes a whole number from {least}")
        if self.geometry is not None and self.geometry not in GEOMETRIES:
            raise LumoTreeError(
                f"unknown geometry {self.geometry!r} in --geometry",
                f"one of {', '.join(GEOMETRIES)}",
            )

    @property
    def needs_model(self) -> bool:
        return self.faults or self.audits != ("component",)

    @property
    def soak_plan(self) -> soak.SoakPlan:
        return soak.SoakPlan.quick() if self.quick else soak.SoakPlan()

    @property
    def soak_beside(self) -> bool:
        """Whether the soak runs in processes of its own, beside the other audits and the faults."""
        others = self.faults or len(self.audits) > 1
        on_processor = _device_name(self.device) == "cpu"
        return "soak" in self.audits and others and on_processor and self.soak_plan.side_by_side


def run_audits(
    options: AuditOptions,
    *,
    out: Path | None = None,
    command: Sequence[str] = (),
    say: Say = lambda text: None,
    note: Say = lambda text: None,
) -> tuple[dict[str, Any], Path]:
    """Runs the audits into `out`, or into runs/<time>-audit; returns audit.json and its folder.

    `say` hears of every finished audit, `note` of every check. Raises LumoTreeError for wrong
    use, and when `out` holds constants that were frozen on other data.
    """
    started = datetime.now(UTC)
    engine, prompts = None, []
    if options.needs_model:
        engine, prompts = _load(options)
    device = _device(options, engine)
    folder = out or _free_folder(started)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LumoTreeError(f"{folder} cannot be created: {error.strerror}") from None
    result = {
        "schema_version": SCHEMA_VERSION,
        "command": list(command),
        "started_at": started.isoformat(),
        "machine": describe_machine() | _gpu(device),
        "versions": describe_versions(),
        "git_commit": git_commit(),
        "model": engine and engine.description(),
        "options": asdict(options),
        "rule": engine and ("equality" if engine.row_multiple is not None else "envelope"),
    }
    found: list[dict[str, Any]] = []
    detections: list[Detection] = []
    power: list[WalkPower] = []

    def save(**more: Any) -> None:
        missed = undetected(detections)
        result.update(
            {
                "ended_at": datetime.now(UTC).isoformat(),
                "audits": found,
                "faults": [detection.as_dict() for detection in detections],
                "undetected": missed,
                "walk_power": [asdict(entry) for entry in power],
                "false_alarms": _false_alarms(found),
                "passed": all(entry["passed"] for entry in found) and not missed,
            },
            **more,
        )
        save_audit(folder, result)

    try:
        for seed in range(options.seed, options.seed + options.seeds):
            constants = Constants(folder, seed)
            with _begin_soak(options, engine, prompts, seed) as beside:
                for name in options.audits:
                    if name == "soak" and beside is not None:
                        continue
                    plan, checks = _audit(
                        name, options, engine, prompts, device, seed, constants, say
                    )
                    found.append(_finish(name, seed, plan, checks, note))
                    say(sentence(found[-1]))
                if options.faults:
                    sensitivity = Sensitivity(engine, prompts, seed, _envelope(constants, seed))
                    detections += _planted(sensitivity, options, seed, say, note)
                    if "sampler" in options.audits and not options.quick:
                        note(f"what walks alone see, seed {seed}")
                        power += sensitivity.walk_power(sampler.SamplerPlan(walks=POWER_WALKS))
                if beside is not None:
                    note(f"soak, seed {seed}: in processes of its own")
                    entry = _finish("soak", seed, beside.plan, beside.checks(), note)
                    entry["seconds"] = round(beside.seconds, 3)
                    entry["cpu_seconds"] = round(beside.cpu_seconds, 3)
                    found.append(entry)
                    say(sentence(entry))
            save()  # after every seed: a long sweep may be cut short
    except BaseException as error:  # what was found before it is kept
        save(passed=False, ended_early=f"{type(error).__name__}: {error}")
        say(f"what was found until then is in {folder}")
        raise
    return result, folder


def _begin_soak(
    options: AuditOptions, engine: Engine | None, prompts: Sequence[Prompt], seed: int
) -> AbstractContextManager[soak.SoakBeside | None]:
    """The soak of a seed, begun; ended at the end of the `with`, however that comes."""
    if not options.soak_beside:
        return nullcontext()
    return closing(soak.SoakBeside(engine, options.soak_plan, prompts, seed))


def _planted(
    sensitivity: Sensitivity, options: AuditOptions, seed: int, say: Say, note: Say
) -> list[Detection]:
    """Every fault of one seed, where time allows to look for it."""
    began = time.perf_counter()
    found = []
    for fault in FAULTS.values():
        note(f"fault '{fault.name}', seed {seed}")
        found += sensitivity.detections(fault, _audits_of(fault.audit, options))
    seconds = time.perf_counter() - began
    say(f"faults, seed {seed}: {len(undetected(found))} undetected, {seconds:.0f} s")
    return found


def sentence(entry: dict[str, Any]) -> str:
    """One finished audit in a line."""
    passed = sum(line["passed"] for line in entry["lines"])
    total = sum(line["total"] for line in entry["lines"])
    end = "passed" if entry["passed"] else f"FAILED: {_first_failure(entry)}"
    return (
        f"{entry['audit']}, seed {entry['seed']}: {passed}/{total} checks in "
        f"{entry['seconds']:.0f} s, {end}"
    )


def _audit(
    name: str,
    options: AuditOptions,
    engine: Engine | None,
    prompts: Sequence[Prompt],
    device: torch.device,
    seed: int,
    constants: Constants,
    say: Say,
) -> tuple[Any, Iterator[Check]]:
    """The plan of an audit and its checks, not yet run."""
    if name == "component":
        kind = component.ComponentPlan
        plan = kind.quick(device) if options.quick else kind.standard(device)
        if options.geometry is not None:
            plan = replace(plan, geometry=GEOMETRIES[options.geometry])
        return plan, component.audit_component(plan, device, seed, constants)
    if name == "continuation":
        kind = continuation.ContinuationPlan
        plan = kind.quick() if options.quick else kind()
        if plan.other_process and not fits_beside(engine):
            say(f"{device} has no memory for a second copy of the weights: control B is left out")
            plan = replace(plan, other_process=False)
        checks = continuation.audit_continuation(engine, plan, prompts, seed, constants)
        return plan, checks
    if name == "sampler":
        plan = sampler.SamplerPlan.quick() if options.quick else sampler.SamplerPlan()
        return plan, sampler.audit_sampler(engine, plan, prompts, seed)
    plan = options.soak_plan
    return plan, soak.audit_soak(engine, plan, prompts, seed)


def _finish(name: str, seed: int, plan: Any, checks: Iterator[Check], note: Say) -> dict[str, Any]:
    began, worked = time.perf_counter(), time.process_time()
    found = []
    for check in checks:
        found.append(check)
        note(f"{name}, seed {seed}: {len(found)} checks")
    failed = [check for check in found if not check.passed]
    return {
        "audit": name,
        "seed": seed,
        "plan": asdict(plan),
        "passed": bool(found) and not failed,
        "seconds": round(time.perf_counter() - began, 3),
        "cpu_seconds": round(time.process_time() - worked, 3),
        "lines": [line.as_dict() for line in lines(found)],
        "failures": [
            {"check": check.name, "place": check.place, "reason": check.reason}
            for check in failed[:FAILURES_KEPT]
        ],
    }


def _audits_of(named: str, options: AuditOptions) -> tuple[str, ...]:
    """Where a fault is looked for: everywhere, or only where it must be seen if time is short."""
    if options.audits == AUDITS and not options.quick:
        return AUDITS
    return (named,) if named in (options.audits or AUDITS) else ()


def _load(options: AuditOptions) -> tuple[Engine, list[Prompt]]:
    from lumotree.engine import Engine

    corpus = load_corpus(Path(options.corpus))
    threads = options.threads
    if threads is None and options.soak_beside:  # two processes share the cores
        threads = max(1, torch.get_num_threads() // 2)
    engine = Engine.load(
        options.model,
        dtype=options.dtype,
        device=options.device,
        rows=options.rows,
        threads=threads,
    )
    prompts = []
    for request in select(corpus.requests, PROMPTS):
        try:
            ids = engine.tokenizer.encode_chat(request.messages, request.tools)
        except RequestError as error:
            where = corpus.where(request)
            raise LumoTreeError(f"{where}: the tokenizer cannot take it: {error}") from None
        prompts.append(Prompt(request.request_id, tuple(ids[: engine.max_context // 2])))
    return engine, prompts


def _device(options: AuditOptions, engine: Engine | None) -> torch.device:
    if engine is not None:
        return engine.model.device
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    name = _device_name(options.device)
    if name not in ("cpu", "cuda"):
        raise LumoTreeError(f"unknown device {name!r} in --device", "cpu, cuda or auto")
    if name == "cuda" and not torch.cuda.is_available():
        raise LumoTreeError("--device cuda: torch sees no CUDA device here", "use --device cpu")
    return torch.device(name)


def _device_name(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def _gpu(device: torch.device) -> dict[str, str]:
    return {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}


def _envelope(constants: Constants, seed: int) -> dict[str, float] | None:
    frozen = constants.values.get(f"continuation, seed {seed}")
    return frozen and frozen["values"]["envelope"]


def _false_alarms(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Audits run without a fault, and how many of them failed all the same."""
    table: dict[str, dict[str, int]] = {}
    for entry in found:
        row = table.setdefault(entry["audit"], {"runs": 0, "failed": 0})
        row["runs"] += 1
        row["failed"] += not entry["passed"]
    return table


def _first_failure(entry: dict[str, Any]) -> str:
    if not entry["failures"]:
        return "nothing was checked"
    first = entry["failures"][0]
    return f"{first['check']}, {first['place']}: {first['reason']}"


def _free_folder(started: datetime) -> Path:
    base = Path("runs") / f"{started:%Y%m%d-%H%M%S}-audit"
    path, number = base, 2
    while path.exists():
        path, number = Path(f"{base}-{number}"), number + 1
    return path

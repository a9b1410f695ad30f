"""A whole replay as a library call: check everything, run, summarise, leave a run folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arms import inprocess
from arms.choice import TreeChoice
from arms.protocol import Arm
from arms.registry import create
from arms.spec import IN_PROCESS, ArmSpec, parse_arms
from lumotree.errors import CorpusError, LumoTreeError
from replay.corpus import Corpus, load_corpus
from replay.guards import Equality, check_equality
from replay.items import held_out, make_items
from replay.load import (
    DEFAULT_ACTIVE,
    RECORDED,
    LoadPlan,
    offsets,
    replay_load,
    summarise_load,
)
from replay.machine import describe_machine, describe_versions, git_commit
from replay.runfolder import RunFolder, difference
from replay.runner import Item, Progress, replay, start_arms
from replay.sampling import SamplingRule
from replay.selection import select
from replay.summary import summarise

if TYPE_CHECKING:
    from lumotree.engine import Engine

# Parts of run.json that say where and with what it ran. A resume may differ in them, but says so.
PLACE = ("machine", "versions", "git_commit")


@dataclass(frozen=True)
class ReplayOptions:
    """Everything that decides what a replay does; kept in run.json, so a resume needs no flags."""

    corpus: str = ""
    arms: tuple[str, ...] = ("all",)
    model: str = "embedded"
    dtype: str = "auto"
    device: str = "auto"
    rows: str = "natural"
    threads: int | None = None
    max_context: int | None = None
    runs: int = 3
    limit: int | None = None
    warmup: int = 1
    sampling: str = "protocol"
    cap: int = 1024
    seed: int = 0
    overrides: dict[str, float] = field(default_factory=dict)
    check_tokens: bool = True
    concurrency: int | None = None
    arrivals: str | None = None
    goodput: dict[str, float] | None = None

    def __post_init__(self) -> None:
        """Raises LumoTreeError naming the option."""
        least_of = {"runs": 1, "limit": 1, "warmup": 0, "threads": 1, "seed": 0, "concurrency": 1}
        for name, least in (least_of | {"max_context": 2}).items():
            value = getattr(self, name)
            if value is not None and value < least:
                option = name.replace("_", "-")
                raise LumoTreeError(f"--{option} is {value}; it takes a whole number from {least}")
        for name, valid in (
            ("dtype", ("auto", "float32", "bfloat16")),
            ("rows", ("natural", "matched")),
        ):
            if getattr(self, name) not in valid:
                value = getattr(self, name)
                raise LumoTreeError(f"--{name} is '{value}'; it takes {', '.join(valid)}")
        if self.arrivals not in (None, RECORDED):
            raise LumoTreeError(f"--arrivals is '{self.arrivals}'; it takes {RECORDED}")
        if self.goodput and not self.under_load:
            raise LumoTreeError("--goodput needs --concurrency or --arrivals recorded")
        object.__setattr__(self, "arms", tuple(str(spec) for spec in parse_arms(self.arms)))
        self.rule()

    def rule(self) -> SamplingRule:
        return SamplingRule(self.sampling, self.cap, self.seed, self.overrides)

    @property
    def under_load(self) -> bool:
        """Whether several requests may be in flight."""
        return self.concurrency is not None or self.arrivals is not None

    def as_dict(self) -> dict[str, Any]:
        """JSON form, without the corpus path: the corpus is known by its hash.

        Options of load and context stand in it only when given, so that folders from before them
        compare.
        """
        values = asdict(self)
        del values["corpus"]
        for name in ("max_context", "concurrency", "arrivals", "goodput"):
            if values[name] is None:
                del values[name]
        return values | {"arms": list(self.arms)}


@dataclass(frozen=True)
class Outcome:
    """What a replay left: its folder, summary and equality check.

    `ok` decides the exit code: no guard withholds an arm's headline, no local request failed.
    """

    folder: RunFolder
    summary: dict[str, Any]
    equality: Equality | None
    failed_in_process: int

    @property
    def ok(self) -> bool:
        return not self.summary["withheld"] and not self.failed_in_process


def run_replay(
    options: ReplayOptions,
    *,
    out: Path | None = None,
    command: Sequence[str] = (),
    progress: Progress,
    opened: Callable[[RunFolder], None] = lambda folder: None,
) -> Outcome:
    """A new run into `out`, or into runs/<time>-<corpus>. `opened` hears of the folder first.

    Raises LumoTreeError for anything that is wrong use, before the folder exists.
    """
    started = datetime.now(UTC)
    job = _Job.prepare(options, progress)
    try:
        if out is None:
            out = _free_folder(started, job.corpus.path.stem)
        folder = RunFolder.create(
            out, job.record() | {"command": list(command), "started_at": started.isoformat()}
        )
        opened(folder)
        return job.finish(folder, progress)
    finally:
        job.close()


def resume_replay(
    path: Path,
    given: dict[str, Any],
    *,
    progress: Progress,
    opened: Callable[[RunFolder], None] = lambda folder: None,
) -> Outcome:
    """Continue a run folder. `given` are the options named this time; they must not differ.

    Another machine, version or commit is kept in `resumed_on` and warned of. Raises CorpusError
    naming what differs in options, corpus, model or in what an arm decodes with.
    """
    folder = RunFolder.open(path)
    options = saved_options(folder)
    if options.under_load:
        raise CorpusError(
            f"{path} was a run under load, which cannot be resumed: what was in flight is part of "
            "the measurement",
            "start a new run",
        )
    # A corpus that has moved is the same corpus if its hash is.
    job = _Job.prepare(replace(options, **given), progress, folder.run.get("arms", {}))
    try:
        now, at = job.record(), datetime.now(UTC).isoformat()
        folder.resume({key: now[key] for key in ("options", "corpus", "model", "arms")})
        folder.run.setdefault("resumed_at", []).append(at)
        differs = {
            part: now[part] for part in PLACE if folder.run.get(part, now[part]) != now[part]
        }
        if differs:
            folder.run.setdefault("resumed_on", []).append({"at": at, **differs})
        opened(folder)
        return job.finish(folder, progress)
    finally:
        job.close()


def saved_options(folder: RunFolder) -> ReplayOptions:
    """The options of a run folder. Raises CorpusError when run.json is not a replay's."""
    try:
        known = {f.name for f in fields(ReplayOptions)}
        values = {key: value for key, value in folder.run["options"].items() if key in known}
        return ReplayOptions(corpus=folder.run["corpus_path"], **values)
    except (KeyError, TypeError, AttributeError):
        raise CorpusError(f"{folder.path / 'run.json'} does not describe a replay") from None


class _Job:
    """A replay made ready: corpus, engine, arms and items, all checked."""

    def __init__(self, options: ReplayOptions, corpus: Corpus, engine: Engine) -> None:
        self.options = options
        self.corpus = corpus
        self.engine = engine
        self.arms = [self._arm(spec) for spec in parse_arms(options.arms)]
        self.items: list[Item] = []
        self.plan: LoadPlan | None = None
        self.ready: list[Any] = []
        self.status: dict[str, dict[str, Any]] = {}

    def _arm(self, spec: ArmSpec) -> Arm:
        if self.options.under_load and spec.name in IN_PROCESS:
            from arms.pool import PooledArm

            return PooledArm(spec, self.engine, self.options.concurrency or DEFAULT_ACTIVE)
        return create(spec, self.engine)

    def fit_slots(self) -> None:
        """Slots under load are made before the first request, for the longest one."""
        longest = max(len(i.request.prompt_ids) + i.params.max_tokens for i in self.items)
        for arm in self.arms:
            if self.plan is not None and arm.in_process:
                arm.context = longest

    def _plan(self) -> LoadPlan | None:
        """How requests are sent under load. Raises CorpusError when no times were recorded."""
        if self.options.arrivals is None:
            return LoadPlan(self.options.concurrency) if self.options.under_load else None
        chosen = select(self.corpus.requests, self.options.limit)
        for request in chosen:
            if request.recorded_at is None:
                raise CorpusError(
                    f"{self.corpus.where(request)} has no time in lumotree.recorded_at",
                    "use --concurrency instead of --arrivals recorded",
                )
        return LoadPlan(self.options.concurrency, offsets(r.recorded_at for r in chosen))

    @classmethod
    def prepare(
        cls, options: ReplayOptions, progress: Progress, before: Mapping[str, Any] | None = None
    ) -> _Job:
        """`before` is run.json's `arms` of a resumed run: its tree=auto stays what it was."""
        corpus = load_corpus(Path(options.corpus))
        progress.note(f"loading model {options.model}")
        engine = inprocess.load_engine(
            options.model,
            dtype=options.dtype,
            device=options.device,
            rows=options.rows,
            threads=options.threads,
            max_context=options.max_context,
        )
        job = cls(options, corpus, engine)
        try:
            progress.note("reading prompts")
            job.items = make_items(corpus, options, engine)
            job.plan = job._plan()
            job.fit_slots()
            job.choose_trees(before or {}, progress)
            job.ready, job.status = start_arms(job.arms)
        except BaseException:
            job.close()
            raise
        return job

    def choose_trees(self, before: Mapping[str, Any], progress: Progress) -> None:
        """Calibrate for arms with tree=auto; one calibration serves all of them.

        A choice saved before stays, also where the plan file says something else by now.
        """
        choice = None
        for arm in self.arms:
            if not getattr(arm, "auto", False):
                continue
            saved = before.get(arm.name, {}).get("description", {}).get("choice")
            if saved is not None:
                arm.choice = TreeChoice.of(saved, "run.json")
            elif arm.needs_choice:
                choice = choice or self._calibrated(progress)
                arm.choice = choice

    def _calibrated(self, progress: Progress) -> TreeChoice:
        from replay.calibration import calibrate

        items = held_out(self.corpus, self.options, self.engine) or self.items
        return calibrate(
            self.engine, items, corpus_sha256=self.corpus.sha256, note=progress.note
        ).choice

    def record(self) -> dict[str, Any]:
        """run.json as far as it is known before the first request."""
        corpus = self.corpus
        return {
            "options": self.options.as_dict(),
            "arms": self.status,
            "corpus_path": str(corpus.path),
            "corpus": {"sha256": corpus.sha256, "requests": len(corpus.requests)},
            "selected": [item.request.request_id for item in self.items],
            "requests": {
                item.request.request_id: {
                    "conversation": item.request.conversation,
                    "prompt_tokens": len(item.request.prompt_ids),
                    "max_tokens": item.params.max_tokens,
                }
                for item in self.items
            },
            "model": self.engine.description(),
            "sampling": self.options.rule().as_dict(),
            "seed": self.options.seed,
            "machine": describe_machine(),
            "versions": describe_versions(),
            "git_commit": git_commit(),
            "ended_at": None,
        }

    def finish(self, folder: RunFolder, progress: Progress) -> Outcome:
        """Serve what is missing, then write the summary and the end into the folder."""
        try:
            folder.run["arms"] = self.status
            folder.write_run()
            how = {
                "runs": self.options.runs,
                "warmup": self.options.warmup,
                "done": {row.key for row in folder.rows()},
                "append": folder.append,
                "progress": progress,
            }
            if self.plan is None:
                replay(self.ready, self.items, **how)
            else:
                replay_load(self.ready, self.items, self.plan, **how)
            rows = folder.rows()
            local = [arm.name for arm in self.arms if arm.in_process]
            equality = None
            if self.options.check_tokens:
                equality = check_equality(rows, local, self._margin)
            summary = summarise(self.status, rows, equality, folder.run)
            if self.plan is not None:
                summary["load"] = summarise_load(
                    rows,
                    list(self.status),
                    self.options.concurrency,
                    self.options.arrivals,
                    self.options.goodput or {},
                )
            warnings = run_warnings(folder.run)
            if warnings:
                summary["warnings"] = warnings
            folder.write_json("summary.json", summary)
            if not folder.run.get("ended_at"):
                folder.run["ended_at"] = datetime.now(UTC).isoformat()
            folder.write_run()
        finally:
            folder.close()
        failed = sum(1 for row in rows if row.arm in local and row.error is not None)
        return Outcome(folder, summary, equality, failed)

    def close(self) -> None:
        for arm in self.arms:
            arm.close()

    def _margin(self, request_id: str, generated: list[int]) -> float | None:
        item = next(item for item in self.items if item.request.request_id == request_id)
        try:
            return self.engine.margin(list(item.request.prompt_ids), generated, item.params)
        except LumoTreeError:
            return None


def run_warnings(run: Mapping[str, Any]) -> list[str]:
    """What run.json says against quoting the run: where it went on, how trees were chosen, how far
    it went beyond the model's training.
    """
    found = _beyond_training(run)
    for resumed in run.get("resumed_on") or ():
        for part in PLACE:
            if part in resumed:
                said = difference(part.replace("_", " "), run.get(part), resumed[part])
                found.append(f"the run went on under other conditions: {said}")
    corpus, scored = run.get("corpus") or {}, run.get("selected") or ()
    for name, status in (run.get("arms") or {}).items():
        choice = (status.get("description") or {}).get("choice")
        if choice is not None:
            notices = TreeChoice.of(choice, "run.json").notices(
                run.get("machine") or {}, corpus.get("sha256", ""), scored
            )
            found += [f"{name}: {notice}" for notice in notices]
    return list(dict.fromkeys(found))


def _beyond_training(run: Mapping[str, Any]) -> list[str]:
    declared = (run.get("model") or {}).get("declared_context")
    asked = (run.get("requests") or {}).values()
    far = [a for a in asked if declared and a["prompt_tokens"] + a["max_tokens"] > declared]
    if not far:
        return []
    return [
        f"{len(far)} of {len(asked)} requests go past the {declared:,} positions that the model "
        "declares: arms must still agree there, but text, acceptance and rates are beyond its "
        "training"
    ]


def _free_folder(started: datetime, stem: str) -> Path:
    base = Path("runs") / f"{started:%Y%m%d-%H%M%S}-{stem}"
    path, number = base, 2
    while path.exists():
        path, number = Path(f"{base}-{number}"), number + 1
    return path

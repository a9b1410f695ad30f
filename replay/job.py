"""A whole replay as a library call: check everything, run, summarise, leave a run folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arms import inprocess
from arms.choice import TreeChoice
from arms.protocol import ArmRequest
from arms.registry import create
from arms.spec import parse_arms
from lumotree.errors import CorpusError, LumoTreeError, RequestError
from lumotree.request import SamplingParams
from replay.corpus import Corpus, CorpusRequest, load_corpus
from replay.guards import Equality, check_equality
from replay.machine import describe_machine, describe_versions, git_commit
from replay.runfolder import RunFolder, difference
from replay.runner import Item, Progress, replay, start_arms
from replay.sampling import SamplingRule
from replay.selection import evenly_spaced, select
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
    runs: int = 3
    limit: int | None = None
    warmup: int = 1
    sampling: str = "protocol"
    cap: int = 1024
    seed: int = 0
    overrides: dict[str, float] = field(default_factory=dict)
    check_tokens: bool = True

    def __post_init__(self) -> None:
        """Raises LumoTreeError naming the option."""
        for name, least in (("runs", 1), ("limit", 1), ("warmup", 0), ("threads", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise LumoTreeError(f"--{name} is {value}; it takes a whole number from {least}")
        for name, valid in (
            ("dtype", ("auto", "float32", "bfloat16")),
            ("rows", ("natural", "matched")),
        ):
            if getattr(self, name) not in valid:
                value = getattr(self, name)
                raise LumoTreeError(f"--{name} is '{value}'; it takes {', '.join(valid)}")
        object.__setattr__(self, "arms", tuple(str(spec) for spec in parse_arms(self.arms)))
        self.rule()

    def rule(self) -> SamplingRule:
        return SamplingRule(self.sampling, self.cap, self.seed, self.overrides)

    def as_dict(self) -> dict[str, Any]:
        """JSON form, without the corpus path: the corpus is known by its hash."""
        values = asdict(self)
        del values["corpus"]
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
        self.arms = [create(spec, engine) for spec in parse_arms(options.arms)]
        self.items: list[Item] = []
        self.ready: list[Any] = []
        self.status: dict[str, dict[str, Any]] = {}

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
        )
        job = cls(options, corpus, engine)
        try:
            progress.note("reading prompts")
            job.items = make_items(corpus, options, engine)
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
            replay(
                self.ready,
                self.items,
                runs=self.options.runs,
                warmup=self.options.warmup,
                done={row.key for row in folder.rows()},
                append=folder.append,
                progress=progress,
            )
            rows = folder.rows()
            local = [arm.name for arm in self.arms if arm.in_process]
            equality = None
            if self.options.check_tokens:
                equality = check_equality(rows, local, self._margin)
            summary = summarise(self.status, rows, equality, folder.run)
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


def make_items(corpus: Corpus, options: ReplayOptions, engine: Engine) -> list[Item]:
    """Tokenise the selected requests and settle their parameters.

    The cap shrinks to what the context leaves, equally for all arms. Raises CorpusError naming
    the line of a prompt that does not fit or cannot be tokenised, or of a recorded sampling value
    out of range.
    """
    chosen = select(corpus.requests, options.limit)
    return [make_item(corpus, request, options, engine) for request in chosen]


def make_item(
    corpus: Corpus, request: CorpusRequest, options: ReplayOptions, engine: Engine
) -> Item:
    """One request of `make_items`."""
    where = corpus.where(request)
    try:
        params: SamplingParams = options.rule().params(request.request_id, request.sampling)
        ids = engine.tokenizer.encode_chat(request.messages, request.tools)
    except RequestError as error:
        raise CorpusError(f"{where}: {error.message}", error.hint) from None
    except (TypeError, UnicodeError):
        # Half a surrogate pair is valid JSON and no text.
        raise CorpusError(
            f"{where}: the tokenizer cannot take this request",
            "look for half a surrogate pair, such as \\ud83d, in its text",
        ) from None
    room = engine.max_context - len(ids)
    if room < 1:
        raise CorpusError(
            f"{where}: the prompt has {len(ids)} tokens, "
            f"the model's context holds {engine.max_context}"
        )
    params = replace(params, max_tokens=min(params.max_tokens, room))
    return Item(ArmRequest(request.request_id, tuple(ids), request.conversation), params)


def held_out(corpus: Corpus, options: ReplayOptions, engine: Engine) -> list[Item]:
    """A few requests that the run leaves out, evenly spaced: a tree chosen on them is not
    flattered by the requests it is scored on. Other turns of their conversations may be scored.
    None where the run takes all, or where they do not fit the model.
    """
    from replay.calibration import REQUESTS

    taken = {request.request_id for request in select(corpus.requests, options.limit)}
    left = [request for request in corpus.requests if request.request_id not in taken]
    items = []
    for index in evenly_spaced(len(left), min(REQUESTS, len(left))):
        try:
            items.append(make_item(corpus, left[index], options, engine))
        except CorpusError:
            continue  # a fault of a request that nobody asked for
    return items


def run_warnings(run: Mapping[str, Any]) -> list[str]:
    """What run.json says against quoting the run: where it went on, how trees were chosen."""
    found = []
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


def _free_folder(started: datetime, stem: str) -> Path:
    base = Path("runs") / f"{started:%Y%m%d-%H%M%S}-{stem}"
    path, number = base, 2
    while path.exists():
        path, number = Path(f"{base}-{number}"), number + 1
    return path

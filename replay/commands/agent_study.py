"""`lumotree agent-study`: coding tasks through each serving arm, graded by their hidden tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lumotree.errors import CorpusError, LumoTreeError

if TYPE_CHECKING:
    from replay.agent.study import StudyOptions
    from replay.agent.tasks import Task

EPILOG = """Examples:

lumotree agent-study --task release --arms scripted

lumotree agent-study --arms "lumotree mtp-5 ar" --budget 120 --steps 6 --max-tokens 256

lumotree agent-study --arms openai:url=http://127.0.0.1:8000 --out runs/study

lumotree agent-study --resume runs/study"""

TASKS = Path("corpora/astropy")


def register(app: typer.Typer) -> None:
    app.command("agent-study", epilog=EPILOG)(agent_study)


def agent_study(
    tasks: list[Path] = typer.Option(
        None,
        "--tasks",
        help="Task files, folders of them, or SWE-bench rows (.jsonl). May be "
        "repeated. Default corpora/astropy.",
    ),
    task: list[str] = typer.Option(
        None,
        "--task",
        help="A task's id or a set (release, mutations); may be repeated. Default all.",
    ),
    arms: str = typer.Option(
        None,
        help="Arms: in-process specs (lumotree, mtp-5, ar ...), each served by the study; "
        "servers by address (openai, sglang-eagle, vllm-mtp with url=, model= and key=, the name "
        "of an environment variable); scripted, the written solutions; idle, an agent that does "
        "nothing. Default scripted.",
    ),
    model: str = typer.Option(None, help="Model of the in-process arms. Default embedded."),
    device: str = typer.Option(None, help="Their device: auto (default), cpu or cuda."),
    dtype: str = typer.Option(None, help="Their dtype: auto (default), float32 or bfloat16."),
    threads: int = typer.Option(None, help="Their CPU threads; default: as torch chooses."),
    max_context: int = typer.Option(
        None, help="Positions of a request to them, answer included; default: the model's."
    ),
    budget: float = typer.Option(None, help="Seconds an attempt may take. Default 9000."),
    steps: int = typer.Option(None, help="Requests an attempt may make. Default 0: no limit."),
    max_tokens: int = typer.Option(None, help="Most tokens of one response. Default 24000."),
    command_timeout: float = typer.Option(None, help="Seconds one command may take. Default 120."),
    output_cap: int = typer.Option(
        None, help="Characters of a command's output that are shown. Default 10000."
    ),
    seed: int = typer.Option(None, help="Seed that each request carries. Default 0."),
    agent_cmd: str = typer.Option(
        None,
        help="A shell command that is the agent, in place of the built-in loop; it finds the "
        "endpoint in OPENAI_BASE_URL, the task in LUMOTREE_PROBLEM_FILE.",
    ),
    sandbox: str = typer.Option(
        None,
        help="bubblewrap or unshare; default: the first that works. none: the agent's "
        "commands run uncontained.",
    ),
    parallel: int = typer.Option(
        1, help="Tasks at a time, also of --check and --compute. Above 1 there is no rate per task."
    ),
    record: Path = typer.Option(None, help="Also write every request of the study as a corpus."),
    out: Path = typer.Option(None, help="Study folder. Default runs/<time>-agent-study."),
    resume: Path = typer.Option(None, help="Continue this study with its own options."),
    python: str = typer.Option(None, help="The Python that makes the tasks' environments."),
    prepare: bool = typer.Option(
        False, "--prepare", help="Only fetch wheels and make environments and workspaces."
    ),
    check: bool = typer.Option(
        False, "--check", help="Only check that each task is red before its fix and green after."
    ),
    compute: bool = typer.Option(
        False,
        "--compute",
        help="Only find out FAIL_TO_PASS and PASS_TO_PASS, and store them in the task files.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress and no talk."),
) -> None:
    """Run coding tasks once through each arm and grade them by tests the agent never saw.

    Writes a study folder: trajectories (mini-swe-agent-1.1), preds.json (SWE-bench), every request
    as a corpus, and the table. Start-up of servers is in no figure. A killed study continues with
    --resume. Exit code 1: an arm was unavailable or a server failed; how many tasks were resolved
    changes no exit code.
    """
    from replay.agent.cache import cache_folder
    from replay.agent.sandbox import Sandbox
    from replay.agent.tasks import load_tasks
    from replay.agent.workspace import Workspaces
    from replay.corpus import manifest_path

    given = {
        "tasks": tasks or None,
        "task": task or None,
        "arms": arms,
        "budget": budget,
        "steps": steps,
        "max-tokens": max_tokens,
        "command-timeout": command_timeout,
        "output-cap": output_cap,
        "seed": seed,
        "sandbox": sandbox,
        "agent-cmd": agent_cmd,
        "model": model,
        "device": device,
        "dtype": dtype,
        "threads": threads,
        "max-context": max_context,
    }
    given = {name: value for name, value in given.items() if value is not None}
    _check(given | {"parallel": parallel})
    if resume is None:
        places, names, options = tasks or [TASKS], task or [], _options(given)
    else:
        for name in [*given, *(["out"] if out is not None else [])]:
            raise LumoTreeError(
                f"--resume and --{name} exclude each other: a study goes on with its own options"
            )
        places, names, options = _saved(resume)
    for place in places:
        if not place.exists():
            raise LumoTreeError(f"{place} does not exist", "name the tasks with --tasks")
    for path in (record, manifest_path(record)) if record is not None else ():
        if path.exists():
            raise CorpusError(f"--record: {path} exists", "name another file")
    chosen = load_tasks(places, names)
    workspaces = Workspaces(cache_folder(), python)
    if prepare:
        _prepare(chosen, workspaces, quiet)
        return
    contained = Sandbox.choose(options.sandbox)
    if check or compute:
        _judge(chosen, workspaces, contained, compute, parallel)
        return
    _run(
        chosen,
        places,
        names,
        options,
        workspaces,
        contained,
        parallel,
        record,
        out,
        resume,
        as_json,
        quiet,
    )


def _check(given: dict[str, Any]) -> None:
    """Raises LumoTreeError naming the option that is out of range."""
    least = {"parallel": 1, "steps": 0, "max-tokens": 1, "output-cap": 100, "threads": 1}
    least["max-context"] = 2
    for name, minimum in least.items():
        if name in given and given[name] < minimum:
            raise LumoTreeError(
                f"--{name} is {given[name]}; it takes a whole number from {minimum}"
            )
    for name in ("budget", "command-timeout"):
        if name in given and not given[name] > 0:
            raise LumoTreeError(f"--{name} is {given[name]:g}; it takes seconds above 0")


def _options(given: dict[str, Any]) -> StudyOptions:
    """What was given, and the defaults of the study for the rest."""
    from replay.agent.attempt import Budget
    from replay.agent.study import StudyOptions

    limits = {
        "budget": "seconds",
        "steps": "steps",
        "max-tokens": "max_tokens",
        "command-timeout": "command_s",
    }
    budget = Budget(**{key: given[name] for name, key in limits.items() if name in given})
    server: list[str] = []
    for name in ("model", "device", "dtype", "threads", "max-context"):
        if name in given:
            server += [f"--{name}", str(given[name])]
    plain = ("seed", "sandbox", "agent-cmd", "output-cap")
    return StudyOptions(
        arms=given.get("arms", "scripted"),
        budget=budget,
        # A request of an attempt may take as long as the attempt.
        server_options=(*server, "--request-timeout", f"{budget.seconds:g}"),
        **{name.replace("-", "_"): given[name] for name in plain if name in given},
    )


def _saved(folder: Path) -> tuple[list[Path], list[str], StudyOptions]:
    """What the study that is resumed was asked to do."""
    from replay.agent.attempt import Budget
    from replay.agent.store import StudyFolder
    from replay.agent.study import StudyOptions

    run = StudyFolder.open(folder).run
    known = dict(run["options"])
    known["budget"] = Budget(**known["budget"])
    known["server_options"] = tuple(known["server_options"])
    return [Path(place) for place in run["places"]], run["names"], StudyOptions(**known)


def _prepare(tasks: list[Task], workspaces: Any, quiet: bool) -> None:
    from replay.talk import say

    for task in tasks:
        workspaces.environment(task)
        workspaces.pristine(task)
        workspaces.hidden_tests(task)
        if not quiet:
            say(f"{task.id}: ready")


def _judge(
    tasks: list[Task], workspaces: Any, contained: Any, compute: bool, parallel: int
) -> None:
    """--check and --compute: one line a task on stdout; exit code 1 when one is not as it says."""
    from concurrent.futures import ThreadPoolExecutor

    from replay.agent.grading import Grader
    from replay.agent.tasks import save_task

    grader = Grader(workspaces, contained)
    wrong = 0
    with ThreadPoolExecutor(parallel) as pool:
        if compute:
            for found in pool.map(grader.compute, tasks):
                save_task(found, found.folder / f"{found.id}.json")
                counts = f"{len(found.fail_to_pass)} to mend, {len(found.pass_to_pass)} to keep"
                print(f"{found.id}: {counts}", flush=True)
        else:
            for task, fault in zip(tasks, pool.map(grader.check, tasks), strict=True):
                wrong += fault is not None
                print(f"{task.id}: {fault or 'red before the fix, green after'}", flush=True)
    if wrong:
        raise typer.Exit(1)


def _run(
    tasks: list[Task],
    places: list[Path],
    names: list[str],
    options: StudyOptions,
    workspaces: Any,
    contained: Any,
    parallel: int,
    record: Path | None,
    out: Path | None,
    resume: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    from replay.agent.progress import Line
    from replay.agent.servers import arm_names, make_arm
    from replay.agent.store import StudyFolder
    from replay.agent.study import Study, default_folder, describe
    from replay.agent.table import markdown
    from replay.formats.writing import write_corpus
    from replay.talk import print_json, say

    run = describe(options, tasks, contained)
    run |= {"places": [str(place.resolve()) for place in places], "names": names}
    names_of_arms = arm_names(options.arms)
    for name in names_of_arms:  # a wrong spec is said before anything is written
        make_arm(name, tasks, options.server_options, Path())
    if resume is None:
        folder = StudyFolder.create(out or default_folder(), run)
    else:
        folder = StudyFolder.open(resume)
        folder.check_same(run)
    if not contained.contains and not quiet:
        say("warning: the agent's commands run without a sandbox and can reach all you can reach")
    with Line(quiet, len(tasks) * len(names_of_arms), len(folder.finished())) as line:
        study = Study(folder, tasks, options, workspaces, contained, line, parallel)
        summary = study.run()
    if record is not None:
        lines = folder.recorded(names_of_arms)
        write_corpus(lines, record, {"recorded_from": "agent study"}, force=False)
    if as_json:
        print_json(summary)
    else:
        print(markdown(summary))
    if not quiet:
        say(f"study: {folder.path}")
    broken = [n for n, arm in summary["arms"].items() if arm["reason"] or arm["outcomes"]["X"]]
    if broken:
        raise typer.Exit(1)

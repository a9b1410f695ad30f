"""`lumotree replay`: a corpus through the arms, into a run folder."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lumotree.errors import LumoTreeError

if TYPE_CHECKING:
    from replay.job import Outcome

EPILOG = """Examples:

lumotree replay corpora/first.jsonl --arms all

lumotree replay corpora/first.jsonl --arms "ar lumotree:suffix=off" --runs 1 --cap 128

lumotree replay mine.jsonl --arms "lumotree openai:url=http://127.0.0.1:8000" --concurrency 8

lumotree replay --resume runs/20260101-120000-first"""


def register(app: typer.Typer) -> None:
    app.command("replay", epilog=EPILOG)(replay)


def replay(
    corpus: str = typer.Argument(None, help="JSONL corpus, one OpenAI batch line per request."),
    arms: str = typer.Option(
        None,
        help="Arm specs separated by spaces, or all (= ar mtp-5 lumotree sglang-eagle), "
        "the default. NAME[:key=value[,key=value]]; names: ar, mtp-1, mtp-3, mtp-5, mtp-7, "
        "lumotree (tree= a preset, a parent list or auto, passes= a number or 3/5, "
        "draft_vocab=, draft_weights=model|fp8, suffix=on|off, verify= a verifier of `bench gdn`, "
        "plan=; on a GPU also attention=grouped|stock, selection=fused|separate, "
        "operands=prepared|inline, round_rows=), sglang-eagle, vllm-mtp, openai (url=, several "
        "joined by +; key= an environment variable; model=; openai also api=completions|chat, "
        "extras=on|off). tree=auto is calibrated before the first request, on requests that "
        "--limit leaves out where there are any.",
    ),
    arm: list[str] = typer.Option(None, help="One arm spec; may be repeated."),
    model: str = typer.Option(
        None,
        help="embedded (default), rehearsal:SHAPE (27b, 9b, 4b, 2b, 0.8b, tiny), or a folder or "
        "hub id of a Hugging Face checkpoint.",
    ),
    dtype: str = typer.Option(None, help="auto (default), float32 or bfloat16."),
    device: str = typer.Option(None, help="auto (default), cpu or cuda."),
    rows: str = typer.Option(
        None, help="natural (default): each arm pays for its own rows; matched: all pay alike."
    ),
    threads: int = typer.Option(None, help="CPU threads; default: as torch chooses."),
    max_context: int = typer.Option(
        None,
        help="Positions of a request, answer included. Default: what the model declares; more is "
        "beyond its training, and the run says so.",
    ),
    runs: int = typer.Option(None, help="Interleaved runs. Default 3."),
    limit: int = typer.Option(
        None, help="Requests to take: proportional to conversations, evenly spaced. Default all."
    ),
    warmup: int = typer.Option(None, help="Warm-up requests per arm, in no rate. Default 1."),
    cap: int = typer.Option(None, help="Most tokens per request. Default 1024."),
    sampling: str = typer.Option(
        None,
        help="protocol (default): temperature 0.6, top-p 0.95, top-k 20, presence penalty 1.0; "
        "recorded: what the request says, the protocol where it says nothing.",
    ),
    greedy: bool = typer.Option(False, "--greedy", help="Short for --temperature 0."),
    temperature: float = typer.Option(None, help="Overrides the temperature."),
    top_p: float = typer.Option(None, help="Overrides top-p."),
    top_k: int = typer.Option(None, help="Overrides top-k; 0 is off."),
    min_p: float = typer.Option(None, help="Overrides min-p."),
    presence_penalty: float = typer.Option(None, help="Overrides the presence penalty."),
    frequency_penalty: float = typer.Option(None, help="Overrides the frequency penalty."),
    repetition_penalty: float = typer.Option(None, help="Overrides the repetition penalty."),
    seed: int = typer.Option(
        None, help="With the request's id it gives the request's seed, for all arms. Default 0."
    ),
    check_tokens: bool = typer.Option(
        None,
        "--check-tokens/--no-check-tokens",
        help="Demand equal token ids of the in-process arms (default); a mismatch is exit code 1.",
    ),
    concurrency: int = typer.Option(
        None, help="Requests in flight, a closed loop. Default: one, arms interleaved."
    ),
    arrivals: str = typer.Option(
        None, help="recorded: an open loop, each request sent at its recorded time."
    ),
    goodput: str = typer.Option(
        None,
        help="Limits in seconds that a good request keeps: ttft=, e2e=, tpot= (decode time per "
        "token), burst= (longest pause), joined by commas.",
    ),
    out: Path = typer.Option(None, help="Run folder. Default runs/<time>-<corpus>."),
    resume: Path = typer.Option(None, help="Continue this run folder with its own options."),
    report: bool = typer.Option(
        True, "--report/--no-report", help="Write report.html and the pictures at the end."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
    quiet: bool = typer.Option(
        False, "--quiet", help="No progress and no talk; failures are still said."
    ),
) -> None:
    """Replay a recorded corpus through each arm and pool the decode rates.

    Prints the pooled table and the phase table, and writes a run folder. A killed or
    interrupted run continues with --resume, without losing or repeating a row.
    """
    if greedy and temperature:
        raise LumoTreeError(f"--greedy and --temperature {temperature:g} exclude each other")
    from replay.load import parse_goodput

    overrides = {
        "temperature": 0.0 if greedy else temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
    }
    overrides = {name: value for name, value in overrides.items() if value is not None}
    named = ([arms] if arms is not None else []) + (arm or [])
    options = {
        "corpus": corpus,
        "arms": tuple(named) if named else None,
        "model": model,
        "dtype": dtype,
        "device": device,
        "rows": rows,
        "threads": threads,
        "max_context": max_context,
        "runs": runs,
        "limit": limit,
        "warmup": warmup,
        "sampling": sampling,
        "cap": cap,
        "seed": seed,
        "overrides": overrides or None,
        "check_tokens": check_tokens,
        "concurrency": concurrency,
        "arrivals": arrivals,
        "goodput": None if goodput is None else parse_goodput(goodput),
    }
    given = {name: value for name, value in options.items() if value is not None}
    if corpus is None and resume is None:
        raise LumoTreeError("no corpus is named", "lumotree replay corpora/first.jsonl --arms all")
    if resume is not None and out is not None:
        raise LumoTreeError("--resume and --out exclude each other: a resumed run stays in place")
    if not run(given, out, resume, report, as_json, quiet).ok:
        raise typer.Exit(1)


def run(
    given: dict[str, Any],
    out: Path | None = None,
    resume: Path | None = None,
    report: bool = True,
    as_json: bool = False,
    quiet: bool = False,
) -> Outcome:
    """Runs or resumes a replay, prints what came of it and draws its report."""
    from replay.job import ReplayOptions, resume_replay, run_replay
    from replay.talk import Bar, say

    place: list[Path] = []
    try:
        with Bar(quiet) as bar:
            if resume is not None:
                outcome = resume_replay(
                    resume, given, progress=bar, opened=lambda folder: place.append(folder.path)
                )
            else:
                outcome = run_replay(
                    ReplayOptions(**given),
                    out=out,
                    command=["lumotree", *sys.argv[1:]],
                    progress=bar,
                    opened=lambda folder: place.append(folder.path),
                )
        _print_outcome(outcome, as_json, quiet)
        # Last, because drawing takes seconds and nothing else depends on it.
        if report:
            _report(outcome.folder.path, quiet)
    except KeyboardInterrupt:
        if {"concurrency", "arrivals"} & given.keys():
            say("interrupted; a run under load cannot be continued")
        elif place:
            say(
                f"interrupted; continue with: lumotree replay --resume {shlex.quote(str(place[0]))}"
            )
        raise typer.Exit(130) from None
    return outcome


def _print_outcome(outcome: Outcome, as_json: bool, quiet: bool) -> None:
    """Tables and warnings on stdout; where the run lies and what failed on stderr."""
    from replay.load_table import load_table
    from replay.tables import console, print_run
    from replay.talk import print_json, say

    if as_json:
        print_json(outcome.summary | {"run": str(outcome.folder.path)})
    else:
        out = console()
        print_run(out, outcome.summary)
        if "load" in outcome.summary:
            out.print(load_table(outcome.summary["load"]))
        for warning in outcome.summary.get("warnings") or ():
            out.print(f"warning: {warning}", markup=False)
    if not quiet:
        say(f"run folder: {outcome.folder.path}")
    for name in outcome.summary["withheld"]:
        say(f"withheld: {name}: {outcome.summary['arms'][name]['reason']}")
    for mismatch in outcome.equality.mismatches if outcome.equality is not None else ():
        say(f"token ids differ: {mismatch.sentence()}")
    if not outcome.ok and outcome.folder.run["model"].get("equal_bits") is False:
        say("the start-up probe found that equal bits do not hold on this machine")
    if outcome.failed_in_process:
        say(f"{outcome.failed_in_process} requests failed in this process; see requests.jsonl")


def _report(path: Path, quiet: bool) -> None:
    """Write the report. The run is whole without it, so a fault in it is no more than a warning."""
    from replay.talk import say

    try:
        from replay.report.page import write_report

        page = write_report(path)
    except Exception as error:  # whatever a file beside the run, a font or the disk may bring
        if os.environ.get("LUMOTREE_DEBUG") == "1":
            traceback.print_exc()
        reason = str(error) if isinstance(error, LumoTreeError) else repr(error)
        again = shlex.join(["lumotree", "report", str(path)])
        say(f"warning: no report was written: {reason}; write it with: {again}")
        return
    if not quiet:
        say(f"report: {page}")

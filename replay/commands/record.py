"""`lumotree record`: a proxy that turns a client's traffic into a corpus."""

from __future__ import annotations

from pathlib import Path

import typer

from lumotree.errors import LumoTreeError

EPILOG = """Examples:

lumotree record --upstream http://127.0.0.1:8000 --out mine.jsonl

OPENAI_BASE_URL=http://127.0.0.1:8900/v1 my-agent   # in another terminal

lumotree replay mine.jsonl --arms all"""
GRACE_S = 5.0


def register(app: typer.Typer) -> None:
    app.command("record", epilog=EPILOG)(record)


def record(
    upstream: str = typer.Option(..., help="The server that answers, http://... or https://..."),
    out: Path = typer.Option(..., help="Corpus file to write, one line per chat request."),
    append: bool = typer.Option(False, "--append", help="Go on in a file that is there."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; loopback unless named."),
    port: int = typer.Option(8900, min=0, max=65535, help="Port; 0 takes a free one."),
    task: str = typer.Option(None, help="Name of the work, kept with each request."),
    agent: str = typer.Option(None, help="Name of the client; default: its user-agent."),
    as_json: bool = typer.Option(False, "--json", help="Print the counts as JSON at the end."),
) -> None:
    """Pass requests on to a server unchanged, and record chat requests as a corpus.

    Answers come back byte for byte. Keys and cookies are passed on and never written. Ctrl-C
    ends it; requests under way have five seconds to end. Exits with 1 when a request could not be
    written.
    """
    from replay.proxy.main import run_proxy
    from replay.proxy.recorder import Recorder, new_session
    from replay.proxy.relay import Upstream
    from replay.talk import print_json, say

    to = Upstream.of(upstream)
    if out.exists() and not append:
        raise LumoTreeError(f"{out} exists", "choose another --out, or add --append")
    recorder = Recorder(out, new_session(), task, agent)

    def ready(bound: int) -> None:
        name = f"[{host}]" if ":" in host else host
        say(f"recording http://{name}:{bound} -> {upstream} into {out}")

    try:
        run_proxy(to, recorder, host, port, GRACE_S, ready)
    finally:
        recorder.close()
    counts = {
        key: recorder.counts[key] for key in ("recorded", "aborted", "failed", "passed", "left out")
    }
    for reason in dict.fromkeys(recorder.reasons):
        say(f"left out: {reason}")
    if as_json:
        print_json({key.replace(" ", "_"): value for key, value in counts.items()})
    else:
        say(
            f"{counts['recorded']} requests recorded ({counts['aborted']} aborted by the client, "
            f"{counts['failed']} failed); {counts['passed']} others passed, "
            f"{counts['left out']} left out"
        )
    if recorder.unwritten:
        raise typer.Exit(1)

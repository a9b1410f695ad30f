"""`lumotree serve`: an in-process arm behind OpenAI's endpoints."""

from __future__ import annotations

import os

import typer

from lumotree.errors import LumoTreeError

EPILOG = """Examples:

lumotree serve --arm lumotree

lumotree serve --arm mtp-5 --model Qwen/Qwen3.5-4B --port 8001 --active 8"""


def register(app: typer.Typer) -> None:
    app.command("serve", epilog=EPILOG)(serve)


def serve(
    arm: str = typer.Option("lumotree", help="An in-process arm spec: ar, mtp-5, lumotree, ..."),
    model: str = typer.Option(
        "embedded", help="embedded, or a folder or hub id of a Hugging Face checkpoint."
    ),
    dtype: str = typer.Option("auto", help="auto, float32 or bfloat16."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    rows: str = typer.Option("natural", help="natural, or matched: all steps at one row count."),
    threads: int = typer.Option(None, help="CPU threads; default: as torch chooses."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; loopback unless named."),
    port: int = typer.Option(8000, help="Port; 0 takes a free one and says which."),
    name: str = typer.Option(None, help="Name of the model in answers; default: --model's own."),
    api_key_env: str = typer.Option(
        None, help="Environment variable that holds the key clients must send; default: no key."
    ),
    active: int = typer.Option(4, help="Requests decoded in turn, each in its own state slot."),
    queue: int = typer.Option(32, help="Requests that may wait; one more is answered 429."),
    max_context: int = typer.Option(
        None,
        help="Positions of a request, answer included; default: what the model declares. More is "
        "beyond its training.",
    ),
    max_body_mib: float = typer.Option(16.0, help="Largest request body, MiB."),
    prefix_mib: float = typer.Option(1024.0, help="Budget of the prefix store, MiB; 0: none."),
    request_timeout: float = typer.Option(600.0, help="Seconds from arrival to the last token."),
    idle_timeout: float = typer.Option(60.0, help="Seconds a client may pause its body or reads."),
    drain_timeout: float = typer.Option(60.0, help="Seconds a stop waits for what is under way."),
) -> None:
    """Serve an arm on /v1/chat/completions and /v1/completions, with /metrics and /health.

    SIGTERM or Ctrl-C takes no new requests and ends when those under way have; the second one
    stops at once. Outputs do not depend on what else is running.
    """
    from arms.spec import AUTO, IN_PROCESS, parse_arm
    from replay.talk import say

    spec = parse_arm(arm)
    if spec.name not in IN_PROCESS:
        raise LumoTreeError(
            f"arm '{spec.name}' runs elsewhere and cannot be served",
            f"arms that can: {', '.join(IN_PROCESS)}",
        )
    key = None
    if api_key_env is not None:
        key = os.environ.get(api_key_env)
        if key is None:
            raise LumoTreeError(f"--api-key-env: there is no variable {api_key_env}")

    from lumotree.serve.settings import ServeSettings

    settings = ServeSettings(
        host=host,
        port=port,
        model_name=name or model,
        api_key=key,
        active=active,
        queue=queue,
        max_context=max_context,
        max_body_bytes=int(max_body_mib * 2**20),
        prefix_bytes=int(prefix_mib * 2**20),
        request_timeout_s=request_timeout,
        idle_timeout_s=idle_timeout,
        drain_timeout_s=drain_timeout,
    )
    if not settings.loopback and key is None:
        say(f"warning: {host} can be reached from outside and no --api-key-env is set")

    from arms.inprocess import InProcessArm, load_engine
    from lumotree.serve.server import ModelServer, listening

    # The address is checked before the model loads, which may take minutes.
    with listening(settings) as sock:
        say(f"loading model {model}")
        engine = load_engine(
            model,
            dtype=dtype,
            device=device,
            rows=rows,
            threads=threads,
            max_context=max_context,
        )
        if engine.max_context > engine.declared_context:
            say(
                f"warning: the model declares {engine.declared_context} positions; what it makes "
                "past them is beyond its training"
            )
        served = InProcessArm(spec, engine)
        if spec.options.get("tree") == AUTO:
            served.start()  # reads the plan, and says what is wrong with it
        server = ModelServer(engine, served.config, settings)
        try:
            server.run(sock, lambda address: say(f"serving {spec} on {address}/v1"))
        finally:
            server.close()
    say("stopped")

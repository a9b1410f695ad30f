"""Running the proxy in the foreground until a signal."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from replay.proxy.recorder import Recorder
from replay.proxy.relay import Proxy, Upstream


def run_proxy(
    upstream: Upstream,
    recorder: Recorder,
    host: str,
    port: int,
    grace_s: float,
    ready: Callable[[int], None],
) -> None:
    """Until SIGINT or SIGTERM; `ready` hears the port. Raises LumoTreeError as Proxy.start."""
    asyncio.run(_run(Proxy(upstream, recorder), host, port, grace_s, ready))


async def _run(
    proxy: Proxy, host: str, port: int, grace_s: float, ready: Callable[[int], None]
) -> None:
    stop = asyncio.Event()
    bound = await proxy.start(host, port)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    ready(bound)
    await stop.wait()
    await proxy.stop(grace_s)

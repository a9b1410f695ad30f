"""One process that serves: slots, scheduler, application, signals."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from lumotree.errors import LumoTreeError
from lumotree.prefix import PrefixStore
from lumotree.serve.app import create_app
from lumotree.serve.metrics import Metrics
from lumotree.serve.scheduler import Scheduler
from lumotree.serve.service import Service
from lumotree.serve.settings import ServeSettings
from lumotree.serve.sglang import add_sglang_routes
from lumotree.serve.slots import make_slots
from lumotree.tree import tree_from_name

if TYPE_CHECKING:
    from lumotree.decoder import DecoderConfig
    from lumotree.engine import Engine

SECOND_SIGNAL_S = 5.0
# Newcomers are refused by an answer for so long, then by a closed door.
REFUSING_S = 0.5


class ModelServer:
    """Everything behind an address. `close` it after use."""

    def __init__(self, engine: Engine, config: DecoderConfig, settings: ServeSettings) -> None:
        """Raises LumoTreeError when the slots do not fit."""
        self.settings = settings
        context = min(settings.max_context or engine.max_context, engine.max_context)
        self.metrics = Metrics()
        self.store = PrefixStore(settings.prefix_bytes)
        slots = make_slots(engine, config, settings.active, context, self.store)
        self.scheduler = Scheduler(slots, settings.queue, self.metrics)
        self.metrics.gauge("num_requests_running", "Active requests.", self._active)
        self.metrics.gauge("num_requests_waiting", "Waiting requests.", self._waiting)
        self.metrics.gauge("prefix_cache_bytes", "Held by the prefix store.", self._held)
        self.metrics.gauge("prefix_cache_entries", "Saved positions.", lambda: len(self.store))
        vocab = engine.model.config.vocab_size
        self.service = Service(settings, self.scheduler, engine.tokenizer, context, vocab)
        self.app: FastAPI = create_app(self.service, self.metrics)
        add_sglang_routes(self.app, self.service, server_info(config))
        self.scheduler.start()

    def _active(self) -> int:
        return self.scheduler.load[0]

    def _held(self) -> int:
        return self.store.nbytes

    def _waiting(self) -> int:
        return self.scheduler.load[1]

    def close(self) -> None:
        self.scheduler.stop()
        self.scheduler.join()
        self.service.close()

    def run(self, sock: socket.socket, ready: Callable[[str], None]) -> None:
        """Serves on a listening socket until a signal; `ready` hears the address."""
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        address = f"http://{host}:{sock.getsockname()[1]}"
        Stopping(self, lambda: ready(address)).run(sockets=[sock])


def server_info(config: DecoderConfig) -> dict[str, Any]:
    """What decodes here, in SGLang's words."""
    tree = tree_from_name(config.tree)
    return {
        "version": f"lumotree {version('lumotree')}",
        "speculative_algorithm": f"lumotree:tree={config.tree}",
        "speculative_num_steps": config.passes,
        "speculative_num_draft_tokens": len(tree),
    }


@contextlib.contextmanager
def listening(settings: ServeSettings) -> Iterator[socket.socket]:
    """The listening socket. Raises LumoTreeError when the address is not to be had."""
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        sock = socket.create_server((settings.host, settings.port), family=family, backlog=256)
    except OSError as error:
        place = f"{settings.host}:{settings.port}"
        raise LumoTreeError(
            f"cannot listen on {place}: {error.strerror or error}", "choose another --port"
        ) from None
    with sock:
        yield sock


class Stopping(uvicorn.Server):
    """The first SIGTERM or SIGINT drains: no new requests, those taken end. The second stops.

    Requests that a stop cuts off are told why before their connection closes.
    """

    def __init__(self, server: ModelServer, ready: Callable[[], None]) -> None:
        settings = server.settings
        config = uvicorn.Config(
            server.app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=max(1, int(settings.idle_timeout_s)),
            timeout_graceful_shutdown=int(settings.drain_timeout_s + SECOND_SIGNAL_S) + 1,
            server_header=False,
        )
        super().__init__(config)
        self._server, self._ready = server, ready
        self._timer: threading.Timer | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # A listener that closes at once resets who is about to be accepted, or has not been read.
        await asyncio.sleep(REFUSING_S)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: object) -> None:
        # In a thread: the handler may have interrupted whoever holds the scheduler's lock.
        if not self.should_exit:
            self.should_exit = True
            threading.Thread(target=self._server.scheduler.drain, daemon=True).start()
            stop = self._server.scheduler.stop
            late = ("the server was stopped: draining took too long",)
            self._timer = threading.Timer(self._server.settings.drain_timeout_s, stop, late)
            self._timer.daemon = True
            self._timer.start()
        else:
            threading.Thread(target=self._server.scheduler.stop, daemon=True).start()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, without raising the signal again: a drained server has done its work."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are the main thread's
            return
        before = {s: signal.signal(s, self.handle_exit) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._timer is not None:
                self._timer.cancel()

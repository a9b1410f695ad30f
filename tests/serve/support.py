"""A server in a thread of this process, and the models that tests serve."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from lumotree.engine import DecoderConfig, Engine
from lumotree.serve.server import ModelServer, Stopping, listening
from lumotree.serve.settings import ServeSettings
from tests.tiny import save_speaking


def speaking_folder(tmp_path_factory) -> Path:
    """A random three-layer model with the embedded model's tokenizer: quick, and nonsense."""
    folder = tmp_path_factory.mktemp("speaking")
    save_speaking(folder)
    return folder


@contextlib.contextmanager
def served(
    engine: Engine, config: DecoderConfig | None = None, **settings
) -> Iterator[tuple[ModelServer, str]]:
    """A server on a free port, and its address."""
    chosen = ServeSettings(port=0, **settings)
    with listening(chosen) as sock:
        server = ModelServer(engine, config or DecoderConfig(), chosen)
        ready = threading.Event()
        loop = Stopping(server, ready.set)
        thread = threading.Thread(target=loop.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            assert ready.wait(60)
            yield server, f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            loop.should_exit = True
            server.scheduler.stop()
            thread.join(60)
            server.close()
            assert not thread.is_alive()

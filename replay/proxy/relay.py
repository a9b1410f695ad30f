"""The wire: each client connection has one to the upstream, and bytes go on before they are read.

Answers pass byte for byte. Requests pass byte for byte but for the Host header and the path,
which name the upstream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import urlsplit

from lumotree.errors import LumoTreeError
from replay.proxy.http1 import Messages, Piece
from replay.proxy.recorder import Exchange, Recorder

READ = 1 << 16
LEFT = "the client left"
CUT = "the upstream closed the connection in the middle"


@dataclass(frozen=True)
class Upstream:
    """Where requests go. `path` stands before theirs."""

    host: str
    port: int
    tls: bool
    path: str

    @classmethod
    def of(cls, url: str) -> Upstream:
        """Raises LumoTreeError."""
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            good = False
        if not good:
            raise LumoTreeError(
                "--upstream takes an address such as http://127.0.0.1:8000",
                "credentials belong into the client's own requests",
            )
        return cls(parts.hostname, port, parts.scheme == "https", parts.path.rstrip("/"))

    def target(self, asked: bytes) -> bytes:
        """The path to ask for; an upstream given with its /v1 is the same as without."""
        path = self.path.encode()
        if path.endswith(b"/v1") and asked.startswith(b"/v1"):
            return path.removesuffix(b"/v1") + asked
        return path + asked

    @property
    def name(self) -> bytes:
        """The Host header."""
        default = 443 if self.tls else 80
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (host if self.port == default else f"{host}:{self.port}").encode()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = ssl.create_default_context() if self.tls else None
        return await asyncio.open_connection(self.host, self.port, ssl=context)


class Relay:
    """One client connection."""

    def __init__(self, upstream: Upstream, recorder: Recorder) -> None:
        self._upstream, self._recorder = upstream, recorder
        self._open: deque[tuple[Exchange, float]] = deque()
        self._methods: deque[bytes] = deque()
        self._requests = Messages()
        self._responses = Messages(self._methods)
        self._asking: tuple[Exchange, float] | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until either side closes."""
        first = await reader.read(READ)
        if not first:
            return
        try:
            up_reader, up_writer = await self._upstream.connect()
        except OSError as error:
            await self._unreachable(first, reader, writer, error)
            return
        back = asyncio.ensure_future(self._answers(up_reader, writer))
        asked = asyncio.ensure_future(self._ask(first, reader, up_writer))
        left = False
        try:
            await asyncio.wait((back, asked), return_when=asyncio.FIRST_COMPLETED)
            left = asked.done() and asked.result() and not back.done()
            if left and up_writer.can_write_eof():
                # Told that no more comes, the upstream decides; the client may still be reading.
                with contextlib.suppress(OSError):
                    up_writer.write_eof()
            if not left or up_writer.can_write_eof():
                await asyncio.wait((back,))
            left |= back.done() and not back.result()
        finally:
            for task in (back, asked):
                task.cancel()
            await asyncio.gather(back, asked, return_exceptions=True)
            self._end_open(left)
            await close(up_writer)

    async def _ask(
        self, data: bytes, reader: asyncio.StreamReader, up: asyncio.StreamWriter
    ) -> bool:
        """True when the client has no more to say, False when the upstream no longer listens."""
        while data:
            try:
                up.write(self._passed_on(self._requests.feed(data)))
                await up.drain()
            except OSError:
                return False
            try:
                data = await reader.read(READ)
            except OSError:
                break
        up.write(self._passed_on(self._requests.close()))
        return True

    def _passed_on(self, pieces: list[Piece]) -> bytes:
        """The bytes for the upstream; notes the requests in them."""
        return b"".join(map(self._request_piece, pieces))

    def _request_piece(self, piece: Piece) -> bytes:
        if piece.head is not None:
            self._asking = (Exchange(piece.head, datetime.now(UTC)), time.perf_counter())
            self._open.append(self._asking)
            self._methods.append(piece.head.method)
            target = self._upstream.target(piece.head.target)
            return piece.head.replaced(target, self._upstream.name)
        if piece.payload:
            self._asking[0].add_body(piece.payload)
        return piece.raw

    async def _answers(self, up: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """True when the upstream has no more to say, False when the client no longer reads."""
        while True:
            try:
                data = await up.read(READ)
            except OSError:
                return True
            if not data:
                self._note(self._responses.close())
                return True
            writer.write(data)  # first of all
            self._note(self._responses.feed(data))
            try:
                await writer.drain()
            except OSError:
                return False

    def _note(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if not self._open:
                return
            exchange, began = self._open[0]
            at = time.perf_counter() - began
            if piece.head is not None:
                exchange.response, exchange.head_s = piece.head, at
            if piece.payload:
                exchange.add_part(at, piece.payload)
            if piece.end:
                exchange.end_s = at
                self._open.popleft()
                self._recorder.put(exchange)

    def _end_open(self, left: bool, fault: str = CUT) -> None:
        """Requests without a whole answer. `left`: it was the client that did not wait for it."""
        while self._open:
            exchange, began = self._open.popleft()
            exchange.end_s = time.perf_counter() - began
            exchange.aborted, exchange.fault = left, LEFT if left else fault
            self._recorder.put(exchange)

    async def _unreachable(
        self,
        data: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        error: OSError,
    ) -> None:
        """Hears the request out, answers 502, and records that."""
        while data:
            self._passed_on(self._requests.feed(data))
            if self._requests.between or self._requests.broken:
                break
            data = await reader.read(READ)
        why = f"the upstream cannot be reached: {error.strerror or type(error).__name__}"
        self._end_open(False, why)
        said = {"message": why, "type": "bad_gateway", "param": None, "code": None}
        body = json.dumps({"error": said}).encode()
        head = (
            "HTTP/1.1 502 Bad Gateway\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()


async def close(writer: asyncio.StreamWriter) -> None:
    """Also when the other side has gone."""
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


class Proxy:
    """Listens, and relays each connection to the upstream."""

    def __init__(self, upstream: Upstream, recorder: Recorder) -> None:
        self._upstream, self._recorder = upstream, recorder
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task] = set()

    async def start(self, host: str, port: int) -> int:
        """The port it listens on. Raises LumoTreeError when the address is not to be had."""
        try:
            self._server = await asyncio.start_server(self._connected, host, port)
        except OSError as error:
            raise LumoTreeError(
                f"cannot listen on {host}:{port}: {error.strerror or error}",
                "choose another --port",
            ) from None
        return self._server.sockets[0].getsockname()[1]

    async def stop(self, grace_s: float) -> None:
        """Takes no new connections; those in use have `grace_s` seconds to end."""
        self._server.close()
        if self._connections:
            await asyncio.wait(self._connections, timeout=grace_s)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._connections.add(task)
        try:
            await Relay(self._upstream, self._recorder).serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # the connection is over, which is all that can be done about it
        finally:
            self._connections.discard(task)
            await close(writer)

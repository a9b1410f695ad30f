"""HTTP/1.1 messages out of a byte stream, piece by piece, with every byte accounted for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

MAX_HEAD = 256 << 10


class NotHttp(Exception):
    """Bytes that are no HTTP/1.1 message."""


@dataclass(frozen=True)
class Head:
    """Start line and headers; names in lower case. `raw` is as it came."""

    raw: bytes
    start: bytes
    headers: tuple[tuple[bytes, bytes], ...]

    @classmethod
    def parse(cls, raw: bytes) -> Head:
        lines = raw.strip(b"\r\n").split(b"\n")
        headers = []
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon:
                raise NotHttp
            headers.append((name.strip().lower(), value.strip()))
        return cls(raw, lines[0].strip(), tuple(headers))

    def get(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def method(self) -> bytes:
        return self.start.split(b" ")[0]

    @property
    def target(self) -> bytes:
        return self.start.split(b" ")[1] if self.start.count(b" ") >= 2 else b""

    @property
    def status(self) -> int:
        """Of a response. Raises NotHttp."""
        parts = self.start.split(b" ")
        if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
            raise NotHttp
        return int(parts[1])

    def replaced(self, target: bytes, host: bytes) -> bytes:
        """The raw head with another target and Host; everything else byte for byte."""
        first, newline, rest = self.raw.lstrip(b"\r\n").partition(b"\n")
        method, _, version = first.split(b" ", 2)
        lines = [b" ".join((method, target, version)) + newline]
        for line in rest.splitlines(keepends=True):
            name, colon, _ = line.partition(b":")
            if colon and name.strip().lower() == b"host":
                line = name + b": " + host + b"\r\n"
            lines.append(line)
        return b"".join(lines)


@dataclass(frozen=True)
class Piece:
    """A run of bytes of a message. `raw` as it came; `payload` what of it is body."""

    raw: bytes = b""
    head: Head | None = None
    payload: bytes = b""
    end: bool = False


class Messages:
    """Cuts one direction of a connection into pieces, whose `raw` joined is what came.

    methods: for responses, the methods of the requests they answer, oldest first; None for
    requests. From bytes that are no HTTP/1.1 message on, and after an upgrade, it is `broken`:
    the rest is pieces of raw bytes.
    """

    def __init__(self, methods: deque[bytes] | None = None) -> None:
        self._methods = methods
        self._buffer = b""
        self._read: Callable[[], Piece | None] = self._head
        self._left = 0
        self.broken = False

    @property
    def between(self) -> bool:
        """True after a whole message, before the next one's first byte."""
        return self._read == self._head and not self._buffer

    def feed(self, data: bytes) -> list[Piece]:
        """The pieces that `data` completes."""
        self._buffer += data
        pieces: list[Piece] = []
        while not self.broken:
            held = self._buffer
            try:
                piece = self._read()
            except NotHttp:
                self._buffer, self.broken = held, True
                break
            if piece is None:
                return pieces
            pieces.append(piece)
        return [*pieces, *self._rest()]

    def close(self) -> list[Piece]:
        """The end of the connection, which ends a body that had no length."""
        if self._read == self._until_close:
            return [self._end()]
        return self._rest()

    def _rest(self) -> list[Piece]:
        return [Piece(self._take(len(self._buffer)))] if self._buffer else []

    def _take(self, size: int) -> bytes:
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                raise NotHttp
            return None
        return self._take(end + 1)

    def _head(self) -> Piece | None:
        start = len(self._buffer) - len(self._buffer.lstrip(b"\r\n"))
        ends = [self._buffer.find(mark, start) + len(mark) for mark in (b"\r\n\r\n", b"\n\n")]
        ends = [end for end, mark in zip(ends, (4, 2), strict=True) if end >= mark + start]
        if not ends:
            if len(self._buffer) > MAX_HEAD:
                raise NotHttp
            return None
        head = Head.parse(self._take(min(ends)))
        self._read = self._body_of(head)
        return Piece(head.raw, head=head)

    def _body_of(self, head: Head) -> Callable[[], Piece | None]:
        if self._methods is None:
            if b" HTTP/1." not in head.start or head.start.count(b" ") < 2:
                raise NotHttp
        else:
            status = head.status
            if status == 101:
                raise NotHttp
            if 100 <= status < 200:
                return self._head
            method = self._methods.popleft() if self._methods else b""
            if method == b"HEAD" or status in (204, 304):
                return self._end
        if b"chunked" in (head.get(b"transfer-encoding") or b"").lower():
            return self._chunk_size
        length = head.get(b"content-length")
        if length is not None:
            if not length.isdigit():
                raise NotHttp
            self._left = int(length)
            return self._fixed
        return self._end if self._methods is None else self._until_close

    def _end(self) -> Piece:
        self._read = self._head
        return Piece(end=True)

    def _fixed(self) -> Piece | None:
        if not self._left:
            return self._end()
        if not self._buffer:
            return None
        taken = self._take(self._left)
        self._left -= len(taken)
        return Piece(taken, payload=taken)

    def _until_close(self) -> Piece | None:
        if not self._buffer:
            return None
        taken = self._take(len(self._buffer))
        return Piece(taken, payload=taken)

    def _chunk_size(self) -> Piece | None:
        line = self._line()
        if line is None:
            return None
        try:
            self._left = int(line.partition(b";")[0].strip(), 16)
        except ValueError:
            raise NotHttp from None
        self._read = self._chunk if self._left else self._trailer
        return Piece(line)

    def _chunk(self) -> Piece | None:
        if not self._left:
            line = self._line()
            if line is None:
                return None
            self._read = self._chunk_size
            return Piece(line)
        if not self._buffer:
            return None
        taken = self._take(self._left)
        self._left -= len(taken)
        return Piece(taken, payload=taken)

    def _trailer(self) -> Piece | None:
        line = self._line()
        if line is None:
            return None
        if line.strip():
            return Piece(line)
        self._read = self._end
        return Piece(line)

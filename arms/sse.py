"""Fields of a server-sent event stream, out of bytes as they come.

Lines end at a line feed (and the carriage return before it), nowhere else: text within JSON may
hold U+2028 and other characters that Python's str.splitlines ends a line at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def fields(parts: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Name and value of each field; empty lines and comments are left out.

    A field comes as soon as its line has ended, one without a line's end after the last part.
    """
    for line in _lines(parts):
        line = line.strip()
        if line and not line.startswith(b":"):
            name, _, value = line.partition(b":")
            yield name, value.strip()


def _lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    held = b""
    for part in parts:
        held += part
        *whole, held = held.split(b"\n")
        yield from whole
    yield held

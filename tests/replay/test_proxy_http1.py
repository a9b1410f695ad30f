"""The message cutter: every byte comes out, whatever the pieces it came in."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from replay.proxy.http1 import Messages

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"
)
TRAILED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nf\r\n0\r\nx-sum: 1\r\n\r\n"
FIXED = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 4\r\n\r\nbody"
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 400\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n" + FIXED
CLOSED = b"HTTP/1.0 200 OK\r\n\r\nuntil the end"
# Answers, the method they answer, and their bodies.
ANSWERS = [
    (CHUNKED, b"POST", b"abcde"),
    (TRAILED, b"POST", b"f"),
    (FIXED, b"POST", b"body"),
    (EMPTY, b"POST", b""),
    (HEAD, b"HEAD", b""),
    (CONTINUE, b"POST", b"body"),
]
NO_TARGET = b"GET HTTP/1.1\r\nhost: a\r\n\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\nhost:a\r\nContent-Length: 5\r\n\r\nhello"
STREAMED = b"\r\nPOST /y HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n5\r\nworld\r\n0\r\n\r\n"
REQUESTS = [(GET, b""), (POST, b"hello"), (STREAMED, b"world")]


def cut(data, sizes):
    at, turn = 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        yield data[at : at + size]
        at, turn = at + size, turn + 1


def read(messages, data, sizes):
    pieces = [piece for part in cut(data, sizes) for piece in messages.feed(part)]
    pieces += messages.close()
    bodies, body = [], b""
    for piece in pieces:
        body += piece.payload
        if piece.end:
            bodies.append(body)
            body = b""
    return b"".join(piece.raw for piece in pieces), bodies


few = settings(max_examples=40, deadline=None)
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=5)


@few
@given(st.lists(st.sampled_from(ANSWERS), max_size=4), st.booleans(), SIZES)
def test_answers(answers, closed, sizes):
    if closed:
        answers = [*answers, (CLOSED, b"POST", b"until the end")]
    messages = Messages(deque(method for _, method, _ in answers))
    data = b"".join(raw for raw, _, _ in answers)
    raw, bodies = read(messages, data, sizes)
    assert raw == data and bodies == [body for _, _, body in answers]
    assert not messages.broken


@few
@given(st.lists(st.sampled_from(REQUESTS), max_size=4), SIZES)
def test_requests(requests, sizes):
    messages = Messages()
    data = b"".join(raw for raw, _ in requests)
    raw, bodies = read(messages, data, sizes)
    assert raw == data and bodies == [body for _, body in requests]
    assert messages.between


@few
@given(st.binary(max_size=200), st.booleans(), SIZES)
def test_anything_else_passes(data, request, sizes):
    assert read(Messages(None if request else deque()), data, sizes)[0] == data


def test_what_breaks_it():
    upgrade = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n"
    for data, messages in (
        (upgrade, Messages(deque([b"GET"]))),
        (b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", Messages(deque([b"GET"]))),
        (b"hello there\r\n\r\n", Messages()),
        (b"x" * 300_000, Messages()),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", Messages()),
    ):
        raw, _ = read(messages, data + b"more", [1 << 20])
        assert raw == data + b"more" and messages.broken


def test_a_head_for_the_upstream():
    (piece, _) = Messages().feed(b"GET /v1/models HTTP/1.1\r\nhost: a\r\nX-Y:  z \r\n\r\n")
    assert piece.head.replaced(b"/api/v1/models", b"b:8") == (
        b"GET /api/v1/models HTTP/1.1\r\nhost: b:8\r\nX-Y:  z \r\n\r\n"
    )
    assert (piece.head.method, piece.head.target) == (b"GET", b"/v1/models")


def test_a_request_line_without_a_target_is_no_http():
    messages = Messages()
    pieces = messages.feed(GET + NO_TARGET)
    assert messages.broken and b"".join(piece.raw for piece in pieces) == GET + NO_TARGET
    assert [piece.head.start for piece in pieces if piece.head] == [b"GET /v1/models HTTP/1.1"]

"""Event streams end their lines at line feeds only, however the bytes arrive."""

import json

from hypothesis import given
from hypothesis import strategies as st

from arms.http import sse_events
from arms.sse import fields
from lumotree.serve.stream import event

ENDS = "a\u2028b\u2029c\u0085d\x1ce"


def test_line_ends_of_python_are_text():
    data = json.dumps({"text": ENDS}, ensure_ascii=False).encode()
    assert list(fields([b"data: " + data + b"\r\n\r\n"])) == [(b"data", data)]
    done = b"\n\ndata: [DONE]\n\n"
    assert list(sse_events(iter([b"data: " + data + done]))) == [{"text": ENDS}]


def test_comments_are_left_out_and_a_cut_line_comes_last():
    found = list(fields([b": hello\n\nevent: x\nda", b"ta:1\n\ndata: {"]))
    assert found == [(b"event", b"x"), (b"data", b"1"), (b"data", b"{")]


@given(st.text(), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_what_the_server_writes_is_ascii_and_comes_back_from_any_pieces(text, sizes):
    raw, parts = event({"text": text}) + b"data: [DONE]\n\n", []
    assert raw.isascii()
    while raw:
        parts.append(raw[: sizes[len(parts) % len(sizes)]])
        raw = raw[len(parts[-1]) :]
    assert list(sse_events(iter(parts))) == [{"text": text}]

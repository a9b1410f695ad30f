"""Choices, from events to OpenAI's objects."""

from lumotree.logprobs import TokenLogprob
from lumotree.request import Generation
from lumotree.serve.answers import TextChoice
from lumotree.serve.scheduler import Tokens

# A character of four bytes in three tokens, between letters.
PIECES = [b"ab", b"\xf0", b"\x9f\x8c", b"\xb3", b"c"]


class Bytes:
    def token_bytes(self, token):
        return PIECES[token]


def test_text_offsets_count_characters_that_several_tokens_make():
    choice = TextChoice(0, [], Bytes(), False, top=0)
    entries = [TokenLogprob(token, -1.0, ()) for token in range(len(PIECES))]
    streamed = []
    for text, part in (("ab", entries[:2]), ("\U0001f333c", entries[2:])):
        event = Tokens(tuple(e.token_id for e in part), text, tuple(part))
        streamed += choice.take(event)["logprobs"]["text_offset"]
    choice.finish(Generation([0, 1, 2, 3, 4], choice.text, "stop", 1, 5, 0, 0.0, 0.0, 0))
    assert streamed == choice.whole()["logprobs"]["text_offset"] == [0, 2, 2, 2, 3]
    assert choice.text[streamed[-1] :] == "c"

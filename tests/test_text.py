"""Chat encoding and streamed decoding, on a tiny byte-level BPE and on the shipped tokenizer."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from lumotree.errors import CheckpointError, RequestError
from lumotree.text import ChatTokenizer, StreamDecoder

EMBEDDED = Path(__file__).parents[1] / "lumotree" / "embedded"
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|im_start|>{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}]{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
SAMPLE = [
    "def f(x): return x + 1",
    "naïve café, 漢字かな交じり文 🙂🙃👩‍👩‍👧",
    "stop here\n\nand go on",
] * 3


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    bpe.train_from_iterator(SAMPLE, trainer)
    bpe.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    bpe.add_tokens([AddedToken("<think>", special=False), AddedToken("a ｜é", special=False)])
    bpe.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    end = bpe.token_to_id("<|endoftext|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    return folder


@pytest.fixture(scope="session", params=["tiny", "embedded"])
def tokenizer(request, tiny_folder):
    if request.param == "tiny":
        return ChatTokenizer.load(tiny_folder)
    if not (EMBEDDED / "tokenizer.json").is_file():
        pytest.skip("the embedded tokenizer is not there")
    return ChatTokenizer.load(EMBEDDED)


@pytest.fixture(scope="session")
def tiny(tiny_folder):
    return ChatTokenizer.load(tiny_folder)


relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def stream(tokenizer, ids, stop=()):
    decoder = StreamDecoder(tokenizer, stop)
    pieces = [decoder.push(i) for i in ids]
    return [*pieces, decoder.finish()], decoder


def cut_at_stop(text: str, stops) -> str:
    """The definition: the stop string whose end comes first, the longest of those."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


# -- streamed decoding


@relaxed
@given(data=st.data())
def test_pieces_are_the_full_decode_for_any_ids(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert "".join(stream(tokenizer, ids)[0]) == tokenizer.decode(ids)


@relaxed
@given(text=st.text(st.sampled_from("ab é漢字🙂👩‍\u200d\ufffd\n<think>"), max_size=30))
def test_pieces_are_the_text_for_encoded_text(tokenizer, text):
    assert "".join(stream(tokenizer, tokenizer.encode(text))[0]) == text


@relaxed
@given(data=st.binary(max_size=24))
def test_invalid_bytes_become_what_the_full_decode_has(tiny, data):
    by_byte = {tiny.token_bytes(i): i for i in range(256)}
    ids = [by_byte[bytes([b])] for b in data]
    assert "".join(stream(tiny, ids)[0]) == tiny.decode(ids) == data.decode(errors="replace")


@relaxed
@given(text=st.text(st.sampled_from("é漢🙂👩"), min_size=1, max_size=12))
def test_pitfall_15_no_replacement_characters_in_the_stream(tiny, text):
    by_byte = {tiny.token_bytes(i): i for i in range(256)}
    pieces, _ = stream(tiny, [by_byte[bytes([b])] for b in text.encode()])
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text
    assert pieces[-1] == ""  # a finished character is not held back


def test_special_tokens_are_hidden_and_added_ones_shown(tiny):
    ids = tiny.encode("<|im_start|>x<think>a ｜é<|im_end|>")
    assert "".join(stream(tiny, ids)[0]) == "x<think>a ｜é" == tiny.decode(ids)


def test_an_id_outside_the_vocabulary_is_silent(tiny):
    assert StreamDecoder(tiny).push(tiny.vocab_size + 5) == ""


@relaxed
@given(
    text=st.text(st.sampled_from("abc"), max_size=30),
    stops=st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_cut_where_the_full_text_has_them(tiny, text, stops):
    pieces, decoder = stream(tiny, tiny.encode(text), stops)
    assert "".join(pieces) == cut_at_stop(text, stops)
    assert decoder.stopped == any(s in text for s in stops)


@relaxed
@given(
    text=st.text(st.sampled_from("ab"), max_size=20),
    stop=st.text(st.sampled_from("ab"), min_size=1, max_size=4),
)
def test_what_is_emitted_is_never_taken_back(tiny, text, stop):
    decoder, emitted = StreamDecoder(tiny, [stop]), ""
    by_byte = {tiny.token_bytes(i): i for i in range(256)}
    for place, byte in enumerate(text.encode()):
        emitted += decoder.push(by_byte[bytes([byte])])
        so_far = text[: place + 1]
        assert cut_at_stop(text, [stop]).startswith(emitted)
        # Held back is only what a stop string begins with.
        rest = cut_at_stop(so_far, [stop])[len(emitted) :]
        assert decoder.stopped or stop.startswith(rest)


def test_pitfall_14_nothing_is_emitted_after_a_stop_inside_a_run(tiny):
    run = tiny.encode("go on STOP and more")
    decoder, out, used = StreamDecoder(tiny, ["STOP"]), "", 0
    for token in run:
        if not decoder.stopped:
            used += 1
        out += decoder.push(token)
    assert out + decoder.finish() == "go on "
    assert decoder.stopped and used < len(run)
    assert tiny.decode(run[:used]).endswith("STOP")
    assert decoder.push(run[0]) == ""


def test_of_two_stops_in_one_token_the_first_to_end_counts(tiny):
    pieces = (tiny.token_bytes(i) for i in range(tiny.vocab_size))
    word = next(p.decode() for p in pieces if p.isalpha() and p.isascii() and len(p) > 2)
    assert len(tiny.encode(word)) == 1 and word[1] != word[0]
    assert "".join(stream(tiny, tiny.encode(word), [word, word[1]])[0]) == word[0]


def test_a_stop_string_of_replacement_characters_is_seen_at_the_end(tiny):
    first = next(i for i in range(256) if tiny.token_bytes(i) == b"\xf0")
    pieces, decoder = stream(tiny, [first], ["\ufffd"])
    assert pieces == ["", ""] and decoder.stopped


def test_cost_per_token_does_not_grow(tiny):
    decoder = StreamDecoder(tiny, ["zzzz"])
    ids = [next(i for i in range(256) if tiny.token_bytes(i) == b"\x80")] * 20_000
    started = time.perf_counter()
    for token in ids:
        decoder.push(token)
    assert time.perf_counter() - started < 2  # measured 0.03 s; a quadratic decoder needs minutes


# -- chat


def test_chat_is_the_template_with_the_generation_prompt(tiny):
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "be "}, {"text": "brief"}]},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None},
    ]
    expected = (
        "<|im_start|>system:be brief<|im_end|><|im_start|>user:hi<|im_end|>"
        "<|im_start|>assistant:<|im_end|><|im_start|>assistant:"
    )
    assert tiny.encode_chat(messages, None) == tiny.encode(expected)


def call(arguments):
    function = {"name": "run", "arguments": arguments}
    calls = [{"id": "1", "type": "function", "function": function}]
    return [{"role": "assistant", "content": None, "tool_calls": calls}]


def test_recorded_arguments_are_parsed(tokenizer):
    assert tokenizer.encode_chat(call('{"a": 1}')) == tokenizer.encode_chat(call({"a": 1}))


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "null", "3", '{"a": 1', '"x"', "{'a': 1}"])
def test_malformed_arguments_do_not_raise(tokenizer, arguments):
    messages = [{"role": "user", "content": "hi"}, *call(arguments)]
    before = json.dumps(messages)
    assert arguments in tokenizer.decode(tokenizer.encode_chat(messages))
    assert json.dumps(messages) == before


def test_tools_reach_the_template(tokenizer):
    tools = [{"type": "function", "function": {"name": "peculiar_name", "parameters": {}}}]
    messages = [{"role": "user", "content": "hi"}]
    assert "peculiar_name" in tokenizer.decode(tokenizer.encode_chat(messages, tools))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "bad", "content": "x"}, "no such role"),
        ({"content": "x"}, "role"),
        ("text", "role"),
        ({"role": "user", "content": 3}, "content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "content"),
        ({"role": "assistant", "tool_calls": ["x"]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{"type": "function"}]}, "template"),
    ],
)
def test_a_refused_message_is_named(tiny, message, reason):
    good = {"role": "user", "content": "hi"}
    with pytest.raises(RequestError, match="message 1") as caught:
        tiny.encode_chat([good, message, good])
    assert reason in str(caught.value)


def test_an_empty_conversation_is_refused(tiny):
    with pytest.raises(RequestError, match="no messages"):
        tiny.encode_chat([])


# -- loading


def test_eos_ids_join_both_sources(tiny):
    ends = tiny.encode("<|im_end|>") + tiny.encode("<|endoftext|>")
    assert tiny.eos_ids == frozenset(ends) and len(ends) == 2


def test_embedded_eos_ids_are_ids_of_special_tokens():
    if not (EMBEDDED / "tokenizer.json").is_file():
        pytest.skip("the embedded tokenizer is not there")
    tokenizer = ChatTokenizer.load(EMBEDDED)
    assert tokenizer.eos_ids
    assert all(tokenizer.decode([i]) == "" and i < tokenizer.vocab_size for i in tokenizer.eos_ids)


def copy_of(folder, target):
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json"),
        ("generation_config.json", "{", "generation_config.json"),
        ("generation_config.json", '{"eos_token_id": ["x"]}', "generation_config.json"),
    ],
)
def test_a_broken_folder_is_named(tiny_folder, tmp_path, file, content, named):
    folder = copy_of(tiny_folder, tmp_path)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=named) as caught:
        ChatTokenizer.load(folder)
    assert str(folder) in str(caught.value)


def test_another_kind_of_tokenizer_is_refused(tiny_folder, tmp_path):
    folder = copy_of(tiny_folder, tmp_path)
    bpe = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bpe.decoder = decoders.Metaspace()
    bpe.save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="byte-level"):
        ChatTokenizer.load(folder)


def test_a_tokenizer_without_template_is_refused(tiny_folder, tmp_path):
    folder = copy_of(tiny_folder, tmp_path)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTokenizer.load(folder).encode_chat([{"role": "user", "content": "hi"}])

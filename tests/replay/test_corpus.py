import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumotree.errors import CorpusError
from replay.corpus import load_corpus, manifest_fault, manifest_path, read_corpus
from tests.replay.fakes import corpus_lines, write_corpus

LINE = corpus_lines()[0]
contents = st.one_of(st.none(), st.text(), st.lists(st.fixed_dictionaries({"text": st.text()})))
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": contents},
    # Recorded arguments may be broken JSON; they are text here.
    optional={"tool_calls": st.lists(st.fixed_dictionaries({"arguments": st.text()}))},
)
bodies = st.fixed_dictionaries(
    {"messages": st.lists(messages, min_size=1, max_size=3)},
    optional={
        "model": st.text(),
        "temperature": st.floats(0, 2),
        "tools": st.lists(st.fixed_dictionaries({"type": st.just("function")}), max_size=2),
        "stop": st.one_of(st.text(), st.lists(st.text())),
    },
)
lines = st.lists(
    st.fixed_dictionaries(
        {"custom_id": st.text(min_size=1), "method": st.just("POST"), "body": bodies},
        optional={"lumotree": st.fixed_dictionaries({"conversation": st.text()})},
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda line: line["custom_id"],
)


@settings(deadline=None, max_examples=60)
@given(lines)
def test_what_was_recorded_is_what_is_read(tmp_path_factory, rows):
    path = write_corpus(tmp_path_factory.mktemp("corpus") / "c.jsonl", rows)
    corpus = read_corpus(path)
    assert [r.request_id for r in corpus.requests] == [row["custom_id"] for row in rows]
    assert [r.messages for r in corpus.requests] == [row["body"]["messages"] for row in rows]
    assert [r.line for r in corpus.requests] == list(range(1, len(rows) + 1))


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_with_their_line(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("corpus") / "c.jsonl"
    path.write_bytes(data)
    try:
        read_corpus(path)
    except CorpusError as error:
        assert str(path) in error.message


def changed(**changes):
    line = json.loads(json.dumps(LINE))
    line.update(changes)
    return line


def deep(n):
    value = []
    for _ in range(n - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ('{"custom_id": "x", ', "line 17: broken JSON"),
        ("[1]", "line 17: line:"),
        (json.dumps(changed(custom_id="")), "line 17: custom_id"),
        (json.dumps({"custom_id": "x"}), "line 17: body: Field required"),
        (json.dumps(changed(body={"messages": []})), "line 17: body.messages"),
        (json.dumps(changed(body={"messages": [{"content": "x"}]})), "body.messages.0.role"),
        (json.dumps(changed(url="/v1/embeddings")), "line 17: url"),
        (json.dumps(changed(lumotree={"turn": "x"})), "line 17: lumotree.turn"),
        (json.dumps(changed(custom_id="r3")), "custom_id 'r3' is already on line 4"),
        ("[" * 100_000, "line 17: JSON is nested too deeply"),
        (json.dumps(changed(custom_id="y", x=deep(600))), "line 17: JSON is nested too deeply"),
        ('{"custom_id": ' + "1" * 5000 + "}", "line 17: a number has more than 4300 digits"),
    ],
    ids=range(12),
)
def test_a_fault_in_line_17_is_named(tmp_path, bad, says):
    path = tmp_path / "c.jsonl"
    good = [json.dumps(changed(custom_id=f"r{i}")) for i in range(16)]
    path.write_text("\n".join([*good, bad]) + "\n")
    with pytest.raises(CorpusError) as caught:
        read_corpus(path)
    assert says in caught.value.message
    assert "\n" not in caught.value.message


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_bytes(json.dumps(LINE).encode() + b'\n"\xff"\n')
    with pytest.raises(CorpusError, match="line 2: not UTF-8"):
        read_corpus(path)


@pytest.mark.parametrize("data", [b"", b"\n\n", b"  \n"])
def test_an_empty_file(tmp_path, data):
    path = tmp_path / "c.jsonl"
    path.write_bytes(data)
    with pytest.raises(CorpusError, match="is empty"):
        read_corpus(path)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(CorpusError, match="does not exist"):
        read_corpus(tmp_path / "none.jsonl")
    with pytest.raises(CorpusError, match="cannot be read"):
        read_corpus(tmp_path)


def test_blank_lines_count_but_hold_nothing(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text(f"\ufeff\n{json.dumps(LINE)}\n\n")
    assert [request.line for request in read_corpus(path).requests] == [2]


def test_the_manifest_freezes_count_and_hash(tmp_path):
    path = write_corpus(tmp_path / "first.jsonl", corpus_lines())
    corpus = read_corpus(path)
    manifest = manifest_path(path)
    assert manifest.name == "first.manifest.json"
    assert manifest_fault(corpus) is None
    for content, says in [
        ({"count": 6, "sha256": corpus.sha256, "note": "more"}, None),
        ({"count": 5, "sha256": corpus.sha256}, "its manifest says 5"),
        ({"count": 6, "sha256": "0" * 64}, "the sha256 differs"),
        ({"count": 6}, "is not a manifest"),
        ([], "is not a manifest"),
        (None, "is not a manifest"),
    ]:
        manifest.write_text("[" * 100_000 if content is None else json.dumps(content))
        fault = manifest_fault(corpus)
        assert fault is None if says is None else says in fault
    with pytest.raises(CorpusError, match="is not a manifest"):
        load_corpus(path)

"""Importers and exporters: each format in, each format out, refusals that name file and line."""

import base64
import json

import pytest
from typer.testing import CliRunner

from lumotree.errors import CorpusError
from replay.cli import app
from replay.corpus import load_corpus, read_corpus
from replay.formats.reading import NAMES, read_foreign
from replay.formats.secrets import SUFFIXES, without_secrets
from replay.formats.writing import WRITERS, export_corpus, write_corpus
from tests.replay.fakes import corpus_lines
from tests.replay.fakes import write_corpus as write_lines
from tests.replay.test_corpus import deep

SECRET = "sk-do-not-keep"
USER = {"role": "user", "content": "Warum ist der Himmel blau? ☀"}
ANSWER = {"role": "assistant", "content": "Rayleigh."}
NEXT = {"role": "user", "content": "And at night?"}
BODY = {"model": "m", "messages": [USER], "temperature": 0.2}
LONGER = BODY | {"messages": [USER, ANSWER, NEXT]}


def har_entry(body, answer=None, url="https://api.example/v1/chat/completions", **content):
    headers = [{"name": "Authorization", "value": f"Bearer {SECRET}"}]
    return {
        "startedDateTime": "2026-01-01T00:00:00Z",
        "request": {
            "method": "POST",
            "url": url,
            "headers": headers,
            "cookies": [{"name": "session", "value": SECRET}],
            "postData": {"mimeType": "application/json", "text": json.dumps(body)},
        },
        "response": {"content": {"text": json.dumps(answer or {}), **content}},
    }


def stream(*deltas):
    chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
    events = [f"data: {json.dumps(chunk, ensure_ascii=False)}" for chunk in chunks]
    return "\n\n".join([*events, "data: [DONE]"])


CALL = {"index": 0, "id": "c1", "function": {"name": "bash", "arguments": '{"command"'}}
REST = {"index": 0, "function": {"arguments": ': "ls"}'}}
JSONL = {
    "batch": [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": BODY},
        {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": LONGER},
    ],
    "body": [BODY, LONGER],
    "mooncake": [
        {"timestamp": 0, "session_id": "s", "payload": BODY},
        {"timestamp": 9, "session_id": "s", "messages": LONGER["messages"], "output_length": 7},
    ],
}
DOCUMENTS = {
    "sharegpt": [
        {
            "id": "x",
            "conversations": [
                {"from": "human", "value": USER["content"]},
                {"from": "gpt", "value": ANSWER["content"]},
                {"from": "human", "value": NEXT["content"]},
                {"from": "gpt", "value": "Stars."},
            ],
        }
    ],
    "mini-swe-agent": {
        "info": {"config": {"model": {"api_key": SECRET}}},
        "messages": [
            USER,
            ANSWER | {"extra": {"cost": 1, "response": {"headers": SECRET}}},
            NEXT,
            {"role": "assistant", "content": "Stars."},
            {"role": "exit", "content": "", "extra": {}},
        ],
        "trajectory_format": "mini-swe-agent-1.1",
    },
    "aiperf": {"data": [{"session_id": "s", "payloads": [BODY, LONGER]}]},
    "har": {
        "log": {
            "entries": [
                har_entry(BODY, {"choices": [{"message": ANSWER}]}),
                {"request": {"method": "GET", "url": "https://api.example/v1/models"}},
                har_entry(LONGER),
            ]
        }
    },
}


def put(path, name):
    if name in JSONL:
        path.write_text("".join(json.dumps(record) + "\n" for record in JSONL[name]))
    else:
        path.write_text(json.dumps(DOCUMENTS[name], indent=2))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_each_format_becomes_the_same_two_requests(tmp_path, name):
    found = read_foreign(put(tmp_path / "in.json", name))
    assert found.format == name
    messages = [line["body"]["messages"] for line in found.lines]
    assert messages == [[USER], [USER, ANSWER, NEXT]]
    first, second = (line["lumotree"] for line in found.lines)
    assert first["conversation"] == second["conversation"]
    assert SECRET not in json.dumps(found.lines)
    out = tmp_path / "out.jsonl"
    write_corpus(found.lines, out, {})
    assert len(load_corpus(out).requests) == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_named_format_is_not_guessed(tmp_path, name):
    path = put(tmp_path / "in.json", name)
    assert len(read_foreign(path, name).lines) == 2
    with pytest.raises(CorpusError, match="unknown format 'nope'"):
        read_foreign(path, "nope")


@pytest.mark.parametrize("name", WRITERS)
def test_an_export_comes_back_and_has_nothing_of_ours(tmp_path, name):
    corpus = read_corpus(write_lines(tmp_path / "c.jsonl", corpus_lines()))
    out = tmp_path / "out"
    export_corpus(corpus, name, out)
    assert b"lumotree" not in out.read_bytes()
    back = read_foreign(out)
    assert back.format == name

    def bodies(lines):
        return sorted(json.dumps(line["body"]) for line in lines)

    assert bodies(back.lines) == bodies(corpus_lines())
    conversations = {}
    for line in back.lines:
        text = line["body"]["messages"][0]["content"].split()[0]
        conversations.setdefault(text, set()).add(line["lumotree"]["conversation"])
    if name in ("aiperf", "mooncake"):  # the others have no place for it
        assert all(len(names) == 1 for names in conversations.values())


def test_our_own_lines_keep_what_is_theirs(tmp_path):
    lines = corpus_lines()
    found = read_foreign(write_lines(tmp_path / "c.jsonl", lines))
    assert found.lines == lines


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"messages": [{"role": "user", "content": "a"}]}\n{"messages": [', "line 2: broken JSON"),
        ('{"messages": [\n{"messages": [{"role": "user", "content": "a"}]}', "line 1: broken JSON"),
        ('{"messages": []}', "line 1: messages is empty"),
        ('{"messages": [{"content": "a"}]}', r"line 1: messages\[0\].role must be a text"),
        ('{"messages": "hello"}', "line 1: messages must be a list"),
        ('{"messages": [{"role": "user", "content": 3}]}', "line 1: body.messages.0.content"),
        ('{"custom_id": "a", "url": "/v1/embeddings", "body": {}}', "only POST /v1/chat"),
        ('{"timestamp": 1, "input_length": 9, "output_length": 3, "hash_ids": [1]}', "no text"),
        ('{"input_length": 9}\n{"input_length": 9}', "line 1: the trace has lengths and hashes"),
        ('{"text": "hello"}', "no known format has the keys text"),
        ("[1, 2]", "item 1: a record must be an object"),
        ("", "is empty"),
        ("[]", "holds no request"),
        ("{\n  broken\n}", "line 2: broken JSON"),
        ('[{"conversations": [{"from": "robot", "value": "a"}]}]', "'robot', which is no known"),
        ('{"log": {"entries": []}}', "no entry is a POST"),
        ('{"messages": ' + "1" * 5000 + "}", "line 1: a number has more than 4300 digits"),
        ("[\n{},\n" + "1" * 5000 + "]", "line 3: a number has more than 4300 digits"),
        (json.dumps(BODY | {"x": deep(600)}), "line 1: JSON is nested too deeply"),
        ("[" * 100_000, "JSON is nested too deeply"),
        (
            json.dumps({"log": {"entries": [har_entry(BODY), har_entry(BODY, url="http://[x")]}}),
            "line 1, entry 2: the request's url is no address",
        ),
        (
            json.dumps({"log": {"entries": [har_entry(BODY | {"x": deep(600)})]}}),
            "line 1, entry 1: the request body is no JSON: JSON is nested too deeply",
        ),
    ],
    ids=range(22),
)
def test_what_cannot_be_read_is_named(tmp_path, text, says):
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with pytest.raises(CorpusError, match=says) as caught:
        read_foreign(path)
    assert str(path) in caught.value.message


def test_bytes_that_are_not_text_are_named(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(json.dumps(BODY).encode() + b"\n\xff\xfe\n")
    with pytest.raises(CorpusError, match="line 2: not UTF-8"):
        read_foreign(path)


def test_a_mixed_file_is_refused_at_the_line_that_differs(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(f"{json.dumps(BODY)}\n{json.dumps({'input_length': 4})}\n")
    with pytest.raises(CorpusError, match="line 2: not of the format of the first record"):
        read_foreign(path)


def test_keys_outside_messages_are_dropped_and_messages_stay_verbatim(tmp_path):
    told = {"role": "user", "content": "x", "headers": {"authorization": "part of the text"}}
    extra = {"extra_headers": {"Authorization": SECRET}, "api_key": SECRET}
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"messages": [told], "extra_body": {"cookie": SECRET}, **extra}))
    (line,) = read_foreign(path).lines
    assert SECRET not in json.dumps(line) and line["body"]["messages"] == [told]
    assert line["body"] == {"messages": [told], "extra_body": {}}


SECRET_KEYS = (
    "headers", "extra_headers", "authorization", "Proxy-Authorization", "cookie", "Set-Cookie",
    "cookies", "api_key", "apikey", "apiKey", "x-api-key", "X-Goog-Api-Key", "openai_api_key",
    "token", "access_token", "X-Auth-Token", "password", "db.password", "client_secret",
    "aws_secret_access_key", "credentials", "openai-organization",
)  # fmt: skip
HARMLESS = {
    "max_tokens": 9, "max_completion_tokens": 9, "completion_tokens": 3, "prompt_tokens": 4,
    "total_tokens": 7, "stop_token_ids": [2], "eos_token": "</s>", "price_per_token": "0.1",
    "return_token_ids": True, "token": 5, "skip_special_tokens": False, "prompt_cache_key": "k",
    "tokenizer": "x", "min_tokens": 1, "token_type": "a",
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"password": {"type": "string"}, "headers": {"type": "object"}},
}


@pytest.mark.parametrize("key", SECRET_KEYS)
def test_a_credential_is_dropped_wherever_it_stands(tmp_path, key):
    function = {"type": "function", "function": {"name": "login", "parameters": SCHEMA}}
    mcp = {"type": "mcp", "server_label": "s", key: SECRET, "auth": {key: {"Bearer": SECRET}}}
    told = {"role": "user", "content": f"my {key} is safe", key: "said by the user"}
    body = {"messages": [told], "tools": [function, mcp], key: SECRET, "extra_body": {key: SECRET}}
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"custom_id": "a", "body": body, "lumotree": {"n": {key: SECRET}}}))
    (line,) = read_foreign(path).lines
    assert line["body"] == {
        "messages": [told],
        "tools": [function, {"type": "mcp", "server_label": "s", "auth": {}}],
        "extra_body": {},
    }
    assert SECRET not in json.dumps(line)
    corpus = read_corpus(write_lines(tmp_path / "c.jsonl", [{"custom_id": "a", "body": body}]))
    export_corpus(corpus, "batch", tmp_path / "out")
    assert SECRET not in (tmp_path / "out").read_text()


def test_what_only_looks_like_a_credential_stays():
    line = {
        "body": {
            **HARMLESS,
            "tools": [{"type": "function", "name": "login", "parameters": SCHEMA}],
            "functions": [{"name": "login", "parameters": SCHEMA}],
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        },
        "lumotree": {
            "completion": {"role": "assistant", "content": "x", "token": "said"},
            "choices": [{"logprobs": {"content": [{"token": "said", "logprob": -1.0}]}}],
        },
    }
    assert without_secrets(line) == line


def test_the_help_says_what_is_dropped():
    said = "".join(call("corpus", "import", "--help").stdout.lower().split())
    for suffix in SUFFIXES:
        plain = "cookie(s)" if suffix.startswith("cookie") else suffix
        assert plain in said.replace("-", ""), suffix


def test_streamed_and_encoded_answers_are_put_together(tmp_path):
    # A line separator within JSON ends no line of the stream.
    text = stream({"content": "I lo"}, {"content": "ok.\u2028"}, {"tool_calls": [CALL]},
                  {"tool_calls": [REST]})  # fmt: skip
    coded = base64.b64encode(json.dumps({"choices": [{"message": ANSWER}]}).encode()).decode()
    entries = [har_entry(BODY, text=text), har_entry(LONGER, text=coded, encoding="base64")]
    path = tmp_path / "in.har"
    path.write_text(json.dumps({"log": {"entries": entries}}))
    first, second = (line["lumotree"]["completion"] for line in read_foreign(path).lines)
    assert first["content"] == "I look.\u2028"
    assert first["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command": "ls"}'}
    assert second == ANSWER


def test_half_a_surrogate_pair_survives(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"messages": [{"role": "tool", "content": "cut \\ud83d"}]}')
    out = tmp_path / "out.jsonl"
    write_corpus(read_foreign(path).lines, out, {})
    assert load_corpus(out).requests[0].messages[0]["content"] == "cut \ud83d"


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_import_select_and_export_commands(tmp_path):
    lines = corpus_lines(conversations=4, turns=5)
    source = tmp_path / "all.jsonl"
    source.write_text("".join(json.dumps(line["body"]) + "\n" for line in lines))
    done = call("corpus", "import", source, "--out", tmp_path / "c.jsonl", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["requests"] == 20
    assert call("corpus", "validate", tmp_path / "c.jsonl").exit_code == 0
    again = call("corpus", "import", source, "--out", tmp_path / "c.jsonl")
    assert again.exit_code == 2 and "--force" in again.stderr

    own = write_lines(tmp_path / "own.jsonl", lines)
    few = tmp_path / "few.jsonl"
    done = call("corpus", "select", own, "--rule", "proportional", "--n", 8, "--out", few)
    assert done.exit_code == 0, done.output
    kept = read_corpus(few).requests
    assert [r.conversation for r in kept].count("c0") == 2 and len(kept) == 8
    assert set(few.read_bytes().splitlines()) <= set(own.read_bytes().splitlines())
    manifest = json.loads((tmp_path / "few.manifest.json").read_text())
    assert manifest["captured"] == 20 and manifest["conversations"]["c1"]["kept"] == 2
    assert call("corpus", "select", own, "--n", 99, "--out", few).exit_code == 2
    wrong = call("corpus", "select", own, "--n", 3, "--rule", "best", "--out", few)
    assert wrong.exit_code == 2 and "valid rules: proportional, even, first" in wrong.stderr
    done = call("corpus", "export", few, "--format", "body", "--out", tmp_path / "b.jsonl")
    assert done.exit_code == 0 and len((tmp_path / "b.jsonl").read_text().splitlines()) == 8

    words = ("corpus", "select", own, "--n", 8, "--out", few, "--force", "--json")
    assert json.loads(call(*words).stdout) == {
        "corpus": str(few),
        "rule": "proportional",
        "requests": 8,
        "selected_from": 20,
        "sha256": read_corpus(few).sha256,
    }
    done = call("corpus", "export", few, "--out", tmp_path / "x.jsonl", "--json")
    assert json.loads(done.stdout) == {
        "file": str(tmp_path / "x.jsonl"),
        "format": "batch",
        "requests": 8,
    }


@pytest.mark.parametrize("out", [".", "..", "/"])
def test_a_folder_is_no_file_to_write(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "c.jsonl", corpus_lines())
    for words in (("import",), ("export",), ("select", "--n", 2)):
        done = call("corpus", words[0], "c.jsonl", *words[1:], "--out", out, "--force")
        assert done.exit_code == 2 and f"{out} is a folder" in done.stderr, done.output


def test_lengths_and_hashes_point_to_what_exists(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"input_length": 9, "hash_ids": [1]}')
    with pytest.raises(CorpusError) as caught:
        read_foreign(path)
    assert "lumotree record" not in str(caught.value) and "HAR" in caught.value.hint

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from lumotree.model.checkpoint import EMBEDDED
from lumotree.serve.tools import ToolCallParser
from lumotree.text import ChatTokenizer

PARAMETERS = {
    "command": {"type": "string"},
    "count": {"type": "integer"},
    "deep": {"type": ["boolean", "null"]},
    "files": {"type": "array"},
    "either": {"type": ["string", "integer"]},
    "free": {},
    "optional": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "words": {"oneOf": [{"type": "string"}, {"type": "array"}]},
    "size": {"anyOf": [{"anyOf": [{"type": "number"}, {"type": "string"}]}, {"type": "null"}]},
    "level": {"enum": [1, 2]},
    "label": {"enum": ["1", "2"]},
    "fixed": {"const": True},
}


def tool(name):
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": PARAMETERS}},
    }


TOOLS = [tool("bash"), tool("read")]


def block(name="bash", **values):
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def parse(*pieces, single=False):
    """Content and calls of a text that comes in pieces."""
    parser = ToolCallParser(TOOLS, single)
    content = ""
    for piece in pieces:
        content += parser.push(piece)[0]
    content += parser.finish()
    return content, [(call.name, json.loads(call.arguments)) for call in parser.calls]


def test_a_call_after_text():
    text = "I look.\n\n" + block(command="ls\n  -l") + "\n"
    assert parse(text) == ("I look.", [("bash", {"command": "ls\n  -l"})])


def test_several_calls_and_text_between():
    text = f"{block(command='a')}\n{block('read', count=3)}\nDone."
    assert parse(text) == ("Done.", [("bash", {"command": "a"}), ("read", {"count": 3})])
    assert parse(text, single=True) == ("", [("bash", {"command": "a"})])


def test_values_follow_the_schema():
    text = block(
        command="3", count="3", deep="null", files='["a", 1]', either="3", free="3", other="3"
    )
    (_, arguments) = parse(text)[1][0]
    assert arguments == {
        "command": "3",
        "count": 3,
        "deep": None,
        "files": ["a", 1],
        "either": 3,
        "free": "3",
        "other": "3",
    }
    assert parse(block(count="three", either="[1]"))[1][0][1] == {"count": "three", "either": "[1]"}


MALFORMED = [
    "<tool_call>\n<function=bash>\n",
    "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</tool_call>",
    "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</function>\n</tool_call>",
    "<tool_call>\n<function=bash>\n<parameter=a>1</parameter><parameter=a>2</parameter>"
    "</function></tool_call>",
    "<tool_call>\n<function=bash>\nls\n</function>\n</tool_call>",
    "<tool_call>\n{}\n</tool_call>",
    block("rm", command="x"),
    "</tool_call>",
    "<tool_call",
]


def test_values_follow_alternatives_and_enumerations():
    cases = {
        "optional": [("3", 3), ("null", None), ("x", "x")],
        "words": [("3", "3"), ("[1]", [1]), ("null", "null")],
        "size": [("3", 3), ("2.5", 2.5), ("null", None), ("true", "true")],
        "level": [("2", 2)],
        "label": [("2", "2")],
        "fixed": [("true", True)],
    }
    for key, pairs in cases.items():
        for text, value in pairs:
            assert parse(block(**{key: text}))[1] == [("bash", {key: value})], (key, text)


def test_no_number_that_json_has_not_is_handed_out():
    for text in ("NaN", "-Infinity", "1e999", "[NaN]"):
        for key in ("count", "size", "files"):
            assert parse(block(**{key: text}))[1] == [("bash", {key: text})]


def test_what_is_malformed_stays_text():
    for text in MALFORMED:
        whole = f"Before \n\n{text} \n after\n"
        assert parse(whole) == (whole, []), text
        assert parse(text) == (text, [])


def test_a_malformed_block_does_not_hide_the_next_call():
    content, calls = parse(f"{MALFORMED[4]}\n{block(command='ls')}")
    assert content == MALFORMED[4] and calls == [("bash", {"command": "ls"})]


PIECES = st.lists(
    st.sampled_from([*MALFORMED, block(command="ls"), "text", " \n", "<", "<tool", "\n"]),
    max_size=6,
)


@settings(deadline=None)
@given(PIECES, st.lists(st.integers(1, 30), min_size=1))
def test_pieces_do_not_matter(parts, sizes):
    text, cut, at = "".join(parts), [], 0
    while at < len(text):
        size = sizes[len(cut) % len(sizes)]
        cut.append(text[at : at + size])
        at += size
    assert parse(*cut) == parse(text)
    if "<function=bash>" not in text:
        assert parse(*cut) == (text, [])


def test_it_reads_what_the_chat_template_writes():
    arguments = {"command": "echo '\n'\n", "count": 3, "deep": True, "files": ["a"]}
    call = {"type": "function", "function": {"name": "bash", "arguments": json.dumps(arguments)}}
    tokenizer = ChatTokenizer.load(EMBEDDED)
    ids = tokenizer.encode_chat(
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "Look.", "tool_calls": [call]},
        ]
    )
    text = tokenizer.decode(ids)
    said = text[text.index("Look.") : text.rindex("</tool_call>") + len("</tool_call>")]
    assert parse(said) == ("Look.", [("bash", arguments)])

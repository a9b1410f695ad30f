"""The committed checkpoint: size, hashes, loading, and the chat template's cases."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "lumotree/embedded"


def load_scripts():
    sys.path[:0] = [str(ROOT / "scripts/train"), str(ROOT / "scripts")]
    try:
        import agent_format
        import render
    finally:
        del sys.path[:2]
    return agent_format, render


AGENT, RENDER = load_scripts()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


def chat(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def calling(arguments, content="", name="bash"):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def test_size_is_at_most_24_mb():
    assert sum(f.stat().st_size for f in FOLDER.rglob("*") if f.is_file()) <= 24_000_000


def test_hashes_are_the_recipes():
    hashes = json.loads((ROOT / "scripts/train/recipe.json").read_text())["hashes"]
    found = {
        name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest()
        for name in hashes
        if name.startswith("lumotree/")
    }
    assert found == {name: hashes[name] for name in found}
    assert len(found) == 2


def test_transformers_loads_the_trunk_and_the_file_holds_the_head():
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, output_loading_info=True
    )
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    assert not info["missing_keys"]
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert file.get_slice("model.embed_tokens.weight").get_shape() == [4096, 256]
    assert len([n for n in names if n.startswith("mtp.")]) == 15
    assert "lm_head.weight" not in names
    with torch.no_grad():
        logits = model(torch.tensor([[4090, 1, 2, 3]])).logits
    assert logits.isfinite().all()


def test_the_trunk_knows_python(tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    text = (ROOT / "scripts/train/render.py").read_text()
    ids = torch.tensor([tokenizer(text).input_ids[:300]])
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    assert loss < 3


def test_special_tokens(tokenizer):
    assert len(tokenizer) == 4096
    assert tokenizer.eos_token == "<|im_end|>"
    for word in ("<|endoftext|>", "<|im_start|>", "<tool_call>", "</tool_response>"):
        assert len(tokenizer(word).input_ids) == 1
    ends = json.loads((FOLDER / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|im_end|>", "<|endoftext|>"]


@pytest.mark.parametrize(
    "text", ["def f(x):\n    return x  # 12345\n", "\té\r\n  naïve 😀 <b>", " "]
)
def test_text_survives_a_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_plain_conversation(tokenizer):
    text = chat(tokenizer, [{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_tools_are_listed_one_per_line_after_the_system_text(tokenizer):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}]
    text = chat(tokenizer, messages, tools=[AGENT.BASH_TOOL, AGENT.BASH_TOOL])
    line = json.dumps(AGENT.BASH_TOOL)
    assert text.startswith("<|im_start|>system\nS\n\n# Tools\n")
    assert f"<tools>\n{line}\n{line}\n</tools>" in text
    assert text.count("<|im_start|>system") == 1


def test_tools_without_a_system_message(tokenizer):
    text = chat(tokenizer, [{"role": "user", "content": "q"}], tools=[AGENT.BASH_TOOL])
    assert text.startswith("<|im_start|>system\n# Tools\n")


@pytest.mark.parametrize(
    "content",
    ["a b", [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}], ["a ", "b"]],
    ids=["string", "parts", "strings"],
)
def test_content_may_be_a_list(tokenizer, content):
    text = chat(tokenizer, [{"role": "user", "content": content}])
    assert text == "<|im_start|>user\na b<|im_end|>\n"


def test_content_may_be_null(tokenizer):
    text = chat(tokenizer, [calling({"command": "ls"}, content=None)])
    assert text == (
        "<|im_start|>assistant\n<tool_call>\n<function=bash>\n<parameter=command>\nls\n"
        "</parameter>\n</function>\n</tool_call><|im_end|>\n"
    )


ARGUMENTS = {
    "command": 'grep "a\\b" x.py\n\ttab é 😀 \u2028 <b> </s>',
    "empty": "",
    "count": 3,
    "rate": 1.5,
    "flag": True,
    "nothing": None,
    "nested": {"a": ["}", {"b": '"'}], "c": []},
}


@pytest.mark.parametrize("ascii_only", [True, False], ids=["escaped", "plain"])
@pytest.mark.parametrize("indent", [None, 2], ids=["compact", "indented"])
def test_arguments_as_a_string_render_as_the_mapping(tokenizer, ascii_only, indent):
    flat = {k: v for k, v in ARGUMENTS.items() if k != "nested"}
    written = json.dumps(flat, ensure_ascii=ascii_only, indent=indent)
    assert chat(tokenizer, [calling(written)]) == chat(tokenizer, [calling(flat)])


def test_nested_arguments_keep_their_json(tokenizer):
    written = json.dumps(ARGUMENTS)
    assert chat(tokenizer, [calling(written)]) == chat(
        tokenizer, [calling({**ARGUMENTS, "command": ARGUMENTS["command"]})]
    )


def test_empty_arguments(tokenizer):
    assert "<function=bash>\n</function>" in chat(tokenizer, [calling("{}")])
    assert "<function=bash>\n</function>" in chat(tokenizer, [calling({})])


@pytest.mark.parametrize(
    "broken",
    ["nonsense", '{"a": "ls', "{", '{"a":}', "[1]", '{"a": "\\q"}', '{"a": 1} tail', '{"a" "b"}'],
)
def test_malformed_arguments_are_shown_raw(tokenizer, broken):
    assert f"<function=bash>\n{broken}\n</function>" in chat(tokenizer, [calling(broken)])


def test_consecutive_tool_results_share_a_user_turn(tokenizer):
    messages = [
        calling({"command": "ls"}, content="Both."),
        {"role": "tool", "content": "a"},
        {"role": "tool", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "Done."},
        {"role": "tool", "content": "c"},
    ]
    text = chat(tokenizer, messages)
    assert (
        "<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\nDone.<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nc\n</tool_response><|im_end|>\n"
    ) in text
    assert "Both.\n\n<tool_call>" in text


def test_the_python_twin_renders_the_same(tokenizer):
    messages = [
        {"role": "system", "content": AGENT.SYSTEM_PROMPT},
        {"role": "user", "content": "Look."},
        calling({"command": "cat <<'EOF'\nx\nEOF"}, content="I look."),
        {"role": "tool", "content": "exit code: 0\nx"},
        calling({"command": "ls"}),
        {"role": "tool", "content": "exit code: 0"},
        {"role": "assistant", "content": "Done."},
    ]
    tools = [AGENT.BASH_TOOL]
    assert RENDER.render(messages, tools) == chat(tokenizer, messages, tools=tools)

"""The official client drives the server over the embedded model."""

import json

import openai
import pytest

from lumotree.engine import DecoderConfig
from lumotree.request import SamplingParams
from tests.serve.support import served

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
QUESTION = [{"role": "user", "content": "Find where the parser reads the tree preset."}]


@pytest.fixture(scope="module")
def address(embedded):
    with served(embedded, active=2, queue=8, max_context=2048, model_name="embedded") as pair:
        yield pair[1]


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as client:
        yield client


def chat(client, **fields):
    return client.chat.completions.create(
        **{"model": "embedded", "messages": QUESTION, "max_tokens": 48, "seed": 5} | fields
    )


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "embedded" and model.max_model_len == 2048
    assert client.models.retrieve("embedded").id == "embedded"
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        client.models.retrieve("gpt")


def test_chat_is_what_the_decoder_says(client, embedded):
    answer = chat(client, extra_body={"top_k": 20, "return_token_ids": True})
    ids = embedded.tokenizer.encode_chat(QUESTION)
    params = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=20, presence_penalty=0.0, seed=5, max_tokens=48
    )
    alone = embedded.decoder(DecoderConfig()).generate(ids, params)
    assert answer.choices[0].token_ids == alone.token_ids
    assert answer.choices[0].prompt_token_ids == ids
    assert answer.choices[0].message.content == alone.text
    assert answer.choices[0].finish_reason == alone.finish_reason
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == alone.completion_tokens
    assert answer.usage.total_tokens == len(ids) + alone.completion_tokens


def test_a_stream_joins_to_the_whole(client):
    whole = chat(client, n=2)
    text, reasons, usage = {0: "", 1: ""}, {}, []
    for chunk in chat(client, n=2, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            text[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        if chunk.usage:
            usage.append(chunk.usage)
    assert text == {c.index: c.message.content for c in whole.choices}
    assert text[0] != text[1]
    assert reasons == {c.index: c.finish_reason for c in whole.choices}
    assert [u.completion_tokens for u in usage] == [whole.usage.completion_tokens]


def test_usage_is_reported_unasked_in_a_stream(client):
    *_, last = chat(client, stream=True, max_tokens=4)
    assert last.choices[0].finish_reason == "length" and last.usage.completion_tokens == 4


def tool_answer(client, **fields):
    """An answer with a call: greedy, else the first seed that has one."""
    for seed in range(8):
        answer = chat(client, tools=[BASH], max_tokens=120, seed=seed, **fields)
        if answer.choices[0].message.tool_calls:
            return seed, answer
    raise AssertionError("the model never called a tool")


def test_tool_calls_whole_and_streamed(client):
    seed, answer = tool_answer(client)
    (call, *_) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.type == "function" and call.function.name == "bash"
    assert set(json.loads(call.function.arguments)) == {"command"}
    assert "<tool_call>" not in (answer.choices[0].message.content or "")
    streamed, reason = {}, None
    for chunk in chat(client, tools=[BASH], max_tokens=120, seed=seed, stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            streamed[part.index] = part.function
        reason = chunk.choices[0].finish_reason or reason
    assert [f.arguments for f in streamed.values()] == [
        c.function.arguments for c in answer.choices[0].message.tool_calls
    ]
    assert reason == "tool_calls"


def test_a_turn_with_the_tool_result_follows(client):
    _, answer = tool_answer(client)
    message = answer.choices[0].message
    turn = [
        *QUESTION,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "nothing found"},
    ]
    again = chat(client, messages=turn, tools=[BASH])
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


def test_without_tools_a_call_is_text(client):
    seed, _ = tool_answer(client)
    answer = chat(client, tools=[BASH], tool_choice="none", max_tokens=120, seed=seed)
    assert answer.choices[0].message.tool_calls is None


def test_completions_of_text_and_ids(client, embedded):
    prompt = "def add(a, b):\n"
    fields = {"model": "embedded", "max_tokens": 12, "temperature": 0}
    of_text = client.completions.create(prompt=prompt, **fields)
    of_ids = client.completions.create(prompt=embedded.tokenizer.encode(prompt), **fields)
    both = client.completions.create(prompt=[prompt, prompt], **fields)
    assert of_text.choices[0].text == of_ids.choices[0].text
    assert [c.text for c in both.choices] == [of_text.choices[0].text] * 2
    assert both.usage.prompt_tokens == 2 * of_ids.usage.prompt_tokens
    streamed = client.completions.create(prompt=prompt, stream=True, **fields)
    assert "".join(c.choices[0].text for c in streamed) == of_text.choices[0].text


def test_a_stop_string_ends_the_text_before_it(client):
    fields = {"model": "embedded", "prompt": "def add(a, b):\n", "temperature": 0}
    whole = client.completions.create(max_tokens=24, **fields).choices[0].text
    stop = whole[6:9]
    cut = client.completions.create(max_tokens=24, stop=[stop], **fields).choices[0]
    assert cut.finish_reason == "stop" and cut.text == whole[: whole.index(stop)]


def test_log_probabilities(client):
    fields = {"logprobs": True, "top_logprobs": 2, "max_tokens": 6, "temperature": 0}
    whole = chat(client, **fields).choices[0]
    entries = whole.logprobs.content
    assert "".join(bytes(e.bytes).decode() for e in entries) == whole.message.content
    for entry in entries:
        first, second = entry.top_logprobs
        assert (first.token, first.logprob) == (entry.token, entry.logprob)  # greedy
        assert 0 >= first.logprob >= second.logprob
    streamed = [
        entry
        for chunk in chat(client, stream=True, **fields)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == entries
    more = {"max_tokens": 6, "logprobs": 1, "temperature": 0, "extra_body": {"ignore_eos": True}}
    answer = client.completions.create(model="embedded", prompt="def add(a, b):\n", **more)
    answer = answer.choices[0]
    assert "".join(answer.logprobs.tokens) == answer.text
    assert answer.logprobs.text_offset[0] == 0 and len(answer.logprobs.token_logprobs) == 6
    assert all(len(top) == 1 for top in answer.logprobs.top_logprobs)


def test_seeds(client):
    def text(seed):
        answer = chat(client, seed=seed, temperature=1.5, max_tokens=12)
        return answer.choices[0].message.content

    assert text(3) == text(3) != text(4)
    assert text(None) != text(None)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format 'json_object'"),
        ({"tools": [BASH], "tool_choice": "required"}, "tool_choice"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"temperature": -1}, "temperature=-1.0 is out of range"),
        ({"extra_body": {"beam_width": 4}}, "field 'beam_width' is not served"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, "the context here holds 2048"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
    ids=str,
)
def test_refusals_say_which_field(client, fields, says):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    assert says in caught.value.message and caught.value.type == "invalid_request_error"


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        chat(client, model="gpt-5")
    assert caught.value.code == "model_not_found"

"""A client, the recording proxy and the server: what was recorded renders to what was sent."""

import json

import openai

from replay.corpus import load_corpus
from tests.replay.test_proxy import Running

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
KEY = "sk-a-very-secret-key"


def test_recorded_traffic_is_the_traffic(quick, speaking, tmp_path):
    _, url = quick
    proxy = Running(url, tmp_path / "mine.jsonl")
    fields = {"model": "tiny", "max_tokens": 4, "seed": 1, "tools": TOOLS}
    fields["extra_body"] = {"return_token_ids": True, "ignore_eos": True}
    turns = [{"role": "user", "content": "hé"}]
    said = []
    with openai.OpenAI(base_url=f"http://127.0.0.1:{proxy.port}/v1", api_key=KEY) as client:
        assert client.models.list().data[0].id == "tiny"
        for stream in (False, True):
            answer = client.chat.completions.create(messages=turns, stream=stream, **fields)
            if stream:
                said.append("".join(c.choices[0].delta.content or "" for c in answer))
            else:
                said.append(answer.choices[0].message.content)
            turns = [*turns, {"role": "assistant", "content": said[-1]}]
            turns.append({"role": "user", "content": "go on"})
    proxy.stop()
    assert KEY not in proxy.out.read_text()
    lines = [json.loads(line)["lumotree"] for line in proxy.out.read_text().splitlines()]
    assert [line["completion"]["content"] or "" for line in lines] == said
    assert [(line["conversation"], line["turn"]) for line in lines] == [("s-001", 1), ("s-001", 2)]
    assert all(line["response"]["usage"]["completion_tokens"] == 4 for line in lines)
    corpus = load_corpus(proxy.out)
    for request, line in zip(corpus.requests, lines, strict=True):
        ids = speaking.tokenizer.encode_chat(request.messages, request.tools)
        assert ids == line["input_ids"]

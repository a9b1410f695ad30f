"""Bodies, keys and clients that misbehave, over a socket."""

import json
import socket
import time

import httpx
import pytest

from tests.serve.support import served

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def strict(speaking):
    with served(
        speaking,
        active=1,
        queue=1,
        max_context=256,
        model_name="tiny",
        api_key=" a-key\n",  # as a file's last line leaves it in the environment
        max_body_bytes=4096,
        idle_timeout_s=1.5,
    ) as pair:
        yield pair


@pytest.fixture(scope="module")
def client(strict):
    headers = {"authorization": "Bearer a-key"}
    with httpx.Client(base_url=strict[1], headers=headers, timeout=60) as client:
        yield client


def complete(client, **fields):
    body = {"prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True} | fields
    return client.post("/v1/completions", json=body)


def error_of(answer):
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_the_key_is_asked_for_everywhere_but_at_health(strict, client):
    assert complete(client).status_code == 200
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "a-key"}):
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            answer = httpx.get(strict[1] + path, headers=headers)
            assert answer.status_code == 401 and error_of(answer)["code"] == "invalid_api_key"
        assert httpx.get(strict[1] + "/health", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b'{"prompt": "\xff\xfe"}', b"{", b"", b"[" * 3000, b'"text"', b'{"prompt": NaN}'],
    ids=["not UTF-8", "cut", "empty", "deep", "no object", "NaN"],
)
def test_a_body_that_is_no_request(client, body):
    headers = {"content-type": "application/json"}
    answer = client.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400 and error_of(answer)["message"]


def test_half_a_surrogate_pair_is_no_text(client):
    for path, field in (
        ("/v1/completions", '"prompt": "\\ud83d"'),
        ("/v1/chat/completions", '"messages": [{"role": "user", "content": "\\ud83d"}]'),
    ):
        headers = {"content-type": "application/json"}
        answer = client.post(path, content=f"{{{field}}}", headers=headers)
        assert answer.status_code == 400, path


def test_a_body_over_the_limit(client):
    answer = complete(client, prompt="x" * 5000)
    assert answer.status_code == 413 and "4096" in error_of(answer)["message"]

    def chunks():
        for _ in range(5):
            yield b"x" * 1000

    assert client.post("/v1/completions", content=chunks()).status_code == 413
    assert complete(client).status_code == 200


def test_a_body_that_does_not_come(strict):
    with socket.create_connection(("127.0.0.1", int(strict[1].rsplit(":", 1)[1]))) as sock:
        sock.sendall(HEAD + b"authorization: Bearer a-key\r\ncontent-length: 100\r\n\r\n{")
        assert sock.recv(4096).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "empty"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [1, 4096]}, "token id 4096"),
        ({"prompt": [-1]}, "token id -1"),
        ({"prompt": [1] * 256}, "holds 256"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"n": 17}, "n:"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"top_p": 0}, "top_p"),
        ({"temperature": 1e999}, "temperature"),
    ],
    ids=str,
)
def test_refusals(client, fields, says):
    body = {"prompt": [1, 2, 3], "max_tokens": 2} | fields
    headers = {"content-type": "application/json"}
    answer = client.post("/v1/completions", content=json.dumps(body), headers=headers)
    assert answer.status_code == 400 and says in error_of(answer)["message"]


def test_a_full_queue_says_when_to_come_again(strict, client):
    body = {"prompt": [1], "max_tokens": 200, "ignore_eos": True, "n": 2, "stream": True}
    with client.stream("POST", "/v1/completions", json=body):
        answer = complete(client)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert error_of(answer)["code"] == "queue_full"
    wait_idle(strict[0])


def test_leaving_frees_the_slot(strict, client):
    server, _ = strict
    before = server.metrics.registry.get_sample_value("lumotree:generation_tokens_total")
    body = {"prompt": [1], "max_tokens": 250, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
        next(stream.iter_raw())
    wait_idle(server)
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.05))
    wait_idle(server)
    after = server.metrics.registry.get_sample_value("lumotree:generation_tokens_total")
    assert after - before < 500
    assert complete(client).status_code == 200


def test_other_paths_and_methods(client):
    assert error_of(client.get("/v1/engines"))["message"] == "there is no /v1/engines"
    assert client.get("/v1/completions").status_code == 405
    assert error_of(client.get("/v1/completions"))["message"] == "GET is not served here"


def wait_idle(server, seconds=60.0):
    deadline = time.monotonic() + seconds
    while server.scheduler.load != (0, 0):
        assert time.monotonic() < deadline, "a slot is stuck"
        time.sleep(0.01)

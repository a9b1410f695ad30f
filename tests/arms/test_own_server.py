"""Every external arm against this project's own server: same ids as in process, same counts."""

import pytest

from arms.openai import OpenAIArm
from arms.protocol import ArmRequest
from arms.sglang import SglangArm
from arms.spec import parse_arm
from arms.vllm import VllmArm
from lumotree.engine import DecoderConfig, Engine
from lumotree.request import SamplingParams
from tests.serve.support import served, speaking_folder

CONFIG = DecoderConfig()
PROMPTS = [tuple(range(10, 40)), (5, 6, 7) * 9]
PARAMS = SamplingParams(max_tokens=14, seed=11, ignore_eos=True)
KINDS = {
    "sglang-eagle:url={}": SglangArm,
    "vllm-mtp:url={}": VllmArm,
    "openai:url={}/v1": OpenAIArm,
    "openai:url={},api=chat": OpenAIArm,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    return Engine.load(str(speaking_folder(tmp_path_factory)), device="cpu")


@pytest.fixture(scope="module")
def address(engine):
    with served(engine, CONFIG, active=2, max_context=256, model_name="tiny") as (_, url):
        yield url


@pytest.mark.parametrize("spec", [spec for spec in KINDS if "chat" not in spec])
def test_ids_and_counts_are_those_of_the_decoder(engine, address, spec):
    arm = KINDS[spec](parse_arm(spec.format(address)))
    arm.start()
    decoder = engine.decoder(CONFIG)
    for index, prompt in enumerate(PROMPTS):
        result = arm.run(ArmRequest(f"r{index}", prompt), PARAMS)
        alone = decoder.generate(prompt, PARAMS)
        assert result.error is None
        assert result.token_ids == tuple(alone.token_ids)
        assert (result.prompt_tokens, result.completion_tokens) == (len(prompt), 14)
        assert result.finish_reason == "length"
        assert len(result.burst_s) <= alone.steps
        if spec.startswith("openai"):
            assert result.steps is None  # nobody told
        else:
            assert result.steps == alone.steps
            told = [n for n in result.accepted_by_depth if n]
            assert told == [n for n in alone.accepted_by_depth if n]
    arm.close()


def test_an_end_of_text_counts_and_is_no_id(engine, address, monkeypatch):
    monkeypatch.setattr(engine.tokenizer, "eos_ids", frozenset(range(0, 4096, 8)))
    params = SamplingParams(max_tokens=200, seed=3)
    alone = engine.decoder(CONFIG).generate(PROMPTS[0], params)
    assert alone.finish_reason == "stop" and 1 < len(alone.token_ids) < 50
    for spec in ("vllm-mtp:url={}", "sglang-eagle:url={}"):
        arm = KINDS[spec](parse_arm(spec.format(address)))
        arm.start()
        result = arm.run(ArmRequest("r", PROMPTS[0]), params)
        assert result.token_ids == tuple(alone.token_ids)
        assert result.completion_tokens == alone.completion_tokens
        assert result.finish_reason == alone.finish_reason
        arm.close()


def test_messages_go_through_the_server_s_own_template(engine, address):
    messages = [{"role": "user", "content": "hello"}]
    arm = OpenAIArm(parse_arm(f"openai:url={address},api=chat"))
    assert arm.start()["sends"] == "messages"
    result = arm.run(ArmRequest("r", (1,), messages=messages), PARAMS)
    ids = engine.tokenizer.encode_chat(messages)
    assert result.prompt_tokens == len(ids) != 1  # what the guards compare
    assert result.token_ids == tuple(engine.decoder(CONFIG).generate(ids, PARAMS).token_ids)
    arm.close()

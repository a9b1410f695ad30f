"""Greedy text is transformers' greedy text; scripts/check_generate.py runs the long version."""

import pytest

from lumotree.engine import DecoderConfig
from scripts.check_generate import ROOT as REPOSITORY
from scripts.check_generate import compare, corpus_prompts, load_oracle
from tests.core.support import random_tokens


@pytest.fixture(scope="module")
def oracle(engines):
    return load_oracle(engines("embedded").source.folder)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(DecoderConfig("root", 0, False), id="ar"),
        pytest.param(DecoderConfig("chain-3", 3, False), id="mtp-3"),
        pytest.param(DecoderConfig("hydra27", 5, True), id="lumotree"),
    ],
)
@pytest.mark.parametrize("prompt", ["request", "code", "noise"])
def test_greedy_tokens_equal_generate(engines, oracle, config, prompt):
    engine = engines("embedded")
    ids = {
        "request": lambda: corpus_prompts(engine, REPOSITORY / "corpora/first.jsonl", 1)[0],
        "code": lambda: engine.tokenizer.encode(compare.__doc__ + "\ndef compare(engine, oracle"),
        "noise": lambda: random_tokens(21, 300, 4000),
    }[prompt]()
    result = compare(engine, oracle, config, ids, 40)
    print(result)
    assert result.accepted(), result

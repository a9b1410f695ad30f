"""The trained draft head agrees with its target, and only when it is fed the right hidden."""

from pathlib import Path

import pytest
import torch

from scripts.mtp_agreement import agreement, choices
from tests.core.exact import Exact
from tests.core.support import random_tokens

HERE = Path(__file__).parent
TEXTS = ("test_decoder.py", "test_pitfalls_state.py", "exact.py")


@pytest.fixture(scope="module")
def measured(engines):
    engine = engines("embedded")
    tokens = [t for name in TEXTS for t in engine.tokenizer.encode((HERE / name).read_text())]
    return engine.model, tokens[:4096], agreement(engine.model, tokens[:4096])


def test_depth_1_agreement_on_code_the_model_has_not_seen(measured):
    _, _, share = measured
    assert share >= 0.60


def test_the_hidden_row_before_the_final_norm_lowers_agreement(measured):
    model, tokens, share = measured
    assert agreement(model, tokens, pre_norm=True) < share


def test_agreement_measures_the_published_arithmetic(engines, tiny_folder):
    model, exact = engines("tiny").model, Exact(tiny_folder)
    tokens = random_tokens(22, 50, 97)
    chosen, drafted = choices(model, torch.tensor(tokens), pre_norm=False)
    trace = exact.trunk(tokens)
    assert chosen.tolist() == trace.logits.argmax(-1).tolist()
    rows, _, _ = exact.draft_head(tokens, trace.hidden)
    assert drafted.tolist() == (rows @ exact.head.T).argmax(-1).tolist()
    _, before = choices(model, torch.tensor(tokens), pre_norm=True)
    rows, _, _ = exact.draft_head(tokens, trace.before_norm)
    assert before.tolist() == (rows @ exact.head.T).argmax(-1).tolist()

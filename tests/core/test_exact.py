"""Every surface of the state, and the draft head, against plain float64 recurrences."""

import pytest
import torch

from lumotree.draft import mtp
from lumotree.model.hybrid import HybridModel
from lumotree.model.runner import RowRunner
from lumotree.model.source import open_source
from lumotree.tree import tree_from_name
from tests.core.exact import Exact
from tests.core.support import prefill, random_tokens, relative, verify
from tests.tiny import Geometry, save_tiny

HYDRA, _ = tree_from_name("hydra27").restrict(tree_from_name("hydra27").default_active)
GEOMETRY = Geometry(
    hidden=48, key_dim=16, value_dim=12, head_dim=16, heads=4, kv_heads=2, value_heads=6
)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exact")
    save_tiny(folder, GEOMETRY, seed=11, gain=0.5)
    model = HybridModel.load(open_source(str(folder)), torch.float32, torch.device("cpu"))
    return model, RowRunner(model, "natural", 4), Exact(folder)


def assert_state_is_exact(state, trace, hidden=None):
    for layer, wanted in enumerate(trace.recurrent):
        assert relative(state.recurrent[layer], wanted) < TOLERANCE, f"recurrent {layer}"
    for layer, wanted in enumerate(trace.conv_inputs):
        assert relative(state.conv[layer], wanted) < TOLERANCE, f"conv {layer}"
    for layer, (keys, values) in enumerate(zip(trace.keys, trace.values, strict=True)):
        assert relative(state.kv.keys[layer, :, : state.length], keys) < TOLERANCE
        assert relative(state.kv.values[layer, :, : state.length], values) < TOLERANCE


@pytest.mark.parametrize("length", [1, 2, 3, 5, 63, 64, 65, 130])
def test_prefill_state_equals_the_token_by_token_recurrence(models, length):
    model, _, exact = models
    tokens = random_tokens(length, length, GEOMETRY.vocab)
    state, logits = prefill(model, tokens)
    trace = exact.trunk(tokens)
    assert relative(logits, trace.logits) < TOLERANCE
    assert_state_is_exact(state, trace)


def test_chunks_hand_the_state_over(models):
    model, _, exact = models
    tokens = random_tokens(1, 90, GEOMETRY.vocab)
    state, logits = prefill(model, tokens, chunk=32)
    trace = exact.trunk(tokens)
    assert relative(logits, trace.logits) < TOLERANCE
    assert_state_is_exact(state, trace)


@pytest.mark.parametrize("prefix", [1, 4, 70])
def test_each_tree_row_equals_the_recurrence_along_its_path(models, prefix):
    model, runner, exact = models
    prompt, drafts = random_tokens(2, prefix, 97), random_tokens(3, len(HYDRA), 97)
    state, _ = prefill(model, prompt)
    step = verify(model, runner, state, HYDRA, drafts)
    for row, path in enumerate(HYDRA.root_paths):
        if not HYDRA.children[row]:
            trace = exact.trunk([*prompt, *(drafts[r] for r in path)])
            wanted = trace.logits[prefix:]
            assert relative(step.logits[list(path)], wanted) < TOLERANCE, f"path to row {row}"


@pytest.mark.parametrize("row", [0, 1, 13, 22, 27])
def test_published_state_equals_the_recurrence_along_the_path(models, row):
    model, runner, exact = models
    prompt, drafts = random_tokens(4, 30, 97), random_tokens(5, len(HYDRA), 97)
    state, _ = prefill(model, prompt)
    path = HYDRA.root_paths[row]
    verify(model, runner, state, HYDRA, drafts).publish(path)
    trace = exact.trunk([*prompt, *(drafts[r] for r in path)])
    assert state.length == 30 + len(path)
    assert_state_is_exact(state, trace)
    # The drafter gets the target's rows after the final norm: the prompt's last and the path's.
    assert relative(state.mtp_hidden, trace.hidden[29:]) < TOLERANCE


# The draft head


def assert_head_is_exact(state, keys, values, stop):
    assert relative(state.mtp_kv.keys[0, :, 1:stop], keys[:, : stop - 1]) < TOLERANCE
    assert relative(state.mtp_kv.values[0, :, 1:stop], values[:, : stop - 1]) < TOLERANCE


@pytest.mark.parametrize("chunk", [256, 16])
@pytest.mark.parametrize("length", [1, 2, 17, 40])
def test_draft_head_of_a_prompt(models, length, chunk):
    model, _, exact = models
    tokens = random_tokens(6, length, 97)
    state, _ = prefill(model, tokens, chunk=chunk)
    trace = exact.trunk(tokens)
    assert relative(state.mtp_hidden, trace.hidden[-1:]) < TOLERANCE
    if length > 1:
        _, keys, values = exact.draft_head(tokens, trace.hidden)
        assert_head_is_exact(state, keys, values, length)


@pytest.mark.parametrize("length", [1, 2, 40])
def test_drafts_of_five_passes(models, length):
    model, runner, exact = models
    tokens = random_tokens(7, length + 1, 97)
    state, _ = prefill(model, tokens[:-1])
    trace = exact.trunk(tokens[:-1])
    found = mtp.draft(model, state, tokens, 5, runner)
    wanted, keys, values = exact.draft(tokens, trace.hidden, 5)
    assert len(found) == 5
    for (best, ordered), logits in zip(found, wanted, strict=True):
        top = logits.topk(4)
        assert (top.values[:-1] - top.values[1:]).min() > 1e-4, "a tie: choose another seed"
        assert best == top.indices[0]
        assert ordered == top.indices[:3].tolist()
    # The slots of the four recursive passes lie after the pending token's.
    assert_head_is_exact(state, keys, values, length + 5)


@pytest.mark.parametrize("row", [0, 13, 27])
def test_refill_replaces_the_heads_guesses_by_true_hidden_rows(models, row):
    model, runner, exact = models
    prompt, drafts = random_tokens(8, 25, 97), random_tokens(9, len(HYDRA), 97)
    state, _ = prefill(model, prompt)
    mtp.draft(model, state, [*prompt, drafts[0]], 5, runner)
    path = HYDRA.root_paths[row]
    verify(model, runner, state, HYDRA, drafts).publish(path)
    text = [*prompt, *(drafts[r] for r in path), 50]
    out = mtp.refill(model, state, text, runner)
    trace = exact.trunk(text[:-1])
    rows, keys, values = exact.draft_head(text, trace.hidden)
    assert relative(out, rows[-1:]) < TOLERANCE
    assert_head_is_exact(state, keys, values, len(text))
    assert state.mtp_hidden.shape[0] == 0

"""`rehearsal:tiny` on CPU float32: the embedded model's text, drafts and acceptance.

Bound: widened logits may differ from the embedded ones by float32 rounding through twelve
layers whose dead twins cancel; measured at most 5e-5 of logits up to 30, LIMIT allows ten times
that. Two models whose logits differ by at most LIMIT choose the same token wherever the top-2
margin is above 2 LIMIT, so texts are compared up to the first narrower step.
"""

import json
import resource
from pathlib import Path

import pytest
import torch

from lumotree.decoder import DecoderConfig
from lumotree.draft import mtp
from lumotree.engine import Engine
from lumotree.model.checkpoint import EMBEDDED, weights_sha256
from lumotree.model.runner import RowRunner
from lumotree.model.source import open_source
from lumotree.request import SamplingParams
from lumotree.sampling import TokenHistory, sample_rows
from lumotree.text import ChatTokenizer
from tests.core.support import plain, prefill

LIMIT = 5e-4
CPU = torch.device("cpu")
CORPUS = Path(__file__).parents[2] / "corpora" / "first.jsonl"
CHAIN = DecoderConfig("chain-5", 5, False)


@pytest.fixture(scope="module")
def engines():
    """The embedded model and its rehearsal, with the rows that float32 wants on a processor."""
    found = []
    for name in ("embedded", "rehearsal:tiny"):
        with pytest.MonkeyPatch.context() as patch:
            # The probe has tests of its own; here it would cost most of the time.
            patch.setattr("lumotree.engine.probe_row_multiple", lambda model: 4)
            found.append(Engine.load(name, dtype="float32", device="cpu"))
    return found


@pytest.fixture(scope="module")
def prompts():
    tokenizer = ChatTokenizer.load(EMBEDDED)
    with CORPUS.open(encoding="utf-8") as corpus:
        body = json.loads(next(corpus))["body"]
    chat = tokenizer.encode_chat([m for m in body["messages"] if m["role"] == "user"][:1])
    return [chat[-40:], tokenizer.encode("import json\n\ndef read_lines(path):\n")]


def margins(engine, prompt, generated):
    """Top-2 gap before every generated token, and the logits."""
    _, logits = prefill(engine.model, [*prompt, *generated], room=8)
    rows = logits[len(prompt) - 1 : -1]
    best = rows.topk(2).values
    return best[:, 0] - best[:, 1], rows


def test_greedy_text_drafts_and_acceptance_are_the_embedded_models(engines, prompts):
    small, wide = engines
    compared = 0
    for prompt in prompts:
        theirs, ours = (e.decoder(CHAIN).generate(prompt, plain(20)) for e in engines)
        gaps, logits = margins(small, prompt, theirs.token_ids)
        _, widened = margins(wide, prompt, theirs.token_ids)
        tokens = small.model.config.vocab_size
        assert (widened[:, :tokens] - logits).abs().max() < LIMIT
        narrow = (gaps <= 2 * LIMIT).nonzero().flatten().tolist()
        sure = narrow[0] if narrow else len(theirs.token_ids)
        assert ours.token_ids[:sure] == theirs.token_ids[:sure]
        if not narrow:
            assert ours.accepted_by_depth == theirs.accepted_by_depth
            assert ours.steps == theirs.steps
        compared += sure
    assert compared > 20, "the prompts must compare something"


def test_mtp_candidates_are_the_embedded_models(engines, prompts):
    text = prompts[1]
    found = []
    for engine in engines:
        state, logits = prefill(engine.model, text)
        pending = logits[-1].argmax().item()
        runner = RowRunner(engine.model, "natural", 4)
        with torch.inference_mode():
            found.append(mtp.draft(engine.model, state, [*text, pending], 5, runner))
    assert found[0] == found[1]
    assert all(token < engines[0].model.config.vocab_size for _, best in found[1] for token in best)


def test_a_padded_vocabulary_is_never_sampled(engines, prompts):
    """Not even hot, with every filter off and every live token under penalties."""
    small, wide = engines
    tokens = small.model.config.vocab_size
    _, logits = prefill(wide.model, prompts[1], room=8)
    rows = logits.repeat(40, 1)
    params = SamplingParams(
        temperature=2.0, top_p=1.0, top_k=0, presence_penalty=2.0, frequency_penalty=2.0
    )
    history = TokenHistory(wide.model.config.vocab_size, prompts[1], CPU)
    history.add([*range(tokens)] * 3)
    paths = torch.zeros(len(rows), 0, dtype=torch.long)
    sampled = sample_rows(rows, params, history, paths, torch.arange(len(rows)))
    assert sampled.max() < tokens < wide.model.config.vocab_size
    assert sampled.unique().numel() > 100, "hot samples vary"


def test_description_says_what_it_is(engines):
    small, wide = engines
    about = wide.description()
    assert about["name"] == "rehearsal:tiny" and about["max_context"] == 262144
    assert about["label"] == "acceptance of the embedded model, cost of the TINY shape"
    assert about["rehearsal"]["embedded_sha256"] == weights_sha256(EMBEDDED)
    assert about["rehearsal"]["geometry"]["hidden_size"] == wide.model.config.hidden_size
    assert about["rehearsal"]["trained_positions"] == small.max_context
    assert about["weights_sha256"] != small.description()["weights_sha256"]
    assert "label" not in small.description()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_of_full_size_touches_the_host():
    source = open_source("rehearsal:27b")
    weights = source.weights(torch.device("cuda"), torch.bfloat16)
    name, shape = "lm_head.weight", (248320, 5120)
    weights.take("model.norm.weight", (5120,))  # the CUDA context has its own host memory
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = weights.take(name, shape)
    assert made.is_cuda and made.dtype == torch.bfloat16
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB

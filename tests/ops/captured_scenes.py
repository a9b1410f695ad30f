"""Scenes of test_captured.py, run as `python captured_scenes.py DEVICE NAME ...`.

A process of its own, because Triton reads whether to interpret when it is imported.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

from lumotree.audit.faults import FAULTS  # noqa: E402
from lumotree.batch import Active  # noqa: E402
from lumotree.captured import batch as batch_module  # noqa: E402
from lumotree.captured import decoder as decoder_module  # noqa: E402
from lumotree.captured.batch import CapturedBatch  # noqa: E402
from lumotree.captured.clock import START  # noqa: E402
from lumotree.captured.decoder import CapturedDecoder  # noqa: E402
from lumotree.captured.graphs import StepGraphs  # noqa: E402
from lumotree.decoder import Decoder, DecoderConfig, Run  # noqa: E402
from lumotree.draft.plan import Proposal  # noqa: E402
from lumotree.model.hybrid import HybridModel  # noqa: E402
from lumotree.model.runner import RowRunner  # noqa: E402
from lumotree.model.source import open_source  # noqa: E402
from lumotree.request import SamplingParams  # noqa: E402
from lumotree.state import HybridState  # noqa: E402
from tests.core.beside import facts, noted_fill, rounds_of_all, run_alone  # noqa: E402
from tests.tiny import Geometry, save_tiny  # noqa: E402

DEVICE = torch.device("cpu")
PROMPTS = [[7 * i % 97 for i in range(n)] for n in (3, 9, 5, 16)]
SAMPLINGS = [
    SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=5, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=4, seed=2, ignore_eos=True),
    SamplingParams(max_tokens=3, seed=3, top_k=0, ignore_eos=True),  # sampled on the host
]


class Letters:
    """A tokenizer of 97 ids."""

    eos_ids = frozenset()

    def token_bytes(self, token: int) -> bytes:
        return bytes([97 + token % 26])


def load() -> HybridModel:
    with tempfile.TemporaryDirectory() as folder:
        geometry = Geometry(layers=("linear_attention", "full_attention"))
        save_tiny(Path(folder), geometry, mtp=True)
        return HybridModel.load(open_source(folder), torch.float32, DEVICE)


def draft_keys(run: Run, state: HybridState) -> torch.Tensor:
    """The draft head's keys of a prompt, which nothing after it may touch."""
    return state.mtp_kv.keys[:, :, 1 : run.prompt_tokens].clone()


def together():
    """Requests that enter one by one answer, and draft, what each does alone: at every size of a
    graph, beside a place to spare, and in a seat that another left with passes under way."""
    config = DecoderConfig("-1,0,1,2,0", 3, True, first_passes=1)
    model = load()
    given = (model, Letters(), config, RowRunner(model, "natural", 1))
    noted, drafts = noted_fill()
    decoder_module.fill = batch_module.fill = noted
    decoder_module.is_sure = batch_module.is_sure = lambda result, depth: True
    single, alone = CapturedDecoder(*given), {}
    for number in (1, 2, 3):
        run, state = run_alone(single, PROMPTS[number], SAMPLINGS[number])
        alone[number] = facts(single.finish(run)), drafts[run.suffix], draft_keys(run, state)

    batch = CapturedBatch(*given, 4, 24)
    sizes, launch = set(), StepGraphs.launch

    def watched(graphs, name):
        sizes.add((name, graphs.upload.requests))
        launch(graphs, name)

    StepGraphs.launch = watched
    active: dict[int, Active] = {}

    def enter(number: int, seat: int) -> None:
        decoder = batch.decoders[seat]
        active[number] = Active(decoder, *decoder.begin(PROMPTS[number], SAMPLINGS[number]))

    def round_() -> None:
        going = [a for a in active.values() if a.run.finish_reason is None]
        assert batch.step(going) == {}

    enter(0, 3)
    round_()
    enter(1, 0)
    round_()
    enter(2, 1)
    round_()
    gone = active.pop(0)  # cancelled, with drafts under way
    assert gone.run.finish_reason is None
    enter(3, 3)
    while any(a.run.finish_reason is None for a in active.values()):
        round_()
    for number in (1, 2, 3):
        run, state = active[number].run, active[number].state
        made = facts(active[number].decoder.finish(run)), drafts[run.suffix]
        assert made == alone[number][:2], number
        assert torch.equal(draft_keys(run, state), alone[number][2]), number
    verified = {size for name, size in sizes if name == "verify"}
    assert verified == {1, 2, 4} and ("more", 4) in sizes, sizes


def cut():
    """Several requests verify fewer rows each than one, and draft and answer what one does alone
    with a tree of those rows."""
    config = DecoderConfig("-1,0,1,2,0,3", 2, True, round_rows=8)
    model = load()
    given = (Letters(), RowRunner(model, "natural", 1))
    noted, drafts = noted_fill()
    decoder_module.fill = batch_module.fill = noted
    small = CapturedDecoder(model, given[0], replace(config, tree="chain-3"), given[1])
    params = [SamplingParams(max_tokens=4, seed=seed, ignore_eos=True) for seed in (1, 2)]
    whole, _ = run_alone(small, PROMPTS[2], params[1])  # one of them will do: this is slow
    batch = CapturedBatch(model, given[0], config, given[1], 2, 24)
    kept = {size: captured.kept for size, captured in batch.rounds.items()}
    # The path to the end of the tail has five rows: two of them are too many.
    assert kept == {1: (0, 1, 2, 3, 4, 5), 2: (0, 1, 2, 3)}, kept
    assert batch.rounds[2].drafted.steps == 4
    _, run = rounds_of_all(batch, PROMPTS[1:3], params)
    made, wanted = drafts[run.suffix], drafts[whole.suffix]
    assert len(made) > 1 and made == wanted[: len(made)]
    assert run.tokens == whole.tokens[: len(run.tokens)]


def forced():
    """Paths that an audit publishes leave every surface, the draft head's too, as the torch
    definition leaves it, near enough: it sums in another order."""
    model = load()
    config = DecoderConfig("-1,0,0,1", 2, False)
    given = (model, Letters(), config, RowRunner(model, "natural", 1))
    plan = [([7, 8, 9, 10], [0, 1, 3], 20), ([20, 1, 2, 3], [0], 5)]
    surfaces = ("recurrent", "conv", "MTP hidden", "MTP keys", "MTP values")

    def end(decoder) -> tuple[list[int], dict[str, torch.Tensor]]:
        """The next drafts, and what both paths leave."""
        run, state = decoder.begin(PROMPTS[1], SAMPLINGS[0])
        decoder.repend(run, plan[0][0][0])
        for tokens, path, pending in plan:
            decoder.propose(run, state)
            proposal = Proposal(decoder.tree, tokens, [True] * 4, [None] * 4)
            verified = decoder.verify(state, proposal)
            run.tokens += [*(tokens[row] for row in path[1:]), pending]
            verified.rows.publish(path, verified.hidden)
        hidden = state.mtp_hidden.clone()
        proposal = decoder.propose(run, state)
        caches = [side[:, :, 1 : state.length + 1].clone()
                  for side in (state.mtp_kv.keys, state.mtp_kv.values)]  # fmt: skip
        left = (state.recurrent.clone(), state.conv.clone(), hidden, *caches)
        return proposal.tokens, dict(zip(surfaces, left, strict=True))

    captured = CapturedDecoder(*given)
    drafts, left = end(captured)
    others, wanted = end(Decoder(*given))
    assert drafts == others
    for name in surfaces:
        torch.testing.assert_close(left[name], wanted[name], rtol=1e-4, atol=1e-4)
    # Faults of the draft head break its surfaces, and nothing else.
    for name, broken in (
        ("MTP rows not refilled", {"MTP keys", "MTP values"}),
        ("pre-norm hidden to the drafter", {"MTP hidden", "MTP keys", "MTP values"}),
    ):
        with FAULTS[name].apply() as mutation:
            _, found = end(captured)
        assert mutation.count > 0
        assert {n for n in surfaces if not torch.equal(found[n], left[n])} == broken, name


def laps():
    """Every stage is booked to the request that took it, drafts or none."""
    seen: list[tuple[str, tuple[Run, ...]]] = []
    decoder_module.Clock.lap = lambda clock, name: seen.append((name, clock.runs))
    given = (load(), Letters())
    config = DecoderConfig("root", 0, False)
    decoder = CapturedDecoder(*given, config, RowRunner(given[0], "natural", 1))
    for prompt in PROMPTS[:2]:
        run, state = decoder.begin(prompt, SAMPLINGS[0])
        decoder.step(run, state)
        taken = [(name, runs) for name, runs in seen if name != START]
        assert taken == [(name, (run,)) for name in ("verify", "select", "publish")], taken
        seen.clear()


if __name__ == "__main__":
    torch.set_num_threads(1)
    DEVICE = torch.device(sys.argv[1])
    for name in sys.argv[2:]:
        globals()[name]()

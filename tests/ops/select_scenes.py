"""Scenes of test_select.py, run as `python select_scenes.py DEVICE NAME ...`.

A process of its own, because Triton reads whether to interpret when it is imported.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from lumotree.ops.select import MAX_TOP_K, SamplingBlock, Selector, TopCandidates  # noqa: E402
from lumotree.request import SamplingParams  # noqa: E402
from lumotree.sampling import TokenHistory, accept_walk, sample_rows  # noqa: E402
from lumotree.tree import TreeDescriptor  # noqa: E402

DEVICE = torch.device("cpu")
FEW = settings(
    max_examples=int(os.environ.get("EXAMPLES", "6")),  # the interpreter is slow
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def tree_of(parents) -> TreeDescriptor:
    return TreeDescriptor("drawn", tuple(parents), (True,) * len(parents))


@st.composite
def trees(draw, rows: int = 6):
    parents = [-1] + [draw(st.integers(0, i)) for i in range(draw(st.integers(0, rows - 1)))]
    return tree_of(parents)


@st.composite
def parameters(draw):
    choose = st.sampled_from
    return SamplingParams(
        temperature=draw(choose([0.0, 0.6, 1.0, 1.7])),
        top_p=draw(choose([1.0, 0.95, 0.5, 0.01])),
        top_k=draw(choose([1, 2, 7, 20, 56, MAX_TOP_K])),
        min_p=draw(choose([0.0, 0.05, 1.0])),
        presence_penalty=draw(choose([0.0, 1.0, -0.7])),
        frequency_penalty=draw(choose([0.0, 0.3])),
        repetition_penalty=draw(choose([1.0, 1.2, 0.8])),
        seed=draw(choose([0, 5, -3, 2**70 + 1])),
    )


class Scene:
    """Logits (multiples of `step`, for ties), a history and drafts of one tree."""

    def __init__(self, tree, vocab, live, seed=0, step=0.0, dtype=torch.float32):
        random_ = torch.Generator().manual_seed(seed)
        rows = len(tree)
        self.tree, self.live = tree, live
        logits = 3 * torch.randn(rows, vocab, generator=random_)
        self.logits = ((logits / step).round() * step if step else logits).to(dtype).to(DEVICE)
        self.logits[:, live:] = 100.0
        tokens = torch.randint(0, live, (rows,), generator=random_, dtype=torch.int32)
        self.tokens = tokens.to(DEVICE)
        prompt, generated = torch.randint(0, live, (2, 20), generator=random_).tolist()
        self.history = TokenHistory(vocab, prompt, DEVICE)
        self.history.add(generated + tokens[: rows // 2].tolist())
        self.length = torch.tensor([40], device=DEVICE)
        self.selector = Selector(tree, vocab, live, DEVICE)
        self.block = SamplingBlock(DEVICE)

    def sample(self, params: SamplingParams) -> tuple[list[int], list[int]]:
        self.block.set(params)
        history = self.history
        self.selector.fallback.fill_(-1)
        sampled = self.selector.sample(
            self.logits, self.block, history.generated, history.prompt_seen, self.tokens,
            self.length,
        )  # fmt: skip
        return sampled.tolist(), self.selector.fallback.tolist()

    def define(self, params: SamplingParams) -> list[int]:
        deepest = max(self.tree.depth)
        below = [[*p[1:], *[-1] * (deepest - len(p) + 1)] for p in self.tree.root_paths]
        ids = torch.cat((self.tokens.long(), torch.tensor([-1], device=DEVICE)))
        paths = ids[torch.tensor(below, device=DEVICE).view(len(self.tree), deepest).long()]
        positions = torch.tensor(self.tree.depth, device=DEVICE) + self.length + 1
        known = TokenHistory(self.live, [], DEVICE)
        known.generated = self.history.generated[: self.live]
        known.prompt_seen = self.history.prompt_seen[: self.live]
        return sample_rows(
            self.logits[:, : self.live].float(), params, known, paths, positions
        ).tolist()

    def check(self, params: SamplingParams) -> int:
        """Every row that the device keeps has the defined token; returns how many it kept."""
        sampled, fallback = self.sample(params)
        wanted = self.define(params)
        assert set(fallback) <= {0, 1} and all(0 <= token < self.live for token in sampled)
        for token, host, right in zip(sampled, fallback, wanted, strict=True):
            assert host or token == right, (params, sampled, wanted)
        return fallback.count(0)


def sampling():
    @FEW
    @given(trees(), parameters(), st.integers(0, 9), st.sampled_from([(500, 500), (300, 130)]))
    def distinct(tree, params, seed, size):
        scene = Scene(tree, *size, seed)
        assert scene.check(params) == len(tree)

    distinct()


def ties():
    @FEW
    @given(
        trees(3),
        parameters(),
        st.integers(0, 9),
        st.sampled_from([0.25, 2.0]),
        st.sampled_from([torch.float32, torch.bfloat16]),
    )
    def coarse(tree, params, seed, step, dtype):
        scene = Scene(tree, 700, 650, seed, step, dtype)
        kept = scene.check(params)
        assert kept == len(tree) or step == 2.0 or params.top_k > 7

    coarse()


def poison():
    tree = tree_of([-1, 0, 0, 1, 1, 4])
    for params in (SamplingParams(), SamplingParams(temperature=0.0)):
        scene = Scene(tree, 300, 250)
        clean = scene.define(params)
        scene.logits[1] = math.nan
        scene.logits[2, 17] = math.nan
        scene.logits[3] = -math.inf
        scene.logits[4, 5] = math.inf
        scene.logits[5, 4:] = -math.inf
        sampled, fallback = scene.sample(params)
        assert fallback == [0, 1, 1, 1, 1, 0] and sampled[0] == clean[0]
        assert sampled[5] == scene.define(params)[5] < 4
        assert all(0 <= token < 250 for token in sampled)
        scene.check(params)


def unsupported():
    for params in (SamplingParams(top_k=0), SamplingParams(top_k=MAX_TOP_K + 1)):
        scene = Scene(tree_of([-1, 0]), 300, 300)
        assert not SamplingBlock.supports(params)
        assert scene.sample(params)[1] == [1, 1]
        assert scene.sample(SamplingParams())[1] == [0, 0]
    flat = Scene(tree_of([-1]), 700, 700)
    flat.logits.zero_()
    assert flat.sample(SamplingParams())[1] == [1]


def few_live():
    """A vocabulary of which the tokenizer knows the first ids only, and fewer than top_k."""
    for live in (3, 40, 600):
        scene = Scene(tree_of([-1]), 1500, live)
        for params in (SamplingParams(top_k=56), SamplingParams(temperature=0.0)):
            assert scene.check(params) == 1


def rows_alone():
    """A row's token does not depend on the rows beside it, nor on its index."""
    scene = Scene(tree_of([-1, 0, 0, 2, 1, 4]), 500, 500, seed=4)
    params = SamplingParams(frequency_penalty=0.4, repetition_penalty=1.3)
    whole, _ = scene.sample(params)
    path = [0, 1, 4, 5]
    chain = Scene(tree_of([-1, 0, 1, 2]), 500, 500, seed=4)
    chain.logits, chain.tokens = scene.logits[path], scene.tokens[path]
    chain.history = scene.history
    assert chain.sample(params)[0] == [whole[row] for row in path]


def walks():
    @FEW
    @given(trees(10), st.data())
    def walk(tree, data):
        rows = len(tree)

        def values(low, high):
            return data.draw(st.lists(st.integers(low, high), min_size=rows, max_size=rows))

        tokens, sampled, active = values(0, 3), values(0, 3), [1, *values(0, 1)[1:]]
        flagged = values(0, 9)
        selector = Selector(tree, 8, 8, DEVICE)
        selector.result.fill_(-7)
        selector.sampled.copy_(torch.tensor(sampled))
        selector.fallback.copy_(torch.tensor([value == 9 for value in flagged]))
        counts = torch.arange(8, dtype=torch.int32, device=DEVICE)
        drafts = torch.tensor(tokens, dtype=torch.int32, device=DEVICE)
        selector.walk(drafts, torch.tensor(active, dtype=torch.uint8, device=DEVICE), counts)
        path, pending = accept_walk(tree.children, tokens, active, sampled)
        outcome = selector.outcome()
        emitted = [*(tokens[row] for row in path[1:]), pending]
        if any(flagged[row] == 9 for row in path):
            path, emitted = [], []
        else:
            assert outcome.pending == pending
        assert outcome.flag == (not path) and list(outcome.path) == path
        assert selector.path.rows.tolist() == path + [0] * (max(tree.depth) + 2 - len(path))
        assert int(selector.path.count) == len(path) and list(outcome.sampled) == sampled
        wanted = [i + emitted.count(i) for i in range(8)]
        assert counts.tolist() == wanted
        steps = max(tree.depth) + 1
        hidden = torch.arange(3.0 * rows, device=DEVICE).view(rows, 3)
        to = torch.full((steps, 3), -1.0, device=DEVICE)
        after = torch.full((steps,), -1, dtype=torch.int32, device=DEVICE)
        count = torch.full((1,), -1, dtype=torch.int32, device=DEVICE)
        selector.take(hidden, drafts, to, after, count)
        padded = path + [0] * (steps - len(path))
        assert to.tolist() == hidden[padded].tolist() and int(count) == len(path)
        assert after[: len(path)].tolist() == emitted

    walk()


def seats():
    """Requests beside each other: each has the result it has alone, and an empty seat nothing."""
    tree, vocab, padded, places = tree_of([-1, 0, 0, 2, 1]), 500, 8, [3, -1, 0]
    rows, steps = len(tree), 3
    kinds = [
        SamplingParams(temperature=0.0),
        None,
        SamplingParams(top_k=7, frequency_penalty=0.4, repetition_penalty=1.3, seed=3),
    ]
    scenes = [Scene(tree, vocab, vocab, seed) for seed in range(3)]
    seats = torch.tensor(places, dtype=torch.int32, device=DEVICE)
    together = Selector(tree, vocab, vocab, DEVICE, seats=seats, padded=padded)
    block = SamplingBlock(DEVICE, 5)

    def room(*shape, dtype=torch.int32):
        return torch.full(shape, 7, dtype=dtype, device=DEVICE)

    counts, seen = room(5, vocab), room(5, vocab, dtype=torch.uint8).bool()
    length, logits = room(5), room(3 * padded, vocab, dtype=torch.float32)
    tokens, active = room(3, padded), room(3, padded, dtype=torch.uint8)
    hidden = torch.randn(3 * padded, 6, device=DEVICE)
    taken = room(5, steps, 6, dtype=torch.float32), room(5, steps), room(5)
    for i, (scene, seat, params) in enumerate(zip(scenes, places, kinds, strict=True)):
        sample = scene.selector.sampled
        logits[i * padded : i * padded + rows] = scene.logits
        if seat < 0:
            continue
        scene.length.add_(i)
        block.set(params, seat)
        counts[seat], seen[seat] = scene.history.generated, scene.history.prompt_seen
        length[seat] = scene.length.int()
        scene.sample(params)
        scene.tokens[1] = sample[0]  # a draft that is right, so that a path has two rows
        scene.sample(params)
        tokens[i, :rows], active[i, :rows] = scene.tokens, 1
    together.results.fill_(-7)
    before = counts.clone()
    flat = tokens.flatten(), active.flatten()
    together.sample(logits, block, counts, seen, flat[0], length)
    together.walk(*flat, counts)
    together.take(hidden, flat[0], *taken)
    for i, (scene, seat) in enumerate(zip(scenes, places, strict=True)):
        alone, own = scene.selector, slice(i * padded, i * padded + rows)
        if seat < 0:
            assert set(together.results[i].tolist()) == {-7}
            continue
        alone.walk(tokens[i, :rows].contiguous(), active[i, :rows].contiguous(),
                   scene.history.generated)  # fmt: skip
        want = room(steps, 6, dtype=torch.float32), room(steps), room(1)
        alone.take(hidden[own].contiguous(), scene.tokens, *want)
        assert together.outcome(together.results[i]) == alone.outcome() and alone.path.count > 1
        assert torch.equal(together.path.rows[i], alone.path.rows)
        assert torch.equal(together.path.count[i : i + 1], alone.path.count)
        assert torch.equal(counts[seat], scene.history.generated)
        for here, there in zip(taken, want, strict=True):
            assert torch.equal(here[seat].flatten(), there.flatten())
    for seat in (1, 2, 4):
        assert torch.equal(counts[seat], before[seat])
        assert all((buffer[seat] == 7).all() for buffer in taken)


def best():
    for dtype in (torch.float32, torch.bfloat16):
        for vocab, live in ((500, 430), (5000, 4999), (9, 3)):
            random_ = torch.Generator().manual_seed(vocab)
            logits = torch.randn(5, vocab, generator=random_).to(dtype).to(DEVICE)
            logits[1] = (2 * logits[1]).round()
            logits[2] = math.nan
            logits[3] = -math.inf
            logits[4, 1:3] = torch.tensor([0.0, -0.0])
            top = TopCandidates(7, vocab, live, DEVICE)
            top.found.fill_(-1)
            found, ordered = (x.clone() for x in top(logits))
            known = logits[:, :live].float()
            assert found.tolist() == known.argmax(-1).tolist() == ordered[:, 0].tolist()
            stable = known.sort(dim=-1, descending=True, stable=True).indices
            assert ordered.tolist() == stable[:, :3].tolist()
            assert top(logits[3:4])[1].tolist() == ordered[3:4].tolist()


if __name__ == "__main__":
    torch.set_num_threads(1)
    DEVICE = torch.device(sys.argv[1])
    for name in sys.argv[2:]:
        globals()[name]()

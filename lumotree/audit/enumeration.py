"""Exact enumeration: the output distribution of tree decoding against autoregressive decoding.

Over a toy language model with a small vocabulary every outcome of every step is followed: rows
are drawn from by production selection, whose exact distributions are read off (`draws`), and
the production walk is run for every combination of samples that it asks for. What comes out is
the probability of every text of a few tokens, to be compared with the chain rule over
`target.distribution`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lumotree import decoder
from lumotree.audit import target
from lumotree.audit.check import Check
from lumotree.audit.draws import Selector, recorded_draws
from lumotree.request import SamplingParams
from lumotree.sampling import TokenHistory
from lumotree.tree import tree_from_name

VOCAB = 7
TOLERANCE = 1e-12
ALL_ON = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=5,
    min_p=0.03,
    presence_penalty=0.6,
    frequency_penalty=0.4,
    repetition_penalty=1.2,
)
PROTOCOL = SamplingParams(top_k=4)
PLAIN = SamplingParams(temperature=1.3, top_p=1.0, top_k=0, presence_penalty=0.0)
SETTINGS = {"all processors": ALL_ON, "protocol": PROTOCOL, "no filters": PLAIN}
TREES = ("chain-2", "-1,0,0,1,1,2", "-1,0,0,0,2,4")


@dataclass(frozen=True)
class Toy:
    """A language model: logits float64 [VOCAB] as a function of the whole text."""

    seed: int

    def logits(self, text: tuple[int, ...]) -> np.ndarray:
        # A tuple of small integers hashes alike in every process.
        key = hash((self.seed, *text)) % 2**63
        return np.random.default_rng(key).normal(0.0, 2.0, VOCAB)


def enumerations(seed: int, length: int, first_step: int = 0) -> Iterator[Check]:
    """One check per tree and setting, over all texts of `length` tokens."""
    step = first_step - 1
    for name, params in SETTINGS.items():
        for tree in TREES:
            step += 1
            choose = random.Random(f"{seed} {tree} {name}")
            prompt = tuple(choose.choices(range(VOCAB), k=4))
            toy = Toy(choose.randrange(2**32))
            ours = tree_texts(toy, tree, params, prompt, length)
            theirs = chain_texts(toy, params, prompt, length)
            apart = max(abs(ours.get(text, 0.0) - theirs.get(text, 0.0)) for text in ours | theirs)
            wrong = not apart <= TOLERANCE
            yield Check(
                "enumeration",
                f"tree {tree}, {name}, {len(theirs)} texts",
                not wrong,
                f"probabilities differ by {apart:.1e}" if wrong else "",
                {"largest difference": apart},
                step,
            )


def chain_texts(
    toy: Toy, params: SamplingParams, prompt: tuple[int, ...], length: int
) -> dict[tuple[int, ...], float]:
    """Autoregressive: the chain rule."""
    texts = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, weight in texts.items():
            row = target.distribution(toy.logits(prompt + text), params, text, prompt)
            for token in np.flatnonzero(row):
                longer[(*text, int(token))] = weight * row[token]
        texts = longer
    return texts


def tree_texts(
    toy: Toy, tree: str, params: SamplingParams, prompt: tuple[int, ...], length: int
) -> dict[tuple[int, ...], float]:
    """Step after step: the first token from the prompt's row, then from trees."""
    first = target.distribution(toy.logits(prompt), params, (), prompt)
    texts = {(int(token),): first[token] for token in np.flatnonzero(first)}
    for done in range(1, length):  # shorter texts first: nothing is added to them any more
        for text in [text for text in texts if len(text) == done]:
            weight = texts.pop(text)
            for tokens, share in step_outcomes(toy, tree, params, prompt, text):
                longer = (*text, *tokens)[:length]
                texts[longer] = texts.get(longer, 0.0) + weight * share
    return texts


def step_outcomes(
    toy: Toy, name: str, params: SamplingParams, prompt: tuple[int, ...], text: tuple[int, ...]
) -> Iterator[tuple[list[int], float]]:
    """Every (emitted tokens, probability) of one step; the last token of `text` is pending."""
    tree = tree_from_name(name)
    choose = random.Random(hash((toy.seed, 1, *text)))
    tokens = [text[-1]]
    for row in range(1, len(tree)):
        taken = {tokens[r] for r in tree.children[tree.parents[row]] if r < row}
        tokens.append(choose.choice([t for t in range(VOCAB) if t not in taken]))
    logits = np.stack(
        [toy.logits((*prompt, *text, *(tokens[r] for r in path[1:]))) for path in tree.root_paths]
    )
    history = TokenHistory(VOCAB, prompt, "cpu")
    history.add(text)
    with recorded_draws() as draws:
        Selector(torch.device("cpu")).choose(
            tree, tokens, torch.from_numpy(logits), params, history, len(prompt) + len(text) - 1
        )
    rows = draws.probabilities(VOCAB)

    def walk(sampled):
        return decoder.accept_walk(tree.children, tokens, [True] * len(tree), sampled)

    for path, pending, weight in walks(walk, rows):
        yield [*(tokens[row] for row in path[1:]), pending], weight


class _Asked(Exception):
    def __init__(self, row: int) -> None:
        self.row = row


class _Sampled(dict):
    """Samples by row; a row that has none yet is asked for."""

    def __missing__(self, row: int) -> int:
        raise _Asked(row)


def walks(
    walk: Callable[[_Sampled], tuple[list[int], int]], rows: np.ndarray
) -> Iterator[tuple[list[int], int, float]]:
    """Every outcome of a walk, with its probability: (path, pending, weight)."""
    todo = [(_Sampled(), 1.0)]
    while todo:
        sampled, weight = todo.pop()
        try:
            path, pending = walk(sampled)
        except _Asked as asked:
            for token in np.flatnonzero(rows[asked.row]):
                more = _Sampled(sampled)
                more[asked.row] = int(token)
                todo.append((more, weight * rows[asked.row, token]))
        else:
            yield path, pending, weight

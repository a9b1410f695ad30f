"""Many walks on one captured step, and the G-test of what each visited row drew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.stats import chi2
from torch import Tensor

from lumotree import decoder
from lumotree.request import SamplingParams
from lumotree.sampling import TokenHistory
from lumotree.tree import TreeDescriptor

# Rows with fewer visits are not tested, as published for the sampler audit (arXiv 2609.23900).
MIN_VISITS = 2000
# Tokens expected less often than this are counted together.
MIN_EXPECTED = 5.0
# Of a false alarm in a whole audit: shared equally by steps, and in a step by tested rows.
ALPHA = 1e-3
BATCH = 250
# Positions between two walks of one seed; no walk is that deep.
STRIDE = 64


@dataclass(frozen=True)
class WalkStep:
    """A captured step over the tokens that matter. rows: target probabilities [rows, tokens].

    logits float32 [rows, tokens]; prompt and generated as token numbers of this vocabulary.
    """

    tree: TreeDescriptor
    tokens: list[int]
    logits: Tensor
    rows: np.ndarray
    params: SamplingParams
    prompt: list[int]
    generated: list[int]


def tally(step: WalkStep, count: int, seed: int) -> np.ndarray:
    """How often each row, when visited, drew each token: int64 [rows, tokens].

    Each batch is a request of its own seed, each walk in it stands at positions of its own;
    rows are drawn by `sample_rows` and followed by `accept_walk`, as the decode loop has them.
    """
    tree, device = step.tree, step.logits.device
    n, vocab = step.logits.shape
    history = TokenHistory(vocab, step.prompt, device)
    history.add(step.generated)
    deepest = max(tree.depth)
    below = [
        [*(step.tokens[r] for r in p[1:]), *[-1] * (deepest - len(p) + 1)] for p in tree.root_paths
    ]
    paths = torch.tensor(below, dtype=torch.long, device=device).view(n, deepest)
    depth = torch.tensor(tree.depth, device=device)
    children, active = tree.children, [True] * n
    found = np.zeros((n, vocab), dtype=np.int64)
    for batch, start in enumerate(range(0, count, BATCH)):
        size = min(BATCH, count - start)
        positions = STRIDE * torch.arange(size, device=device)[:, None] + depth + 1
        drawn = decoder.sample_rows(
            step.logits.repeat(size, 1),
            replace(step.params, seed=seed + batch),
            history,
            paths.repeat(size, 1),
            positions.flatten(),
        )
        for sampled in drawn.view(size, n).tolist():
            path, pending = decoder.accept_walk(children, step.tokens, active, sampled)
            for row, child in zip(path, path[1:], strict=False):
                found[row, step.tokens[child]] += 1
            found[path[-1], pending] += 1
    return found


@dataclass(frozen=True)
class NodeTest:
    """G-test of one row; p is 0 when a token was drawn that cannot be."""

    row: int
    visits: int
    p: float


def g_tests(found: np.ndarray, rows: np.ndarray, min_visits: int = MIN_VISITS) -> list[NodeTest]:
    """One per row with enough visits. found [rows, tokens] counts, rows their probabilities."""
    tests = []
    for row, counts in enumerate(found):
        visits = int(counts.sum())
        if visits >= min_visits:
            tests.append(NodeTest(row, visits, g_test(counts, rows[row])))
    return tests


def g_test(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of counts [k] under probabilities [k]; rare tokens are pooled."""
    if counts[probabilities == 0].any():
        return 0.0
    expected = counts.sum() * probabilities
    rare = expected < MIN_EXPECTED
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < MIN_EXPECTED and len(expected) > 1:  # the pool itself may be rare
        smallest = int(np.argmin(expected[:-1]))
        observed[smallest] += observed[-1]
        expected[smallest] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    if len(expected) < 2:
        return 1.0
    some = observed > 0
    g = 2 * float((observed[some] * np.log(observed[some] / expected[some])).sum())
    return float(chi2.sf(g, len(expected) - 1))


def reduced(
    tree: TreeDescriptor,
    tokens: Sequence[int],
    logits: Tensor,
    rows: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    generated: Sequence[int],
    least_reach: np.ndarray,
) -> WalkStep:
    """The step over its reachable rows, and over the tokens that any row may draw or carries.

    rows: target probabilities over the whole vocabulary; least_reach: bool [rows], rows to keep,
    closed under parent. Beyond the tokens with a probability the best 64 of each row are kept, so
    that a wrongly processed row finds what it would draw.
    """
    part, kept = tree.restrict(tuple(bool(on) for on in least_reach))
    kept = list(kept)
    best = logits[kept].topk(min(64, logits.shape[1])).indices.flatten().tolist()
    ids = sorted({*best, *tokens, *np.flatnonzero(rows[kept].any(0)).tolist()})
    number = {token: i for i, token in enumerate(ids)}
    return WalkStep(
        part,
        [number[tokens[row]] for row in kept],
        logits[kept][:, ids].contiguous(),
        rows[kept][:, ids],
        params,
        [number[token] for token in set(prompt) if token in number],
        [number[token] for token in generated if token in number],
    )

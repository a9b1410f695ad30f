"""What a row shall be sampled from, spelled out in float64 for one row at a time.

Shares no code with lumotree.sampling: penalties, temperature, top-k, top-p and min-p are written
from their definitions, token by token where tokens matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from lumotree.request import SamplingParams
from lumotree.tree import TreeDescriptor


def distribution(
    logits: np.ndarray,
    params: SamplingParams,
    generated: Iterable[int],
    prompt: Iterable[int],
) -> np.ndarray:
    """Probabilities [V] of the next token; logits float64 [V].

    generated: every token generated before, drafts on the row's own path included.
    """
    x = logits.astype(np.float64).copy()
    counts = Counter(generated)
    for token in set(prompt) | set(counts):
        if params.repetition_penalty != 1:
            x[token] *= params.repetition_penalty if x[token] < 0 else 1 / params.repetition_penalty
        if counts[token]:
            x[token] -= params.frequency_penalty * counts[token] + params.presence_penalty
    if params.greedy:
        return np.eye(1, len(x), int(np.argmax(x)))[0]
    x /= params.temperature
    kept = np.ones(len(x), dtype=bool)
    if params.top_k:
        kept &= x >= np.sort(x)[::-1][: params.top_k][-1]
    if params.top_p < 1:
        order = np.argsort(-x[kept], kind="stable")
        p = np.exp(x[kept][order] - x.max())
        before = np.cumsum(p / p.sum()) - p / p.sum()
        kept &= x >= x[kept][order][before < params.top_p][-1]
    if params.min_p > 0:
        kept &= np.exp(x - x.max()) >= params.min_p
    p = np.where(kept, np.exp(x - x.max()), 0.0)
    return p / p.sum()


def tree_rows(
    logits: np.ndarray,
    tree: TreeDescriptor,
    tokens: Sequence[int],
    params: SamplingParams,
    generated: Sequence[int],
    prompt: Sequence[int],
) -> np.ndarray:
    """`distribution` of every row [rows, V]. The pending token, tokens[0], is in `generated`."""
    return np.stack(
        [
            distribution(logits[row], params, [*generated, *(tokens[r] for r in path[1:])], prompt)
            for row, path in enumerate(tree.root_paths)
        ]
    )


def reach(tree: TreeDescriptor, tokens: Sequence[int], rows: np.ndarray) -> np.ndarray:
    """Probability [rows] that the walk visits each row."""
    found = np.ones(len(tree))
    for row, parent in enumerate(tree.parents):
        if parent >= 0:
            found[row] = found[parent] * rows[parent, tokens[row]]
    return found

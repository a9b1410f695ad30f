"""Start-up probe: at which row counts are tree rows and decoded tokens equal bit for bit?

Nothing is assumed about the BLAS of a machine: a random tree is verified in one forward, then
smaller parts of it at every row count below, then two of its paths are decoded token by token,
and the bits are compared.
"""

from __future__ import annotations

import torch

from lumotree.decoder import prefill
from lumotree.model.hybrid import HybridModel
from lumotree.model.rows import TreeRows
from lumotree.model.runner import RowRunner
from lumotree.ops.reference import KEY_BLOCK
from lumotree.tree import TreeDescriptor, tree_from_name

ROW_MULTIPLES = (4, 8, 16, 32)
# The rows of the largest tree compared; a larger one is not known to have equal bits.
PROBED_ROWS = 32


@torch.inference_mode()
def probe_row_multiple(model: HybridModel, seed: int = 0) -> int | None:
    """The smallest row-count multiple that gives equal bits here, or None when none does.

    The prefix ends just below a key-block boundary, so that the tree crosses it.
    """
    tree = tree_from_name("hydra27")
    generator = torch.Generator().manual_seed(seed)
    count = KEY_BLOCK - 5
    ids = torch.randint(model.config.vocab_size, (count + len(tree),), generator=generator)
    ids = ids.to(model.device)
    for multiple in ROW_MULTIPLES:
        if _equal_bits(model, RowRunner(model, "natural", multiple), tree, ids, count):
            return multiple
    return None


def _equal_bits(
    model: HybridModel, runner: RowRunner, tree: TreeDescriptor, ids: torch.Tensor, count: int
) -> bool:
    capacity = count + len(tree)
    state = model.new_state(capacity, mtp=False)
    prompt, tokens = ids[:count].tolist(), ids[count:].tolist()
    prefill(model, state, prompt)
    before = state.snapshot(tuple(prompt))

    def step(shape: TreeDescriptor, rows_tokens: list[int]) -> tuple[TreeRows, torch.Tensor]:
        index = runner.index(shape)
        rows = TreeRows(index, state.kv, state.length, model.rope, state)
        return rows, model.forward(runner.token_ids(rows_tokens, index.padded), rows)

    rows, hidden = step(tree, tokens)
    whole = model.logits(hidden)
    for smaller in range(runner.multiple, len(tree), runner.multiple):
        part, kept = tree.restrict(tuple(row < smaller for row in range(len(tree))))
        _, hidden = step(part, [tokens[row] for row in kept])
        if not torch.equal(model.logits(hidden)[:smaller], whole[:smaller]):
            return False
    for leaf in (len(tree) - 1, 22):
        path = list(tree.root_paths[leaf])
        state.restore(before)
        rows, hidden = step(tree, tokens)
        wanted = whole[path]
        rows.publish(path, hidden)
        published = (state.recurrent.clone(), state.conv.clone())
        state.restore(before)
        for depth, row in enumerate(path):
            rows, hidden = step(tree_from_name("root"), [tokens[row]])
            if not torch.equal(model.logits(hidden)[0], wanted[depth]):
                return False
            rows.publish([0], hidden)
        if not all(map(torch.equal, published, (state.recurrent, state.conv))):
            return False
    return True

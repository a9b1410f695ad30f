"""Start-up probe of the captured path: are a tree's rows those of decoding, bit for bit, here?"""

from __future__ import annotations

import torch

from lumotree.captured.decoder import CapturedDecoder
from lumotree.decoder import DecoderConfig, prefill
from lumotree.draft.plan import Proposal
from lumotree.model.hybrid import HybridModel
from lumotree.model.runner import RowRunner
from lumotree.state import HybridState

# The prefix ends just below a key block of the attention kernels, so that the tree crosses it.
PREFIX = 251
LEAVES = (31, 22)


@torch.inference_mode()
def probe_equal_bits(model: HybridModel, runner: RowRunner, seed: int = 0) -> bool:
    """Verifies a random tree, then decodes two of its paths token by token, and compares logits
    and published surfaces."""
    tree = CapturedDecoder(model, None, DecoderConfig("hydra27", 0, False), runner)
    chain = CapturedDecoder(model, None, DecoderConfig("root", 0, False), runner)
    count = len(tree.tree)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (PREFIX + count,), generator=generator).tolist()
    prompt, tokens = ids[:PREFIX], ids[PREFIX:]
    for leaf in LEAVES:
        state = _start(tree, prompt)
        proposal = Proposal.root_only(tree.tree, tokens[0])
        for row in tree.kept[1:]:
            proposal.put(row, tokens[row], "suffix")
        verified = tree.verify(state, proposal)
        place = {row: i for i, row in enumerate(tree.kept)}
        path = tree.tree.root_paths[leaf]
        wanted = verified.logits[[place[row] for row in path]]
        verified.rows.publish([place[row] for row in path], verified.hidden)
        published = (state.recurrent.clone(), state.conv.clone())
        keys = state.kv.keys[:, :, : state.length].clone()
        state = _start(chain, prompt)
        for depth, row in enumerate(path):
            verified = chain.verify(state, Proposal.root_only(chain.tree, tokens[row]))
            if not torch.equal(verified.logits[0], wanted[depth]):
                return False
            verified.rows.publish([0], verified.hidden)
        here = (state.recurrent, state.conv)
        if not all(map(torch.equal, published, here)):
            return False
        if not torch.equal(keys, state.kv.keys[:, :, : state.length]):
            return False
    return True


def _start(decoder: CapturedDecoder, prompt: list[int]) -> HybridState:
    """Materialises the prompt in the decoder's slot."""
    state = decoder.reserve(len(prompt))
    state.reset()
    prefill(decoder.model, state, prompt)
    decoder.request.length.fill_(state.length)
    return state

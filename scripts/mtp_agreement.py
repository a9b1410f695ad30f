"""How often the MTP head's first draft is the target's own choice, on given text.

Agreement at depth 1: the share of positions where the head's argmax, from the target's hidden
row and the next token, equals the target's argmax one position later. `--pre-norm` feeds the
hidden row before the final norm instead, a silent fault: it lowers agreement and nothing else.

    python scripts/mtp_agreement.py FILE... [--pre-norm]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lumotree.engine import Engine
from lumotree.model.hybrid import HybridModel
from lumotree.model.rows import PrefillRows

WINDOW = 512


@torch.inference_mode()
def agreement(
    model: HybridModel, tokens: Sequence[int], window: int = WINDOW, pre_norm: bool = False
) -> float:
    """Depth-1 agreement over windows of `tokens`, each computed from an empty state."""
    right = positions = 0
    for start in range(0, len(tokens) - 1, window):
        ids = torch.tensor(tokens[start : start + window], device=model.device)
        chosen, drafted = choices(model, ids, pre_norm)
        right += int((chosen[1:] == drafted).sum())
        positions += len(drafted)
    return right / positions


def choices(model: HybridModel, ids: Tensor, pre_norm: bool) -> tuple[Tensor, Tensor]:
    """What the target and the head expect next.

    chosen[p] follows token p; drafted[p] follows token p + 1, from row p and token p + 1.
    """
    n = ids.numel()
    state = model.new_state(n, mtp=True)
    rows = PrefillRows(state.kv, 0, n, model.rope, state)
    raw, hidden = model.stream(ids, rows)
    chosen = model.logits(hidden).argmax(-1)
    below = raw if pre_norm else hidden
    shifted = torch.cat((torch.zeros_like(below[:1]), below[:-1]))
    head = PrefillRows(state.mtp_kv, 0, n, model.rope, first=1)
    drafted = model.logits(model.draft_forward(ids, shifted, head)).argmax(-1)
    return chosen, drafted[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--window", type=int, default=WINDOW)
    parser.add_argument("--pre-norm", action="store_true")
    args = parser.parse_args()
    engine = Engine.load(args.model)
    for file in args.files:
        tokens = engine.tokenizer.encode(file.read_text(encoding="utf-8"))
        share = agreement(engine.model, tokens, args.window, args.pre_norm)
        print(f"{file}: {share:.3f} over {len(tokens)} tokens")


if __name__ == "__main__":
    main()

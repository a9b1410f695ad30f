"""What drafts are computed with: the model's own heads, or the same in 8 bits."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from lumotree.model.layers import Rows

if TYPE_CHECKING:
    from lumotree.model.hybrid import HybridModel, MTPHead

DRAFT_WEIGHTS = ("model", "fp8")


class Drafter(Protocol):
    """A HybridModel is one."""

    rope: Tensor | None

    def draft_forward(self, token_ids: Tensor, hidden: Tensor, rows: Rows) -> Tensor: ...

    def logits(self, hidden: Tensor, vocab: int | None = None) -> Tensor: ...


class NarrowDrafter:
    """The MTP head and the output head with weights in 8 bits.

    Drafts alone read them: what is proposed may change, what is accepted is the model's business.
    A prompt's draft keys come from the model's own head.
    """

    def __init__(self, model: HybridModel) -> None:
        self.model = model
        self.lm_head = model.table.narrow_weight(model.lm_head)
        self.mtp = _narrow(model.mtp)

    @property
    def rope(self) -> Tensor | None:
        return self.model.rope

    def draft_forward(self, token_ids: Tensor, hidden: Tensor, rows: Rows) -> Tensor:
        return self.mtp(self.model.embed(token_ids), hidden, rows)

    def logits(self, hidden: Tensor, vocab: int | None = None) -> Tensor:
        return self.model.logits(hidden, vocab, self.lm_head)


def _narrow(head: MTPHead) -> MTPHead:
    narrow, head = head.table.narrow_weight, copy(head)
    head.fc, head.layer = narrow(head.fc), copy(head.layer)
    mixer = head.layer.mixer = copy(head.layer.mixer)
    mixer.in_proj, mixer.out_proj = narrow(mixer.in_proj), narrow(mixer.out_proj)
    mlp = head.layer.mlp = copy(head.layer.mlp)
    mlp.gate_up, mlp.down = narrow(mlp.gate_up), narrow(mlp.down)
    return head

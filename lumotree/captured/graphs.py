"""The graphs of one tree's step: verify, select, publish and draft, and what the host reads."""

from __future__ import annotations

import torch

from lumotree.captured.draft import DraftInputs, DraftPasses
from lumotree.captured.graph import replayable
from lumotree.captured.rows import StepRows
from lumotree.captured.step import RequestBuffers, Upload, VerifyStep
from lumotree.decoder import Decoder, Verified
from lumotree.draft.plan import Proposal
from lumotree.state import StateBuffers


class StepGraphs:
    """A step of the decoder's tree and arm, captured over the buffers of a state.

    With `requests`, of so many at once, and the buffers have seats. result int32 [requests, ...]
    and candidates int32 [requests, passes, 5] are the host's copies of `Selector.results` and
    `DraftPasses.results`, filled behind the launches. launches: the graphs by name; "draft" with
    an MTP head alone, and "more" where its last passes are a graph of their own. cut: which rows
    of the decoder's tree the step has, one of its plan's; plan: what fills them; kept: the row
    there behind each row of `tree`.
    """

    def __init__(
        self,
        decoder: Decoder,
        cut: tuple[bool, ...],
        buffers: StateBuffers,
        request: RequestBuffers,
        inputs: DraftInputs | None,
        requests: int | None = None,
        pool=None,
    ) -> None:
        model, config, device = decoder.model, decoder.config, decoder.model.device
        tree, self.kept = decoder.tree.restrict(cut)
        self.plan = decoder.plan.within(cut)
        self.tree, self.padded = tree, (padded := decoder.runner.padded(len(tree)))
        self.upload = upload = Upload(padded, device, requests)
        rows = StepRows(
            model,
            buffers,
            tree,
            padded,
            request.length,
            config.verify,
            config.attention == "stock",
            config.operands == "inline",
            upload.seats,
        )
        self.step = step = VerifyStep(model, request, tree, upload, rows)
        pin = device.type == "cuda"
        self.result = torch.zeros(step.selector.results.shape, dtype=torch.int32, pin_memory=pin)
        work = {"verify": step.verify, "select": step.select, "publish": step.publish}
        self.drafted: DraftPasses | None = None
        if inputs is not None:
            vocab = model.config.vocab_size
            self.drafted = drafted = DraftPasses(
                model,
                buffers.mtp_kv,
                step,
                inputs,
                len(self.plan.mtp),
                config.first_passes,
                min(config.draft_vocab or vocab, vocab),
                decoder.drafter,
            )
            shape = drafted.results.shape
            self.candidates = torch.zeros(shape, dtype=torch.int32, pin_memory=pin)
            work["draft"] = drafted.draft
            if drafted.first < drafted.passes:
                work["more"] = drafted.more
            work["publish"] = lambda: (step.publish(), drafted.take())
        if requests is not None:  # a warm-up is of everybody, and accepts nothing
            upload.sit(range(requests))
            upload.send()
        if pool is None and pin:
            pool = torch.cuda.graph_pool_handle()
        self.launches = {name: replayable(stage, device, pool) for name, stage in work.items()}

    def launch(self, name: str) -> None:
        """Starts a stage, and the host's copy of what it finds."""
        self.launches[name]()
        if name == "select":
            self.result.copy_(self.step.selector.results, non_blocking=True)
        elif name in ("draft", "more"):
            self.candidates.copy_(self.drafted.results, non_blocking=True)

    def put(self, place: int, proposal: Proposal) -> None:
        """A proposal of the step's rows for the next `upload.send`, at its request's place."""
        tokens = [proposal.tokens[row] for row in self.kept]
        self.upload.put(place, tokens, [proposal.active[row] for row in self.kept])

    def answer(self, place: int, proposal: Proposal, rows) -> Verified:
        """What the target said of it, views; rows: what can publish it."""
        start, count = place * self.padded, len(self.tree)
        tokens = [proposal.tokens[row] for row in self.kept]
        active = [proposal.active[row] for row in self.kept]
        hidden = self.step.hidden[start : start + self.padded]
        logits = self.step.logits[start : start + count]
        return Verified(self.tree, self.kept, tokens, rows, hidden, logits, active)

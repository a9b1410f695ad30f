"""Slots against the memory that there is."""

from types import SimpleNamespace

import pytest
import torch

from lumotree.errors import LumoTreeError
from lumotree.prefix import PrefixStore
from lumotree.serve import slots

MIB = 1 << 20


@pytest.mark.parametrize(("taken", "made"), [(10, True), (15, False)])
def test_on_a_gpu_what_slots_took_beside_their_state_counts(monkeypatch, taken, made):
    free = [100 * MIB]

    def reserve(context):
        free[0] -= taken * MIB  # a state of 10 MiB, and the buffers of captured steps
        return SimpleNamespace(nbytes=10 * MIB)

    monkeypatch.setattr(slots, "free_bytes", lambda device: free[0])
    monkeypatch.setattr(slots, "Batch", lambda decoders: None)
    engine = SimpleNamespace(
        model=SimpleNamespace(device=torch.device("cuda"), kernels=False),
        decoder=lambda config: SimpleNamespace(reserve=reserve),
    )
    if made:
        assert len(slots.make_slots(engine, None, 4, 64, PrefixStore(60 * MIB))) == 4
    else:
        with pytest.raises(LumoTreeError, match="MiB are free"):
            slots.make_slots(engine, None, 4, 64, PrefixStore(60 * MIB))


@pytest.mark.parametrize(
    ("free", "known", "says"),
    [(70, 30, None), (50, 30, "60 MiB"), (70, 28, "more than 28 rows.*--active 2")],
)
def test_seats_of_captured_rounds(monkeypatch, free, known, says):
    """The prefix store must fit beside them, and products must keep their bits."""
    pytest.importorskip("triton")
    from lumotree.captured import batch
    from lumotree.decoder import DecoderConfig

    made = SimpleNamespace(rows=[28, 30], decoders=[SimpleNamespace() for _ in range(3)])
    monkeypatch.setattr(batch, "CapturedBatch", lambda *given: made)
    monkeypatch.setattr(slots, "free_bytes", lambda device: free * MIB)
    monkeypatch.setattr(slots, "probe_rows", lambda *given: known)
    engine = SimpleNamespace(
        model=SimpleNamespace(device=torch.device("cuda"), kernels=True),
        tokenizer=None,
        runner=SimpleNamespace(multiple=1, padded=lambda rows: rows),
        row_multiple=1,
    )
    store = PrefixStore(60 * MIB)
    if says is None:
        found = slots.make_slots(engine, DecoderConfig(), 3, 64, store)
        assert [slot.decoder.snapshots for slot in found] == [store] * 3 and found.batch is made
    else:
        with pytest.raises(LumoTreeError, match=says):
            slots.make_slots(engine, DecoderConfig(), 3, 64, store)
    with pytest.raises(LumoTreeError, match="no kernels for this arm"):
        slots.make_slots(engine, DecoderConfig(verify="weaver"), 3, 64, store)

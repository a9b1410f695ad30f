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
        model=SimpleNamespace(device=torch.device("cuda")),
        decoder=lambda config: SimpleNamespace(reserve=reserve),
    )
    if made:
        assert len(slots.make_slots(engine, None, 4, 64, PrefixStore(60 * MIB))) == 4
    else:
        with pytest.raises(LumoTreeError, match="MiB are free"):
            slots.make_slots(engine, None, 4, 64, PrefixStore(60 * MIB))

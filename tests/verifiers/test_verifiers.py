"""Every verifier against a float64 recurrence, on random trees; torch on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lumotree.bench import gdn as bench
from lumotree.bench.inputs import random_operands, random_states
from lumotree.errors import LumoTreeError
from lumotree.ops.gdn import Geometry, Path
from lumotree.tree import TreeDescriptor
from lumotree.verifiers import NAMES, verifier_class
from lumotree.verifiers.compact import fused_update, replay_rows

CPU = torch.device("cpu")
SMALL = Geometry(layers=2, heads=4, key_heads=2, dk=16, dv=8)


@st.composite
def trees(draw) -> TreeDescriptor:
    rows = draw(st.integers(1, 9))
    parents = (-1, *(draw(st.integers(0, row - 1)) for row in range(1, rows)))
    return TreeDescriptor("drawn", parents, (True,) * rows)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(tree=trees(), seed=st.integers(0, 2**16))
def test_outputs_and_published_states_are_right(name, tree, seed):
    case = bench.Case(SMALL, tree, CPU, seed=seed)
    gate = bench.check(case, case.make(name))
    assert gate.green, gate.reasons


@pytest.mark.parametrize("name", ["path-scan", "native-path"])
def test_exact_rows_have_native_bits(name):
    case = bench.Case(SMALL, bench.active_tree("hydra27"), CPU)
    gate = bench.check(case, case.make(name))
    assert gate.states_equal == gate.bf16_outputs_equal == gate.cells == 56


def test_a_commit_fused_with_the_next_verification_equals_a_flush():
    tree = bench.active_tree("-1,0,0,1,1,2")
    steps = [[random_operands(SMALL, 6, CPU, 10 * s + i) for i in range(2)] for s in range(3)]
    results = []
    for flush in (True, False):
        verifier = verifier_class("tree-wy")(tree, SMALL, CPU)
        states = random_states(SMALL, CPU, 0)
        for operands in steps:
            outs = [verifier.verify(i, states, o) for i, o in enumerate(operands)]
            verifier.publish(states, Path.of(tree, (0, 1, 4), CPU))
            if flush:
                verifier.flush(states)
        verifier.flush(states)
        results.append((torch.stack(outs), states))
    for flushed, fused in zip(*results, strict=True):
        torch.testing.assert_close(flushed, fused)


def test_rejected_rows_that_are_not_finite_publish_nothing():
    tree = bench.active_tree("-1,0,0,1")
    for name in NAMES:
        kind = verifier_class(name)
        states = []
        for poison in (False, True):
            verifier, state = kind(tree, SMALL, CPU), random_states(SMALL, CPU, 0)
            for i in range(SMALL.layers):
                operands = random_operands(SMALL, 4, CPU, i)
                if poison:
                    operands.value[2] = float("inf")
                verifier.verify(i, state, operands)
            verifier.publish(state, Path.of(tree, (0, 1, 3), CPU))
            verifier.flush(state)
            states.append(state)
        assert torch.equal(*states) or not verifier.exact, name


def test_one_product_publishes_what_a_replay_does():
    generator = torch.Generator().manual_seed(0)
    key, u = torch.randn(2, 5, 2, 16, generator=generator), torch.randn(2, 5, 4, 8)
    decay = torch.rand(2, 5, 4, generator=generator) * 0.5 + 0.5
    one, other = random_states(SMALL, CPU, 1), random_states(SMALL, CPU, 1)
    replay_rows(one, key, u, decay)
    fused_update(other, key, u, decay)
    torch.testing.assert_close(one, other)


def test_an_unknown_verifier_names_the_known_ones():
    with pytest.raises(LumoTreeError, match="path-scan, native-path"):
        verifier_class("crystal-ball")

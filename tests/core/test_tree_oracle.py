"""A tree row is the token decoded: logits, states and draft-head keys, bit for bit."""

import warnings

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lumotree.draft import mtp
from lumotree.exactness import probe_row_multiple
from lumotree.model.hybrid import HybridModel
from lumotree.model.runner import RowRunner
from lumotree.model.source import open_source
from lumotree.tree import tree_from_name
from tests.core.support import (
    assert_same_bits,
    decode_every_path,
    parent_lists,
    prefill,
    random_tokens,
    relative,
    surfaces,
    tree_of,
    verify,
)
from tests.tiny import Geometry, save_tiny

HYDRA = tree_from_name("hydra27")
FIXTURE = HealthCheck.function_scoped_fixture
DTYPES_AND_ROWS = [
    pytest.param(dtype, rows, id=f"{dtype} {rows}")
    for dtype in ("float32", "bfloat16")
    for rows in ("natural", "matched")
]
# Around the start, around the row count, and where a tree crosses a key block.
PREFIXES = st.one_of(st.integers(1, 65), st.sampled_from([225, 240, 250, 254, 255, 256, 257, 505]))


def check_tree(engine, tree, prefix, seed, every_path=True):
    """Logits of every row, then all surfaces after publishing accepted paths."""
    model, runner = engine.model, engine.runner
    exact = engine.row_multiple is not None
    if not exact:
        warnings.warn("no row multiple gives equal bits here: compared to 1e-5", stacklevel=2)
    vocab = model.config.vocab_size
    prompt, drafts = random_tokens(seed, prefix, vocab), random_tokens(seed + 1, len(tree), vocab)
    state, _ = prefill(model, prompt)
    start = state.snapshot(tuple(prompt))
    nodes = decode_every_path(model, runner, start, state, tree, drafts)

    def propose_and_verify():
        state.restore(start)
        # Five passes leave the head's own guesses behind in its slots, as a draft phase does.
        mtp.draft(model, state, [*prompt, drafts[0]], 5, runner)
        return verify(model, runner, state, tree, drafts)

    step = propose_and_verify()
    for row, node in enumerate(nodes):
        if exact:
            assert torch.equal(step.logits[row], node.logits), f"row {row}"
        else:
            assert relative(step.logits[row], node.logits) < 1e-5, f"row {row}"

    leaves = [row for row in range(len(tree)) if not tree.children[row]]
    ends = range(len(tree)) if every_path else {0, tree.spine[-1], leaves[0], leaves[-1]}
    pending = (seed + 2) % vocab
    for end in ends:
        path = tree.root_paths[end]
        step = propose_and_verify()
        step.publish(path)
        text = (*prompt, *(drafts[row] for row in path))
        ours = refilled(model, runner, state, text, pending)
        state.restore(nodes[end].after)
        theirs = refilled(model, runner, state, text, pending)
        if exact:
            assert_same_bits(ours, theirs)
        else:
            for name, tensor in surfaces(theirs).items():
                if tensor.numel():
                    assert relative(surfaces(ours)[name], tensor) < 1e-5, name


def refilled(model, runner, state, text, pending):
    """The state after the draft head has read `pending`, whose slot is the last one compared."""
    mtp.refill(model, state, (*text, pending), runner)
    saved = state.snapshot(text)
    saved.mtp_hidden.zero_()
    saved.mtp_kv.keys = state.mtp_kv.keys[:, :, : state.length + 1].clone()
    saved.mtp_kv.values = state.mtp_kv.values[:, :, : state.length + 1].clone()
    return saved


@pytest.mark.parametrize(("dtype", "rows"), DTYPES_AND_ROWS)
@settings(max_examples=20, suppress_health_check=[FIXTURE])
@given(parents=parent_lists(), prefix=PREFIXES, seed=st.integers(0, 10**6))
@example(parents=[-1], prefix=1, seed=0)
@example(parents=list(range(-1, 31)), prefix=240, seed=0)
@example(parents=[-1] + [0] * 31, prefix=255, seed=0)
def test_random_trees_equal_their_paths(engines, dtype, rows, parents, prefix, seed):
    check_tree(engines("tiny", dtype, rows), tree_of(parents), prefix, seed, every_path=False)


@pytest.mark.parametrize(("dtype", "rows"), DTYPES_AND_ROWS)
@pytest.mark.parametrize("prefix", [3, 64, 250, 256])
def test_every_path_of_hydra27_can_be_published(engines, dtype, rows, prefix):
    tree, _ = HYDRA.restrict(HYDRA.default_active)
    check_tree(engines("tiny", dtype, rows), tree, prefix, seed=prefix)


@pytest.mark.parametrize("prefix", range(1, 66))
def test_prefixes_up_to_twice_the_row_count(engines, prefix):
    tree = tree_of([-1, 0, 0, 1, 1, 2, 4, 6])
    check_tree(engines("tiny"), tree, prefix, seed=prefix, every_path=False)


@pytest.mark.parametrize("rows", ["natural", "matched"])
@pytest.mark.parametrize("prefix", [37, 251])
def test_embedded_model_rows_equal_their_paths(engines, rows, prefix):
    tree, _ = HYDRA.restrict(HYDRA.default_active)
    check_tree(engines("embedded", rows=rows), tree, prefix, seed=prefix, every_path=False)


def test_embedded_model_rows_equal_their_paths_in_bfloat16(engines):
    """bfloat16 is slow on CPU, so this tree is small; the probe walks hydra27 over a key block."""
    tree = tree_of([-1, 0, 0, 1, 3, 4])
    check_tree(engines("embedded", "bfloat16"), tree, 37, seed=1, every_path=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "geometry",
    [
        pytest.param(Geometry(layers=("linear_attention",) * 2), id="only linear"),
        pytest.param(Geometry(layers=("full_attention",) * 2), id="only full"),
        pytest.param(Geometry(hidden=24, key_dim=4, value_dim=12, head_dim=8), id="odd widths"),
        pytest.param(Geometry(heads=4, kv_heads=1, key_heads=1, key_dim=16), id="ratios of 4"),
        pytest.param(Geometry(key_heads=1), id="48 conv channels"),
        pytest.param(Geometry(conv=2), id="conv width 2"),
    ],
)
def test_other_geometries_equal_their_paths(tmp_path, geometry, dtype):
    save_tiny(tmp_path, geometry, seed=5)
    model = HybridModel.load(open_source(str(tmp_path)), getattr(torch, dtype), torch.device("cpu"))
    multiple = probe_row_multiple(model)

    class Probed:
        row_multiple, runner = multiple, RowRunner(model, "natural", multiple or 4)

    Probed.model = model
    tree, _ = HYDRA.restrict(HYDRA.default_active)
    check_tree(Probed, tree, 250, seed=1, every_path=False)


def test_matched_and_natural_rows_give_the_same_bits(engines):
    """Arms of different row modes may be compared with each other on this machine."""
    natural, matched = engines("embedded"), engines("embedded", rows="matched")
    if natural.row_multiple is None:
        pytest.skip("no row multiple gives equal bits on this machine")
    prompt, tree = random_tokens(1, 40, 4000), tree_of([-1, 0, 0, 1, 2])
    drafts = random_tokens(2, len(tree), 4000)
    state, _ = prefill(natural.model, prompt)
    logits = [
        verify(engine.model, engine.runner, state, tree, drafts).logits
        for engine in (natural, matched)
    ]
    assert torch.equal(*logits)


def test_verification_reads_the_state_and_changes_none_of_it(engines):
    engine = engines("tiny")
    prompt = random_tokens(3, 50, 97)
    state, _ = prefill(engine.model, prompt)
    before = state.snapshot(tuple(prompt))
    verify(engine.model, engine.runner, state, HYDRA, random_tokens(4, 32, 97))
    assert_same_bits(state.snapshot(tuple(prompt)), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["tiny", "embedded"])
def test_equal_bits_hold_on_cpus_with_mkl(engines, model, dtype):
    """Without this, a lost summation order would only loosen the comparisons above."""
    if not torch.backends.mkl.is_available():
        pytest.skip("another BLAS: whether equal bits hold is for the probe to say")
    assert engines(model, dtype).row_multiple is not None


@pytest.mark.parametrize(("rows", "prefix"), [(128, 255), (128, 250), (100, 190)])
def test_trees_of_many_rows_equal_their_paths(engines, rows, prefix):
    """The last key block and the largest tree together are one summation chain of the BLAS."""
    parents = [-1, *[max(0, row - 1 - row % 3) for row in range(1, rows)]]
    check_tree(engines("tiny"), tree_of(parents), prefix, seed=rows, every_path=False)


def test_rows_equal_their_paths_on_two_threads(engines):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tree, _ = HYDRA.restrict(HYDRA.default_active)
        check_tree(engines("embedded"), tree, 251, seed=2, every_path=False)
    finally:
        torch.set_num_threads(before)

import numpy as np
import pytest
import torch

from lumotree.audit import enumeration, seeds, target
from lumotree.audit.check import lines
from lumotree.audit.enumeration import _Sampled, enumerations, walks
from lumotree.audit.faults import fault, selection
from lumotree.audit.sampler import SamplerPlan, audit_sampler, capture
from lumotree.audit.walks import WalkStep, g_test, g_tests, reduced, tally
from lumotree.request import SamplingParams
from lumotree.tree import tree_from_name

PROBE = SamplerPlan.probe()


def test_an_audit_without_faults_passes(engine, prompts):
    found = list(audit_sampler(engine, PROBE, prompts, 0))
    assert all(check.passed for check in found), [c.sentence for c in found if not c.passed]
    names = [line.name for line in lines(found)]
    assert names == ["drafts", "rows", "draws", "walks", "enumeration", "seeds"]


def test_captured_steps_are_those_with_most_to_decide(engine, prompts):
    one, two = capture(engine, PROBE, prompts, 0)
    assert one.tokens != two.tokens and len(one.tree) > 1
    assert one.generated[-1] == one.tokens[0] and one.root_position == (
        len(one.prompt) + len(one.generated) - 1
    )


@pytest.fixture(scope="module")
def walk_step():
    """A step whose drafts are likely, over a small vocabulary."""
    tree = tree_from_name("-1,0,0,1,1,2")
    torch.manual_seed(1)
    logits, tokens = torch.randn(6, 12), [4, 7, 2, 9, 3, 5]
    for row, parent in enumerate(tree.parents):
        if parent >= 0:
            logits[parent, tokens[row]] += 2
    params = SamplingParams(top_k=8)
    rows = target.tree_rows(logits.double().numpy(), tree, tokens, params, [4], [1])
    return WalkStep(tree, tokens, logits, rows, params, [1], [4])


@pytest.mark.parametrize("seed", range(4))
def test_honest_walks_pass_the_g_test(walk_step, seed):
    tests = g_tests(tally(walk_step, 10_000, 100 * seed), walk_step.rows)
    assert len(tests) == 2 and min(test.p for test in tests) > 1e-4


@pytest.mark.parametrize("name", [f.name for f in selection.FAULTS])
def test_walks_alone_see_every_fault_of_selection(walk_step, name):
    """The G-test does not lean on the exact checks beside it."""
    with fault(name).apply() as mutation:
        tests = g_tests(tally(walk_step, 10_000, 0), walk_step.rows)
    assert mutation.count and min(test.p for test in tests) < 1e-6


@pytest.mark.parametrize("name", ["fixed residual", "unconditional accept", "shifted rows"])
def test_enumeration_sees_a_wrong_walk_or_row(name):
    with fault(name).apply():
        assert not all(check.passed for check in enumerations(0, 3))


@pytest.mark.parametrize("seed", range(2))
def test_enumeration_is_exact(seed):
    found = list(enumerations(seed, 3))
    assert len(found) == len(enumeration.TREES) * len(enumeration.SETTINGS)
    assert all(check.passed for check in found)


def test_enumerated_texts_have_probability_one():
    toy = enumeration.Toy(5)
    for texts in (
        enumeration.chain_texts(toy, enumeration.ALL_ON, (1, 2), 3),
        enumeration.tree_texts(toy, "-1,0,0,1", enumeration.ALL_ON, (1, 2), 3),
    ):
        assert sum(texts.values()) == pytest.approx(1, abs=1e-12)
        assert {len(text) for text in texts} == {3}


def test_walks_follow_every_sample_that_is_asked_for():
    rows = np.array([[0.25, 0.75], [0.5, 0.5]])

    def walk(sampled: _Sampled):
        return ([0, 1], sampled[1]) if sampled[0] == 1 else ([0], 0)

    found = {(tuple(path), pending): weight for path, pending, weight in walks(walk, rows)}
    assert found == {((0,), 0): 0.25, ((0, 1), 0): 0.375, ((0, 1), 1): 0.375}


def off(**changes) -> SamplingParams:
    fields = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "presence_penalty": 0.0}
    return SamplingParams(**fields | changes)


@pytest.mark.parametrize(
    ("params", "generated", "prompt", "wanted"),
    [
        (off(), [], [], [8, 4, 2, 1]),
        (off(temperature=0.5), [], [], [64, 16, 4, 1]),
        (off(top_k=2), [], [], [8, 4, 0, 0]),
        (off(top_p=0.5), [], [], [8, 0, 0, 0]),
        (off(top_p=0.54), [], [], [8, 4, 0, 0]),
        (off(min_p=0.25), [], [], [8, 4, 2, 0]),
        (off(presence_penalty=np.log(2)), [0, 0], [1], [4, 4, 2, 1]),
        (off(frequency_penalty=np.log(2)), [0, 0], [1], [2, 4, 2, 1]),
        (off(repetition_penalty=3.0), [0], [2], [2, 4, 2 ** (1 / 3), 1]),
        (off(temperature=0.0), [], [], [1, 0, 0, 0]),
    ],
)
def test_the_definition_by_hand(params, generated, prompt, wanted):
    found = target.distribution(np.log([8.0, 4, 2, 1]), params, generated, prompt)
    assert found == pytest.approx(np.array(wanted) / sum(wanted))


def test_the_g_test_tells_right_from_wrong():
    p = np.array([0.5, 0.3, 0.1999, 0.0001, 0.0])
    rng = np.random.default_rng(0)
    honest = [g_test(rng.multinomial(20_000, p), p) for _ in range(200)]
    assert min(honest) > 1e-4 and 0.3 < np.mean(honest) < 0.7
    assert g_test(rng.multinomial(20_000, [0.52, 0.28, 0.1999, 0.0001, 0.0]), p) < 1e-5
    assert g_test(np.array([5000, 3000, 1999, 1, 1]), p) == 0.0
    assert g_test(np.array([100, 0]), np.array([1.0, 0.0])) == 1.0


def test_rows_with_few_visits_are_in_no_test():
    counts = np.array([[1500, 1500], [900, 900], [0, 0]])
    tests = g_tests(counts, np.full((3, 2), 0.5))
    assert [(t.row, t.visits) for t in tests] == [(0, 3000)]


def test_a_reduced_step_has_the_distribution_of_the_whole_one():
    tree = tree_from_name("-1,0,0,1")
    torch.manual_seed(0)
    logits, tokens = torch.randn(4, 900) * 3, [7, 800, 20, 5]
    params = SamplingParams(top_k=8)
    rows = target.tree_rows(logits.double().numpy(), tree, tokens, params, [3, 7], [1])
    keep = np.array([True, True, False, True])
    small = reduced(tree, tokens, logits, rows, params, [1], [3, 7], keep)
    again = target.tree_rows(
        small.logits.double().numpy(),
        small.tree,
        small.tokens,
        params,
        small.generated,
        small.prompt,
    )
    assert small.tree.parents == (-1, 0, 1) and small.logits.shape[1] < 300
    assert np.abs(again - small.rows).max() < 1e-12
    found = tally(small, 3000, 0)
    assert found[0].sum() == 3000
    assert all(test.p > 1e-4 for test in g_tests(found, small.rows))


def test_noise_of_requests_and_boots():
    found = list(seeds.seed_checks(0, other_process=False))
    assert all(check.passed for check in found) and len(found) == 4
    rows = np.stack([seeds.noise(1).flatten(), seeds.noise(1).flatten()])
    assert not seeds._within("requests", rows).passed

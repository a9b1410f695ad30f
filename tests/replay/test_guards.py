from hypothesis import given
from hypothesis import strategies as st

from replay.guards import check_equality, divergence
from replay.rows import Row

ids = st.lists(st.integers(0, 3), max_size=6)


@given(ids, ids)
def test_divergence_is_the_length_of_the_common_prefix(left, right):
    position = divergence(left, right)
    if position is None:
        assert left == right
    else:
        assert left[:position] == right[:position]
        assert left[position : position + 1] != right[position : position + 1]


def row(arm, token_ids, run=1, request="r", **fields):
    return Row(arm=arm, run=run, request_id=request, token_ids=token_ids, **fields)


def test_arms_and_runs_are_compared_with_the_first():
    rows = [
        row("ar", [1, 2, 3]),
        row("ar", [1, 2, 3], run=2),
        row("tree", [1, 2, 4]),
        row("tree", [1, 2], run=2),
        row("tree", [9], error="gone", request="s"),
        row("server", [7]),
        row("ar", [5], run=0, warmup=True),
    ]
    found = check_equality(rows, ["ar", "tree"], lambda request, before: len(before) / 10)
    assert found.compared == {"ar": 1, "tree": 2}
    first, second = found.mismatches
    assert (first.position, first.expected, first.found, first.margin) == (2, 3, 4, 0.2)
    assert (second.position, second.expected, second.found, second.run) == (2, 3, None, 2)
    assert "leaves ar at token 2: id 3 became id 4, top-2 margin 0.2" in first.sentence()
    assert "the end" in second.sentence()
    assert found.of("ar")["token_ids_equal"] is True
    assert found.of("tree")["token_ids_equal"] is False
    assert found.of("server")["token_ids_equal"] is None


def test_a_request_the_first_arm_failed_is_compared_among_the_others():
    rows = [row("ar", None, error="gone"), row("b", [1]), row("c", [2])]
    found = check_equality(rows, ["ar", "b", "c"])
    assert [(m.reference, m.arm) for m in found.mismatches] == [("b", "c")]

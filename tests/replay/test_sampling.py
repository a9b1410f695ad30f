import pytest

from lumotree.errors import LumoTreeError, RequestError
from lumotree.request import SamplingParams
from replay.sampling import SamplingRule, request_seed


def test_the_protocol_overrides_the_body_but_keeps_stops():
    recorded = {"temperature": 1.5, "max_tokens": 3, "stop": "END", "top_k": 5}
    params = SamplingRule(seed=4).params("r1", recorded)
    assert params == SamplingParams(seed=request_seed(4, "r1"), stop=("END",))
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.95, 20)
    assert (params.presence_penalty, params.max_tokens) == (1.0, 1024)


def test_recorded_sampling_under_the_cap():
    rule = SamplingRule("recorded", cap=100)
    params = rule.params("r1", {"temperature": 0.1, "top_k": -1, "max_completion_tokens": 300})
    assert (params.temperature, params.top_k, params.max_tokens, params.top_p) == (
        0.1,
        0,
        100,
        0.95,
    )
    assert rule.params("r1", {"max_tokens": 7}).max_tokens == 7
    with pytest.raises(RequestError, match="top_p"):
        rule.params("r1", {"top_p": 3})


def test_flags_win_over_both():
    rule = SamplingRule("recorded", overrides={"temperature": 0.0})
    assert rule.params("r1", {"temperature": 0.9}).temperature == 0


def test_seeds_are_stable_and_differ_between_requests():
    assert request_seed(0, "r1") == 1533983255
    assert len({request_seed(s, f"r{i}") for s in range(10) for i in range(50)}) == 500


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mode": "random"}, "--sampling is 'random'"),
        ({"cap": 0}, "--cap is 0"),
        ({"overrides": {"top_p": 1.5}}, "--top-p is 1.5"),
    ],
)
def test_a_bad_option_is_named(fields, says):
    with pytest.raises(LumoTreeError, match=says):
        SamplingRule(**fields)

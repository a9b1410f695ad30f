"""vLLM's counters, differenced: pages and streams written by hand."""

import threading

import pytest

from arms.counters import Counters
from arms.openai import OpenAIArm
from arms.spec import parse_arm
from arms.vllm import VllmArm
from lumotree.errors import ArmError
from replay.guards.check import Evidence
from replay.guards.counters import check_resets
from replay.rows import make_row
from tests.arms.test_openai import DONE, MODELS, PARAMS, REQUEST, chunk, usage

LABELS = 'engine="0",model_name="m"'


def page(generated, steps, drafted, by_depth):
    rows = [
        "# HELP vllm:generation_tokens_total Number of generation tokens processed.",
        f"vllm:generation_tokens_total{{{LABELS}}} {generated:.1f}",
        f"vllm:spec_decode_num_drafts_total{{{LABELS}}} {steps:.1f}",
        f"vllm:spec_decode_num_draft_tokens_total{{{LABELS}}} {drafted:.1f}",
        f"vllm:spec_decode_num_accepted_tokens_total{{{LABELS}}} {sum(by_depth):.1f}",
    ]
    for place, count in enumerate(by_depth):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        rows.append(f'{name}{{{LABELS},position="{place}"}} {count:.1f}')
    return (200, "\n".join([*rows, "vllm:gpu_cache_usage_perc 0.1", ""]).encode())


@pytest.fixture
def arm(server):
    server.pages |= {"/v1/models": MODELS, "/metrics": page(100, 30, 150, (40, 30))}
    server.script = [chunk("abcde", [1, 2, 3, 4, 5], "length"), usage(completion=5), DONE]
    arm = VllmArm(parse_arm(f"vllm-mtp:url={server.url}"), timeout_s=2.0)
    assert arm.start()["kind"] == "vllm"
    yield arm
    arm.close()


def test_differences_are_the_request_s(server, arm):
    server.pages["/metrics"] = [
        page(100, 30, 150, (40, 30)),
        page(102, 31, 155, (41, 30)),  # not booked to the end yet
        page(105, 32, 160, (42, 30)),
    ]
    result = arm.run(REQUEST, PARAMS)
    assert result.error is None
    assert (result.steps, result.accepted_by_depth) == (2, (2, 0))
    read = result.details["counters"]
    assert read["before"]["completion_tokens"] == 100 and read["after"]["draft_tokens"] == 160
    assert verdict(result)[0] == "pass"


@pytest.mark.parametrize(
    ("after", "says"),
    [
        (page(5, 2, 10, (2,)), "was reset"),
        (page(155, 32, 160, (42, 30)), "not the difference"),
    ],
    ids=["restart", "somebody else"],
)
def test_a_difference_that_is_not_the_request_s(server, arm, after, says):
    server.pages["/metrics"] = [page(100, 30, 150, (40, 30)), after]
    result = arm.run(REQUEST, PARAMS)
    assert result.steps is None and result.accepted_by_depth == ()
    status, reason = verdict(result)
    assert status == "fail" and says in reason


def verdict(result):
    row = make_row("vllm-mtp", 1, "r1", result)
    check = check_resets(Evidence("vllm-mtp", [row]))
    return check.status, check.reason


def test_requests_at_once_are_not_told_apart(server, arm):
    results = []
    started, serve = threading.Barrier(2), OpenAIArm._serve

    def meet(*args):
        started.wait(60)
        return serve(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenAIArm, "_serve", meet)
        ask = lambda: results.append(arm.run(REQUEST, PARAMS))  # noqa: E731
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [(r.error, r.steps, r.details.get("counters")) for r in results] == [(None,) * 3] * 2


def test_a_server_without_the_counters(server, arm):
    server.pages["/metrics"] = (200, b"vllm:generation_tokens_total 5\n")
    with pytest.raises(ArmError, match="--speculative-config"):
        arm.start()


def test_counters_of_several_engines_are_summed():
    text = page(100, 30, 150, (40, 30))[1].decode()
    both = Counters.read(text + text.replace('engine="0"', 'engine="1"'))
    assert both == Counters(200, 60, 300, 140, (80, 60))
    assert Counters.read("") is None
    assert Counters.read("vllm:generation_tokens_total what") is None
    assert (both - Counters(1, 1, 1, 1, (1, 1, 1))).fell

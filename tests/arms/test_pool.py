"""An in-process arm with several requests in flight."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from arms.pool import PooledArm
from arms.protocol import ArmRequest
from arms.spec import parse_arm
from lumotree.engine import Engine
from lumotree.request import SamplingParams
from tests.serve.support import speaking_folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    return Engine.load(str(speaking_folder(tmp_path_factory)), device="cpu")


def test_answers_are_those_of_one_at_a_time(engine):
    arm = PooledArm(parse_arm("mtp-1"), engine, 3)
    arm.context = 400
    assert arm.start()["active"] == 3
    work = [
        (
            ArmRequest(f"r{i}", tuple(range(5 + i, 290 + i % 2))),
            SamplingParams(max_tokens=5, seed=i),
        )
        for i in range(6)
    ]
    decoder = engine.decoder(arm.config)
    wanted = [tuple(decoder.generate(r.prompt_ids, p).token_ids) for r, p in work]
    with ThreadPoolExecutor(6) as clients:
        found = list(clients.map(lambda pair: arm.run(*pair), work))
    assert [r.token_ids for r in found] == wanted
    for result in found:
        assert result.error is None and 0 < result.ttft_s <= result.e2e_s
        assert sum(result.burst_s) == pytest.approx(result.e2e_s - result.ttft_s, abs=1e-4)
    again = arm.run(*work[0])
    assert again.prefix_reused_tokens > 0 and again.token_ids == wanted[0]
    arm.new_run()
    assert arm.run(*work[0]).prefix_reused_tokens == 0
    refused = arm.run(ArmRequest("bad", (9999,)), SamplingParams())
    assert "outside the vocabulary" in refused.error
    arm.close()

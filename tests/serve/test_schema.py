"""schemathesis reads the server's own OpenAPI and sends what it allows and what it does not."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from tests.serve.support import served

PATHS = {
    "/health": "GET",
    "/metrics": "GET",
    "/v1/models": "GET",
    "/server_info": "GET",
    "/generate": "POST",
    "/v1/models/{name}": "GET",
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
}


@pytest.fixture(scope="module")
def schema(speaking):
    with served(speaking, active=2, queue=30, max_context=48, model_name="tiny") as (_, url):
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


def test_every_route_is_in_the_schema(schema):
    found = {(r.ok().path, r.ok().method.upper()) for r in schema.get_all_operations()}
    assert found == set(PATHS.items())


VALID, INVALID = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
# A GET without parameters has nothing to get wrong.
CASES = [(path, VALID) for path in PATHS]
CASES += [(path, INVALID) for path, method in PATHS.items() if method == "POST"]


@pytest.mark.parametrize(("path", "mode"), CASES)
def test_no_request_is_a_server_error(schema, path, mode):
    operation = schema[path][PATHS[path]]

    @settings(
        max_examples=6,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case):
        answer = case.call(timeout=20)
        case.validate_response(answer, checks=[not_a_server_error])

    check()

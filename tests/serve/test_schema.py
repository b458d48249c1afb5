"""Requests that a machine makes up from the server's own description: none leads to a mistake of the server."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from helpers.serving import HOSTS, QUICK, tiny
from metaleo.serve.models import load_served_models
from metaleo.serve.server import make_app

pytestmark = pytest.mark.slow

ROUTES = {
    "/api/models": "GET",
    "/api/adapt": "POST",
    "/api/predict": "POST",
    "/api/functions": "POST",
    "/api/columns": "POST",
    "/api/adapt-file": "POST",
    "/api/predict-file": "POST",
    "/api/example.csv": "GET",
}
CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]
LOCAL = {"host": "localhost"}


@pytest.fixture(scope="module")
def description():
    app = make_app(load_served_models() | {"tiny": tiny()}, QUICK, HOSTS)
    return schemathesis.openapi.from_asgi("/api/openapi.json", app, headers=LOCAL)


def test_every_route_is_tried(description):
    assert set(description.raw_schema["paths"]) == set(ROUTES)


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
@pytest.mark.parametrize("path", ROUTES)
def test_made_up_requests(description, path, mode):
    """Both such as are in order and such as are not."""
    operation = description[path][ROUTES[path]]
    if mode is schemathesis.GenerationMode.NEGATIVE and path == "/api/models":
        pytest.skip("nothing can be wrong with it")

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def try_all(case):
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str) and path == "/api/adapt":
            case.body["model"] = "tiny"  # or hardly any would get further than that there is no such model
        if path == "/api/adapt-file" and isinstance(case.query.get("model"), str):
            case.query["model"] = "tiny"
        case.call_and_validate(headers=LOCAL, checks=CHECKS)

    try_all()

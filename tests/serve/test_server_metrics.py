"""/metrics of a real server has what the dashboard shows, dlinfer's own counters among them."""

import time

import pytest

from tests.serve.api_server import MODEL_NAME, ApiServer
from tests.serve.test_cluster_files import metrics_of_dashboard

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

# Names of the router and the supervisor; test_dlinfer_serve.py looks for these.
NOT_OF_A_SERVER = ("envoy_", "dlinfer:replica")


def test_every_metric_of_the_dashboard_exists(server: ApiServer):
    with server.client() as client:
        client.completions.create(model=MODEL_NAME, prompt="hello", max_tokens=4)
    wanted_names = {name for name in metrics_of_dashboard() if not name.startswith(NOT_OF_A_SERVER)}
    end = time.monotonic() + 120
    while "dlinfer:steps_total" not in (page := server.request("GET", "/metrics")[1]):  # every ten seconds
        assert time.monotonic() < end, page
        time.sleep(0.5)
    assert [
        name for name in sorted(wanted_names) if f"# TYPE {name.removesuffix('_bucket')} " not in page
    ] == []

"""``lmdeploy serve proxy`` with what the extra ``serve`` installs."""

import http.client
import time

import pytest

from tests.serve.api_server import held_port
from tests.serve.processes import LMDEPLOY, ProcessTree

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def test_it_starts_and_answers():
    held = held_port()
    port = held.getsockname()[1]
    command = [LMDEPLOY, "serve", "proxy", "--server-name", "127.0.0.1", "--server-port", str(port)]
    with held, ProcessTree([*command, "--disable-cache-status"]) as proxy:
        status = None
        while status is None and time.monotonic() < proxy.started + 300:
            assert proxy.process.poll() is None, proxy.output()[-3000:]
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            try:
                connection.request("GET", "/v1/models")
                status = connection.getresponse().status
            except OSError:
                time.sleep(0.2)
            finally:
                connection.close()
        assert status == 200, proxy.output()[-3000:]

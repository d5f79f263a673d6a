"""A forked process lacks OpenVINO's threads: it says so, and does not wait for ever."""

import os
import signal
from collections.abc import Callable

import pytest
import torch

from dlinfer.errors import UnsupportedFeatureError
from tests.graph.compiling import compiled

pytestmark = pytest.mark.usefixtures("graph_mode")


def in_a_fork(work: Callable[[], None]) -> int:
    """What the child makes of it: 0 where it raised UnsupportedFeatureError, else 1, or the number of a signal."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            work()
        except UnsupportedFeatureError:
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_compiled_model_and_a_new_one():
    x = torch.randn(4)
    run = compiled(lambda x: (x * 2).tanh(), engine="openvino", fallback="error", small_regions="engine")
    expected = run(x)
    new = compiled(lambda x: x * 3 + 1, engine="openvino", fallback="error", small_regions="engine")
    assert in_a_fork(lambda: run(x)) == 0
    assert in_a_fork(lambda: new(x)) == 0
    assert torch.equal(run(x), expected)

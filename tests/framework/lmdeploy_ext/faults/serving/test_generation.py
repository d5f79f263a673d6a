"""What a pipeline is called with."""

from types import SimpleNamespace
from typing import Any

import pytest
from lmdeploy import GenerationConfig, PytorchEngineConfig
from lmdeploy.pipeline import Pipeline

PIPELINE: Any = SimpleNamespace(
    _is_single=Pipeline._is_single, session_mgr=SimpleNamespace(get=lambda: "session")
)


@pytest.fixture(autouse=True)
def on_the_cpu():
    PytorchEngineConfig(device_type="cpu")


@pytest.mark.parametrize(
    ("given", "named"),
    [({"gen_config": [GenerationConfig()]}, "1 gen_configs"), ({"sessions": "s"}, "1 sessions")],
)
def test_a_list_of_another_length_is_an_error_where_it_was_given(given: dict[str, Any], named: str):
    """LMDeploy 0.18 itself raises in the engine's thread, and the caller waits for ever."""
    with pytest.raises(ValueError, match=named):
        Pipeline._request_generator(PIPELINE, ["a", "b"], **given)


def test_request_output_len_is_the_number_of_new_tokens():
    config = GenerationConfig(max_new_tokens=7, top_k=3)
    requests = Pipeline._request_generator(PIPELINE, ["a", "b"], gen_config=config, request_output_len=9)
    assert [(request["gen_config"].max_new_tokens, request["gen_config"].top_k) for request in requests] == [
        (9, 3)
    ] * 2
    assert config.max_new_tokens == 7

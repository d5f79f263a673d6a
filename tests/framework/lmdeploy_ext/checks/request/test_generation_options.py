"""Each field that says how tokens are drawn: what it takes, and the error that names it."""

import math
import pickle
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from lmdeploy import GenerationConfig, PytorchEngineConfig
from lmdeploy.pytorch import envs
from lmdeploy.pytorch.engine.logits_process import _process_temperature_
from lmdeploy.pytorch.messages import SamplingParam
from lmdeploy.serve.core.generation_config import build_generation_config
from lmdeploy.serve.openai.chat_completions.logits_processors import logit_bias_logits_processor
from lmdeploy.serve.openai.endpoints.common import validate_request
from lmdeploy.serve.openai.protocol import ChatCompletionRequest, CompletionRequest

from dlinfer.errors import GenerationOptionError
from dlinfer.framework.lmdeploy_ext.checks.request.generation_options import (
    _check_mode,
    check_generation,
    check_sampling,
)
from dlinfer.framework.lmdeploy_ext.checks.request.prompts import _fault, fit_sampling
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.faults.answers.forbidden_text import ForbiddenText
from dlinfer.framework.lmdeploy_ext.sampling.logit_bias import LogitBias

NAN, INF = math.nan, math.inf
HUGE = 2**70
BAD: dict[str, list[Any]] = {
    "n": [0, -1, 2, 1.0, "1", None, True],
    "max_new_tokens": [-1, 1.5, "4", True],
    "min_new_tokens": [-1, 600, HUGE, 1.5],
    "top_p": [-0.1, 1.1, 2, NAN, INF, "0.5", None],
    "top_k": [-1, 2.0, NAN, "4", None],
    "min_p": [-0.1, 2, NAN, -INF, "0"],
    "temperature": [-1, 2.1, NAN, INF, "1", None],
    "repetition_penalty": [0, -1, NAN, INF, 1e-320, 1e308, None],
    "random_seed": [1.5, "7", NAN],
    "stop_words": ["word", [1], [None]],
    "bad_words": ["word", [b"x"]],
    "stop_token_ids": [5, [1.5], ["x"], [True]],
    "bad_token_ids": [{5}, [None]],
    "logprobs": [-1, 1.5, True],
    "logprob_start_len": [-2, 0.5, None],
    "repetition_ngram_size": [1.5, envs.repetition_window_size + 1, HUGE],
    "repetition_ngram_threshold": [1.5, HUGE],
    "response_format": [{"type": "regex_schema"}],
}
GOOD: dict[str, list[Any]] = {
    "max_new_tokens": [0, None, HUGE, numpy.int64(4)],
    "min_new_tokens": [None, 0, 512],
    "top_p": [0, 1, 0.5, numpy.float32(0.5)],
    "top_k": [0, 1, HUGE],
    "temperature": [0, 2, 1e-320],
    "repetition_penalty": [0.01, 1.1, 100],
    "random_seed": [None, -1, HUGE],
    "stop_words": [None, [], ["a", "b"], ("a",)],
    "stop_token_ids": [None, [], [-1, HUGE], [numpy.int64(3)]],
    "logprobs": [None, 0, 10**6],
    "repetition_ngram_size": [-1, 0, envs.repetition_window_size],  # LMDeploy documents that less than 0 is 0
    "repetition_ngram_threshold": [-1, 0, 3],
    "response_format": [None, {"type": "regex_schema", "regex_schema": "a+"}],
}


def pairs(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}={value!r}")
        for name, values in table.items()
        for value in values
    ]


@pytest.fixture(autouse=True)
def on_the_cpu():
    PytorchEngineConfig(device_type="cpu")


@pytest.mark.parametrize(("field", "value"), pairs(BAD))
def test_a_value_that_cannot_be_served_is_an_error_that_names_the_field(field: str, value: Any):
    with pytest.raises(GenerationOptionError, match=f"^{field}=") as caught:
        GenerationConfig(**{field: value})
    assert caught.value.fields["field"] == field
    later = GenerationConfig()
    setattr(later, field, value)
    assert (_fault(later, 1000) or "").startswith(f"{field}=")


@pytest.mark.parametrize(("field", "value"), pairs(GOOD))
def test_a_value_that_means_something_is_taken(field: str, value: Any):
    assert _fault(GenerationConfig(**{field: value}), 1000) is None


def test_without_a_device_of_ours_lmdeploy_checks_as_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(activation, "_active", None)
    with pytest.raises(AssertionError):
        GenerationConfig(min_p=2)
    assert GenerationConfig(repetition_penalty=-1).repetition_penalty == -1


def test_logprobs_of_the_input_need_logprobs():
    with pytest.raises(GenerationOptionError, match="logprobs"):
        GenerationConfig(logprob_start_len=0, max_new_tokens=0)
    check_generation(GenerationConfig(logprob_start_len=0, max_new_tokens=0, logprobs=0))


def engine(mode: Any) -> Any:
    return PytorchEngineConfig(device_type="cpu", logprobs_mode=mode)


def test_logprobs_of_the_input_need_a_mode():
    """LMDeploy 0.18 itself returns raw logits."""
    config = GenerationConfig(logprob_start_len=0, max_new_tokens=0, logprobs=0)
    reason = _fault(config, 1000, engine(None)) or ""
    assert reason.startswith("logprob_start_len=0 is not valid: expected -1")
    assert "PytorchEngineConfig(logprobs_mode='raw_logprobs')" in reason
    assert _fault(config, 1000, engine("raw_logprobs")) is None
    assert _fault(GenerationConfig(logprobs=0), 1000, engine(None)) is None


@pytest.mark.parametrize("count", [0, 3])
def test_logprobs_of_a_completion_need_a_mode(count: int):
    """LMDeploy 0.18 itself refuses 3 alone, and then an ``echo`` returns raw logits."""
    asked = CompletionRequest(model="m", prompt="a", logprobs=count, echo=True)
    silent = CompletionRequest(model="m", prompt="a", echo=True)
    context: Any = SimpleNamespace(engine_config=engine(None))
    with pytest.raises(GenerationOptionError, match=f"logprobs={count} .*--logprobs-mode raw_logprobs"):
        validate_request(asked, context, lambda *_: "")
    _check_mode(silent, context)
    _check_mode(asked, SimpleNamespace(engine_config=engine("raw_logprobs")))


def test_forbidding_every_token_is_refused():
    config = GenerationConfig(bad_token_ids=list(range(-3, 1000)))
    assert "bad_token_ids" in (_fault(config, 1000) or "")
    assert _fault(config, 1001) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("min_new_tokens", HUGE), ("repetition_ngram_size", HUGE), ("repetition_penalty", NAN), ("top_p", NAN)],
)
def test_what_would_end_the_engines_loop_is_refused_at_its_door(field: str, value: Any):
    param = SamplingParam.from_gen_config(GenerationConfig())
    check_sampling(param)
    setattr(param, field, value)
    with pytest.raises(GenerationOptionError, match=field):
        check_sampling(param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_temperature_that_logits_cannot_be_divided_by_means_the_likeliest_token(dtype: torch.dtype):
    logits = torch.tensor([[90.0, -3.0, 89.0]], dtype=dtype)
    for temperature in (1.0, 1e-2, 1e-3, 1e-6, 1e-30, 1e-37, 1e-40, 1e-320):
        param = SamplingParam(temperature=temperature, top_k=3)
        fit_sampling(param, 3, dtype)
        if param.top_k == 1:
            assert param.temperature == 1.0
            assert temperature < 0.01
            continue
        divided = _process_temperature_(logits.clone(), torch.tensor([param.temperature]))
        assert divided.isfinite().all(), f"{temperature} was let through"
    with_zero = SamplingParam(temperature=0, top_k=3)  # LMDeploy itself asks for the likeliest token
    fit_sampling(with_zero, 3, dtype)
    assert with_zero.temperature == 0


def test_processors_of_ours_know_only_tokens_of_the_model():
    """A tokenizer may have more; an index beyond the logits would end the engine's loop."""
    forbidden = ForbiddenText(b"ab", {}, 6, (torch.tensor([1, 5]), torch.tensor([4])))

    def users(token_ids: Any, logits: Any) -> Any:
        return logits

    param = SamplingParam(
        logits_processors=[LogitBias((2, 4), (1.0, 2.0)), LogitBias((5,), (1.0,)), forbidden, users]
    )
    fit_sampling(param, 4, torch.float32)
    logits = torch.zeros(4)
    fit: Any = param.logits_processors
    for processor in fit:
        logits = processor(torch.tensor([0]), logits)
    assert logits.tolist() == [0.0, -torch.inf, 1.0, 0.0]
    assert fit[-1] is users
    with pytest.raises(IndexError):
        forbidden(torch.tensor([0]), torch.zeros(4))


def test_the_models_least_number_of_tokens_gives_way_to_the_requests_most():
    request = ChatCompletionRequest(model="m", messages=[])
    built = build_generation_config(request, {"min_new_tokens": 10}, max_new_tokens=4)
    assert (built.min_new_tokens, built.max_new_tokens) == (4, 4)
    asked = ChatCompletionRequest(model="m", messages=[], min_new_tokens=10)
    with pytest.raises(GenerationOptionError, match="min_new_tokens"):
        build_generation_config(asked, {}, max_new_tokens=4)


def test_a_logit_bias_can_be_sent_to_another_process():
    tokenizer: Any = SimpleNamespace(vocab_size=4)
    made = logit_bias_logits_processor({"1": 2.5, "3": -200.0}, tokenizer)
    assert made == LogitBias((1, 3), (2.5, -100.0))
    logits = torch.zeros(4, dtype=torch.bfloat16)
    assert pickle.loads(pickle.dumps(made))([], logits).tolist() == [0.0, 2.5, 0.0, -100.0]
    with pytest.raises(ValueError, match="logit_bias of token 1"):
        logit_bias_logits_processor({"1": NAN}, tokenizer)

"""How long a session may be: as long as the model's positions reach, and as the KV cache holds, each by its name."""

import argparse
import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmdeploy import PytorchEngineConfig
from lmdeploy.archs import get_task
from lmdeploy.cli.utils import ArgumentHelper, FlexibleArgumentParser
from lmdeploy.messages import ResponseType
from lmdeploy.serve.core.async_engine import AsyncEngine

from dlinfer.errors import ModelMemoryError, UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.options import session_length
from dlinfer.framework.lmdeploy_ext.device import activation, kv_memory
from dlinfer.framework.lmdeploy_ext.errors import NoCudaError
from dlinfer.framework.lmdeploy_ext.preflight.check import preflight
from examples.tiny_models.build import build


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    build("llama", folder, dtype="float32")
    return folder


def config(most: int | None = 2048, **rope: Any) -> Any:
    return SimpleNamespace(max_position_embeddings=most, rope_parameters=rope)


@pytest.mark.parametrize(
    ("given", "most"),
    [
        (config(), 2048),
        (config(None), None),
        (config(rope_type="linear", factor=4.0), 8192),
        (config(rope_type="yarn", factor=4.0), 8192),
        (config(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048), 8192),
        (config(8192, rope_type="yarn", factor=4.0, original_max_position_embeddings=2048), 8192),
        (config(rope_type="llama3", factor=8.0, original_max_position_embeddings=256), 2048),
        (config(type="longrope", factor=8.0), 2048),
        (config(rope_type="dynamic", factor=2.0), None),
        (config(rope_type="yarn", factor=None), 2048),
    ],
)
def test_how_far_positions_reach(given, most):
    assert session_length.positions(given) == most


def test_a_session_beyond_the_models_positions_is_refused(llama):
    said = "session_len=100000, more than the model's 2048 positions"
    (refusal,) = preflight(llama, "cpu", session_len=100000).refusals
    assert said in refusal.text and "use session_len=2048" in refusal.next_step
    with pytest.raises(UnsupportedFeatureError, match=said):
        get_task(
            "pytorch", str(llama), backend_config=PytorchEngineConfig(device_type="cpu", session_len=100000)
        )
    get_task("pytorch", str(llama), backend_config=PytorchEngineConfig(device_type="cpu", session_len=2048))


def test_positions_of_a_language_model_inside(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    inner = json.loads(file.read_text())
    file.write_text(json.dumps({"model_type": "llava", "architectures": ["L"], "text_config": inner}))
    with pytest.raises(UnsupportedFeatureError, match="session_len=3000"):
        session_length.check(str(tmp_path / "m"), 3000, trust_remote_code=False)


# --- what the KV cache holds


def engine(asked: int | None, device_type: str = "cpu") -> Any:
    PytorchEngineConfig(device_type="cpu")
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_session_len=asked),
        engine_config=SimpleNamespace(device_type=device_type),
    )


@pytest.mark.parametrize(("asked", "said"), [(2048, True), (960, False), (None, False)])
def test_a_cache_that_holds_less_than_session_len_is_told_of(asked, said, caplog, monkeypatch):
    monkeypatch.setattr(kv_memory, "_longest_session", None)
    with caplog.at_level(logging.WARNING, "dlinfer"):
        assert kv_memory._session_len.build(lambda engine: 960)(engine(asked)) == 960
    assert ("sessions may have at most 960 tokens, not the 2048 of session_len" in caplog.text) == said
    assert kv_memory.longest_session() == (960 if said else None)


def test_a_request_beyond_the_cache_is_not_called_beyond_the_models_context(monkeypatch):
    PytorchEngineConfig(device_type="cpu")
    monkeypatch.setattr(kv_memory, "_longest_session", 960)
    error = AsyncEngine._request_error_from_status(ResponseType.INPUT_LENGTH_ERROR)
    assert error.message == (
        "The request needs more tokens than the KV cache holds for one session (960 tokens)."
    )
    assert error.status_code == 400


def test_a_model_that_does_not_fit_is_told_what_packs_it():
    assert "DLINFER_CPU_WEIGHTS=int8, int4 or bf12" in str(
        ModelMemoryError(needed="1", free="0", source="a test's")
    )


# --- where torch sees no CUDA device


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def parser() -> argparse.ArgumentParser:
    made = FlexibleArgumentParser()
    made.add_argument("--backend", default="turbomind")
    ArgumentHelper.device(made)
    return made


def test_the_host_is_taken_where_nothing_was_chosen(llama, no_cuda, caplog):
    config = PytorchEngineConfig()
    assert config.device_type == "cuda"
    with caplog.at_level(logging.WARNING, "dlinfer"):
        get_task("pytorch", str(llama), backend_config=config)
        assert config.device_type == "cpu" == activation.active()
        assert parser().parse_args([]).device == "cpu"
    assert caplog.text.count("torch sees no CUDA device") == 2
    assert config.max_prefill_token_num == PytorchEngineConfig(device_type="cpu").max_prefill_token_num


@pytest.mark.parametrize("arguments", [["--device", "cuda"], ["--device=cuda"], ["--dev", "cuda"]])
def test_cuda_that_was_asked_for_is_an_error(arguments, no_cuda):
    with pytest.raises(NoCudaError, match="--device cpu"):
        parser().parse_args(arguments)
    assert parser().parse_args(["--device", "cpu"]).device == "cpu"


def test_where_torch_sees_cuda_it_is_kept(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert parser().parse_args(["--device", "cuda"]).device == "cuda"
    assert parser().parse_args([]).device == "cuda"


def test_other_commands_keep_their_device(no_cuda):
    made = FlexibleArgumentParser()
    made.add_argument("--device", default="cuda")
    assert made.parse_args([]).device == "cuda"

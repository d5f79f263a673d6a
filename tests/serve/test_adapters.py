"""``lmdeploy serve api_server --adapters``: each adapter is a model of its own name, beside the base model."""

import json
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_models.families import STOP_IDS
from tests.e2e.harness import Lab
from tests.serve.api_server import MODEL_NAME, ApiServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1500)]

NEW = 16
GREEDY: dict[str, Any] = {"max_tokens": NEW, "temperature": 0.0, "extra_body": {"ignore_eos": True}}


def test_adapters_are_models_that_say_what_peft_says(lab: Lab, model: Path, tmp_path: Path):
    texts, tokenizer = lab.prompts(model, (3, 20)), lab.tokenizer(model)
    adapters = {"wide": [["q_proj", "up_proj"], 4, 8], "narrow": [["v_proj", "down_proj"], 8, 4]}
    job = {"model": str(model), "out": str(tmp_path), "adapters": adapters, "new": NEW, "never": STOP_IDS}
    prompts = [tokenizer.encode(text).ids for text in texts]
    lab.ask("tests.e2e.peft_job", job | {"prompts": prompts}, 600, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    said = json.loads((tmp_path / "said.json").read_text())
    listed = [f"{name}={tmp_path / name}" for name in adapters]
    with ApiServer(model, "--eager-mode", "--adapters", *listed) as server:
        server.ready()
        with server.client() as client:
            assert {one.id for one in client.models.list()} == {MODEL_NAME, *adapters}
            for name in ("", *adapters):
                for text, tokens in zip(texts, said[name], strict=True):
                    answer = client.completions.create(model=name or MODEL_NAME, prompt=text, **GREEDY)
                    assert answer.choices[0].text.rstrip("\ufffd") == tokenizer.decode(tokens).rstrip(
                        "\ufffd"
                    )
        unknown = json.dumps({"model": "nobody", "prompt": "hello", "max_tokens": 4}).encode()
        status, body = server.request("POST", "/v1/completions", unknown)
        assert status == 404 and "nobody" in body

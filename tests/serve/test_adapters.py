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


ADAPTERS = {"wide": [["q_proj", "up_proj"], 4, 8], "narrow": [["v_proj", "down_proj"], 8, 4]}


def peft_says(lab: Lab, model: Path, out: Path, texts: list[str]) -> dict[str, list[list[int]]]:
    """Make the adapters in ``out``, and return what PEFT generates for each text by each adapter, and by none."""
    prompts = [lab.tokenizer(model).encode(text).ids for text in texts]
    job = {"model": str(model), "out": str(out), "adapters": ADAPTERS, "new": NEW, "never": STOP_IDS}
    lab.ask("tests.e2e.peft_job", job | {"prompts": prompts}, 600, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    return json.loads((out / "said.json").read_text())


def check(
    server: ApiServer, lab: Lab, model: Path, texts: list[str], name: str, said: list[list[int]]
) -> None:
    """Compare the texts of model or adapter ``name`` with the tokens ``said``."""
    tokenizer = lab.tokenizer(model)
    with server.client() as client:
        for text, tokens in zip(texts, said, strict=True):
            answer = client.completions.create(model=name, prompt=text, **GREEDY)
            assert answer.choices[0].text.rstrip("\ufffd") == tokenizer.decode(tokens).rstrip("\ufffd")


def models(server: ApiServer) -> set[str]:
    with server.client() as client:
        return {one.id for one in client.models.list()}


def test_adapters_are_models_that_say_what_peft_says(lab: Lab, model: Path, tmp_path: Path):
    texts = lab.prompts(model, (3, 20))
    said = peft_says(lab, model, tmp_path, texts)
    listed = [f"{name}={tmp_path / name}" for name in ADAPTERS]
    with ApiServer(model, "--eager-mode", "--adapters", *listed) as server:
        server.ready()
        assert models(server) == {MODEL_NAME, *ADAPTERS}
        for name in ("", *ADAPTERS):
            check(server, lab, model, texts, name or MODEL_NAME, said[name])
        unknown = json.dumps({"model": "nobody", "prompt": "hello", "max_tokens": 4}).encode()
        status, body = server.request("POST", "/v1/completions", unknown)
        assert status == 404 and "nobody" in body
        status, body = change(server, "unload", lora_name="wide")
        assert status == 400 and "DLINFER_CPU_ADAPTER_ROWS" in body


def change(server: ApiServer, verb: str, **fields: str) -> tuple[int, str]:
    return server.request("POST", f"/v1/{verb}_lora_adapter", json.dumps(fields).encode())


def test_adapters_that_clients_load_and_unload(lab: Lab, model: Path, tmp_path: Path):
    texts = lab.prompts(model, (3, 20))
    said = peft_says(lab, model, tmp_path, texts)
    with ApiServer(model, "--eager-mode", DLINFER_CPU_ADAPTER_ROWS="8") as server:
        server.ready()
        assert models(server) == {MODEL_NAME}
        for name in ("wide", "narrow"):
            path = str(tmp_path / name)
            status, body = change(server, "load", lora_name=name, lora_path=path)
            assert (status, body) == (200, f"\"Success: LoRA adapter '{name}' added successfully.\"")
            assert models(server) == {MODEL_NAME, name}
            check(server, lab, model, texts, name, said[name])
            check(server, lab, model, texts, MODEL_NAME, said[""])
            for taken in (name, MODEL_NAME):
                status, body = change(server, "load", lora_name=taken, lora_path=path)
                assert status == 400 and f"cannot load the LoRA adapter '{taken}'" in body
            status, body = change(server, "load", lora_name="other", lora_path=str(tmp_path / "nowhere"))
            assert status == 400 and "there is no such folder" in body
            status, body = change(server, "unload", lora_name=name)
            assert (status, body) == (200, f"\"Success: LoRA adapter '{name}' removed successfully.\"")
            status, _ = change(server, "unload", lora_name=name)
            assert status == 404
            request = json.dumps({"model": name, "prompt": "hello", "max_tokens": 4}).encode()
            assert server.request("POST", "/v1/completions", request)[0] == 404
        status, body = change(server, "load", lora_name="wide")
        assert status == 400 and "lora_path" in body
        check(server, lab, model, texts, MODEL_NAME, said[""])

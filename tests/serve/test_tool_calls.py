"""Calls of tools from the server, by a tiny model that was trained on the spot to write them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.harness import Lab
from tests.framework.lmdeploy_ext.faults.answers.tool_texts import CALLS, TOOLS, WRITERS
from tests.serve.api_server import MODEL_NAME, ApiServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

PROMPTS = {"several": CALLS, "one without arguments": CALLS[1:2], "none": []}
GATE = ("qwen3", "glm47")
PARSERS = [
    pytest.param(name, marks=() if name in GATE else pytest.mark.full)
    for name in ("qwen3", "glm47", "qwen3coder", "llama3", "deepseek-v32")
]
SAID = "I call:"


def trained(lab: Lab, parser: str, out: Path) -> None:
    """A copy of the tiny Llama that answers each of ``PROMPTS`` with its calls, in the format of a parser."""
    source = lab.model("llama")
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    texts = [
        f"{prompt}{SAID}{WRITERS[parser](calls) if calls else ''}</s>" for prompt, calls in PROMPTS.items()
    ]
    ids = [tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids for text in texts]
    torch.manual_seed(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.full((), torch.inf)
    for _ in range(400):
        loss = sum((model(input_ids=each, labels=each).loss for each in ids), torch.zeros(()))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if loss.item() < 0.05:
            break
    assert loss.item() < 0.5
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


@pytest.fixture(scope="module", params=PARSERS)
def served(
    request: pytest.FixtureRequest, lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ApiServer, Path]]:
    folder = tmp_path_factory.mktemp("trained")
    trained(lab, request.param, folder)
    with ApiServer(folder, "--eager-mode", "--tool-call-parser", request.param) as server:
        server.ready()
        yield server, folder


def body(folder: Path, prompt: str, **fields: Any) -> bytes:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    common = {"model": MODEL_NAME, "messages": [], "input_ids": ids, "tools": TOOLS, "temperature": 0}
    return json.dumps({**common, "max_tokens": 700, **fields}).encode()


def whole(server: ApiServer, request: bytes) -> tuple[str, list[tuple[str, str]], str]:
    status, text = server.request("POST", "/v1/chat/completions", request)
    assert status == 200, text
    (choice,) = json.loads(text)["choices"]
    calls = [call["function"] for call in choice["message"]["tool_calls"] or []]
    read = [(call["name"], call["arguments"]) for call in calls]
    return choice["message"]["content"] or "", read, choice["finish_reason"]


def streamed(server: ApiServer, request: bytes) -> tuple[str, list[tuple[str, str]], str]:
    status, text = server.request("POST", "/v1/chat/completions", request)
    assert status == 200, text
    content, reason, calls = "", "", {}
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        content += choice["delta"].get("content") or ""
        reason = choice.get("finish_reason") or reason
        for call in choice["delta"].get("tool_calls") or ():
            name, arguments = calls.get(call["index"], ("", ""))
            function = call["function"]
            calls[call["index"]] = (
                name + (function.get("name") or ""),
                arguments + (function.get("arguments") or ""),
            )
    return content, [calls[index] for index in sorted(calls)], reason


@pytest.mark.parametrize("prompt", PROMPTS)
def test_calls(prompt: str, served: tuple[ApiServer, Path]):
    server, folder = served
    content, calls, reason = whole(server, body(folder, prompt))
    assert content == SAID
    assert [(name, json.loads(arguments)) for name, arguments in calls] == PROMPTS[prompt]
    assert reason == ("tool_calls" if calls else "stop")
    assert streamed(server, body(folder, prompt, stream=True)) == (content, calls, reason)


@pytest.mark.parametrize("most", [3, 30, 47, 77, 111, 140])
def test_calls_cut_by_length(most: int, served: tuple[ApiServer, Path]):
    server, folder = served
    answer = whole(server, body(folder, "several", max_tokens=most))
    assert answer[2] == "length"
    assert [name for name, _ in answer[1]] == [name for name, _ in CALLS][: len(answer[1])]
    assert streamed(server, body(folder, "several", max_tokens=most, stream=True)) == answer


@pytest.mark.parametrize("stop", ["now", "all:", "}"])
def test_a_stop_inside_a_call(stop: str, served: tuple[ApiServer, Path]):
    """Text is held back for the stop, so that markers reach the parser in pieces."""
    server, folder = served
    answer = whole(server, body(folder, "several", stop=[stop]))
    assert streamed(server, body(folder, "several", stop=[stop], stream=True)) == answer

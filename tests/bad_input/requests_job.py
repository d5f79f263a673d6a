"""Bad requests, one after the other, to one engine; ``test_requests`` starts it as a process of its own.

    python requests_job.py MODEL_FOLDER

Prints one JSON line: case -> answer. An answer is a list with one entry per response, or ``{"raised": text}``.
After each case a good prompt is asked; what it got is under "<case>, then a good prompt".
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from lmdeploy import GenerationConfig, PytorchEngineConfig
from lmdeploy.api import pipeline

SESSION_LEN = 64
GOOD = "hello world"


def main() -> None:
    config = PytorchEngineConfig(
        device_type="cpu", session_len=SESSION_LEN, max_batch_size=4, logprobs_mode="raw_logprobs"
    )
    with pipeline(sys.argv[1], backend_config=config) as pipe:
        answers: dict[str, Any] = {}
        for name, ask in cases(pipe).items():
            answers[name] = attempt(ask)
            answers[f"{name}, then a good prompt"] = attempt(lambda: infer(pipe, [GOOD]))
    print(json.dumps(answers))


def attempt(ask: Callable[[], list[dict[str, Any]]]) -> Any:
    try:
        return ask()
    except Exception as error:  # noqa: BLE001 (the error is the answer)
        return {"raised": f"{type(error).__name__}: {error}"}


def infer(pipe: Any, prompts: list[str], **options: Any) -> list[dict[str, Any]]:
    gen = GenerationConfig(**{"max_new_tokens": 4, "do_sample": False, "ignore_eos": True} | options)
    return [shown(response) for response in pipe(prompts, gen_config=gen, do_preprocess=False)]


def shown(response: Any) -> dict[str, Any]:
    names = ("token_ids", "finish_reason", "error_code", "error_message")
    return {name: getattr(response, name, None) for name in names}


def generate(pipe: Any, input_ids: list[int]) -> list[dict[str, Any]]:
    """By token ids, as the server's ``/generate`` does."""

    async def run() -> list[dict[str, Any]]:
        request = await pipe.async_engine.preprocess(
            None,
            pipe.session(),
            gen_config=GenerationConfig(max_new_tokens=4, do_sample=False, ignore_eos=True),
            input_ids=input_ids,
        )
        outputs = [out async for out in pipe.async_engine.generate(request, stream_response=False)]
        return [{"token_ids": [token for out in outputs for token in out.token_ids]}]

    return asyncio.run_coroutine_threadsafe(run(), pipe.internal_thread.loop).result(300)


def cases(pipe: Any) -> dict[str, Callable[[], list[Any]]]:
    long = "hello " * (2 * SESSION_LEN)
    return {
        "long prompt": lambda: infer(pipe, [long]),
        "long prompt beside a good one": lambda: infer(pipe, [long, GOOD]),
        "prompt of session_len": lambda: generate(pipe, [5] * SESSION_LEN),
        "prompt one shorter": lambda: generate(pipe, [5] * (SESSION_LEN - 1)),
        "max_new_tokens=0": lambda: infer(pipe, [GOOD], max_new_tokens=0),
        "max_new_tokens beyond session_len": lambda: infer(pipe, [GOOD], max_new_tokens=10**6),
        "empty prompt": lambda: infer(pipe, [""]),
        "empty prompt beside a good one": lambda: infer(pipe, ["", GOOD]),
        "empty batch": lambda: infer(pipe, []),
        "no token ids": lambda: generate(pipe, []),
        "token id too large": lambda: generate(pipe, [5, 10**6]),
        "negative token id": lambda: generate(pipe, [5, -7]),
        "ppl of nothing": lambda: pipe.get_ppl([[]]),
        "ppl of a prompt too long": lambda: pipe.get_ppl([5] * (2 * SESSION_LEN)),
        "ppl of a token id too large": lambda: pipe.get_ppl([5, 10**6]),
        "top_k beyond the vocabulary": lambda: infer(pipe, [GOOD], top_k=10**6, do_sample=True),
        "logprobs beyond the vocabulary": lambda: infer(pipe, [GOOD], logprobs=10**6),
        "stop ids outside the vocabulary": lambda: infer(pipe, [GOOD], stop_token_ids=[10**9, -4]),
        "bad ids outside the vocabulary": lambda: infer(pipe, [GOOD], bad_token_ids=[10**9, -4]),
    }


if __name__ == "__main__":
    main()

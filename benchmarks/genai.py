"""OpenVINO GenAI as a contender, in whatever environment has it: the standard library and openvino_genai only.

    python -m benchmarks.genai BACKEND FOLDER JSON

FOLDER holds the exported model and its openvino_tokenizer. BACKEND is "PA", its paged attention, "SDPA", or "CB", its
continuous batching of requests.
JSON: {"precision": "f32" | "bf16"}, the type that it computes in.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.orders import take_orders
from benchmarks.requests import Arrivals, mixed


class GenAI:
    """``LLMPipeline`` as its own samples use it, and its own stopwatch: the time to the first token, and all."""

    def __init__(self, model: Path, backend: str, precision: str) -> None:
        self.genai: Any = importlib.import_module("openvino_genai")
        paged = {"scheduler_config": self._scheduler()} if backend == "PA" else {}
        self.pipe: Any = self.genai.LLMPipeline(
            str(model),
            "CPU",
            ATTENTION_BACKEND=backend,
            INFERENCE_PRECISION_HINT=precision,
            KV_CACHE_PRECISION=precision,
            **paged,
        )

    def _scheduler(self) -> Any:
        """What ``LLMPipeline`` takes by itself, without its cache of prefixes: each round has the same prompt."""
        scheduler = self.genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = sys.maxsize
        scheduler.enable_prefix_caching = False
        return scheduler

    def run(self, work: str, batch: int, length: int, tokens: int) -> float:
        """Seconds of a prefill, or of the steps after it."""
        config = self.genai.GenerationConfig()
        config.max_new_tokens = 1 if work == "prefill" else tokens + 1
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        prompts = [prompt_of(self.pipe.get_tokenizer(), length)] * batch
        metrics = self.pipe.generate(prompts, config).perf_metrics
        first = metrics.get_ttft().mean
        milliseconds = first if work == "prefill" else metrics.get_generate_duration().mean - first
        return milliseconds / 1e3


class ContinuousBatching:
    """``ContinuousBatchingPipeline`` with what it takes by itself, but for its cache of prefixes."""

    def __init__(self, model: Path, precision: str) -> None:
        self.genai: Any = importlib.import_module("openvino_genai")
        scheduler = self.genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = 1  # GB
        properties = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
        self.pipe: Any = self.genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", properties)

    def run(self, work: str, batch: int, length: int, tokens: int) -> dict[str, Any]:
        """What becomes of ``batch`` requests of mixed lengths."""
        requests, tokenizer = mixed(batch), self.pipe.get_tokenizer()
        prompts = [prompt_of(tokenizer, length) for length, _ in requests]
        arrivals = Arrivals(batch)
        handles = [
            self.pipe.add_request(place, prompt, self._config(tokens))
            for place, (prompt, (_, tokens)) in enumerate(zip(prompts, requests, strict=True))
        ]
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
            for place, handle in enumerate(handles):
                while handle.can_read():
                    outputs = handle.read().values()
                    arrivals.note(place, sum(len(output.generated_ids) for output in outputs))
        return arrivals.answer()

    def _config(self, tokens: int) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        return config


def prompt_of(tokenizer: Any, length: int) -> str:
    """Text of so many tokens."""
    text = "hello"
    while tokenizer.encode(text).input_ids.shape[1] < length:
        text += " hello"
    return text


def main() -> None:
    backend, model, options = sys.argv[1:]
    given = json.loads(options)
    if backend == "CB":
        take_orders(lambda: ContinuousBatching(Path(model), **given))
    take_orders(lambda: GenAI(Path(model), backend, **given))


if __name__ == "__main__":
    main()

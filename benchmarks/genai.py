"""OpenVINO GenAI as a contender, in whatever environment has it: the standard library and openvino_genai only.

    python -m benchmarks.genai BACKEND FOLDER JSON

FOLDER holds the exported model and its openvino_tokenizer. BACKEND is "PA", its paged attention, or "SDPA".
JSON: {"precision": "f32" | "bf16"}, the type that it computes in.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.orders import take_orders


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
        metrics = self.pipe.generate([self._prompt(length)] * batch, config).perf_metrics
        first = metrics.get_ttft().mean
        milliseconds = first if work == "prefill" else metrics.get_generate_duration().mean - first
        return milliseconds / 1e3

    def _prompt(self, length: int) -> str:
        tokenizer = self.pipe.get_tokenizer()
        text = "hello"
        while tokenizer.encode(text).input_ids.shape[1] < length:
            text += " hello"
        return text


def main() -> None:
    backend, model, options = sys.argv[1:]
    take_orders(lambda: GenAI(Path(model), backend, **json.loads(options)))


if __name__ == "__main__":
    main()

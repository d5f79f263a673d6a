"""One way of running a model, in a process of its own, which takes orders as ``benchmarks.orders`` says.

    python -m benchmarks.contender KIND MODEL_FOLDER [JSON]

Kinds are the keys of CONTENDERS; JSON has keywords for the kind's class.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.orders import take_orders
from benchmarks.requests import Arrivals, mixed


class LMDeploy:
    """The serving engine as a user starts it.

    eager: its eager_mode. dtype: its dtype. most: sequences in a batch. blocks: of 64 tokens in its cache. drafts: most
    tokens that it looks up in the text of a sequence for each step; 0 for no speculative decoding.
    """

    def __init__(
        self,
        model: Path,
        eager: bool,
        dtype: str = "auto",
        most: int = 8,
        blocks: int = 160,
        drafts: int = 0,
    ) -> None:
        from lmdeploy import PytorchEngineConfig, pipeline
        from lmdeploy.messages import SpeculativeConfig

        config = PytorchEngineConfig(
            device_type="cpu",
            dtype=dtype,
            eager_mode=eager,
            max_batch_size=most,
            session_len=4096,
            num_gpu_blocks=blocks,
        )
        speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=drafts) if drafts else None
        self.pipe: Any = pipeline(  # pyright: ignore[reportCallIssue]
            str(model), backend_config=config, speculative_config=speculative
        )

    def _prompt(self, length: int) -> str:
        text = "hello"
        tokenizer = self.pipe.async_engine.tokenizer
        while len(tokenizer.encode(text, add_bos=False)) < length:
            text += " hello"
        return text

    def run(self, work: str, batch: int, length: int, tokens: int) -> float | dict[str, Any]:
        from lmdeploy import GenerationConfig

        if work == "requests":
            return self._requests(mixed(batch))
        draws: dict[str, Any] = {"temperature": 2.0, "top_k": 0, "random_seed": 1} if work == "draw" else {}
        most = 1 if work == "prefill" else tokens + 1
        gen = GenerationConfig(max_new_tokens=most, ignore_eos=True, do_sample=bool(draws), **draws)
        prompts = [self._prompt(length)] * batch
        seen = [0] * batch
        start = time.perf_counter()
        for response in self.pipe.stream_infer(prompts, gen_config=gen, do_preprocess=False):
            before = min(seen)
            seen[response.index] += len(response.token_ids)
            if work != "prefill" and before == 0 and min(seen) > 0:
                start = (
                    time.perf_counter()
                )  # every sequence has its first token: from here on it only decodes
        return time.perf_counter() - start

    def _requests(self, requests: list[tuple[int, int]]) -> dict[str, Any]:
        from lmdeploy import GenerationConfig

        prompts = [self._prompt(length) for length, _ in requests]
        configs = [
            GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
            for _, tokens in requests
        ]
        arrivals = Arrivals(len(requests))
        for response in self.pipe.stream_infer(prompts, gen_config=configs, do_preprocess=False):
            arrivals.note(response.index, len(response.token_ids))
        return arrivals.answer()


class HuggingFace:
    """transformers' own model, eager with its default cache, or compiled with a static one.

    optimized: with its modules and its attention on dlinfer's ops.
    """

    def __init__(self, model: Path, backend: str | None, optimized: bool = False) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(model).eval().requires_grad_(False)
        if optimized:
            import dlinfer

            dlinfer.transformers.register_attention()
            dlinfer.transformers.optimize(self.model)
            self.model.set_attn_implementation("dlinfer")
        self.compiled = backend is not None
        self.forward: Any = self.model
        self.caches: dict[int, Any] = {}  # by batch size, made once: a new one would be new to every guard
        if backend == "dlinfer":
            self.forward = torch.compile(self.model, backend="dlinfer")
        elif backend == "inductor-freezing":
            # The best that inductor has for inference; its weights are packed as constants of the graph.
            import torch._inductor.config as inductor

            inductor.freezing = True
            self.forward = torch.compile(self.model, backend="inductor")

    def _static_cache(self, batch: int) -> Any:
        """The cache of a batch size, with its memory: one that gets it in the first call is compiled for twice."""
        from transformers import StaticCache

        if batch not in self.caches:
            config = self.model.config
            cache = self.caches[batch] = StaticCache(config, max_cache_len=1024)
            width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            cache.early_initialization(
                batch, config.num_key_value_heads, width, self.model.dtype, self.model.device
            )
        return self.caches[batch]

    @torch.no_grad()
    def run(self, work: str, batch: int, length: int, tokens: int) -> float:
        from transformers import DynamicCache

        ids = torch.arange(length).repeat(batch, 1) % 1000
        cache: Any = DynamicCache(config=self.model.config)
        if self.compiled:
            cache = self._static_cache(batch)
            cache.reset()
        start = time.perf_counter()
        logits = self.forward(ids, past_key_values=cache, logits_to_keep=1).logits
        if work == "prefill":
            return time.perf_counter() - start
        start = time.perf_counter()
        for step in range(tokens):
            ids = logits[:, -1:].argmax(-1)
            position = torch.full((batch, 1), length + step)
            logits = self.forward(ids, past_key_values=cache, position_ids=position, logits_to_keep=1).logits
        return time.perf_counter() - start


CONTENDERS = {
    "lmdeploy-graph": lambda model, **options: LMDeploy(model, eager=False, **options),
    "lmdeploy-eager": lambda model, **options: LMDeploy(model, eager=True, **options),
    "hf-eager": lambda model: HuggingFace(model, None),
    "hf-optimized": lambda model: HuggingFace(model, None, optimized=True),
    "hf-optimized-dlinfer": lambda model: HuggingFace(model, "dlinfer", optimized=True),
    "hf-dlinfer": lambda model: HuggingFace(model, "dlinfer"),
    "hf-inductor-freezing": lambda model: HuggingFace(model, "inductor-freezing"),
}


def main() -> None:
    kind, model, *options = sys.argv[1:]
    take_orders(lambda: CONTENDERS[kind](Path(model), **json.loads(options[0] if options else "{}")))


if __name__ == "__main__":
    main()

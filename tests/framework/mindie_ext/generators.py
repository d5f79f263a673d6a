"""What tests of generators share: configs of tiny checkpoints, and a server's part in a few lines."""

from pathlib import Path
from typing import Any

import numpy as np

from dlinfer.framework.mindie_ext import GenerationParams, GeneratorTorch, KVCacheSettings, Request

BASE: dict[str, Any] = {
    "backend_type": "atb",
    "world_size": 1,
    "rank": 0,
    "local_rank": 0,
    "npu_device_id": 0,
    "block_size": 16,
    "cpu_mem": 0,
    "npu_mem": -1,
    "max_input_len": 256,
    "max_iter_times": 256,
    "max_prefill_tokens": 512,
    "max_seq_len": 512,
    "max_batch_size": 8,
    "max_prefill_batch_size": 8,
    "load_tokenizer": False,
}


def config_of(model: Path, **changes: Any) -> dict[str, Any]:
    """A good config of a checkpoint."""
    return BASE | {"model_id": str(model)} | changes


def with_blocks(generator: GeneratorTorch, device: int, host: int, block_size: int = 16) -> GeneratorTorch:
    """Give a generator a pool of so many blocks."""
    info = generator.model_info
    one = KVCacheSettings(0, info, 0, 1 << 20, block_size).cache_block_bytes
    generator.update_cache_policy(KVCacheSettings(0, info, host * one, device * one, block_size))
    return generator


class Blocks:
    """Gives each request consecutive blocks, as many as it may come to need."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.taken = 0

    def request(
        self, number: int, prompt: list[int], new: int, sampling: np.ndarray | None = None, **params: Any
    ) -> Request:
        count = -(-(len(prompt) + new) // self.block_size)
        fields = {"max_new_tokens": new, "ignore_eos": True} | params
        request = Request.request_from_token(prompt, sampling, GenerationParams(**fields), number)
        request.block_tables = np.arange(self.taken, self.taken + count)
        self.taken += count
        return request


def run(generator: GeneratorTorch, requests: list[Request]) -> list[list[int]]:
    """All requests prefilled together, then decoded together to their ends."""
    tokens: dict[int, list[int]] = {request.req_id: [] for request in requests}
    running = list(requests)
    output = generator.prefill(running)
    while True:
        left = []
        for index, request in enumerate(running):
            tokens[request.req_id].append(int(output.token_ids[index, 0]))
            if not output.finish_reason[index]:
                left.append(request)
        done = [request for request in running if request not in left]
        generator.clear_cache([one for request in done for one in request.sequences])
        running = left
        if not running:
            return [tokens[request.req_id] for request in requests]
        output = generator.decode(running)

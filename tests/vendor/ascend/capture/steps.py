"""A decoding step in small, and steps of sequences that grow, for what is captured on the simulated NPU."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dlinfer import ops
from dlinfer.framework.lmdeploy_ext.layers.attention import StepMetadata
from dlinfer.framework.lmdeploy_ext.running.capture.policy import CapturePolicy
from dlinfer.framework.lmdeploy_ext.running.capture.runner import CaptureRunner
from dlinfer.vendor.ascend.device import AscendDevice
from tests.vendor.ascend.simulated_npu.install import NAME

BLOCK, BLOCKS, HEADS, SIZE = 128, 8, 2, 64
LATENT, ROPE = 512, 64
STEPS = ([5, 127], [6, 128], [7, 129], [200], [201], [3, 9, 255], [4, 10, 256])
"""Lengths: two rows of which one grows into a second block, one row, three rows of a graph of four."""


class OneLayer(torch.nn.Module):
    """An embedding, a norm, a write to the cache and attention over it; with ``latent`` over DeepSeek's cache."""

    def __init__(self, latent: bool = False, window: int = -1, layers: int = 2) -> None:
        super().__init__()
        self.ctx_mgr: Any = None
        self.latent, self.window, self.layers = latent, window, layers
        self.size, self.size_v = (LATENT + ROPE, LATENT) if latent else (SIZE, SIZE)
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(32, HEADS * self.size, generator=generator).half()
        self.embedding = torch.nn.Parameter(table.to(NAME), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.ones(HEADS * self.size).half().to(NAME), requires_grad=False)
        self.asks_host = False

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: Any,
        attn_metadata: Any,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        meta = attn_metadata
        hidden = self.embedding[input_ids[0]] + position_ids[0].unsqueeze(-1).half() / 64
        if self.asks_host:
            hidden = hidden * float(hidden.sum().item() != 0)
        for layer in range(self.layers):
            keys, values = past_key_values[layer]
            q = ops.rms_norm(hidden, self.norm, 1e-6).view(-1, HEADS, self.size)
            k = q[:, :1] if self.latent else q
            v = k[..., :LATENT] if self.latent else q * 2
            ops.fill_kv_cache(k, v, keys, values, meta.kv_start_indices)
            out = ops.paged_decode_attention(
                q, keys, values, meta.block_offsets, meta.block_size, meta.cu_seqlens_q_cpu[1:],
                meta.kv_seqlens_cpu, meta.max_kv_seq_len, HEADS, k.shape[1], softmax_scale=0.125,
                head_size_v=self.size_v, sliding_window=(self.window, 0) if self.window >= 0 else None,
            )  # fmt: skip
            hidden = hidden.clone()
            hidden[:, : out[0].numel()] += out.flatten(1)
        return hidden.unsqueeze(0)


def caches(model: OneLayer) -> list[list[Tensor]]:
    """Of each layer; those of a latent cache are one tensor."""
    generator = torch.Generator().manual_seed(1)
    heads, found = 1 if model.latent else HEADS, []
    for _ in range(model.layers):
        keys, values = (
            torch.randn(BLOCKS, BLOCK, heads, model.size, generator=generator).half().to(NAME)
            for _ in range(2)
        )
        found.append([keys, keys[..., :LATENT] if model.latent else values])
    return found


def step(lengths: list[int], cached: Any, first: int = 0, decoding: bool = True) -> dict[str, Any]:
    """LMDeploy's keywords of a step of sequences of these lengths, of which each has two blocks from ``first`` on."""
    count = len(lengths)
    table = torch.arange(first, first + 2 * count).view(count, 2) % BLOCKS
    length = torch.tensor(lengths)
    slots = table[torch.arange(count), (length - 1) // BLOCK] * BLOCK + (length - 1) % BLOCK
    ends = torch.arange(count + 1, dtype=torch.int32)
    meta = StepMetadata(
        is_decoding=decoding,
        block_offsets=table.int().to(NAME),
        q_start_loc=ends[:-1].to(NAME),
        q_seqlens=torch.ones(count, dtype=torch.int64).to(NAME),
        kv_seqlens=length.to(NAME),
        cu_seqlens_q=ends.to(NAME),
        cu_seqlens_q_cpu=ends,
        kv_seqlens_cpu=length,
        kv_start_indices=slots.to(NAME),
        block_size=BLOCK,
        max_kv_seq_len=max(lengths),
    )
    return {
        "input_ids": (length % 32).view(1, -1).to(NAME),
        "position_ids": (length - 1).view(1, -1).to(NAME),
        "past_key_values": cached,
        "attn_metadata": meta,
        "inputs_embeds": None,
    }


def build(model: OneLayer | None = None, **policy: Any) -> CaptureRunner:
    """A runner of the model."""
    config = SimpleNamespace(max_batches=8)
    chosen = CapturePolicy(largest=8, **policy)
    return CaptureRunner(AscendDevice(), model or OneLayer(), None, config, None, None, policy=chosen)


def differs(runner: Any, steps: Any = STEPS, **more: Any) -> bool:
    """Whether any step gives another result, or leaves another cache, than the model alone."""
    ours, alone = caches(runner.model), caches(runner.model)
    for number, lengths in enumerate(steps):
        mine = runner(**step(lengths, ours, first=number, **more)).cpu()
        want = runner.model(**step(lengths, alone, first=number, **more)).cpu()
        same = mine.shape == want.shape and torch.equal(mine, want)
        pairs = [
            (a, b) for left, right in zip(ours, alone, strict=True) for a, b in zip(left, right, strict=True)
        ]
        if not same or not all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs):
            return True
    return False

"""The network of CogVLM and CogVLM2 in plain torch, with a checkpoint's names; GLM-4V has the same encoder.

As its authors publish it: every layer has two sets of weights, one for pieces of an image and one for text. The tokens
of an image are an opening one, its pieces and a closing one; the closing one is text to the layers. All pieces share
one rotary position. CogVLM2 has fewer heads of keys and values, a bias on the vision expert's, a convolution that makes
one piece of 2 x 2 patches, and rotary frequencies of another base.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ONE_PIECE_A_PATCH = 1226
"""``num_positions`` of CogVLM's vision model; any other is CogVLM2's."""


class Network(nn.Module):
    """config: as ``config.json`` has it. Parameters have a checkpoint's names."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        hidden = config["hidden_size"]
        self.model: Any = nn.Module()
        self.model.embed_tokens = nn.Embedding(config["vocab_size"], hidden)
        self.model.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.model.norm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        vision = config["vision_config"]
        joined = 0 if vision["num_positions"] == ONE_PIECE_A_PATCH else vision["hidden_size"]
        self.model.vision = Vision(vision, hidden, config["intermediate_size"], joined)
        self.lm_head = nn.Linear(hidden, config["vocab_size"], bias=False)

    def forward(self, ids: Tensor, features: Tensor | None, begin: int = 0) -> Tensor:
        """Scores of the next token, [vocabulary].

        ids: int64 [tokens]. features: [tokens of an image, hidden] of the tokens from ``begin`` on, or None.
        """
        x = self.model.embed_tokens(ids)
        positions, expert = torch.arange(len(ids)), torch.zeros(len(ids), dtype=torch.bool)
        if features is not None:
            end = begin + len(features)
            x[begin:end] = features
            expert[begin : end - 1] = True
            share_position(positions, begin, end)
        for layer in self.model.layers:
            x = layer(x, positions, expert)
        return self.lm_head(self.model.norm(x[-1]))


def share_position(positions: Tensor, begin: int, end: int) -> None:
    """Let the pieces of an image of the tokens ``begin`` to ``end`` have one position. positions is changed."""
    pieces = end - begin - 2
    positions[begin + 1 : end - 1] = begin + 1
    positions[end - 1 :] -= pieces - 1


class Layer(nn.Module):
    """x: [tokens, hidden]. positions: int64 [tokens]. expert: bool [tokens], whether the vision expert takes it."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn = Attention(config)
        self.mlp: Any = nn.Module()
        self.mlp.vision_mlp, self.mlp.language_mlp = Gated(config), Gated(config)
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)

    def forward(self, x: Tensor, positions: Tensor, expert: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, expert)
        y = self.post_attention_layernorm(x)
        return x + torch.where(expert[:, None], self.mlp.vision_mlp(y), self.mlp.language_mlp(y))


class Attention(nn.Module):
    """Causal, over the heads of one text."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.heads = config["hidden_size"], config["num_attention_heads"]
        second = "num_multi_query_heads" in config
        self.kv_heads = config["num_multi_query_heads"] if second else self.heads
        self.size, self.base = hidden // self.heads, 500000.0 if second else 10000.0
        rows = (self.heads + 2 * self.kv_heads) * self.size
        self.vision_expert_query_key_value = nn.Linear(hidden, rows, bias=second)
        self.language_expert_query_key_value = nn.Linear(hidden, rows, bias=False)
        self.vision_expert_dense = nn.Linear(hidden, hidden, bias=False)
        self.language_expert_dense = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, positions: Tensor, expert: Tensor) -> Tensor:
        chosen = expert[:, None]
        made = torch.where(
            chosen, self.vision_expert_query_key_value(x), self.language_expert_query_key_value(x)
        )
        heads = made.unflatten(-1, (-1, self.size)).transpose(0, 1)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads))
        q, k = self.rotated(q, positions), self.rotated(k, positions)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = y.transpose(0, 1).flatten(1)
        return torch.where(chosen, self.vision_expert_dense(y), self.language_expert_dense(y))

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [heads, tokens, size], whose halves are rotated as pairs."""
        frequencies = self.base ** (-torch.arange(0, self.size, 2, dtype=torch.float64) / self.size)
        angles = torch.outer(positions.double(), frequencies)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Gated(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Vision(nn.Module):
    """The encoder, and the projection into the language model: pixels [images, 3, side, side] to tokens.

    vision: its configuration. hidden, inner: widths of the projection. joined: channels of the convolution that makes
    one piece of 2 x 2 patches; 0 for none.
    """

    def __init__(self, vision: dict[str, Any], hidden: int, inner: int, joined: int) -> None:
        super().__init__()
        width, patch = vision["hidden_size"], vision["patch_size"]
        self.scale = vision.get("scaling_factor", 1.0)
        self.patch_embedding: Any = nn.Module()
        self.patch_embedding.proj = nn.Conv2d(3, width, patch, patch)
        self.patch_embedding.cls_embedding = nn.Parameter(torch.randn(1, width))
        self.patch_embedding.position_embedding = nn.Embedding(vision["num_positions"], width)
        self.transformer: Any = nn.Module()
        self.transformer.layers = nn.ModuleList(
            VisionLayer(vision) for _ in range(vision["num_hidden_layers"])
        )
        self.conv = nn.Conv2d(width, joined, 2, 2) if joined else None
        self.linear_proj: Any = nn.Module()
        self.linear_proj.linear_proj = nn.Linear(joined or width, hidden, bias=False)
        self.linear_proj.norm1 = nn.LayerNorm(hidden)
        self.linear_proj.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.linear_proj.dense_h_to_4h = nn.Linear(hidden, inner, bias=False)
        self.linear_proj.dense_4h_to_h = nn.Linear(inner, hidden, bias=False)
        self.boi, self.eoi = nn.Parameter(torch.randn(1, 1, hidden)), nn.Parameter(torch.randn(1, 1, hidden))

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embedding.proj(pixels).flatten(2).transpose(1, 2)
        first = self.patch_embedding.cls_embedding.expand(len(pixels), 1, -1)
        x = torch.cat((first, patches), 1) + self.patch_embedding.position_embedding.weight
        for layer in self.transformer.layers:
            x = layer(x)
        x = x[:, 1:]
        if self.conv is not None:
            side = math.isqrt(x.shape[1])
            x = self.conv(x.transpose(1, 2).unflatten(2, (side, side))).flatten(2).transpose(1, 2)
        glu = self.linear_proj
        x = F.gelu(glu.norm1(glu.linear_proj(x)))
        x = glu.dense_4h_to_h(F.silu(glu.gate_proj(x)) * glu.dense_h_to_4h(x))
        ends = (one.expand(len(x), 1, -1) for one in (self.boi, self.eoi))
        return torch.cat((next(ends), x, next(ends)), 1) / self.scale


class VisionLayer(nn.Module):
    """Attention and MLP, each followed by its norm."""

    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        width, inner, eps = vision["hidden_size"], vision["intermediate_size"], vision["layer_norm_eps"]
        self.heads = vision["num_heads"]
        self.attention: Any = nn.Module()
        self.mlp: Any = nn.Module()
        self.attention.query_key_value = nn.Linear(width, 3 * width)
        self.attention.dense = nn.Linear(width, width)
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self.input_layernorm = nn.LayerNorm(width, eps=eps)
        self.post_attention_layernorm = nn.LayerNorm(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention.query_key_value(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.input_layernorm(self.attention.dense(seen))
        return x + self.post_attention_layernorm(self.mlp.fc2(F.gelu(self.mlp.fc1(x))))

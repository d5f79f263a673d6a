"""Each layer shows the keys that transformers shows, whichever way the configuration says so."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.layers.attention import PagedAttention
from dlinfer.framework.lmdeploy_ext.layers.positions import windows
from tests.framework.lmdeploy_ext.layers.attention_specs import paged_spec

TOKENS, LAYERS = 24, 4
TINY = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
SOME = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]

CONFIGS = {
    "mistral": ("Mistral", {"sliding_window": 6}),
    "mistral without": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", {"sliding_window": 6, "num_local_experts": 2}),
    "phi3": ("Phi3", {"sliding_window": 6}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "qwen2 unused": ("Qwen2", {"use_sliding_window": False, "sliding_window": 6}),
    "qwen3": ("Qwen3", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3}),
    "qwen2_moe": (
        "Qwen2Moe",
        EXPERTS | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3},
    ),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"use_sliding_window": True, "sliding_window": 6}),
    "gemma2": ("Gemma2", {"sliding_window": 6}),
    "gemma2, layers named": ("Gemma2", {"sliding_window": 6, "layer_types": SOME}),
    "gemma3": ("Gemma3", {"sliding_window": 6, "layer_types": SOME}),
    "llama": ("Llama", {}),
}


class Layer(torch.nn.Module):
    """As much of an LMDeploy layer as has to do with windows; Gemma's keeps its own."""

    def __init__(self, sliding_window: int | None) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        self.attn_fwd: Any = torch.nn.Module()
        self.attn_fwd.impl = PagedAttention.from_spec(paged_spec(sliding_window=sliding_window))


class Model(torch.nn.Module):
    """All layers with the window that LMDeploy's class passes."""

    def __init__(self, sliding_window: int | None) -> None:
        super().__init__()
        self.layers: Any = torch.nn.ModuleList(Layer(sliding_window) for _ in range(LAYERS))


@pytest.mark.parametrize(("family", "fields"), CONFIGS.values(), ids=CONFIGS)
def test_layers_show_as_many_keys_as_transformers(family, fields):
    """The oracle is transformers' own attention: the keys of the last token that have any weight."""
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{family}ForCausalLM")
    config = model_class.config_class(**TINY, **fields, attn_implementation="eager")
    with torch.inference_mode():
        out = model_class(config).eval()(torch.arange(TOKENS)[None], output_attentions=True)
    shown = [int((weights[0, 0, -1] > 0).sum()) for weights in out.attentions]

    model = Model(getattr(config, "sliding_window", None))
    if family == "Llama":  # LMDeploy's class passes no window
        assert windows.of_layers(config) is None
        return
    windows.apply(model, config)
    pairs = [layer.attn_fwd.impl.sliding_window for layer in model.layers]
    assert [TOKENS if pair is None else pair[0] + 1 for pair in pairs] == shown

    assert [layer.sliding_window for layer in model.layers] == [
        -1 if keys == TOKENS else keys for keys in shown
    ]

    cache = SimpleNamespace(llm_config=config, hf_config=config, sliding_window=6)
    windows.check(cache)
    assert cache.sliding_window == (6 if TOKENS not in shown else -1), "layers that see all need all blocks"


@pytest.mark.parametrize(
    ("given", "pair"), [(None, None), (-1, None), (0, None), (1, (0, 0)), (16, (15, 0)), ((3, 2), (3, 2))]
)
def test_a_window_counts_the_querys_own_key(given, pair):
    assert windows.as_pair(given) == pair


def test_layers_of_another_kind_are_refused():
    config = SimpleNamespace(layer_types=["chunked_attention"], num_hidden_layers=1)
    with pytest.raises(UnsupportedFeatureError, match="chunked_attention"):
        windows.of_layers(config)


def test_layers_of_llama4_are_chunked_by_their_types():
    types = ["chunked_attention", "full_attention"]
    config = SimpleNamespace(model_type="llama4_text", layer_types=types, attention_chunk_size=64)
    assert windows.of_layers(config) == [None, None]
    model = Model(None)
    windows.apply(model, config)
    assert [layer.attn_fwd.impl.is_chunked for layer in model.layers[:2]] == [True, False]


@pytest.mark.parametrize(("size", "block", "is_served"), [(64, 64, True), (64, 128, False), (96, 64, False)])
def test_chunks_are_whole_blocks(size: int, block: int, is_served: bool):
    config = SimpleNamespace(model_type="llama4_text", attention_chunk_size=size)
    if is_served:
        windows.check_chunks(config, block)
        return
    with pytest.raises(
        UnsupportedFeatureError, match=rf"block_size={block}.*use a block_size that divides {size}"
    ):
        windows.check_chunks(config, block)

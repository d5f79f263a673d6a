"""Sliding windows as in transformers: with a window of w a query sees w keys, including its own.

LMDeploy's models pass w as an int. LMDeploy's CUDA kernels take w for the number of keys before the query's own, which
is one key more. Some of LMDeploy's models pass w to all layers, though in transformers only some layers have a window
(``layer_types``). LMDeploy's Mixtral passes no window.
"""

from typing import Any

from torch import nn

from dlinfer.framework.lmdeploy_ext.device.activation import refuse

_CHUNKED = "llama4_text"
"""Model type of Llama 4, whose layers of type "chunked_attention" see the text from the begin of a chunk."""

# Model types with the window, if any, in every layer. Other types list the layers that have it.
_ALL_LAYERS = ("mistral", "mixtral", "phi3", "qwen3_moe")

_OWN_LAYERS = ("deepseek_v4",)
"""Model types whose layers have a window of their own, and get it from LMDeploy when they are built."""


def as_pair(sliding_window: Any) -> tuple[int, int] | None:
    """Return a window as flash-attention's pair (keys before the query's, keys after it); None for no window.

    sliding_window: a number of keys as in transformers, or such a pair. None and ints below 1 mean no window.
    """
    if sliding_window is None or (isinstance(sliding_window, int) and sliding_window < 1):
        return None
    return (sliding_window - 1, 0) if isinstance(sliding_window, int) else tuple(sliding_window)


def of_layers(config: Any) -> list[int | None] | None:
    """Return a list of each layer's window in keys, with None for a layer without a window.

    If LMDeploy gives all layers the right windows, return None instead of the list. config: the text model's. Raises
    UnsupportedFeatureError for other layer types.
    """
    window = getattr(config, "sliding_window", None) or None
    if getattr(config, "model_type", "") in _ALL_LAYERS:
        return [window] * config.num_hidden_layers
    types = getattr(config, "layer_types", None)
    if not types or getattr(config, "model_type", "") in _OWN_LAYERS:
        return None
    known = dict.fromkeys(("full_attention", "linear_attention", "indexed_attention"))
    known |= {"sliding_attention": window}
    if getattr(config, "model_type", "") == _CHUNKED:
        known["chunked_attention"] = None
    for name in types:
        if name not in known:
            raise refuse(f"layers of type {name!r}", "use another model")
    return [known[name] for name in types]


def check(model_config: Any) -> None:
    """Unset ``sliding_window`` if some layers see the whole text, so that LMDeploy drops no cached tokens."""
    layers = of_layers(model_config.llm_config or model_config.hf_config)
    if layers is not None and None in layers:
        model_config.sliding_window = -1


def check_chunks(config: Any, block_size: int) -> None:
    """Raise UnsupportedFeatureError unless chunks of Llama 4's attention are whole blocks of the cache.

    config: the text model's.
    """
    size = (
        getattr(config, "attention_chunk_size", None)
        if getattr(config, "model_type", "") == _CHUNKED
        else None
    )
    if size is not None and size % block_size:
        feature = f"block_size={block_size} for attention in chunks of {size} tokens"
        raise refuse(feature, f"use a block_size that divides {size}")


def apply(model: nn.Module, config: Any) -> None:
    """Give each attention layer of an LMDeploy model the window, or the chunks, that transformers gives it.

    config: the text model's. A layer's index is the number in its name. An attribute ``sliding_window`` of the module
    around the layer is set too (-1 for no window), because Gemma 3's module chooses its frequencies by that attribute.
    """
    layers = of_layers(config)
    if layers is None:
        return
    types = list(getattr(config, "layer_types", None) or ())
    for name, module in model.named_modules():
        implementation: Any = getattr(module, "impl", None)
        number = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if not hasattr(implementation, "sliding_window") or number is None or number >= len(layers):
            continue
        window = layers[number]
        implementation.sliding_window = as_pair(window)
        implementation.is_chunked = types[number : number + 1] == ["chunked_attention"]
        owner: Any = model.get_submodule(name.rpartition(".")[0])
        if hasattr(owner, "sliding_window"):
            owner.sliding_window = -1 if window is None else window

"""Refuse config keys of MindIE features that dlinfer does not serve, unless their values turn the feature off."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def _is_one(value: Any) -> bool:
    return str(value) in ("-1", "1")


def _is_off(value: Any) -> bool:
    return str(value).lower() in ("false", "0", "", "[]", "{}")


def _is_standard(value: Any) -> bool:
    return value == "standard"


# Key -> (feature, whether a value turns the feature off).
REFUSED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model_role": ("prefill and decoding on different machines", _is_standard),
    "role": ("prefill and decoding on different machines", _is_standard),
    "remote_device_ips": ("prefill and decoding on different machines", _is_off),
    "remote_model_instance_ids": ("prefill and decoding on different machines", _is_off),
    "plugin_params": ("plugins (speculation, prefix cache, splitfuse)", _is_off),
    "speculation_gamma": ("speculative decoding", _is_off),
    "num_speculative_tokens": ("speculative decoding", _is_off),
    "kv_pool_backend": ("a KV pool that machines share", _is_off),
    "kv_pool_config_path": ("a KV pool that machines share", _is_off),
    "kv_pool_async_write": ("a KV pool that machines share", _is_off),
    "layerwiseDisaggregated": ("layers on different machines", _is_off),
    "distributed_enable": ("a scheduler on each data parallel rank", _is_off),
    "dp": ("data parallelism", _is_one),
    "cp": ("context parallelism", _is_one),
    "sp": ("sequence parallelism", _is_one),
    "moe_ep": ("expert parallelism", _is_one),
}


def refused(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield the fault (key, expected, given) of each key that turns on a feature that is not served."""
    for key, (feature, asks_nothing) in REFUSED.items():
        value = config.get(key)
        if value is not None and not asks_nothing(value):
            yield key, f"no value ({feature}: not supported)", value

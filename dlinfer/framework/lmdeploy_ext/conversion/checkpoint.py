"""Describes a conversion: the checkpoint that goes in, and the plan of what LMDeploy loads instead."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device.activation import refuse

ADVICE = "use a checkpoint in a served format (AWQ of 4 bits is one), or the unquantised model"
CONVERTED_FROM = "converted_from"
"""The key of a configuration that a conversion wrote: the format of the files."""

FLOATS = "floats"
"""The beginning of that format where DLINFER_CPU_WEIGHTS packs files in floats as they load."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of a configuration for the number of experts."""

SERVED = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
"""LMDeploy's classes of models with experts whose tokens were compared where the experts are of 4 bits."""

INTERMEDIATE = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
"""Keys of a configuration for the in_features of down projections, also of experts."""

_INSIDE = ("text_config", "llm_config", "language_config")

Convert = Callable[[str, Tensor, Any], Iterable[tuple[str, Tensor]]]
"""(name, tensor, layer) of a file -> (name, tensor) as LMDeploy loads them: none, one or several.

layer: LMDeploy's linear layer that the tensor belongs to, or our packed experts, or None.
Raises UnsupportedFeatureError for numbers that the target cannot hold.
"""


def language_configs(config: Any) -> list[Any]:
    """A configuration (a dict, or transformers' object), and those of a language model nested in it."""
    mapped = isinstance(config, Mapping)
    nested = (config.get(name) if mapped else getattr(config, name, None) for name in _INSIDE)
    return [config, *(part for part in nested if part is not None)]


def linear_sizes(model: Mapping[str, Any]) -> dict[str, int]:
    """The in_features and out_features of a decoder's linear layers, by their names in the configuration.

    Latent attention has other projections, which LMDeploy does not join: its heads are left out.
    """
    hidden, heads = model.get("hidden_size") or 0, model.get("num_attention_heads")
    sizes = {"hidden_size": hidden, **{name: model.get(name) or 0 for name in INTERMEDIATE}}
    if heads and hidden and not model.get("kv_lora_rank"):
        head = model.get("head_dim") or hidden // heads
        sizes["num_attention_heads * head_dim"] = heads * head
        sizes["num_key_value_heads * head_dim"] = (model.get("num_key_value_heads") or heads) * head
    return {name: size for name, size in sizes.items() if size}


def shown(sizes: Mapping[str, int]) -> str:
    """Sizes in words, for errors."""
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())


@dataclass(frozen=True)
class Plan:
    """How a checkpoint is converted.

    config: the ``quantization_config`` for LMDeploy; None where only a layer of ours knows that weights are packed.
    packs: whether floats are packed into fewer bytes than the files have.
    """

    config: dict[str, Any] | None
    convert: Convert
    packs: bool = False

    @property
    def changes_bytes(self) -> bool:
        """Whether the weights take other bytes in memory than LMDeploy's own layers would."""
        return self.packs or self.config is None


@dataclass(frozen=True)
class Checkpoint:
    """A quantised checkpoint. source: its format, for errors. config: its ``quantization_config``. model: the whole
    configuration."""

    source: str
    config: Mapping[str, Any]
    model: Mapping[str, Any]

    def require(self, is_served: Any, detail: str) -> None:
        """Raise UnsupportedFeatureError with the source and ``detail`` unless a property is served."""
        if not is_served:
            raise refuse(f"a quantised model ({self.source} {detail})", ADVICE)

    def named(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration for LMDeploy that also names the format of the files."""
        return {**config, CONVERTED_FROM: self.source}

    def require_packed(self, is_packed: bool, name: str) -> None:
        """Raise UnsupportedFeatureError for a layer in floats where LMDeploy's has packed weights."""
        self.require(is_packed, f"with layers that are not packed ({name})")

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return any(self.model.get(name) for name in EXPERTS)

    def require_served_experts(self) -> None:
        """Raise UnsupportedFeatureError for a class that is not served with experts of 4 bits."""
        for name in (self.model.get("architectures") or [""]) if self.has_experts else []:
            self.require(name in SERVED, f"with experts of {name}; served are {', '.join(SERVED)}")

    def require_plain(self) -> None:
        """Raise UnsupportedFeatureError for images and latent attention, whose names or sizes differ."""
        nested = self.model.get("vision_config") or language_configs(self.model)[1:]
        self.require(not nested, "of a vision-language model")
        self.require(not self.model.get("kv_lora_rank"), "with latent attention")

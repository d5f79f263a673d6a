"""Describes a conversion: a quantised checkpoint, and the plan that converts it to a checkpoint that LMDeploy loads."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device.activation import refuse

ADVICE = "use a checkpoint in a supported format, such as 4-bit AWQ, or the unquantised model"
CONVERTED_FROM = "converted_from"
"""The key that a conversion adds to ``quantization_config``. Its value names the format of the stored checkpoint."""

FLOATS = "floats"
"""The start of the value of ``CONVERTED_FROM`` if DLINFER_CPU_WEIGHTS packs floating-point files while they load."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of config.json that may hold the number of experts."""

SERVED = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
"""LMDeploy's model classes that we serve with 4-bit experts, because we have compared the tokens that they generate."""

AS_STORED = "KimiK25ForConditionalGeneration"
"""LMDeploy's class that reads packed experts of compressed-tensors as its published checkpoints store them."""

INTERMEDIATE = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
"""Keys of config.json that may hold the in_features of down projections, in dense layers or in experts."""

_INSIDE = ("text_config", "llm_config", "language_config", "thinker_config")

Convert = Callable[[str, Tensor, Any], Iterable[tuple[str, Tensor]]]
"""A function that takes one tensor of a file, and returns the pairs (name, tensor) that LMDeploy loads instead.

Its arguments: the tensor's name; the tensor; the layer that owns it, which is a linear layer of LMDeploy's or our
packed experts, or None for other tensors. Raises UnsupportedFeatureError for values that the target format cannot hold.
"""


def language_configs(config: Any) -> list[Any]:
    """Return a model's configuration, followed by the configurations of language models that are nested in it.

    config: a dict, or a configuration object of transformers.
    """
    mapped = isinstance(config, Mapping)
    nested = (config.get(name) if mapped else getattr(config, name, None) for name in _INSIDE)
    return [config, *(inner for part in nested if part is not None for inner in language_configs(part))]


def linear_sizes(model: Mapping[str, Any]) -> dict[str, int]:
    """Return every in_features and out_features of a decoder's linear layers: a dict from name in config.json to size.

    The sizes of heads are left out for latent attention (MLA), because its projections have other sizes. model: the
    contents of config.json.
    """
    hidden, heads = model.get("hidden_size") or 0, model.get("num_attention_heads")
    sizes = {"hidden_size": hidden, **{name: model.get(name) or 0 for name in INTERMEDIATE}}
    if heads and hidden and not model.get("kv_lora_rank"):
        head = model.get("head_dim") or hidden // heads
        sizes["num_attention_heads * head_dim"] = heads * head
        sizes["num_key_value_heads * head_dim"] = (model.get("num_key_value_heads") or heads) * head
    for part in ("key", "value"):  # gated linear attention
        number, size = f"linear_num_{part}_heads", f"linear_{part}_head_dim"
        sizes[f"{number} * {size}"] = (model.get(number) or 0) * (model.get(size) or 0)
    return {name: size for name, size in sizes.items() if size}


def shown(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())


@dataclass(frozen=True)
class Plan:
    """The plan of a checkpoint's conversion.

    config: the ``quantization_config`` that LMDeploy gets. None means that LMDeploy loads the model as an unquantised
    one, and only our own layer knows that its weights are packed.
    convert: the function that converts each tensor.
    packs: whether the files hold floating-point weights, and the plan packs them to int8 or int4 while they load.
    experts: without ``config``, the format that the experts of the loaded model have.
    """

    config: dict[str, Any] | None
    convert: Convert
    packs: bool = False
    experts: str = ""

    @property
    def changes_bytes(self) -> bool:
        """Whether the weights have another size in memory than in the layers that LMDeploy itself would build."""
        return self.packs or self.config is None


@dataclass(frozen=True)
class Checkpoint:
    """A quantised checkpoint.

    source: the name of its format, for error texts. config: its ``quantization_config``. model: the contents of
    config.json.
    """

    source: str
    config: Mapping[str, Any]
    model: Mapping[str, Any]

    def require(self, is_served: Any, detail: str) -> None:
        """Raise UnsupportedFeatureError unless ``is_served``. The error names the format and ``detail``."""
        if not is_served:
            raise refuse(f"a quantised model ({self.source} {detail})", ADVICE)

    def named(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of ``config`` that also names the stored format, under the key ``CONVERTED_FROM``.

        config: the converted ``quantization_config``.
        """
        return {**config, CONVERTED_FROM: self.source}

    def require_packed(self, is_packed: bool, name: str) -> None:
        """Raise UnsupportedFeatureError unless ``is_packed``, because LMDeploy builds this layer only as packed.

        is_packed: whether the files hold packed weights for the layer. name: the layer's name, for the error.
        """
        self.require(is_packed, f"with layers that are not packed ({name})")

    @property
    def has_experts(self) -> bool:
        return any(self.model.get(name) for name in EXPERTS)

    def require_served_experts(self) -> None:
        """Raise UnsupportedFeatureError if the model has experts, but its class is not in ``SERVED``."""
        for name in (self.model.get("architectures") or [""]) if self.has_experts else []:
            self.require(name in SERVED, f"with experts of {name}; supported are {', '.join(SERVED)}")

    def require_plain(self) -> None:
        """Raise UnsupportedFeatureError for vision-language models and latent attention, which we do not convert."""
        nested = self.model.get("vision_config") or language_configs(self.model)[1:]
        self.require(not nested, "of a vision-language model")
        self.require(not self.model.get("kv_lora_rank"), "with latent attention")

"""What a conversion is told and what it says: a checkpoint's configuration, and a plan."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion.experts import SERVED
from dlinfer.framework.lmdeploy_ext.device.refusing import refuse

ADVICE = "use a checkpoint in a served format (AWQ of 4 bits is one), or the unquantised model"
CONVERTED_FROM = "converted_from"
"""The key of a configuration that was made here: the format that the files have."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of a configuration that tell how many experts there are."""

_INSIDE = ("vision_config", "text_config", "llm_config", "language_config")

Convert = Callable[[str, Tensor, Any], Iterable[tuple[str, Tensor]]]
"""(name, tensor, layer) of a file -> (name, tensor) as LMDeploy loads them: none, one or several.

layer: LMDeploy's linear layer that the tensor is of, or our packed experts, or None where there is none of that name.
Raises UnsupportedFeatureError for numbers that the target cannot hold.
"""


@dataclass(frozen=True)
class Plan:
    """What becomes of a checkpoint. config: the ``quantization_config`` that LMDeploy is given; None for none, where a
    layer of ours alone knows what is packed. packs: whether floats are packed, into fewer bytes than the files have."""

    config: dict[str, Any] | None
    convert: Convert
    packs: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """What a plan is made of. source: the format, as refusals name it. config: its ``quantization_config``. model: the
    whole configuration."""

    source: str
    config: Mapping[str, Any]
    model: Mapping[str, Any]

    def require(self, is_served: Any, what: str) -> None:
        """Raise UnsupportedFeatureError that names ``what``, which stands behind the source, unless it is served."""
        if not is_served:
            raise refuse(f"a quantised model ({self.source} {what})", ADVICE)

    def named(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration of LMDeploy's that says what it was made of."""
        return {**config, CONVERTED_FROM: self.source}

    def require_packed(self, is_packed: bool, name: str) -> None:
        """Raise UnsupportedFeatureError for a layer ``name`` that is in floats where LMDeploy's has packed weights."""
        self.require(is_packed, f"with layers that are not packed ({name})")

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return any(self.model.get(name) for name in EXPERTS)

    def require_dense(self) -> None:
        """Raise UnsupportedFeatureError for experts."""
        self.require(not self.has_experts, "with experts")

    def require_served_experts(self) -> None:
        """Raise UnsupportedFeatureError for experts of a class that is not served with experts of 4 bits."""
        for name in (self.model.get("architectures") or [""]) if self.has_experts else []:
            self.require(name in SERVED, f"with experts of {name}; served are {', '.join(SERVED)}")

    def require_floats_apart(self, layer: Any, name: str) -> None:
        """Raise UnsupportedFeatureError for a packed layer ``name`` that LMDeploy's class has in floats: a router."""
        is_packed = layer is None or hasattr(layer, "group_size")
        self.require(is_packed, f"with {name} quantised, which LMDeploy's class has in floats")

    def require_plain(self) -> None:
        """Raise UnsupportedFeatureError for images and latent attention, whose names or sizes differ."""
        for name in _INSIDE:
            self.require(not self.model.get(name), "of a vision-language model")
        self.require(not self.model.get("kv_lora_rank"), "with latent attention")

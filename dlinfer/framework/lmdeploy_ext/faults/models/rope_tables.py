"""Build the rotary tables of Phi-3.5-MoE and MiniCPM3 from the rope keys of transformers 5.

LMDeploy's classes read the rope keys of transformers 4.
"""

from typing import Any

from torch import nn

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.lmdeploy_ext.layers.positions import rope_parameters
from dlinfer.framework.patching import Original, Patch


class _Unscaled:
    """A model's configuration without its rope parameters. LMDeploy's classes fail on those of transformers 5."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name in ("rope_parameters", "rope_scaling"):
            raise AttributeError(name)
        return getattr(self._config, name)


def _tables(config: Any, dim: int) -> nn.Module:
    """Return LMDeploy's module that computes cos and sin for the first ``dim`` features of a head."""
    from lmdeploy.pytorch.nn import rotary_embedding

    built: dict[str, Any] = rotary_embedding.build_rotary_params(config)
    longrope = built.get("longrope_params")
    if longrope is not None and config.model_type == "phimoe":
        own = rope_parameters.parameters(config)
        longrope.short_mscale, longrope.long_mscale = own["short_mscale"], own["long_mscale"]
    base = rotary_embedding.get_rope_theta(config)
    return rotary_embedding.build_rotary_embedding(dim, config.max_position_embeddings, base, **built)


def _rotary(target: str, model: str) -> Patch:
    @corrects(
        target,
        why="reads rope_parameters['type'], which transformers 5 does not write, and supports only longrope",
        for_models=(model,),
    )
    def init(original: Original, self: Any, config: Any, dtype: Any = None, device: Any = None) -> None:
        original(self, _Unscaled(config), dtype, device)
        whole = config.hidden_size // config.num_attention_heads
        self.rotary_emb = _tables(config, getattr(config, "qk_rope_head_dim", whole))

    return init


PATCHES = (
    _rotary("lmdeploy.pytorch.models.phi3_moe:PhiMoEModel.__init__", "phimoe"),
    _rotary("lmdeploy.pytorch.models.minicpm3:MiniCPM3Model.__init__", "minicpm3"),
)

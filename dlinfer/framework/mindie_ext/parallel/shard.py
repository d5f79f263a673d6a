"""Load a model, or one rank's shard of it, with transformers' own tensor parallelism."""

from typing import Any

from torch import nn

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.mindie_ext.parallel.group import Group


def load(
    model_id: str,
    *,
    dtype: Any,
    attn_implementation: str,
    group: Group | None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load a causal language model from safetensors. With a group, load only this rank's shard.

    Raises UnsupportedFeatureError, before weights are read, if the model has no tensor parallel plan or if its heads or
    sizes cannot be divided among the ranks. Also raises RankLostError.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    fixed: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    kwargs = fixed | {"dtype": dtype, "attn_implementation": attn_implementation, "use_safetensors": True}
    if group is None:
        return AutoModelForCausalLM.from_pretrained(model_id, **kwargs)
    config = AutoConfig.from_pretrained(model_id, **fixed)
    refuse_unspread(config, group.world_size)
    with group.watched("the model was loaded"):
        spread = DistributedConfig(tp_size=group.world_size)
        return AutoModelForCausalLM.from_pretrained(model_id, distributed_config=spread, **kwargs)


def refuse_unspread(config: Any, world_size: int) -> None:
    """Raise UnsupportedFeatureError if the model of a config cannot be divided among world_size ranks."""
    text = config.get_text_config(decoder=True)
    if not getattr(text, "base_model_tp_plan", None):
        raise UnsupportedFeatureError(
            feature=f"world_size = {world_size} with {text.model_type}, a model type without a tensor parallel plan,",
            where="dlinfer's GeneratorTorch",
            advice="set world_size = 1",
        )
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        count = getattr(text, key, None)
        if count is not None and count % world_size:
            raise UnsupportedFeatureError(
                feature=f"world_size = {world_size} with {key} = {count}",
                where="dlinfer's GeneratorTorch",
                advice=f"set a world_size that divides {count}",
            )

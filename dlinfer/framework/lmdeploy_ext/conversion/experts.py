"""Experts of 4 bits: which of LMDeploy's classes have them, and where a checkpoint's expert lies in such a class."""

SERVED = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
"""LMDeploy's classes of models with experts whose tokens were compared where the experts are of 4 bits."""

_SHARDS: dict[str, str] = dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up")
_SHARDS |= dict.fromkeys(("down_proj", "w2"), "down")


def place_of(path: str) -> str:
    """The path of an expert's projection in LMDeploy's model, from its path in a checkpoint; others stay.

    ``model.layers.0.mlp.experts.7.up_proj`` becomes ``model.layers.0.mlp.experts.gate_up``.
    """
    before, found, inside = path.partition(".experts.")
    expert, _, name = inside.partition(".")
    if not found or not expert.isdigit() or name not in _SHARDS:
        return path
    return f"{before}.experts.{_SHARDS[name]}"

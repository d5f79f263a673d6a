"""Checks models that decode by block diffusion (SDAR), and refuses options and requests that they do not serve.

Such a model generates a block of tokens at a time. A step decides some tokens of the block, in any order. So the rules
for a request's next token that read the token before it, such as penalties and grammars, have no meaning there.
"""

from collections.abc import Sequence
from typing import Any

from dlinfer.framework.lmdeploy_ext.device import activation, devices
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.layers import block_diffusion
from dlinfer.framework.patching import Original, replaces

_NAMED = "a model that decodes by block diffusion"
_DEFAULT_LENGTH = 4
"""LMDeploy's ``dllm_block_length`` for a model whose configuration does not say it."""


def check_model(model_config: Any) -> None:
    """Adjust LMDeploy's ModelConfig of a model that decodes by block diffusion. Leave other models as they are.

    LMDeploy has the mask token and the block length as constants, and passes on a sliding window that is switched off.
    Raises UnsupportedFeatureError for a sliding window, and for a mask token outside the vocabulary.
    """
    if not block_diffusion.is_used(model_config):
        return
    config = model_config.hf_config
    if getattr(config, "use_sliding_window", False) and getattr(config, "sliding_window", None):
        raise refuse(f"{_NAMED} with use_sliding_window", "use a model without it")
    config.sliding_window = None
    model_config.sliding_window = -1
    if not hasattr(config, "pad_token_id"):
        config.pad_token_id = None
    mask = getattr(config, "mask_token_id", None)
    if mask is not None:
        model_config.dllm_mask_token = mask
    if model_config.dllm_mask_token >= model_config.vocab_size:
        feature = (
            f"mask token {model_config.dllm_mask_token} outside the vocabulary of {model_config.vocab_size}"
        )
        raise refuse(feature, "set mask_token_id in config.json to the model's mask token")
    if model_config.dllm_block_length is None:
        model_config.dllm_block_length = getattr(config, "block_size", None) or _DEFAULT_LENGTH


def check_options(model_config: Any, cache_config: Any, misc_config: Any, speculates: bool = False) -> None:
    """Raise UnsupportedFeatureError for an engine option that is not served with this model.

    The parameters are LMDeploy's configurations. speculates: whether drafts are asked for.
    """
    dllm: Any = misc_config.dllm_config
    asked = dllm.block_length
    if not block_diffusion.is_used(model_config):
        if asked is not None:
            feature = f"dllm_block_length={asked} for a model that does not decode by block diffusion"
            raise refuse(feature, "leave dllm_block_length out")
        return
    device = activation.active()
    if device is not None and not devices.shares_host(device):
        raise refuse(_NAMED, "use device_type='cpu'")
    length = model_config.dllm_block_length if asked is None else asked
    block, chunk = cache_config.block_size, cache_config.max_prefill_token_num
    if length < 2 or block % length or chunk % length:
        advice = f"use a dllm_block_length of 2 or more that divides both block_size={block} and"
        raise refuse(f"dllm_block_length={length}", f"{advice} max_prefill_token_num={chunk}")
    steps = dllm.denoising_steps
    if steps is not None and (steps < 1 or length % steps):
        raise refuse(
            f"dllm_denoising_steps={steps} with blocks of {length} tokens",
            f"use a divisor of {length}, or leave it out for one token a step",
        )
    policy = int(cache_config.quant_policy or 0)
    for is_asked, option, advice in (
        (cache_config.enable_prefix_caching, "enable_prefix_caching", "leave enable_prefix_caching off"),
        (policy, f"quant_policy={policy}", "use quant_policy=0"),
        (speculates, "speculative decoding", "leave speculative_config out"),
    ):
        if is_asked:
            raise refuse(f"{option} with {_NAMED}", advice)


_PLAIN: dict[str, tuple[Sequence[Any], str]] = {
    "repetition_penalty": ((1.0,), "use repetition_penalty=1"),
    "presence_penalty": ((0.0,), "use presence_penalty=0"),
    "frequency_penalty": ((0.0,), "use frequency_penalty=0"),
    "repetition_ngram_size": ((0,), "use repetition_ngram_size=0"),
    "logits_processors": ((None, []), "leave logit_bias and logits processors out"),
    "bad_words": ((None, []), "forbid single tokens with bad_token_ids"),
    "response_format": ((None, {"type": "text"}), "leave response_format out"),
    "logprobs": ((None,), "leave logprobs out"),
    "logprob_start_len": ((-1,), "leave logprob_start_len out"),
    "output_logits": ((None,), "leave output_logits out"),
    "return_ppl": ((False, None), "score texts with an autoregressive model"),
}
"""Field of a GenerationConfig -> (the values that block diffusion serves, the user's next step)."""

_OF_THE_ENGINE = {
    "logprobs": ("num_logprobs", (-1,)),
    "output_logits": ("out_logits", (False,)),
    "return_ppl": ("out_ce_loss", (False,)),
}
"""Field of a GenerationConfig -> (the field of LMDeploy's SamplingParam, the served values there)."""


def refusal(gen_config: Any) -> str | None:
    """Return a reason to refuse a request's GenerationConfig; None if block diffusion serves it."""
    greedy = not gen_config.do_sample  # LMDeploy then drops the repetition penalty
    for name, (served, advice) in _PLAIN.items():
        value = getattr(gen_config, name, served[0])
        if value not in served and not (greedy and name == "repetition_penalty"):
            return str(refuse(f"{name}={value!r} with {_NAMED}", advice))
    if gen_config.max_new_tokens == 0:
        return str(refuse(f"max_new_tokens=0 with {_NAMED}", "use max_new_tokens=1 or more"))
    return None


def is_servable(param: Any) -> bool:
    """Return whether block diffusion serves a SamplingParam. ``bad_words`` are token ids there, which are served."""
    for name, (served, _) in _PLAIN.items():
        field, values = _OF_THE_ENGINE.get(name, (name, served))
        if name != "bad_words" and getattr(param, field, values[0]) not in values:
            return False
    return param.max_new_tokens > 0


@replaces(
    "lmdeploy.pytorch.engine.executor.base:ExecutorBase.__init__",
    why="accepts options that block diffusion does not serve, and a dllm_block_length for other models",
    when=activation.is_on,
    signature="(self, model_path, model_config, cache_config, backend_config, dist_config, misc_config, adapters=None, "
    "specdecode_config=None, device_type='cuda', trust_remote_code=False)",
)
def _init(
    original: Original,
    self: Any,
    model_path: str,
    model_config: Any,
    cache_config: Any,
    backend_config: Any,
    dist_config: Any,
    misc_config: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    specdecode_config = args[1] if len(args) > 1 else kwargs.get("specdecode_config")
    check_options(model_config, cache_config, misc_config, specdecode_config is not None)
    configs = (model_config, cache_config, backend_config, dist_config, misc_config)
    original(self, model_path, *configs, *args, **kwargs)

"""Return the model's own logits for ``output_logits="all"``. LMDeploy returns logits that sampling has scaled."""

from typing import Any

import torch

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original


@corrects(
    "lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent._step_postprocess_with_output",
    why="returns logits that sampling has divided in place by the temperature (0.8 by default), if every sequence "
    "has one row",
    signature="(self, last_logits, logits, inputs, sampling_inputs, stopping_criteria, model_metas, "
    "need_broadcast_next, return_logits=False, return_ce_loss=False, seq_length=None, all_routed_experts=None, "
    "extra_inputs=None)",
)
def _step_postprocess(
    original: Original, self: Any, last_logits: torch.Tensor, logits: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    if kwargs.get("return_logits") or kwargs.get("return_ce_loss"):
        last_logits = last_logits.clone()  # sampling divides it by the temperature, in place
    return original(self, last_logits, logits, *args, **kwargs)

"""Give Qwen3.5's MTP layer the embeddings of its tokens in every step, as a step with images does."""

from typing import Any

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.patching import Original, replaces


@replaces(
    "lmdeploy.pytorch.models.qwen3_5_mtp:Qwen3_5MTPModel.prepare_inputs_for_generation",
    why="passes embeddings only in steps with images, so graph mode would compile the draft again at the first image, "
    "while its request waits",
    when=activation.is_on,
    for_models=("qwen3_5", "qwen3_5_moe"),
)
def _prepare_inputs(
    original: Original, self: Any, past_key_values: Any, inputs_embeds: Any = None, context: Any = None
) -> dict[str, Any]:
    inputs = original(self, past_key_values, inputs_embeds, context)
    if inputs["inputs_embeds"] is None:
        inputs["inputs_embeds"] = self.get_input_embeddings()(inputs["input_ids"])
    return inputs

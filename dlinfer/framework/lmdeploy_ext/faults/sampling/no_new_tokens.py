"""After a request with ``max_new_tokens=0``, keep the same rows in the engine's batch as in the model agent.

LMDeploy's engine drops the row of this request, but the model agent keeps it. The next step would then use the rows of
other requests.
"""

from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original


@corrects(
    "lmdeploy.pytorch.engine.inputs_maker:InputsMakerAsync.update_running_seqs",
    why="leaves requests with max_new_tokens=0 out of the batch, but the model agent keeps their rows, so the next "
    "batch decodes with the rows of other requests",
)
def _update_running_seqs(original: Original, self: Any, running: list[Any], inputs: Any) -> None:
    from lmdeploy.pytorch.disagg.config import EngineRole

    if inputs is not None and self.config.role != EngineRole.Prefill:
        chunk = self.long_context_chunker.enabled() and inputs.is_chunk
        # A prefill for the logprobs of its input samples nothing, and the model agent keeps none of its rows.
        if not chunk and inputs.logits_indices is None:
            self.running_seqs.extend(running)
            return
    original(self, running, inputs)

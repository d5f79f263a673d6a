"""What one step's layers of gated linear attention share."""

from typing import Any

from lmdeploy.pytorch.backends.gated_delta_rule import GatedDeltaMeta, GatedDeltaMetaImpl
from torch import Tensor


class StepStates(GatedDeltaMetaImpl):
    """Makes what one step's layers share. LMDeploy's Qwen3-Next makes it itself, by the same class."""

    def forward(
        self, num_tokens: int, conv_kernel_size: int, state_ids: Tensor, attn_metadata: Any
    ) -> GatedDeltaMeta:
        """state_ids: [sequences], the slot of each."""
        return GatedDeltaMeta(num_tokens, conv_kernel_size, state_ids, attn_metadata)

"""LoRA adapters on LMDeploy's linear layers: several adapters and the base model in one batch.

LMDeploy packs the adapters of a layer one behind the other and numbers them by their sorted names; number 0 is the base
model, with a rank of 0. Which adapter a token has comes with the step's attention metadata, which models are given at
each step: a compiled graph reads nothing else that changes.
"""

from collections.abc import Callable
from typing import Any

from lmdeploy.pytorch.backends.lora import AdapterInfo, LoRAImpl
from lmdeploy.pytorch.nn.linear import LoRA
from torch import Tensor, nn

from dlinfer import ops

# Attribute of LMDeploy's manager of step contexts, which each model has one of.
_OF_CALL = "dlinfer_adapter_ids"


class Lora(LoRAImpl):
    """Adds to the result of a linear layer, or to a part of it where LMDeploy has merged several layers into one."""

    # LMDeploy calls it by these names.
    def forward(
        self,
        x: Tensor,
        lora_A: Tensor,  # noqa: N803
        lora_B: Tensor,  # noqa: N803
        base_output: Tensor,
        adapter_info: AdapterInfo,
        ctx_mgr: Any,
        colwise: bool,
        is_tp: bool = True,
    ) -> Tensor:
        """x [..., in], lora_A [rows, in], lora_B [rows, out], base_output [..., all out] -> base_output's shape.

        The columns ``adapter_info.base_slice`` of base_output, as many as ``out``, are added to. Where they are not
        all of them, base_output is written and given back.
        """
        adapter_ids = getattr(ctx_mgr, _OF_CALL, None)
        if adapter_ids is None:
            adapter_ids = ctx_mgr.current_context().attn_metadata.adapter_ids
        if adapter_ids is None:
            return base_output
        part = base_output[..., adapter_info.base_slice]
        rows = (part.flatten(0, -2), x.flatten(0, -2), lora_A, lora_B)
        ranks = (adapter_info.rank_offsets, adapter_info.ranks, adapter_info.scalings)
        added = ops.lora_linear(*rows, *ranks, adapter_ids).view(part.shape)
        if part.shape[-1] == base_output.shape[-1]:
            return added
        part.copy_(added)
        return base_output


def has_adapters(model: nn.Module) -> bool:
    """Whether a model of LMDeploy's has LoRA layers."""
    return any(isinstance(module, LoRA) for module in model.modules())


class ForwardWithAdapters(nn.Module):
    """A forward for graphs, of a model or of its language part; they read nothing that changes but their arguments.

    LMDeploy's context is none, so for the time of a call the layers find the adapter ids of its arguments.
    """

    def __init__(self, ctx_mgr: Any, owner: nn.Module, forward: Callable[..., Any]) -> None:
        """ctx_mgr: LMDeploy's, of the model. forward: a method of ``owner``, which is the model or a part of it."""
        super().__init__()
        self.owner, self._forward, self.ctx_mgr = owner, forward, ctx_mgr
        setattr(self.ctx_mgr, _OF_CALL, None)

    def forward(
        self,
        position_ids: Tensor,
        past_key_values: list[list[Tensor]],
        attn_metadata: Any,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        mrope_position_ids: Tensor | None = None,
    ) -> Any:
        """As ``forward`` of any of the classes that adapters are served on."""
        self.ctx_mgr.dlinfer_adapter_ids = attn_metadata.adapter_ids
        further = {} if mrope_position_ids is None else {"mrope_position_ids": mrope_position_ids}
        tokens = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "position_ids": position_ids}
        caches = {"past_key_values": past_key_values, "attn_metadata": attn_metadata}
        result = self._forward(**tokens, **caches, **further)
        self.ctx_mgr.dlinfer_adapter_ids = None
        return result

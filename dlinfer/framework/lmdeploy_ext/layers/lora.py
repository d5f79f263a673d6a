"""LoRA adapters on LMDeploy's linear layers: several adapters and the base model in one batch.

LMDeploy concatenates a layer's adapters and numbers them in the order of their names. Number 0 is the base model, with
rank 0. Each token's adapter number is in the attention metadata, because a compiled graph sees changes from step to
step only in its arguments.
"""

from collections.abc import Callable
from typing import Any

from lmdeploy.pytorch.backends.lora import AdapterInfo, LoRAImpl
from lmdeploy.pytorch.nn.linear import LoRA
from torch import Tensor, nn

from dlinfer import ops

# Attribute of LMDeploy's step context manager, one for each model: the adapter ids for the time of a call.
_OF_CALL = "dlinfer_adapter_ids"


class Lora(LoRAImpl):
    """Adds the adapters' products to the result of a linear layer, or to one slice of a merged layer's result."""

    # LMDeploy passes the arguments by these names.
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
        """Return base_output with the adapters' products added to its columns ``adapter_info.base_slice``.

        x: [..., in]. lora_A: [rows, in]. lora_B: [rows, out]. An adapter has as many rows as its rank, and the rows of
        all adapters follow each other. base_output: [..., all columns]. If the slice has only some of the columns,
        base_output is changed in place and returned. If a DoRA adapter is given, ``adapter_info`` has two more tensors:
        ``gains`` [adapters, out], float32, which multiply the layer's result without its bias, and ``base_bias`` [out]
        or None.
        """
        adapter_ids = getattr(ctx_mgr, _OF_CALL, None)
        if adapter_ids is None:
            adapter_ids = ctx_mgr.current_context().attn_metadata.adapter_ids
        if adapter_ids is None:
            return base_output
        part = base_output[..., adapter_info.base_slice]
        base = part.flatten(0, -2)
        gains: Tensor | None = getattr(adapter_info, "gains", None)
        if gains is not None:  # DoRA
            bias: Tensor | None = adapter_info.base_bias  # pyright: ignore[reportAttributeAccessIssue]
            product = base if bias is None else base - bias
            base = base + (gains.index_select(0, adapter_ids) * product).to(base.dtype)
        rows = (base, x.flatten(0, -2), lora_A, lora_B)
        ranks = (adapter_info.rank_offsets, adapter_info.ranks, adapter_info.scalings)
        added = ops.lora_linear(*rows, *ranks, adapter_ids).view(part.shape)
        if part.shape[-1] == base_output.shape[-1]:
            return added
        part.copy_(added)
        return base_output


def has_adapters(model: nn.Module) -> bool:
    """Return whether an LMDeploy model has LoRA layers."""
    return any(isinstance(module, LoRA) for module in model.modules())


class ForwardWithAdapters(nn.Module):
    """Wraps the forward of a model, or of its language part, so that graphs get adapter ids as an argument.

    LoRA layers usually read the ids from LMDeploy's step context, which a graph cannot read. During a call of this
    wrapper, they read the ids that are in the argument ``attn_metadata``.
    """

    def __init__(self, ctx_mgr: Any, owner: nn.Module, forward: Callable[..., Any]) -> None:
        """Wrap ``forward``, a method of ``owner``: the model or a part of it. ctx_mgr: the model's context manager."""
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
        """Return the wrapped forward's result, with the adapters of ``attn_metadata``."""
        self.ctx_mgr.dlinfer_adapter_ids = attn_metadata.adapter_ids
        further = {} if mrope_position_ids is None else {"mrope_position_ids": mrope_position_ids}
        tokens = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "position_ids": position_ids}
        caches = {"past_key_values": past_key_values, "attn_metadata": attn_metadata}
        result = self._forward(**tokens, **caches, **further)
        self.ctx_mgr.dlinfer_adapter_ids = None
        return result

"""Layers of gated linear attention (Qwen3-Next, Qwen3.5): a short convolution, the gated delta rule, and their states.

LMDeploy keeps two states for each sequence in slots of a cache: the last inputs of the convolution and the state of
the rule. LMDeploy's classes call CUDA kernels of other packages, different ones for prefill and decoding. Here one op
computes the convolution and one op the rule, in both phases. A slot is not cleared between requests. The ops ignore
the slot's content for a sequence without cached tokens, and begin with a state of zero.

With drafts a slot holds the states after each of the last tokens, as many as a step verifies. So the next step begins
after the last accepted token.
"""

from typing import Any, NoReturn

import torch
from lmdeploy.pytorch.backends.causal_conv1d import CausalConv1dImpl
from lmdeploy.pytorch.backends.gated_delta_rule import GatedDeltaMeta, GatedDeltaMetaImpl, GatedDeltaRuleImpl
from torch import Tensor, nn
from torch.nn import functional

from dlinfer import ops
from dlinfer.framework.lmdeploy_ext.device.activation import refuse


def _refuse_part(name: str) -> NoReturn:
    """Raise UnsupportedFeatureError from a method that LMDeploy's base class demands, but that nothing calls here."""
    raise refuse(f"a separate call of {name}", "call the forward of the layer")


class StepStates(GatedDeltaMetaImpl):
    """Makes the GatedDeltaMeta that all layers of a step share, for models that do not make it themselves."""

    def forward(
        self, num_tokens: int, conv_kernel_size: int, state_ids: Tensor, attn_metadata: Any
    ) -> GatedDeltaMeta:
        """Return the step's metadata. state_ids: [sequences], the cache slot of each sequence."""
        return GatedDeltaMeta(num_tokens, conv_kernel_size, state_ids, attn_metadata)


class Convolution(CausalConv1dImpl):
    """The causal convolution, for prefill and decoding."""

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        conv_state: Tensor,
        gated_delta_meta: Any,
        activation: str,
    ) -> Tensor:
        """Return a tensor of x's shape [1, tokens, channels], and update conv_state. weight: [channels, 1, width].

        activation: silu, swish (the same) or none. Raises UnsupportedFeatureError for others.
        """
        if activation not in ("silu", "swish", "none"):
            feature = f"a causal convolution with the activation {activation!r}"
            raise refuse(feature, "use a model with silu or without an activation")
        meta, taps = gated_delta_meta, weight.flatten(1)
        sequence = (meta.state_ids, meta.q_ends, meta.fresh, activation != "none")
        past = meta.past_lengths if conv_state.dim() == 4 else None
        return ops.causal_conv1d(x[0], taps, bias, conv_state, *sequence, past_lengths=past)[None]

    def conv1d_fn(self, *args: Any, **kwargs: Any) -> Any:
        """Raise UnsupportedFeatureError."""
        _refuse_part("conv1d_fn")

    def update_fn(self, *args: Any, **kwargs: Any) -> Any:
        """Raise UnsupportedFeatureError."""
        _refuse_part("update_fn")


class DeltaRule(GatedDeltaRuleImpl):
    """The gated delta rule, for prefill and decoding."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        b: Tensor,
        a: Tensor,
        dt_bias: Tensor,
        a_log_exp: Tensor,
        recurrent_state: Tensor,
        gated_delta_meta: Any,
        kv_ratio: int,
        use_qk_l2norm_in_kernel: bool,
    ) -> Tensor:
        """Return a tensor of value's shape, and update recurrent_state. ``kv_ratio`` is not used.

        query, key: [1, tokens, key heads, size]. value: [1, tokens, value heads, size]. a, b: [1, tokens, value
        heads], or [1, tokens, key heads, value heads of each key head].
        """
        rate, step = (x.reshape(value.shape[1:3]) for x in (b, a))
        rate, decay = rate.sigmoid(), a_log_exp * functional.softplus(step.float() + dt_bias)
        meta, heads = gated_delta_meta, (query[0], key[0], value[0])
        sequence = (meta.state_ids, meta.q_ends, meta.fresh)
        past = meta.past_lengths if recurrent_state.dim() == 5 else None
        options = {"normalise": use_qk_l2norm_in_kernel, "past_lengths": past}
        return ops.gated_delta_rule(*heads, decay, rate, recurrent_state, *sequence, **options)[None]

    def chunk_gated_delta_rule(self, *args: Any, **kwargs: Any) -> Any:
        """Raise UnsupportedFeatureError."""
        _refuse_part("chunk_gated_delta_rule")

    def fused_recurrent_gated_delta_rule(self, *args: Any, **kwargs: Any) -> Any:
        """Raise UnsupportedFeatureError."""
        _refuse_part("fused_recurrent_gated_delta_rule")


class GatedRMSNorm(nn.Module):
    """rms_norm(x) * weight * silu(gate), rounded as in transformers: the product with the gate is in float32."""

    def __init__(self, hidden_size: int, eps: float, activation: str = "silu", **place: Any) -> None:
        super().__init__()
        if activation not in ("silu", "swish"):
            raise refuse(f"a gated norm with the activation {activation!r}", "use a model with silu")
        self.weight = nn.Parameter(torch.ones(hidden_size, **place), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return [rows, hidden_size] of x's dtype. x, gate: [rows, hidden_size]."""
        normed = ops.rms_norm(x, self.weight, self.eps)
        return (normed * functional.silu(gate.float())).to(x.dtype)

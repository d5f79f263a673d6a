"""Layers of experts with packed weights, for AWQ. LMDeploy has only linear layers for AWQ.

LMDeploy's model classes find the parameters by name while they load: ``gate_up`` and ``down``, each with the same
tensors as in a checkpoint. Gate and up are concatenated along out_features. With tensor parallelism each rank has a
part of the intermediate size: outputs of gate and up, and groups of inputs of down.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from lmdeploy.pytorch.distributed import get_tp_world_rank
from lmdeploy.pytorch.nn.moe.base import FusedMoEBase
from torch import Tensor, nn

from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.layers.quantised.four_bit import FusedMoEW4A16
from dlinfer.ops.linear.dense import reduced
from dlinfer.ops.quantised.packing import AWQ


class ExpertWeights(nn.Module):
    """The weights of one projection of all experts.

    parts: the names of the parameters, in the order of the op's arguments.
    """

    parts: ClassVar[tuple[str, ...]]

    def register(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None,
        device: Any,
        load: Callable[..., None],
    ) -> None:
        """Make a parameter of the module. LMDeploy calls ``load`` to fill it."""
        parameter: Any = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        parameter.weight_loader = load
        self.register_parameter(name, parameter)


class PackedExperts(FusedMoEBase):
    """Gated experts. Raises UnsupportedFeatureError for expert parallelism.

    impl: the object that computes the layer. gate_up, down: this rank's weights of the two projections. all_reduce:
    whether to sum the result over the ranks.
    """

    def __init__(
        self,
        impl: Any,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        renormalize: bool = False,
        all_reduce: bool = False,
    ) -> None:
        self.init_dist_args(all_reduce)
        if self.ep > 1:
            raise refuse(f"expert parallelism (ep_size={self.ep})", "set ep=1")
        super().__init__(tp=self.tp, tp_mode=self.tp_mode, do_renormalize=renormalize)
        self.impl, self.gate_up, self.down = impl, gate_up, down

    def forward(self, hidden_states: Tensor, topk_weights: Tensor, topk_idx: Any) -> Tensor:
        """Return [tokens, hidden]. hidden_states: [tokens, hidden]. topk_weights, topk_idx: [tokens, top_k]."""
        weights = [getattr(part, name) for part in (self.gate_up, self.down) for name in part.parts]
        out = self.impl.forward(hidden_states, topk_weights, topk_idx, *weights)
        return reduced(out, self.all_reduce, self.tp_group)


class PackedWeights(ExpertWeights):
    """This rank's part of one projection's weights of all experts, in AWQ's layout.

    qweight: int32 [experts, in_features, out_features / 8]. scales: float16 [experts, groups, out_features]. qzeros:
    int32 [experts, groups, out_features / 8]. in_features, out_features: those of this rank. tp: the number of ranks.
    colwise: whether the ranks split outputs, and not inputs.
    """

    parts = ("qweight", "scales", "qzeros")
    bias = None  # as in linear layers without a bias

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        group_size: int,
        device: torch.device | None,
        colwise: bool = True,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group_size = in_features, out_features, group_size
        self.tp, self.tp_rank = get_tp_world_rank("moe")
        self.colwise = colwise
        if in_features % group_size or out_features % AWQ.per_word:
            sizes = f"experts with {in_features} inputs and {out_features} outputs in groups of {group_size}"
            raise refuse(sizes, "use a checkpoint whose group size divides the sizes of experts")
        groups, words = in_features // group_size, out_features // AWQ.per_word
        shapes = {
            "qweight": (in_features, words),
            "scales": (groups, out_features),
            "qzeros": (groups, words),
        }
        for name, shape in shapes.items():
            dtype = torch.float16 if name == "scales" else AWQ.storage
            self.register(name, (experts, *shape), dtype, device, self.weight_loader)

    def weight_loader(
        self, param: nn.Parameter, loaded_weight: Tensor, expert_id: int, shard_id: str
    ) -> None:
        """Copy this rank's part of one expert's tensor into ``param``. LMDeploy's loaders call this.

        shard_id: "gate" for the first half of the columns, "up" for the second half, or "down" for all columns. Raises
        UnsupportedFeatureError if the tensor's shape differs from that of these columns.
        """
        mine, half = param.data[expert_id], param.shape[2] // 2
        columns = {"gate": mine[:, :half], "up": mine[:, half:], "down": mine}[shard_id]
        split = 1 if self.colwise else 0
        whole = [size * self.tp if dim == split else size for dim, size in enumerate(columns.shape)]
        if whole != list(loaded_weight.shape):
            what = f"an expert's {shard_id} of shape {tuple(loaded_weight.shape)} instead of {tuple(whole)}"
            raise refuse(what, "use a checkpoint whose config.json belongs to its weights")
        columns.copy_(loaded_weight.chunk(self.tp, split)[self.tp_rank])


def packed_experts(
    hidden: int,
    inner: int,
    experts: int,
    top_k: int,
    renormalize: bool,
    group_size: int,
    device: Any,
    all_reduce: bool,
) -> PackedExperts:
    """Return the layer of gated experts with silu in AWQ's layout.

    hidden: the size of an expert's input. inner: its intermediate size, over all ranks. all_reduce: whether the layer
    sums over the ranks. Raises UnsupportedFeatureError unless a rank's input sizes are multiples of the group size, and
    its output sizes multiples of 8.
    """
    inner //= get_tp_world_rank("moe")[0]
    own = SimpleNamespace(
        top_k=top_k, renormalize=renormalize, group_size=group_size, num_bits=AWQ.bits, ep_size=1
    )
    gate_up = PackedWeights(experts, hidden, 2 * inner, group_size, device)
    down = PackedWeights(experts, inner, hidden, group_size, device, colwise=False)
    return PackedExperts(FusedMoEW4A16(own), gate_up, down, renormalize, all_reduce)

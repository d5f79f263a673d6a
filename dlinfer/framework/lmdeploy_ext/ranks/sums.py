"""Makes LMDeploy sum over ranks with ``dlinfer.ops.all_reduce``, which graphs and vendors support.

LMDeploy itself calls torch.distributed. Dynamo captures this call as three ops, two of them copies: it copies the
tensor, sums the copies over the ranks, and copies the sum back.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from dlinfer import ops
from dlinfer.framework.lmdeploy_ext.device import activation, ranks
from dlinfer.framework.patching import Original, replaces
from dlinfer.ops.collective import groups

_WHY = (
    "calls torch.distributed, which graph mode captures with two copies, and which does not use shared memory"
)

_ways: dict[int, str] = {}
"""Group number -> text from the device that says how the group's ranks sum."""


def place() -> str:
    """Return a text that names this process's rank and how ranks sum. It is a part of a compiled graph's key."""
    from lmdeploy.pytorch.distributed import get_dist_manager

    context = get_dist_manager().current_context()
    assert context is not None, "LMDeploy sets it before it builds a model"
    return f"rank {context.rank} of {context.dist_config.world_size} {sorted(_ways.items())}"


class Communicator:
    """Replaces methods of LMDeploy's DeviceCommunicator, which sums tensors over one group of ranks."""

    def __init__(self, **of_lmdeploy: Any) -> None:
        super().__init__(**of_lmdeploy)
        self.device_group: Any
        self._number = groups.register(self.device_group)
        _ways[self._number] = activation.device().connect(self._number)

    def all_reduce_(self, input: Tensor) -> None:
        """Sum ``input`` over the ranks of the group, in place."""
        ops.all_reduce(input, self._number)

    def close(self) -> None:
        """Free the vendor's resources for the group, and the number that stands for the group in ops.

        A later group may get this number. LMDeploy destroys the group after this call.
        """
        activation.device().disconnect(self._number)
        del _ways[self._number]
        groups.forget(self._number)


def communicator(base: type, device_group: Any) -> Any:
    """Return the communicator of a process group. base: LMDeploy's class DeviceCommunicator, or a subclass."""
    return type(base.__name__, (Communicator, base), {})(device_group=device_group)


@replaces(
    "lmdeploy.pytorch.distributed:all_reduce",
    why=_WHY,
    when=activation.is_on,
    for_feature=ranks.FEATURE,
)
def _all_reduce(
    original: Original, tensor: Any, op: Any = ReduceOp.SUM, group: Any = "tp", async_op: Any = False
) -> Any:
    if async_op or op != ReduceOp.SUM:
        return original(tensor, op, group, async_op)
    if isinstance(group, str):
        from lmdeploy.pytorch.distributed import get_group

        group = get_group(group, "gpu")
    ops.all_reduce(tensor, group)
    return None


@replaces(
    "lmdeploy.pytorch.backends.dlinfer.linear:DlinferLinearImpl.forward",
    why=_WHY,
    when=activation.is_on,
    for_feature=ranks.FEATURE,
)
def _linear(
    original: Original,
    self: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    all_reduce: bool = False,
    group: Any = None,
    rank: int = 0,
    scatter_size: list[int] | None = None,
) -> Tensor:
    return ops.linear(x, weight, bias, all_reduce, group)


@replaces(
    "lmdeploy.pytorch.backends.default.embedding:DefaultEmbeddingImpl.forward",
    why=_WHY,
    when=activation.is_on,
    for_feature=ranks.FEATURE,
)
def _embedding(
    original: Original, self: Any, x: Tensor, weight: Tensor, all_reduce: bool = False, group: Any = None
) -> Tensor:
    if not all_reduce:
        return original(self, x, weight)
    here = x - self.start_index
    rows = here.clamp(0, self.end_index - self.start_index - 1)
    embedded = torch.nn.functional.embedding(rows, weight)
    return ops.all_reduce(embedded.masked_fill((rows != here).unsqueeze(-1), 0), group)

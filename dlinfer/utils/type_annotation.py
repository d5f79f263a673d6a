"""Plain types that LMDeploy builds and passes to the MoE ops. LMDeploy relies on their names and fields.

The fields come from LMDeploy 0.18: ``pytorch/backends/dlinfer/ascend/op_backend.py`` builds the objects, and
``pytorch/backends/dlinfer/moe.py`` sets two of the fields for each layer.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import Tensor


class MoECommType(Enum):
    """How expert-parallel ranks exchange tokens."""

    ALLGATHER = auto()
    MC2 = auto()
    ALLTOALL = auto()


@dataclass
class MoeMetadata:
    """Tokens and ranks of one step, for the MoE ops.

    max_tokens_across_dp, pad_size: token counts for exchanges that need equal sizes on all ranks.
    dp_size, tp_size, ep_size, tp_rank, ep_rank, tp_group, ep_group: the parallel layout.
    moe_comm_type, moe_group_name: how ranks exchange tokens.
    x_active_mask: which tokens are no padding.
    router_n_groups: the number of groups of experts. From each group, topk / router_n_groups experts are chosen. Below
        1, there are no groups.
    expert_ids_per_ep_rank: [num_experts], the index of each expert on its rank. None without expert parallelism.
    """

    max_tokens_across_dp: int = 0
    pad_size: int = 0
    dp_size: int = 1
    tp_size: int = 1
    ep_size: int = 1
    tp_rank: int = 0
    ep_rank: int = 0
    tp_group: Any = None
    ep_group: Any = None
    moe_comm_type: MoECommType = MoECommType.ALLGATHER
    x_active_mask: Tensor | None = None
    moe_group_name: str | None = None
    router_n_groups: int = -1
    expert_ids_per_ep_rank: Tensor | None = None

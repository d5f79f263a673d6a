"""The storage of experts' weights. LMDeploy calls these functions before it allocates the weights.

The layout is always None, so LMDeploy stores the experts one after the other. In a chunked layout, each chunk would be
one grouped product. But a single grouped product takes 1024 experts, more than any model that LMDeploy serves.
``ChunkedLayout`` exists because LMDeploy names it; ``dlinfer.ops.fused_moe`` refuses it by name.
"""

from dataclasses import dataclass

from torch import Tensor

MOST_GROUPS = 1024
"""The most groups of one npu_grouped_matmul."""


@dataclass(frozen=True)
class ChunkedLayout:
    """A layout of experts' weights in chunks. LMDeploy names the class, but no function here returns one.

    experts: the number of experts. chunk: the number of experts in a chunk. stride: the number of places that a chunk
    takes, with its padding.
    """

    experts: int
    chunk: int
    stride: int

    @property
    def packed(self) -> bool:
        return self.stride != self.chunk


def build_chunked_moe_storage_layout(num_experts: int) -> tuple[int, ChunkedLayout | None]:
    """Return the number of experts to allocate, and None as their layout: they are stored one after the other.

    Raises ValueError for more experts than one grouped product takes.
    """
    if num_experts > MOST_GROUPS:
        raise ValueError(
            f"a rank has {num_experts} experts, but npu_grouped_matmul takes at most {MOST_GROUPS} groups"
        )
    return num_experts, None


def chunked_moe_storage_expert_id(expert_id: int, layout: ChunkedLayout | None) -> int:
    if layout is None:
        return expert_id
    return expert_id // layout.chunk * layout.stride + expert_id % layout.chunk


def zero_chunked_moe_weight_padding(gate_up: Tensor, down: Tensor, layout: ChunkedLayout | None) -> None:
    """Zero the padding between chunks in gate_up and down [places, out, in].

    This changes nothing for the layout None, the only one that ``build_chunked_moe_storage_layout`` returns.
    """
    if layout is None or not layout.packed:
        return
    used = {chunked_moe_storage_expert_id(expert, layout) for expert in range(layout.experts)}
    for place in range(gate_up.shape[0]):
        if place not in used:
            gate_up[place].zero_()
            down[place].zero_()

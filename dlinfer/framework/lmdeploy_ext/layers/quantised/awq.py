"""Linear layers whose weights are of 4 bits, as AWQ checkpoints have them.

LMDeploy's own implementation of its dlinfer backend makes the same call of ``weight_quant_matmul``, but leaves out the
process group of a sum, and takes a weight of any number of bits for one of 4. The weight stays as it was loaded: what
LMDeploy fuses, q, k and v or gate and up, stands side by side along out_features, words of eight beside each other.
"""

from typing import Any

from lmdeploy.pytorch.backends.awq_modules import LinearW4A16Impl
from torch import Tensor

from dlinfer import ops
from dlinfer.framework.lmdeploy_ext.device.activation import refuse


class LinearW4A16(LinearW4A16Impl):
    """x @ weight + bias, the weight packed as ``ops.quantised.packing.AWQ`` says."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    @classmethod
    def from_spec(cls, spec: Any) -> "LinearW4A16":
        """From LMDeploy's LinearW4A16BuildSpec. Raises UnsupportedFeatureError for other widths than 4 bits."""
        if spec.w_bit != 4:
            raise refuse(f"AWQ weights of {spec.w_bit} bits", "use a model of 4 bits")
        return cls(spec.group_size)

    # The abstract method of LMDeploy knows neither scales nor zero points.
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Tensor,
        qweight: Tensor,
        scales: Tensor,
        qzeros: Tensor,
        bias: Tensor | None = None,
        all_reduce: bool = False,
        group: Any = None,
    ) -> Tensor:
        """x [..., in]; qweight int32 [in, out / 8]; scales [groups, out] and bias [out], float16 in any model; qzeros
        int32 [groups, out / 8]. Returns a new tensor [..., out] of x's dtype."""
        return ops.weight_quant_matmul(
            x,
            qweight,
            scales,
            offset=qzeros,
            bias=bias,
            all_reduce=all_reduce,
            group_size=self.group_size,
            group=group,
        )

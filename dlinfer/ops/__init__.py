"""WHAT can be asked: the fused-op interface (S4-03, S4-09).

Each op is ``dlinfer.ops.<op>(...)`` for callers and ``torch.ops.dlinfer.<op>`` for graphs. Both dispatch to the
active vendor of the tensors' device. Parameter names, order and dimensions are LMDeploy's; the data layout of
the KV cache is the vendor's choice (S4-11).
"""

from dlinfer.ops import kernels
from dlinfer.ops.norm import add_rms_norm, rms_norm
from dlinfer.ops.spec import OpSpec, Tolerance, registry

kernels.install()

__all__ = ["OpSpec", "Tolerance", "add_rms_norm", "registry", "rms_norm"]

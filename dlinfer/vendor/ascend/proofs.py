"""How far each kernel was proven, as data; docs/vendors/ascend.md says of each what was leant upon."""

from dlinfer.vendor.ascend.kernels import KERNELS
from dlinfer.vendor.claims import Proof, Proofs

_OTHERS = {
    "linear": Proof.NONE
}  # torch_npu's own kernel of aten::linear, which the simulation has no part in

PROOFS: Proofs = {op: _OTHERS.get(op, Proof.DOCUMENTS) for op in KERNELS}
"""Of paged_decode_attention all but DeepSeek's latent cache, which is called by its true schema alone."""

"""How far each kernel was tested; docs/vendors/ascend.md names the evidence for each."""

from dlinfer.vendor.ascend.kernels import KERNELS
from dlinfer.vendor.claims import Proof, Proofs

_OTHERS = {"linear": Proof.NONE}  # torch_npu's kernel of aten::linear, not simulated

PROOFS: Proofs = {op: _OTHERS.get(op, Proof.DOCUMENTS) for op in KERNELS}
"""How far each kernel was tested. For paged_decode_attention over a latent cache, only the vendor's schema is known."""

"""How far each kernel was tested; docs/vendors/maca.md names the evidence for each."""

from dlinfer.vendor.claims import Proof, Proofs
from dlinfer.vendor.maca.kernels import KERNELS

_OTHERS = {
    "linear": Proof.NONE,  # the vendor's kernel of a torch op, not simulated
    # MetaX publishes no source of its flash_attn: these call it as flash-attention and vLLM-metax do.
    "prefill_attention": Proof.STAND_IN,
    "paged_prefill_attention": Proof.STAND_IN,
    "paged_decode_attention": Proof.STAND_IN,
}

PROOFS: Proofs = {op: _OTHERS.get(op, Proof.TRANSCRIBED) for op in KERNELS}

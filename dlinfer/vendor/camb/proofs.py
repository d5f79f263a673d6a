"""How far each kernel was tested; docs/vendors/camb.md names the evidence for each."""

from dlinfer.vendor.camb.kernels import KERNELS
from dlinfer.vendor.claims import Proof, Proofs

PROOFS: Proofs = dict.fromkeys(KERNELS, Proof.TRANSCRIBED)

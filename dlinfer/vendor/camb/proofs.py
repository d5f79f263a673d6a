"""How far each kernel was proven, as data; docs/vendors/camb.md says of each what was leant upon."""

from dlinfer.vendor.camb.kernels import KERNELS
from dlinfer.vendor.claims import Proof, Proofs

PROOFS: Proofs = dict.fromkeys(KERNELS, Proof.TRANSCRIBED)

"""The transformers adaptor: Hugging Face's own models run on the fused ops. Their code is not copied.

``optimize(model)`` replaces the forward of each module that a fused op can compute, and returns a list of the replaced
modules. ``register_attention()`` registers ``attn_implementation="dlinfer"`` with transformers.
"""

from dlinfer.framework.transformers_ext.optimize import Kept, Optimization, Swapped, optimize
from dlinfer.framework.transformers_ext.packed import Packing
from dlinfer.framework.transformers_ext.paged import Pages
from dlinfer.framework.transformers_ext.register import register_attention

__all__ = ["Kept", "Optimization", "Packing", "Pages", "Swapped", "optimize", "register_attention"]

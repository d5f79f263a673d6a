"""The transformers adaptor: Hugging Face's own models on the fused ops, without a copy of their code.

``optimize(model)`` lets those modules of a model call the ops that compute what an op computes, and says which.
``register_attention()`` makes ``attn_implementation="dlinfer"`` known to transformers.
"""

from dlinfer.framework.transformers_ext.optimize import Kept, Optimization, Swapped, optimize
from dlinfer.framework.transformers_ext.paged import Pages
from dlinfer.framework.transformers_ext.register import register_attention

__all__ = ["Kept", "Optimization", "Pages", "Swapped", "optimize", "register_attention"]

"""The transformers adaptor: Hugging Face's own models on the fused ops, without a copy of their code.

``optimize(model)`` lets those modules of a model call the ops that compute what an op computes, and says which.
"""

from dlinfer.framework.transformers_ext.optimize import Kept, Optimization, Swapped, optimize

__all__ = ["Kept", "Optimization", "Swapped", "optimize"]

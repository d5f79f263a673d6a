"""sophon-sail's API for compiled LLMs: ``EngineLLM`` with ``Tensor``, ``Handle``, ``Dtype`` and ``BmrtFlag``.

Write ``from dlinfer.vendor.sophgo import sail`` where sophon's examples say ``import sophon.sail as sail``.
"""

from dlinfer.vendor.sophgo.sail.engine_llm import EngineLLM
from dlinfer.vendor.sophgo.sail.handle import Handle
from dlinfer.vendor.sophgo.sail.tensor import Tensor
from dlinfer.vendor.sophgo.sail.types import BmrtFlag, Dtype, Failure

# sail has its data types by these names too, in the order of their numbers.
BM_FLOAT32, BM_FLOAT16, BM_INT8, BM_UINT8, BM_INT16, BM_UINT16, BM_INT32, BM_UINT32, BM_BFLOAT16 = Dtype

__all__ = ["BmrtFlag", "Dtype", "EngineLLM", "Failure", "Handle", "Tensor"]

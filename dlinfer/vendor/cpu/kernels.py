"""The kernels of the cpu vendor: C++ for a decoder's layers, vectorised torch for the rest.

Decode has no Python loop over sequences or experts. The KV cache has the default layout,
[blocks, block_size, kv_heads, head_size], with any strides.
"""

from dlinfer.ops.core.spec import registry
from dlinfer.vendor.base import Kernel
from dlinfer.vendor.cpu import elementwise, gated, linears, lora, moe, ranks
from dlinfer.vendor.cpu.attention import decode, kv_cache, prefill
from dlinfer.vendor.cpu.bf12 import experts as bf12_experts
from dlinfer.vendor.cpu.bf12 import matrices
from dlinfer.vendor.cpu.eight_bit import experts as eight_bit_experts
from dlinfer.vendor.cpu.eight_bit import linears as eight_bit_linears
from dlinfer.vendor.cpu.eight_bit import rows
from dlinfer.vendor.cpu.four_bit import experts as four_bit_experts
from dlinfer.vendor.cpu.four_bit import linears as four_bit_linears
from dlinfer.vendor.cpu.gguf import matrices as gguf_matrices
from dlinfer.vendor.cpu.recurrent import causal_conv1d, gated_delta_rule
from dlinfer.vendor.cpu.sparse import attention as sparse
from dlinfer.vendor.cpu.sparse import compressed

_MODULES = (
    elementwise, gated, linears, lora, moe, ranks, decode, kv_cache, prefill, bf12_experts, matrices, eight_bit_experts,
    eight_bit_linears, rows, four_bit_experts, four_bit_linears, gguf_matrices, causal_conv1d, gated_delta_rule, sparse,
    compressed,
)  # fmt: skip

_FUNCTIONS = [
    (name, function)
    for module in _MODULES
    for name, function in vars(module).items()
    if name in registry() and getattr(function, "__module__", "") == module.__name__
]

KERNELS: dict[str, Kernel] = dict(_FUNCTIONS)
"""Op -> its kernel: the function of the op's name in one of these modules."""

assert len(KERNELS) == len(_FUNCTIONS), "two functions have the name of one op"

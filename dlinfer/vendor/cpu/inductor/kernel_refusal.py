"""Whether a vendor's kernel takes a node, asked of its fakes: for engines whose regions call kernels."""

from torch import fx
from torch.fx.node import map_arg

from dlinfer.graph.ir.device import graph_device
from dlinfer.graph.ir.dialect import arguments, fake, overload, tensors_of
from dlinfer.ops.core.kernels import refusal
from dlinfer.ops.core.spec import NAMESPACE


def kernel_refusal(node: fx.Node) -> str | None:
    """Why a call of one of dlinfer's ops would run on the reference; None where a kernel takes it, and for other nodes.

    The kernel is one of the active vendor of the node's device.
    """
    op = overload(node)
    if op is None or op.namespace != NAMESPACE:
        return None
    device = graph_device(tensor for near in (node, *node.all_input_nodes) for tensor in tensors_of(near))
    values = map_arg(arguments(node), fake)
    return refusal(op._schema.name.partition("::")[2], device.type, [*values.values()])

"""Ask a vendor's kernel, by a node's fake tensors, whether it takes the node's call."""

from torch import fx
from torch.fx.node import map_arg

from dlinfer.graph.ir.device import graph_device
from dlinfer.graph.ir.dialect import arguments, fake, overload, tensors_of
from dlinfer.ops.core.kernels import refusal
from dlinfer.ops.core.spec import NAMESPACE


def kernel_refusal(node: fx.Node) -> str | None:
    """Return a reason if a node calls a dlinfer op and the vendor's kernel refuses the call's arguments; else None.

    The vendor is the active one of the node's device. The op's reference implementation runs in place of a kernel that
    refuses."""
    op = overload(node)
    if op is None or op.namespace != NAMESPACE:
        return None
    device = graph_device(tensor for near in (node, *node.all_input_nodes) for tensor in tensors_of(near))
    values = map_arg(arguments(node), fake)
    return refusal(op._schema.name.partition("::")[2], device.type, [*values.values()])

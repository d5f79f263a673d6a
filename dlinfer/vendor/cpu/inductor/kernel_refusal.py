"""Ask a vendor's kernel whether it takes a node, by the node's fakes."""

from torch import fx
from torch.fx.node import map_arg

from dlinfer.graph.ir.device import graph_device
from dlinfer.graph.ir.dialect import arguments, fake, overload, tensors_of
from dlinfer.ops.core.kernels import refusal
from dlinfer.ops.core.spec import NAMESPACE


def kernel_refusal(node: fx.Node) -> str | None:
    """Return why a call of a dlinfer op would run on the op's reference; None if a kernel takes it, and for other ops.

    The kernel is that of the vendor that is active on the node's device."""
    op = overload(node)
    if op is None or op.namespace != NAMESPACE:
        return None
    device = graph_device(tensor for near in (node, *node.all_input_nodes) for tensor in tensors_of(near))
    values = map_arg(arguments(node), fake)
    return refusal(op._schema.name.partition("::")[2], device.type, [*values.values()])

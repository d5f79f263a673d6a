"""Translation of rotary position embedding."""

from torch import Tensor

from dlinfer.vendor.megengine.nodes import NodeList, Value
from dlinfer.vendor.megengine.translations.places import part
from dlinfer.vendor.megengine.translations.table import ours, reshaped, translation


@translation(ours.apply_rotary_pos_emb.default)
def _rotary(
    writer: NodeList, result: tuple[Tensor, Tensor], q: Value, k: Value, cos: Value, sin: Value
) -> list[Value]:
    return [_rotated(writer, x, cos, sin) for x in (q, k)]


def _rotated(writer: NodeList, x: Value, cos: Value, sin: Value) -> Value:
    """Return x * cos + (-b, a) * sin, where a and b are the halves of x's last dimension.

    cos, sin: one row for each token."""
    size = x.shape[-1]
    first, second = (part(writer, x, -1, start, start + size // 2) for start in (0, size // 2))
    turned = writer.op("concat", writer.op("neg", second, like=second), first, like=x, axis=len(x.shape) - 1)
    rows = (*x.shape[:-2], 1, size)
    products = [
        writer.op("mul", value, reshaped(writer, angle, rows), like=x)
        for value, angle in ((x, cos), (turned, sin))
    ]
    return writer.op("add", *products, like=x)

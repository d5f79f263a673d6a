"""The Dynamo entry: what ``torch.compile(model, backend="dlinfer")`` finds by its entry point.

Graph mode is not part of this release. The name is registered so that asking for it says so, instead of torch's
"invalid backend"; eager calls of the same ops work, also inside models compiled by other backends.
"""

from typing import Any, NoReturn

from dlinfer.errors import UnsupportedFeatureError


def dlinfer_backend(graph_module: Any, example_inputs: list[Any], **options: Any) -> NoReturn:
    """Raises UnsupportedFeatureError."""
    raise UnsupportedFeatureError(
        feature='torch.compile(backend="dlinfer")',
        where="this release of dlinfer",
        advice='run the model eagerly, or compile it with backend="inductor"; both call dlinfer\'s ops.',
    )

"""What LMDeploy 0.18's own backend for Ascend imports: the runner of a model, and the batch sizes that graphs have.

LMDeploy takes this adaptor's backend for ``device_type="ascend"``; its own (``backends/dlinfer/ascend``) stays usable
through these names, eagerly.
"""

from typing import Any

import torch
from lmdeploy.pytorch.backends.graph_runner import GraphRunner

from dlinfer.framework.lmdeploy_ext.device.refusing import refuse

_DOUBLING, _FINE = 16, 256  # sizes double up to the first, and are its multiples up to the second


def get_ascend_compatible_size(size: int) -> int:
    """The least batch size, not below ``size``, that a graph would be captured for."""
    if size <= _DOUBLING:
        return 1 << max(size - 1, 0).bit_length()
    step = _DOUBLING if size <= _FINE else _FINE
    return -(-size // step) * step


class AscendGraphRunner(GraphRunner):
    """Runs the model as it is: graphs of the vendor's are proven on no card.

    Raises UnsupportedFeatureError unless ``backend_config.eager_mode``. is_mla: whether keys and values have other
    sizes, which eager execution need not know.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        model_config: Any,
        cache_config: Any,
        backend_config: Any,
        device: torch.device,
        is_mla: bool = False,
    ) -> None:
        if not backend_config.eager_mode:
            raise refuse("graph mode of LMDeploy's own Ascend backend", "set eager_mode=True")
        super().__init__(model, model_config, cache_config, backend_config, device)
        self.is_mla = is_mla

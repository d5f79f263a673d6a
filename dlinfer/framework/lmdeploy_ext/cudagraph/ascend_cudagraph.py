"""Provides the names that LMDeploy 0.18's own Ascend backend imports: a model runner, and the batch sizes of graphs.

For ``device_type="ascend"`` LMDeploy uses this adaptor's backend if the installed vendor has a ``load_device``.
Otherwise LMDeploy uses its own backend (``backends/dlinfer/ascend``), in eager mode only. This file imports nothing of
LMDeploy.
"""

from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.running.capture.policy import compatible_size

get_ascend_compatible_size = compatible_size


def AscendGraphRunner(  # noqa: N802 - LMDeploy's name for it, which it calls
    model: Any, model_config: Any, cache_config: Any, backend_config: Any, device: Any, is_mla: bool = False
) -> Any:
    """Return LMDeploy's runner without graphs, because the vendor's graphs have not been tested on a card.

    The parameter ``is_mla`` is not used. Raises UnsupportedFeatureError unless ``backend_config.eager_mode`` is true.
    """
    if not backend_config.eager_mode:
        raise refuse("graph mode of LMDeploy's own Ascend backend", "set eager_mode=True", "ascend")
    from lmdeploy.pytorch.backends.graph_runner import GraphRunner

    return GraphRunner(model, model_config, cache_config, backend_config, device)

"""What LMDeploy 0.18's own backend for Ascend imports: what runs a model, and the batch sizes that graphs have.

LMDeploy takes this adaptor's backend for ``device_type="ascend"``; its own (``backends/dlinfer/ascend``) stays usable
through these names, eagerly. Importing them imports nothing of LMDeploy.
"""

from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.running.capture.policy import compatible_size

get_ascend_compatible_size = compatible_size


def AscendGraphRunner(  # noqa: N802 - LMDeploy's name for it, which it calls
    model: Any, model_config: Any, cache_config: Any, backend_config: Any, device: Any, is_mla: bool = False
) -> Any:
    """LMDeploy's runner without graphs: those of the vendor's are proven on no card.

    is_mla: whether keys and values have other sizes, which eager execution need not know. Raises
    UnsupportedFeatureError unless ``backend_config.eager_mode``.
    """
    if not backend_config.eager_mode:
        raise refuse("graph mode of LMDeploy's own Ascend backend", "set eager_mode=True", "ascend")
    from lmdeploy.pytorch.backends.graph_runner import GraphRunner

    return GraphRunner(model, model_config, cache_config, backend_config, device)
